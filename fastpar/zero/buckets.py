"""Buckets of gradients that travel together: averaged whole on every rank, or by rows.

| bucket | of | collective |
|---|---|---|
| `AllReduceBucket` | stage 0 | all-reduce: every rank gets all means |
| `ReduceScatterBucket` | what is sharded: stages 1 to 3 | reduce-scatter to rows, all-reduce of these over replicas |
| `PersistentBucket` | what stage 3 keeps on every rank | all-reduce in float32 |
| `LocalBucket` | experts that no other rank has | none |

Note: copies. A gradient is copied once, from where autograd made it to its bucket: where ranks share memory, the
others read it there. Letting autograd add into zeroed buckets instead costs a pass over the bucket more.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.pending import Pending
from fastpar.comm.transport_selector import Mode
from fastpar.comm.wire_formats import CastWire, Wire
from fastpar.zero.flat import FlatLayout, PeerMemory
from fastpar.zero.groups import Groups, as_dtensor, local
from fastpar.zero.sharded_param import ShardedParam, keep_traces

STAGING_BUFFERS = 2  # one that travels, one that is filled


class FlatGradients:
    """Gradients of whole tensors, to be averaged over the ranks and split like their `layout`.

        gradients.put([0], [grad])             # any order; what is not put counts as zero
        pending = gradients.reduce()           # all ranks
            rows = pending.wait()              # this rank's rows of every tensor's mean, views of a new flat tensor

    `buffer`: memory to lay them out in (`Staging.take`), which may be used again after `wait`.
    """

    def __init__(self, comm: Communicator, layout: FlatLayout, buffer: Tensor, *, mode: Mode = "background") -> None:
        self.comm, self.layout = comm, layout
        self.flat = buffer[: layout.total]
        self._pieces = self.flat.split_with_sizes(layout.numels)  # of all tensors, rank by rank
        self._is_put = [False] * len(layout.shapes)
        self._collectives = comm.collectives(mode)

    def put(self, indices: Sequence[int], grads: Sequence[Tensor]) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, grad in zip(indices, grads, strict=True):
            self._is_put[index] = True
            targets += self._pieces_of(index)
            sources += grad.reshape(-1).split_with_sizes(self.layout.numels_of(index))
        if targets:
            torch._foreach_copy_(targets, sources)

    def fill(self) -> None:
        """Zero what has not been put."""
        for index, is_put in enumerate(self._is_put):
            if not is_put:
                torch._foreach_zero_(self._pieces_of(index))
                self._is_put[index] = True

    def pieces(self) -> list[tuple[Tensor, ...]]:
        """Each tensor's elements, in one piece for each rank that gets some."""
        return [self._pieces_of(index) for index in range(len(self._is_put))]

    def _pieces_of(self, index: int) -> tuple[Tensor, ...]:
        return tuple(self._pieces[index :: len(self._is_put)])

    def reduce(self, wire: Wire | None = None, *, key: Hashable = None) -> Pending[list[Tensor]]:
        """Begin to average, in the format of `wire` (None: as they are, summed in float32)."""
        self.fill()
        if wire is not None:
            pending = wire.reduce_scatter_async(self.comm, self.flat, self.layout.counts, key=key)
        else:
            wide = torch.float32 if self.flat.dtype.itemsize < 4 else None  # as they were added up
            pending = self._collectives.reduce_scatter(self.flat, "avg", sizes=self.layout.counts, dtype=wide)
        return Pending(
            None,
            lambda: self.layout.views(pending.wait(), self.comm.rank),
            describe=lambda: "reducing gradients",
            timeout=self.comm.timeout,
        )


class Staging:
    """Buffers to lay gradients out in: at most `count` at a time, of `numel` elements, that peers can read."""

    def __init__(
        self, comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device, *, count: int = STAGING_BUFFERS
    ) -> None:
        self._free = [PeerMemory(comm, [numel] * comm.size, dtype, device) for _ in range(count)]
        self.numel = numel

    def take(self) -> PeerMemory:
        if not self._free:
            raise RuntimeError("all staging buffers are in use: wait for a reduction first")
        return self._free.pop(0)

    def give_back(self, memory: PeerMemory) -> None:
        self._free.append(memory)


class BucketKind(NamedTuple):
    """Properties that a bucket's gradients have in common: the dtype that they travel in, device, ranks."""

    dtype: torch.dtype
    device: torch.device
    groups: Groups

    @staticmethod
    def of(param: ShardedParam, groups: Groups) -> BucketKind:
        return BucketKind(param.reduce_dtype, param.parameter.device, groups.of(param.parameter))


class StagingPool:
    """The staging buffers of a reducer: of each kind two of the largest bucket's size, made on first use."""

    def __init__(self) -> None:
        self._numels: dict[BucketKind, int] = {}
        self._made: dict[BucketKind, Staging] = {}

    def fit(self, kind: BucketKind, numel: int) -> None:
        self._numels[kind] = max(self._numels.get(kind, 0), numel)

    def of(self, kind: BucketKind) -> Staging:
        """Collective where they are made."""
        found = self._made.get(kind)
        if found is None or found.numel < self._numels[kind]:
            found = self._made[kind] = Staging(kind.groups.shard, self._numels[kind], kind.dtype, kind.device)
        return found


class Bucket:
    """Gradients that travel together: `open`, then `put` some of them, `launch`, and `finish`, which hands the means
    to the optimizer's parameters (zero for what was not put); `close` instead of `launch` where a pass has failed."""

    travels = True  # False: `finish` waits for nobody
    is_staged = False  # whether gradients are laid out in a staging buffer

    def __init__(self, params: Sequence[ShardedParam], kind: BucketKind) -> None:
        self.params, self.kind = params, kind
        self.numels = [local(param.parameter).numel() for param in params]

    def open(self) -> None:
        pass

    def put(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        raise NotImplementedError

    def launch(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass  # the next pass writes all of it

    def set_aside(self, but: Container[ShardedParam] = ()) -> None:
        """A forward pass begins whose gradients are to be reduced for themselves and then added to what there is."""

    def is_result(self, position: int) -> bool:
        """Whether what the parameter has as gradient came out of a reduction."""
        return False


class AllReduceBucket(Bucket):
    """Every rank gets the mean of all gradients (stage 0). They lie in this bucket's memory from then on."""

    def __init__(self, params: Sequence[ShardedParam], kind: BucketKind, wire: Wire | None = None) -> None:
        super().__init__(params, kind)
        comm = self._comm = kind.groups.replicate
        self._shapes = [local(param.parameter).shape for param in params]
        self._flat = PeerMemory(comm, [sum(self.numels)] * comm.size, kind.dtype, kind.device).mine
        self._views = self._cut(self._flat)
        self._wire = wire
        if wire is None and comm.size > 1 and kind.dtype.itemsize < 4 and params[0].optim_param.dtype == torch.float32:
            # Master weights get the sum as it was taken, in float32, as rows of it do in other stages.
            self._wire = CastWire(kind.dtype)
        self._is_put = [False] * len(params)
        self._pending: Pending[Tensor] | None = None

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(self.numels), self._shapes, strict=True)]

    def set_aside(self, but: Container[ShardedParam] = ()) -> None:
        for param, grad in self._results():
            if param.optim_param is param.parameter and param not in but:  # which autograd would add to
                param.set_aside, param.optim_param.grad = local(grad).clone(), None

    def _results(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        """Means that lie in this bucket's memory."""
        for param, view in zip(self.params, self._views, strict=True):
            grad = param.optim_param.grad
            if grad is not None and _is_same(local(grad), view):
                yield param, grad

    def is_result(self, position: int) -> bool:
        grad = self.params[position].unsent
        return grad is not None and _is_same(local(grad), self._views[position])

    def open(self) -> None:
        self._is_put = [False] * len(self.params)
        for param, grad in self._results():
            if param.optim_param is not param.parameter:  # the bucket is about to be written to
                param.optim_param.grad = as_dtensor(local(grad).clone(), param.spec)

    def put(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        targets, sources = [], []
        for position, gradient in zip(positions, gradients, strict=True):
            self._is_put[position] = True
            if not _is_same(gradient, self._views[position]):
                targets.append(self._views[position])
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def launch(self) -> None:
        for view, is_put in zip(self._views, self._is_put, strict=True):
            if not is_put:
                view.zero_()
        keep_traces(self.params, self._flat, lambda: [[view] for view in self._views])
        if self._wire is not None and self._comm.size > 1:
            self._pending = self._wire.all_reduce_async(self._comm, self._flat, key=self.params[0].name)
        else:
            collectives = self._comm.collectives(self.kind.groups.mode)
            self._pending = collectives.all_reduce(self._flat, "avg", out=self._flat)

    def finish(self) -> None:
        assert self._pending is not None
        mean, self._pending = self.kind.groups.as_sum_of_parts(self._pending.wait()), None
        for param, view in zip(self.params, self._views if mean is self._flat else self._cut(mean), strict=True):
            param.add_gradient(view)
            if param.set_aside is not None:
                param.add_gradient(param.set_aside)
                param.set_aside = None


class ReduceScatterBucket(Bucket):
    """Every rank gets its rows of the mean (stages 1 to 3)."""

    is_staged = True

    def __init__(
        self, params: Sequence[ShardedParam], kind: BucketKind, staging: StagingPool, wire: Wire | None = None
    ) -> None:
        super().__init__(params, kind)
        self._wire = wire
        self.layout = FlatLayout([local(param.parameter).shape for param in params], kind.groups.shard.size)
        self._staging = staging
        staging.fit(kind, self.layout.total)
        self._memory: PeerMemory | None = None
        self._gradients: FlatGradients | None = None
        self._pending: Pending[list[Tensor]] | None = None

    def open(self) -> None:
        self._memory, groups = self._staging.of(self.kind).take(), self.kind.groups
        self._gradients = FlatGradients(groups.shard, self.layout, self._memory.mine, mode=groups.mode)

    def put(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        assert self._gradients is not None
        self._gradients.put(positions, gradients)

    def close(self) -> None:
        assert self._memory is not None
        self._staging.of(self.kind).give_back(self._memory)
        self._memory = self._gradients = None

    def launch(self) -> None:
        assert self._gradients is not None
        self._gradients.fill()
        keep_traces(self.params, self._gradients.flat, self._gradients.pieces)
        self._pending = self._gradients.reduce(self._wire, key=self.params[0].name)

    def finish(self) -> None:
        assert self._pending is not None
        rows = self._pending.wait()
        self.close()  # before replicas are waited for: the next bucket may be filled meanwhile
        self._pending = None
        replicate, flat = self.kind.groups.replicate, _flat_of(rows)
        if replicate.size > 1:
            replicate.all_reduce(flat, "avg", out=flat)
        self.kind.groups.as_sum_of_parts(flat)
        for param, mine in zip(self.params, rows, strict=True):
            param.add_gradient(mine)


class PersistentBucket(Bucket):
    """Every rank gets the mean of all gradients, of parameters that stage 3 keeps on every rank: few and small, so they
    travel in float32."""

    def __init__(self, params: Sequence[ShardedParam], kind: BucketKind) -> None:
        super().__init__(params, kind)
        self._flat: Tensor | None = None

    def open(self) -> None:
        wide = torch.promote_types(self.kind.dtype, torch.float32)
        self._flat = torch.zeros(sum(self.numels), dtype=wide, device=self.kind.device)

    def put(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        assert self._flat is not None
        pieces = self._flat.split(self.numels)
        if positions:
            torch._foreach_copy_([pieces[position] for position in positions], [x.reshape(-1) for x in gradients])

    def launch(self) -> None:
        flat = self._flat
        assert flat is not None
        keep_traces(self.params, flat, lambda: [[piece] for piece in flat.split(self.numels)])
        for comm in self.kind.groups.everyone():
            comm.all_reduce(flat, "avg", out=flat)
        self.kind.groups.as_sum_of_parts(flat)

    def finish(self) -> None:
        assert self._flat is not None
        for param, mine in zip(self.params, self._flat.split(self.numels), strict=True):
            param.add_gradient(mine)
        self._flat = None


class LocalBucket(Bucket):
    """Gradients that no other rank averages, of experts that nobody else has: handed over without a buffer, rounded to
    what the others' travel in."""

    travels = False

    def open(self) -> None:
        self._gradients: dict[int, Tensor] = {}

    def put(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        self._gradients.update(zip(positions, gradients, strict=True))

    def launch(self) -> None:
        for position, gradient in self._gradients.items():
            _keep_trace(self.params[position], gradient)

    def finish(self) -> None:
        for position, param in enumerate(self.params):
            mine, gradient = local(param.optim_param), self._gradients.pop(position, None)
            if gradient is not None:
                gradient = gradient.to(mine.device, self.kind.dtype).to(mine.dtype).contiguous()
                param.add_gradient(self.kind.groups.as_sum_of_parts(gradient))
            elif param.optim_param.grad is None:
                param.optim_param.grad = as_dtensor(torch.zeros_like(mine), param.spec)


def _keep_trace(param: ShardedParam, gradient: Tensor) -> None:
    keep_traces([param], gradient, lambda: [[gradient]])


def _is_same(x: Tensor, view: Tensor) -> bool:
    return x.data_ptr() == view.data_ptr() and x.stride() == view.stride()


def _flat_of(rows: Sequence[Tensor]) -> Tensor:
    """The flat tensor that these are views of, one after the other."""
    numel = sum(x.numel() for x in rows)
    return rows[0].as_strided((numel,), (1,), rows[0].storage_offset()) if numel else rows[0].view(-1)
