"""Numbers that an optimizer's step reads of split parameters: those of the whole.

DTensor's `.item()` of a sum over split rows is this rank's term. An optimizer whose step size depends on such a number
(Prodigy, D-Adaptation and others that adapt it, or clip by a norm) would move every rank's rows by another factor, and
the copies of parameters that are not split apart. So while an optimizer with DTensors steps, what is read from a
DTensor is what one process would read. All ranks of a mesh step together: it is a collective.

Elsewhere `.item()` stays DTensor's own, since a program may call it on one rank alone; the number of the whole is
`.full_tensor().item()`.

torch.amp.GradScaler skips steps by such a number, too. torch lets ranks decide together by the first gradient of an
optimizer alone, where that is split. One that is whole on every rank comes first as a rule (an embedding, a norm): a
rank whose part of another one overflowed then skipped the step, and the others made it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fastpar.comm import Communicator

_NUMBER_OF = torch.ops.aten._local_scalar_dense.default
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def _begin_reading_whole(is_on: Callable[[], bool] = lambda: True) -> Callable[[], None]:
    """Starts it, and returns what ends it. No dispatch mode, in which nothing compiles."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # as torch's loss_parallel adds to them
    before = handlers.get(_NUMBER_OF)

    def read(op: Any, args: Any, kwargs: Any) -> Any:
        return op(args[0].full_tensor() if is_on() else args[0]._local_tensor)

    def end() -> None:
        if before is None:
            handlers.pop(_NUMBER_OF, None)
        else:
            handlers[_NUMBER_OF] = before

    handlers[_NUMBER_OF] = read
    return end


@contextmanager
def reading_whole() -> Iterator[None]:
    """What is read from a DTensor in the block (`.item()`, `float`, a condition) is the number that one process would
    read. Collective."""
    end = _begin_reading_whole()
    try:
        yield
    finally:
        end()


class _WholeNumbersInSteps:
    """Hooks of every optimizer of the process. The outermost step, known by its frame, reads whole numbers from its
    begin to its end, whatever steps it takes inside. torch calls no hook after a step that raises: whoever asks next
    finds that its frame does not run."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._thread = 0
        self._end: Callable[[], None] | None = None

    def begin(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling() or not _has_dtensors(optimizer) or self.is_on():
            return
        self._frame, self._thread = sys._getframe(1), threading.get_ident()
        self._end = _begin_reading_whole(self.is_on)

    def end(self, *_: Any) -> None:
        if self._end is not None and sys._getframe(1) is self._frame:
            self._leave()

    def is_on(self) -> bool:
        if self._end is None:
            return False
        if self._thread == threading.get_ident():  # others, of backward passes in a step, have other frames
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame is not self._frame:
                frame = frame.f_back
            if frame is None:
                self._leave()
        return self._end is not None

    def _leave(self) -> None:
        assert self._end is not None
        self._end()
        self._frame = self._end = None


def _has_dtensors(optimizer: Any) -> bool:
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


_HOOKS = _WholeNumbersInSteps()


def is_in_step() -> bool:
    """Whether an optimizer with DTensors steps."""
    return _HOOKS.is_on()


@functools.cache
def read_whole_numbers_in_steps() -> None:
    """For all optimizers of the process; once."""
    register_optimizer_step_pre_hook(_HOOKS.begin)
    register_optimizer_step_post_hook(_HOOKS.end)


@functools.cache
def skip_steps_together() -> None:
    """For all gradients of the process that are DTensors; once."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_UNSCALE] = _unscale


def _unscale(op: Any, args: tuple[list[Tensor], Tensor, Tensor], kwargs: dict[str, Any]) -> None:
    """Divide by the scale; what is not finite on a rank of these gradients' meshes is found on all. Collective."""
    grads, found, inverse = args
    op([x._local_tensor if isinstance(x, DTensor) else x for x in grads], found, inverse)
    meshes: dict[DeviceMesh, None] = dict.fromkeys(x.device_mesh for x in grads if isinstance(x, DTensor))
    for mesh in meshes:
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                found.copy_(Communicator(mesh.get_group(dim)).all_reduce(found, "max"))
