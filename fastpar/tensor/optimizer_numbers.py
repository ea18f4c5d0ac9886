"""Numbers that an optimizer's step reads of split parameters: those of the whole.

DTensor's `.item()` of a sum over split rows is this rank's term. An optimizer whose step size depends on such a number
(Prodigy, D-Adaptation and others that adapt it, or clip by a norm) would move every rank's rows by another factor, and
the copies of parameters that are not split apart. So while an optimizer with DTensors steps, what is read from a
DTensor is what one process would read. All ranks of a mesh step together: it is a collective.

Elsewhere `.item()` stays DTensor's own, since a program may call it on one rank alone; the number of the whole is
`.full_tensor().item()`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_NUMBER_OF = torch.ops.aten._local_scalar_dense.default


def _read_whole(op: Any, args: Any, kwargs: Any) -> Any:
    return op(args[0].full_tensor())


def _begin_reading_whole() -> Callable[[], None]:
    """Starts it, and returns what ends it. No dispatch mode, in which nothing compiles."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # as torch's loss_parallel adds to them
    before = handlers.get(_NUMBER_OF)
    handlers[_NUMBER_OF] = _read_whole

    def end() -> None:
        if before is None:
            handlers.pop(_NUMBER_OF, None)
        else:
            handlers[_NUMBER_OF] = before

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
    begin to its end, whatever steps it takes inside. torch calls no hook after a step that raises: its frame is left
    then, which the next step finds out."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._end: Callable[[], None] | None = None

    @property
    def is_on(self) -> bool:
        return self._end is not None

    def begin(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling() or not _has_dtensors(optimizer):
            return
        caller = sys._getframe(1)
        if self._end is not None:
            if self._is_running(caller):
                return
            self._end()
        self._frame, self._end = caller, _begin_reading_whole()

    def end(self, *_: Any) -> None:
        if self._end is not None and sys._getframe(1) is self._frame:
            self._end()
            self._frame = self._end = None

    def _is_running(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


def _has_dtensors(optimizer: Any) -> bool:
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


_HOOKS = _WholeNumbersInSteps()


def is_in_step() -> bool:
    """Whether an optimizer with DTensors steps, of which a step that has raised is the last until the next one."""
    return _HOOKS.is_on


@functools.cache
def read_whole_numbers_in_steps() -> None:
    """For all optimizers of the process; once."""
    register_optimizer_step_pre_hook(_HOOKS.begin)
    register_optimizer_step_post_hook(_HOOKS.end)
