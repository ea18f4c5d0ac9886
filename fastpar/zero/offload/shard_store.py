"""Stores of what a rank keeps at rest: stage 3's shards on the device, in the host's memory or in a file; and optimizer
states in a file.

    store = ShardStore.of(offload)                       # or HostStore or FileStore
    shards = store.shards(comm, names, tensors)          # this rank's rows
    store.attach(name, parameter)                        # what shows those of one tensor
    store.open()                                         # collective: memory for what will be read
    pending = shards.gather_rows_async(rows)             # begins to copy or read
    pending.wait()                                       # gathers; collective
    store.released()                                     # before shards are written to: no copy of them is under way
    with store.writing(parameters):                      # which have memory here, of unknown content,
        ...                                              # get new values,
    store.settle()                                       # and are at rest after this; collective

Note: file buffers and other ranks. Of each kind (ranks, dtype, device) there are two buffers for the largest group's
shards: one that ranks gather from, one that is read into. Where ranks share memory they copy out of each other's
buffers. The gather number k of a kind uses buffer k % 2 on every rank, and begins with an exchange that a rank enters
when it has read its own shards: so nobody copies what has not been read. After gather k a rank prefetches the next into
the other buffer, which gather k - 1 has used; all ranks had copied that when they entered the exchange of gather k. A
wrong guess is read again, into the same buffer.

Note: failures. On CPUs that exchange, and one after the writes of a step, tell which ranks could not read or write, so
that all ranks raise StorageError. On other devices it would have to wait for the device; there the other ranks meet
their deadline. What opens a file, and what reads and writes the states, which no device waits for, tells everywhere
(`use_files`).
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.comm import Communicator
from fastpar.comm.agree import raise_on_all
from fastpar.comm.observers import note
from fastpar.comm.pending import Pending
from fastpar.storage import StorageError, TensorStore, Transfer, stream
from fastpar.zero.flat import FlatLayout, FlatShards, PeerMemory, Upload, copy_rows, filled
from fastpar.zero.groups import local, set_local
from fastpar.zero.options import Offload
from fastpar.zero.param_classes import mark_absent, mark_present

T = TypeVar("T")


class ShardStore:
    """The place of stage 3's shards at rest: their device, where they are used. Other stores say what differs."""

    is_device = True  # shards rest where they are used
    has_memory = True  # at rest

    def __init__(self, offload: Offload | None = None) -> None:
        self._has_copies = offload is not None

    @staticmethod
    def of(offload: Offload | None) -> ShardStore:
        if offload is None or not offload.parameters:
            return ShardStore(offload)
        return HostStore(offload) if offload.path is None else FileStore(offload)

    def needs_copy(self, is_persistent: bool) -> bool:
        """Whether the optimizer is to have a copy of a parameter even where dtypes agree."""
        return self._has_copies

    def of_masters(self, device: torch.device) -> torch.device:
        """The device of the optimizer's copies of parameters on `device`."""
        return torch.device("cpu") if self._has_copies else device

    def shards(self, comm: Communicator, names: Sequence[str], tensors: Sequence[Tensor]) -> FlatShards | DiskShards:
        """This rank's rows of whole tensors of one dtype and device, which have names in the model. Collective."""
        return FlatShards(comm, tensors)

    def attach(self, name: str, *faces: Tensor) -> None:
        """Tensors (plain, DTensors or parameters) that show the rows of a name."""

    def open(self) -> None:
        """When all shards have been made: memory for what will be read. Collective."""

    @property
    def buffers(self) -> list[Tensor]:
        """Memory that shards are read into."""
        return []

    def released(self) -> None:
        """Before shards are written to: no copy of them is under way after this."""

    def writing(self, faces: Sequence[Tensor]) -> AbstractContextManager[None]:
        """These have memory in the block, which writes to all of it."""
        return nullcontext()

    def settle(self) -> None:
        """After shards were written to: returns when everything is at rest. Collective."""

    def load(self) -> None:
        """Bring everything into memory, as for a checkpoint; `put_away` gives it back."""

    def put_away(self) -> None:
        """The memory of `load` is needed no more. What has been taken of it meanwhile, as by state_dict, stays."""

    def close(self) -> None:
        pass


class HostStore(ShardStore):
    """Shards in the host's (pinned) memory: the optimizer updates or rounds to them there, and a gather copies them to
    their device first."""

    is_device = False

    def __init__(self, offload: Offload) -> None:
        super().__init__(offload)
        self._uploads: dict[torch.device, Upload | None] = {}

    def needs_copy(self, is_persistent: bool) -> bool:
        return is_persistent

    def shards(self, comm: Communicator, names: Sequence[str], tensors: Sequence[Tensor]) -> FlatShards:
        device = tensors[0].device
        if device not in self._uploads:
            self._uploads[device] = Upload.of(device)
        return FlatShards(comm, tensors, upload=self._uploads[device])

    def released(self) -> None:
        for upload in self._uploads.values():
            if upload is not None:
                upload.settle()


BUFFERS = 2  # one that ranks gather from, one that is read into


class DiskShards:
    """The rows of `tensors` that belong to this rank, in the file: what `FlatShards` are in memory."""

    is_shared = False  # to gather takes time that can be hidden

    def __init__(self, reader: _ShardReader, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._reader, self._names = reader, names
        comm = reader.comm
        self.layout = FlatLayout([x.shape for x in tensors], comm.size)
        self.shards: list[Tensor] = []
        for index, (name, x) in enumerate(zip(names, tensors, strict=True)):
            rows = self.layout.rows_of(x.detach(), index, comm.rank).cpu()
            if rows.numel() > 0:
                reader.write(name, rows)
            self.shards.append(nothing_like(rows))
        reader.fit(max(self.layout.counts))

    def rows_in(self, outs: Sequence[Tensor]) -> list[list[Tensor]]:
        return [filled(self.layout.rows_of(x.detach(), i, rank) for i, x in enumerate(outs)) for rank in self._ranks]

    def gather_rows_async(self, rows: Sequence[list[Tensor]]) -> Pending[None]:
        """Begins to read this rank's rows, if no other read is under way. The rest is done by `wait`, which is
        collective."""
        self._reader.begin(self)
        return Pending(
            None, lambda: self._reader.gather(self, rows), describe=lambda: "gathering shards", timeout=self._timeout
        )

    def abandon(self, _: Pending[None]) -> None:
        self._reader.forget(self)

    def read_into(self, flat: Tensor, transfers: list[Transfer]) -> None:
        """Begin to read this rank's rows."""
        comm = self._reader.comm
        views = self.layout.views(flat[: self.layout.counts[comm.rank]], comm.rank)
        for name, x in zip(self._names, views, strict=True):
            if x.numel() > 0:
                transfers.append(self._reader.store.read(name, x))

    @property
    def _ranks(self) -> range:
        return range(self._reader.comm.size)

    @property
    def _timeout(self) -> float:
        return self._reader.comm.timeout


class _ShardReader:
    """Reads and gathers the shards of one communicator, dtype and device."""

    def __init__(self, store: TensorStore, comm: Communicator, dtype: torch.dtype, device: torch.device) -> None:
        self.store, self.comm, self._dtype, self._device = store, comm, dtype, device
        self._upload = Upload.of(device)
        self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS  # from each buffer, to the device
        self._buffers: list[PeerMemory] = []
        self._numel = 0
        self._number = 0  # of the next gather
        self._ahead: DiskShards | None = None  # what is being read for it
        self._transfers: list[Transfer] = []
        self._failure: OSError | None = None

    def write(self, name: str, rows: Tensor) -> None:
        """Before `open`, which raises what goes wrong."""
        try:
            self.store.write(name, rows).wait()
        except OSError as error:
            self._failure = self._failure or error

    def fit(self, numel: int) -> None:
        self._numel = max(self._numel, numel)

    def open(self) -> None:
        """Collective."""
        _raise_on_all(self._failure, self.comm, self._device, "write")
        counts = [self._numel] * self.comm.size
        self._buffers = [PeerMemory(self.comm, counts, self._dtype, self._device, at_host=True) for _ in range(BUFFERS)]

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer.mine for buffer in self._buffers]

    def begin(self, shards: DiskShards) -> None:
        """Read them ahead, unless others are."""
        if self._ahead is not None:
            return
        copied = self._copied[self._number % BUFFERS]
        if copied is not None:
            copied.synchronize()
        self._ahead = shards
        try:
            shards.read_into(self._buffers[self._number % BUFFERS].mine, self._transfers)
        except OSError as error:  # of the last write; all ranks are to hear of it
            self._failure = error

    def forget(self, shards: DiskShards) -> None:
        """Drop shards that were read ahead, and are not wanted any more."""
        if self._ahead is shards:
            self._settle()

    def gather(self, shards: DiskShards, rows: Sequence[list[Tensor]]) -> None:
        """Bring the rows of all ranks in. Collective."""
        if self._ahead is not shards:
            self._settle()
            self.begin(shards)
        failure = self._settle()
        index = self._number % BUFFERS
        memory = self._buffers[index]
        self._number += 1
        _raise_on_all(failure, self.comm, self._device, "read")
        layout = shards.layout
        if memory.is_shared:
            note("all_gather", self.comm.size, layout.total, self._dtype)
            for targets, sources in zip(rows, layout.sources(memory, self.comm.rank), strict=True):
                copy_rows(targets, sources)
            return
        mine = memory.mine[: layout.counts[self.comm.rank]]
        if self._upload is not None:
            with self._upload.stream():
                mine = self._upload.copy(mine)
                self._copied[index] = event = self._upload.event()
            self._upload.arrived(event, mine)
        layout.put_rows(mine if self.comm.size == 1 else self.comm.all_gather(mine, sizes=layout.counts), rows)

    def _settle(self) -> OSError | None:
        """Wait for what is read ahead; why it failed, if it did."""
        failure = wait_for(self._transfers) or self._failure
        self._ahead = self._failure = None
        return failure


@dataclass(eq=False)
class _Stored:
    """One tensor of the file, and what shows it: tensors that have its values in memory, or no memory."""

    name: str
    faces: tuple[Tensor, ...]

    def show(self, memory: Tensor) -> None:
        for face in self.faces:
            mark_present(face)
            set_local(face, memory)

    def hide(self) -> None:
        nothing = nothing_like(_held(self.faces[0]))
        text = (
            f"the shard of {self.name!r} is in a file (offload of parameters): unshard() a module to use its whole "
            "parameters, or take state_dict()"
        )
        for face in self.faces:
            set_local(face, nothing)
            mark_absent(face, text)


class FileStore(ShardStore):
    """The shards of all parameters of a model that are sharded, in a file of this rank."""

    is_device = has_memory = False

    def __init__(self, offload: Offload) -> None:
        assert offload.path is not None
        super().__init__(offload)
        self._store = TensorStore(offload.path, **(offload.options or {}))
        self._readers: dict[tuple[Communicator, torch.dtype, torch.device], _ShardReader] = {}
        self._stored: list[_Stored] = []
        self._of: dict[int, _Stored] = {}  # by each of its faces
        self._writes: deque[list[Transfer]] = deque()
        self._failure: OSError | None = None
        self.is_loaded = False

    @property
    def file_bytes(self) -> int:
        return self._store.file_bytes

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer for reader in self._readers.values() for buffer in reader.buffers]

    def shards(self, comm: Communicator, names: Sequence[str], tensors: Sequence[Tensor]) -> DiskShards:
        kind = comm, tensors[0].dtype, tensors[0].device
        if kind not in self._readers:
            self._readers[kind] = _ShardReader(self._store, *kind)
        return DiskShards(self._readers[kind], names, tensors)

    def attach(self, name: str, *faces: Tensor) -> None:
        if _held(faces[0]).numel() > 0:
            stored = _Stored(name, faces)
            self._stored.append(stored)
            self._of |= {id(face): stored for face in faces}
            stored.hide()

    def open(self) -> None:
        for reader in self._readers.values():
            reader.open()

    def close(self) -> None:
        self._store.close()

    # ---- at rest

    @contextmanager
    def writing(self, faces: Sequence[Tensor]) -> Iterator[None]:
        """These have memory in the block, which writes to all of it; then it goes to the file. If the block raises, the
        file keeps what it had."""
        found = [] if self.is_loaded else [self._of[id(face)] for face in faces if id(face) in self._of]
        memory = [self._store.empty(_held(stored.faces[0]).shape, _held(stored.faces[0]).dtype) for stored in found]
        for stored, x in zip(found, memory, strict=True):
            stored.show(x)
        try:
            yield
            self._writes.append([self._write(stored) for stored in found])
        finally:
            for stored in found:
                stored.hide()
        while len(self._writes) > 1:
            self._failure = wait_for(self._writes.popleft()) or self._failure

    def load(self) -> None:
        if not self.is_loaded:
            self.is_loaded = True
            for stored, read in [(stored, self._store.read(stored.name)) for stored in self._stored]:
                stored.show(read.wait())

    def put_away(self) -> None:
        if self.is_loaded:
            self.is_loaded = False
            self._writes.append([self._write(stored) for stored in self._stored])
            for stored in self._stored:
                stored.hide()

    def settle(self) -> None:
        self.put_away()
        while self._writes:
            self._failure = wait_for(self._writes.popleft()) or self._failure
        failure, self._failure = self._failure, None
        for comm, device in dict.fromkeys((comm, device) for comm, _, device in self._readers):
            _raise_on_all(failure, comm, device, "write")

    def _write(self, stored: _Stored) -> Transfer:
        return self._store.write(stored.name, _held(stored.faces[0]))


def wait_for(transfers: list[Transfer]) -> OSError | None:
    """Wait for all, and forget them; the first error."""
    failure: OSError | None = None
    for transfer in transfers:
        try:
            transfer.wait()
        except OSError as error:
            failure = failure or error
    transfers.clear()
    return failure


def use_files(work: Callable[[], T], comms: Sequence[Communicator], operation: str) -> T:
    """`work()`; on every rank that these groups reach one after the other StorageError where the file of one fails.

    Without it the other ranks would wait for that one in their next collective. Collective: an all-reduce of 8 bytes in
    each group.
    """
    failure, found = None, []
    try:
        found.append(work())
    except OSError as error:
        failure = error
    rank = dist.get_rank() if dist.is_initialized() else 0
    failed = torch.tensor([-1 if failure is None else rank], device="cpu")
    for comm in comms:
        comm.all_reduce(failed, "max", out=failed)
    if failure is not None:
        raise failure
    if int(failed) >= 0:
        raise StorageError(errno.EIO, f"rank {int(failed)}", operation, cause="that rank's own error says why")
    return found[0]


def _raise_on_all(failure: OSError | None, comm: Communicator, device: torch.device, operation: str) -> None:
    """Raise this rank's failure, and on CPUs that of another rank. Collective there."""

    def of_others(ranks: list[int]) -> StorageError:
        who = f"rank {', '.join(map(str, ranks))} of {comm.size}"
        return StorageError(errno.EIO, who, operation, cause="that rank's own error says why")

    if device.type == "cpu":
        raise_on_all(failure, comm, of_others)
    elif failure is not None:
        raise failure


def _held(x: Tensor) -> Tensor:
    """This rank's part of x itself."""
    inner: Any = x
    found: Tensor = inner._local_tensor if isinstance(x, DTensor) else x
    return found


SMALL_BYTES = 64 << 10  # tensors below stay in memory


class DiskStates:
    """Keeps the values and states of parameters in a file between steps.

        states = DiskStates(offload, parameters, optimizer)      # values go to the file; their memory is freed
        states.update(step)                                      # step(some of them), group by group, in memory

    Tensors below 64 KB stay in memory, and so do parameters that are not trained. While a group is updated the next is
    read and the one before written.
    """

    def __init__(self, offload: Offload, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        assert offload.path is not None
        self._store = TensorStore(offload.path, **(offload.options or {}))
        self._optimizer = optimizer
        self._names = {id(parameter): f"{number}" for number, parameter in enumerate(parameters)}
        self._group_bytes = offload.group_bytes
        self._groups = _groups([p for p in parameters if p.requires_grad], offload.group_bytes)
        self._away: dict[str, Tensor] = {}  # tensors whose values are in the file
        for group in self._groups:
            self._put_away(group)
        self._store.flush()

    @property
    def file_bytes(self) -> int:
        return self._store.file_bytes

    def adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep these, too: the optimizer has got them after this was made."""
        first = len(self._names)
        self._names |= {id(parameter): f"{first + number}" for number, parameter in enumerate(parameters)}
        for group in _groups(parameters, self._group_bytes):
            self._groups.append(group)
            self._put_away(group)
        self._store.flush()

    def update(self, step: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """Call `step` for the parameters of one group after the other; those without gradient are left out."""
        groups = [[p for p in group if p.grad is not None] for group in self._groups]
        groups = [group for group in groups if group]
        items = [tuple(name for name, _ in self._held(group) if name in self._away) for group in groups]

        def work(number: int, tensors: Mapping[str, Tensor]) -> None:
            for name, memory in tensors.items():
                self._away[name].data = memory
            step(groups[number])
            for name in tensors:
                self._away[name].data = nothing_like(self._away[name])
            self._put_away(groups[number])

        stream(self._store, items, work)
        self._store.flush()

    def load(self) -> None:
        """Bring everything into memory, as for a checkpoint; `put_away` gives it back. What is there already stays: it
        may have been written to."""
        for name, tensor in self._away.items():
            if tensor.untyped_storage().nbytes() == 0:
                tensor.data = self._store.read(name).wait()

    def put_away(self) -> None:
        for name, tensor in self._away.items():
            self._store.write(name, tensor).wait()
            tensor.data = nothing_like(tensor)
        for group in self._groups:
            self._put_away(group)

    def refresh(self) -> None:
        """The optimizer has other tensors as states than before: puts these away."""
        for group in self._groups:
            for name, tensor in self._held(group):
                if name in self._away:
                    self._away[name] = tensor
        self.put_away()

    def close(self) -> None:
        self._store.close()

    def _held(self, group: Sequence[nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        """What belongs to these parameters: the tensors with memory, by name."""
        for parameter in group:
            number = self._names[id(parameter)]
            inner: Any = parameter
            yield f"{number}.value", getattr(inner, "_local_tensor", inner)
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    inner = value
                    yield f"{number}.{key}", getattr(inner, "_local_tensor", inner)

    def _put_away(self, group: Sequence[nn.Parameter]) -> None:
        """Write what is in memory and large, and free it."""
        for name, tensor in self._held(group):
            if name not in self._away and tensor.nbytes >= SMALL_BYTES:
                self._store.write(name, tensor.detach()).wait()
                self._away[name] = tensor
                tensor.data = nothing_like(tensor)


def _groups(parameters: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    groups: list[list[nn.Parameter]] = []
    held = 0
    for parameter in parameters:
        nbytes = local(parameter).nbytes
        if not groups or held + nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(parameter)
        held += nbytes
    return groups


def nothing_like(x: Tensor) -> Tensor:
    """A tensor of the same shape without memory."""
    nothing = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    nothing.untyped_storage().resize_(0)
    return nothing
