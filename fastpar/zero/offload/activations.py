"""Activations that backward needs are kept in a file, or in the host's memory, from forward until then.

autograd hands every tensor that it saves to a hook. This one sends the tensor's *storage* away, and the tensor becomes
a description of a view of it: so strides, offsets and aliases come back as they were and gradients are bit-equal, and
what several nodes save (or the thirds of one storage, as queries, keys and values) travels once. Parameters and other
leaves stay, since somebody else keeps them anyway.

Forward: the copy away runs while the next layers compute, and the memory is freed when it has ended. Where layers are
faster than the disk, forward waits as soon as `window_bytes` are under way. Backward: storages are asked for in reverse
order of their saving, ahead of their use, within the same window; one whose copy away has not ended yet is just kept.
What a pass holds beside the layer that runs is thus at most two windows (one storage each where that is larger).
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fastpar.arguments import checked
from fastpar.storage import TensorStore


@checked(computed=False)
def offload_activations(
    to: TensorStore | str = "cpu",
    *,
    min_bytes: int = 1 << 20,
    window_bytes: int = 256 << 20,
    keep: Iterable[Tensor] = (),
) -> ActivationOffload:
    """Keep what forward saves for backward elsewhere.

        with fp.zero.offload_activations(store):
            loss = model(batch)
        loss.backward()

    to            a TensorStore (CPU tensors go to its file), or "cpu": tensors of a device go to pinned memory of the
                  host, on a stream of their own. Where the device is the CPU that is the same memory: nothing moves
    min_bytes     storages smaller than this stay
    window_bytes  that may be under way at once: see the module
    keep          tensors whose storages stay: weights that are neither parameters nor leaves

    The object may be entered any number of times, and serve any number of graphs at once. Gradients are bit-equal to
    those without it. Backward twice through one graph (retain_graph) fetches twice.

    Raises StorageError from the forward or the backward where the disk is full or fails, and RuntimeError, in backward,
    where a saved tensor was changed in place before it was away.
    """
    return ActivationOffload(to, min_bytes=min_bytes, window_bytes=window_bytes, keep=keep)


class ActivationOffload:
    """The context of `offload_activations`.

    moved_bytes    sent away so far
    waiting_bytes  on their way there, still in memory
    """

    def __init__(self, to: TensorStore | str, *, min_bytes: int, window_bytes: int, keep: Iterable[Tensor]) -> None:
        if not isinstance(to, TensorStore) and to != "cpu":
            raise ValueError(f'to must be a TensorStore or "cpu", got {to!r}')
        if min_bytes < 1 or window_bytes < 1:
            raise ValueError(f"min_bytes ({min_bytes}) and window_bytes ({window_bytes}) must be positive")
        self._away: _Away = _File(to) if isinstance(to, TensorStore) else _HostMemory()
        self._min_bytes, self._window_bytes = min_bytes, window_bytes
        self._kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in keep]
        self._prefix = f"activation.{uuid.uuid4().hex}"
        self._lock = threading.RLock()
        self._count = 0
        self._saved: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()  # in order of saving
        self._by_storage: weakref.WeakValueDictionary[tuple[int, int], _Saved] = weakref.WeakValueDictionary()
        self._leaving: deque[_Saved] = deque()
        self._hooks: list[saved_tensors_hooks] = []
        self._fetched: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._frontier = 0  # index of what was asked for last
        self.moved_bytes = self.waiting_bytes = 0

    def __enter__(self) -> ActivationOffload:
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.pop().__exit__()
        if error is None:
            with self._lock:
                self._let_go(0)

    # ---- forward

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        if not self._moves(tensor):
            return tensor
        with self._lock:
            storage = tensor.untyped_storage()
            key = (storage._cdata, tensor._version)
            saved = self._by_storage.get(key)
            if saved is None:
                saved = self._by_storage[key] = self._send(tensor)
            saved.add_view()
            return _View(saved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        origin = tensor if tensor._base is None else tensor._base
        if isinstance(origin, nn.Parameter) or (origin.is_leaf and origin.requires_grad):
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_bytes or any(kept.cdata == storage._cdata for kept in self._kept):
            return False
        return self._away.takes(tensor)

    def _send(self, tensor: Tensor) -> _Saved:
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._let_go(memory.nbytes)
        name = f"{self._prefix}.{self._count}"
        saved = _Saved(self._count, name, memory.nbytes, _Original(memory, tensor), self._away.write(name, memory))
        # Once the graph is gone nobody asks for it any more.
        weakref.finalize(saved, self._away.discard, name).atexit = False
        self._saved[saved.index] = saved
        self._leaving.append(saved)
        self._count += 1
        self.waiting_bytes += saved.num_bytes
        self.moved_bytes += saved.num_bytes
        return saved

    def _let_go(self, coming_bytes: int) -> None:
        """Free what is away, and wait until what comes fits into the window."""
        while self._leaving:
            saved = self._leaving[0]
            if self.waiting_bytes + coming_bytes <= self._window_bytes and not saved.has_left():
                return
            self._leaving.popleft()
            self.waiting_bytes -= saved.num_bytes
            saved.free()

    # ---- backward

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with self._lock:
            self._let_go(0)
            saved = packed.saved
            if not saved.is_asked_for:
                self._fetch(saved)
            self._fetch_ahead()
            memory = saved.take()
            if not saved.is_asked_for:
                self._fetched.discard(saved)
        start = memory.storage_offset() // packed.dtype.itemsize + packed.offset
        view = torch.empty(0, dtype=packed.dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), start, packed.size, packed.stride)

    def _fetch(self, saved: _Saved) -> None:
        saved.ask(self._away)
        self._fetched.add(saved)
        self._frontier = saved.index

    def _fetch_ahead(self) -> None:
        """Ask for what was saved before that which was asked for last."""
        fetched = self.fetched_bytes
        for index in range(self._frontier - 1, -1, -1):
            saved = self._saved.get(index)
            if saved is not None and not saved.is_asked_for:
                if fetched + saved.num_bytes > self._window_bytes:
                    return
                self._fetch(saved)
                fetched += saved.num_bytes
            self._frontier = index

    @property
    def fetched_bytes(self) -> int:
        """Bytes that are fetched, or on their way, and not used by all who saved them."""
        return sum(saved.num_bytes for saved in self._fetched)


class _Original:
    """The memory that is being copied away, and whether somebody has changed it since it was saved."""

    def __init__(self, memory: Tensor, tensor: Tensor) -> None:
        self.memory = memory
        self._tensor, self._version = tensor.detach(), tensor._version  # detach() shares the counter

    @property
    def is_changed(self) -> bool:
        return self._tensor._version != self._version


class _Saved:
    """One storage: leaving, away, asked for, and back until all who saved it have it."""

    def __init__(self, index: int, name: str, num_bytes: int, original: _Original, leaving: _Work) -> None:
        self.index, self.name, self.num_bytes = index, name, num_bytes
        self._storage = StorageWeakRef(original.memory.untyped_storage())  # as long as this lives, its key is its own
        self._original: _Original | None = original
        self._leaving: _Work | None = leaving
        self._is_damaged = False
        self._arriving: _Work | None = None
        self._memory: Tensor | None = None
        self.num_views = self._views_left = 0

    def add_view(self) -> None:
        self.num_views += 1
        self._views_left += 1

    def has_left(self) -> bool:
        return self._leaving is None or self._leaving.done()

    def free(self) -> None:
        """Wait for the copy, and free the memory. Where the copy fails the memory stays."""
        assert self._leaving is not None
        assert self._original is not None
        self._leaving.wait()
        self._is_damaged = self._original.is_changed
        self._leaving = self._original = None

    @property
    def is_asked_for(self) -> bool:
        return self._arriving is not None or self._memory is not None

    def ask(self, away: _Away) -> None:
        if self._original is not None:
            self._memory = self._original.memory
        else:
            self._arriving = away.read(self.name)

    def take(self) -> Tensor:
        if self._is_damaged or (self._original is not None and self._original.is_changed):
            raise RuntimeError(
                "a tensor that forward saved for backward was changed in place while offload_activations copied it "
                "away; without offloading autograd refuses that too. Clone it before it is changed."
            )
        if self._arriving is not None:  # asked for every view: another one may be read on another stream
            self._memory = self._arriving.wait()
        memory = self._memory
        assert memory is not None
        self._views_left -= 1
        if self._views_left == 0:
            self._memory, self._arriving, self._views_left = None, None, self.num_views
        return memory


@dataclass(frozen=True)
class _View:
    """What autograd keeps instead of a tensor."""

    saved: _Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


# -------------------------------------------------------------------------------------------------------- where to


class _Work(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> Tensor: ...


class _Away(Protocol):
    def takes(self, tensor: Tensor) -> bool: ...

    def write(self, name: str, memory: Tensor) -> _Work: ...

    def read(self, name: str) -> _Work: ...

    def discard(self, name: str) -> None: ...


class _File:
    """A store's file."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self.write, self.read, self.discard = store.write, store.read, store.discard

    def takes(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"a TensorStore takes CPU tensors, and forward has saved one on {tensor.device}: "
                'use offload_activations("cpu")'
            )
        return True


class _HostMemory:
    """Pinned memory of the host for CUDA tensors. Tested on an H200, not timed."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[Tensor, torch.device]] = {}
        # Copies in both directions, beside the kernels of the current stream.
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def write(self, name: str, memory: Tensor) -> _Work:
        host = torch.empty(memory.nbytes, dtype=torch.uint8, pin_memory=True)
        stream = self._stream(memory.device)
        stream.wait_stream(torch.cuda.current_stream(memory.device))  # which computes it
        with torch.cuda.stream(stream):
            host.copy_(memory, non_blocking=True)
        self._copies[name] = (host, memory.device)
        return _DeviceCopy(memory, stream.record_event())

    def read(self, name: str) -> _Work:
        host, device = self._copies[name]
        stream = self._stream(device)
        with torch.cuda.stream(stream):
            memory = host.to(device, non_blocking=True)
        return _DeviceArrival(memory, stream.record_event())

    def discard(self, name: str) -> None:
        self._copies.pop(name, None)


class _DeviceCopy:
    """A copy to the host: `memory` is free when the event has come."""

    def __init__(self, memory: Tensor, event: torch.cuda.Event) -> None:
        self._memory, self._event = memory, event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> Tensor:
        self._event.synchronize()
        return self._memory


class _DeviceArrival(_DeviceCopy):
    """A copy to the device: kernels that are launched after `wait` see it. The host does not wait."""

    def wait(self) -> Tensor:
        current = torch.cuda.current_stream(self._memory.device)
        current.wait_event(self._event)
        self._memory.record_stream(current)  # it was allocated on the other stream
        return self._memory
