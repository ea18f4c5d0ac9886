"""A process group that has a backend for CUDA tensors only, as `init_process_group("nccl")` makes it.

It refuses CPU tensors, as NCCL does, and moves the others by a gloo group that nobody else knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from fastpar.comm.torch import device_lanes
from tests.rehearsal.device import on_host

_BACKEND = "rehearsal"
_Base: Any = ProcessGroup


class DeviceGroup(_Base):
    def __init__(self, name: str, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)
        self._own_name, self._gloo = name, gloo

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    @property
    def pg_name(self) -> str:
        return self._own_name

    @property
    def group_name(self) -> str:
        return self._own_name

    def getBackendName(self) -> str:
        return _BACKEND

    def get_group_store(self) -> Any:
        return self._gloo.get_group_store()

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return SimpleNamespace(name=lambda: "nccl")

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._do("allreduce", _hosts(tensors), opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._do("broadcast", _hosts(tensors), opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._do("reduce", _hosts(tensors), opts)

    def alltoall_base(self, out: Tensor, x: Tensor, outs: list[int], ins: list[int], opts: Any = None) -> Any:
        return self._do("alltoall_base", *_hosts([out, x]), outs, ins, opts)

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> Any:
        there, here = _hosts(outs), _hosts(ins)
        with _disable_current_modes():
            received = there[0].new_empty(sum(x.numel() for x in there))
            sizes = [x.numel() for x in there], [x.numel() for x in here]
            self._gloo.alltoall_base(received, torch.cat(here), *sizes, opts).wait()
            for target, part in zip(there, received.split(sizes[0]), strict=True):
                target.copy_(part)
            return self._gloo.barrier()

    def _allgather_base(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        there, here = _hosts([out, x])
        with _disable_current_modes():
            return self._gloo.allgather([list(there.view(self.size(), -1).unbind())], [here.view(-1)])

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        there, here = _hosts([out, x])
        with _disable_current_modes():
            whole = here.clone().view(self.size(), -1)
            self._gloo.allreduce([whole], opts.reduceOp).wait()
            there.copy_(whole[self.rank()].view(there.shape))
            return self._gloo.barrier()

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def _do(self, name: str, *arguments: Any) -> Any:
        with _disable_current_modes():
            return getattr(self._gloo, name)(*arguments)


def _hosts(tensors: Sequence[Tensor]) -> list[Tensor]:
    for x in tensors:
        if not x.is_cuda:
            raise RuntimeError(f"No backend type associated with device type {x.device.type}")
    with _disable_current_modes():
        return [on_host(x) for x in tensors]


class Lane:
    """What sends tensors of a device from rank to rank: gloo on the same memory."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        with _disable_current_modes():
            return self._gloo.send(_hosts(tensors), peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        with _disable_current_modes():
            return self._gloo.recv(_hosts(tensors), peer, tag)

    def shutdown(self) -> None:
        pass


@contextlib.contextmanager
def lanes() -> Iterator[None]:
    """Lanes between devices without NCCL."""
    make = device_lanes._new_backend
    with mock.patch.object(device_lanes, "_new_backend", lambda name, *arguments: Lane(make("gloo", *arguments))):
        yield


def device_group() -> ProcessGroup:
    """Over all ranks; a collective call."""
    gloo = dist.new_group(backend="gloo")

    def make(options: Any, *more: Any) -> Any:
        return DeviceGroup(options.group_id, options.group_rank, options.group_size, gloo)

    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, lambda *a: _make[-1](*a), extended_api=True, devices=["cuda"])
    _make.append(make)
    return dist.new_group(backend=_BACKEND)


_make: list[Any] = []
