"""What must not happen on the way of CUDA tensors: the host waits for the device, or does the device's work.

    with Watch() as watch:
        loss = op(x).sum()
        loss.backward()
    assert not watch.found

Noticed are, each with the line of fastpar that asks for it:

    sync      the host needs a value of the device: .item(), .tolist(), bool(), nonzero(), an index by a mask, ...
    copy      a tensor goes from one device to another
    on_cpu    an operation makes a CPU tensor of more than SMALL elements
    race      host memory was written to while a copy that nobody waits for may still have been reading it

Note: copies that nobody waits for. What `non_blocking=True` copies to the host is NaN, or another wrong value, until
the host waits, so that what reads it too early computes with that. What it copies from the host is compared, when the
host waits next, with what it was. All memory counts as pinned, and a wait for any stream as one for all.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.rehearsal import device

SMALL = 64
_TO_HOST = " to the host"
ROOT = Path(__file__).resolve().parents[2]
_PARTS = (str(ROOT / "fastpar"), str(ROOT / "kernels"))
# Sizes of their results depend on values, so CUDA's kernels wait for the device.
_BY_VALUE = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
    "aten::bincount", "aten::equal", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::argwhere",
}  # fmt: skip
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}
_TO_PYTHON = (Tensor.tolist, Tensor.numpy, Tensor.__reduce_ex__)
_FACTORIES = (torch.tensor, torch.as_tensor, Tensor.new_tensor)


class Finding(NamedTuple):
    kind: str  # "sync", "copy", "on_cpu"
    place: str  # file and function of fastpar
    op: str
    line: int

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device."""
        return self.kind == "sync" or self.op.endswith(_TO_HOST)

    def __str__(self) -> str:
        return f"{self.kind:6} {self.place}:{self.line}  {self.op}"


class _Functions(TorchFunctionMode):
    """Sees what torch does not dispatch: tensors made of Python's numbers."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TO_PYTHON and args[0].is_cuda:
            self.watch.settle()
            self.watch.note("sync", func.__name__)
        if func in _FACTORIES and isinstance(result, Tensor) and result.is_cuda:
            given = args[1] if func is Tensor.new_tensor else args[0]
            if not (isinstance(given, Tensor) and given.is_cuda):
                self.watch.note("copy", func.__name__)
        return result


class _Underway(NamedTuple):
    """A copy that the host has not waited for: its memory there, and the bytes that this has or is to get."""

    host: Tensor
    content: Tensor
    is_read: bool
    begun: Finding | None


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._underway: list[_Underway] = []
        self.found: list[Finding] = []
        self.everywhere = False  # outside fastpar too
        self._functions = _Functions(self)

    def __enter__(self) -> Watch:
        device.waits.append(self._note_wait)
        device.looks.append(self.settle)
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._functions.__exit__(*exc)
        device.waits.remove(self._note_wait)
        device.looks.remove(self.settle)
        self.settle()

    def _note_wait(self, what: str) -> None:
        self.settle()
        self.note("sync", what)

    def settle(self) -> None:
        """The host has waited: what was under way has arrived."""
        underway, self._underway = self._underway, []
        with _disable_current_modes(), torch.no_grad():
            for copy in underway:
                if not copy.is_read:
                    copy.host.copy_(copy.content)
                elif copy.begun is not None and not _has_bytes(copy.host, copy.content):
                    self.found.append(copy.begun)

    def _follow(self, source: Tensor, target: Tensor, op: str) -> None:
        """A copy between the host and a device has been begun."""
        with _disable_current_modes(), torch.no_grad():
            if source.is_cuda:
                host = target.detach()
                self._underway.append(_Underway(host, host.clone(), False, None))
                if host.dtype == torch.bool:
                    host.logical_not_()
                else:
                    has_nan = host.is_floating_point() or host.is_complex()
                    host.fill_(torch.nan if has_nan else torch.iinfo(host.dtype).max)
            elif source.dtype == target.dtype and source.is_contiguous():  # else of a copy of its own
                host = source.detach()
                self._underway.append(_Underway(host, host.clone(), True, self._finding("race", op)))

    def note(self, kind: str, op: str) -> None:
        finding = self._finding(kind, op)
        if finding is not None:
            self.found.append(finding)

    def _finding(self, kind: str, op: str) -> Finding | None:
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(_PARTS):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return Finding(kind, "", op, 0) if self.everywhere else None  # the test itself
        file = str(Path(frame.f_code.co_filename).resolve().relative_to(ROOT))  # fastpar/kernels may be a link
        return Finding(kind, f"{file}:{frame.f_code.co_qualname}", op, frame.f_lineno)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = any(x.is_cuda for x in given)
        if on_device and (name in _BY_VALUE or _indexes_by_mask(name, args) or _repeats(func, args, kwargs)):
            self.settle()
            self.note("sync", name)
        result = func(*args, **kwargs)
        if name in _COPIES and given:
            source, target = (given[0], result) if name == "aten::_to_copy" else (given[1], given[0])
            if source.device != target.device:
                self.note("copy", name + (_TO_HOST if target.device.type == "cpu" else ""))
                if not _is_begun(name, args, kwargs):
                    self.settle()
                elif source.device.type != target.device.type:
                    self._follow(source, target, name)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if any(x.device.type == "cpu" and x.numel() > SMALL for x in made):
            self.note("on_cpu", name)
        return result


def _indexes_by_mask(name: str, args: Any) -> bool:
    if name not in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return False
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _is_begun(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a copy is one that the host does not wait for."""
    return bool(kwargs.get("non_blocking", len(args) > 2 and name != "aten::_to_copy" and args[2]))


def _has_bytes(x: Tensor, content: Tensor) -> bool:
    if x.untyped_storage().nbytes() < x.nbytes:  # gone meanwhile
        return False
    return torch.equal(x.reshape(-1).view(torch.uint8), content.reshape(-1).view(torch.uint8))


def _repeats(func: Any, args: Any, kwargs: Any) -> bool:
    """repeat_interleave that has to look how long its result is."""
    if func._schema.name != "aten::repeat_interleave" or func._schema.overload_name == "self_int":
        return False
    return kwargs.get("output_size") is None
