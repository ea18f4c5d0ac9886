"""Results that outlive the forward that computed them, so that a second run of it need not communicate again.

Recomputing a layer repeats its collectives, unless what they brought was kept. The functions here that communicate, and
fastpar's linears, which hide collectives behind products, compute their forward through `kept`:

    out = kept(lambda: comm.all_reduce(x))

That is a plain call, except within `recording(tape)`, which puts a copy of the reference on the tape, and within
`replaying(tape)`, which takes it from there instead of calling, unless it has been written to since: then it calls.
Both are of the current thread and end with the block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

T = TypeVar("T")
_LOST = -1  # no tensor's version


class Tape:
    """Results of `kept` calls, in order, and their versions, which tell of writes in place."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.versions: list[list[int]] = []

    def lose(self, written: Tensor) -> None:
        """The results in this tensor's memory are written to, whatever their versions say: the product of a batch is an
        `aten::_unsafe_view` of the kept one, and counts versions of its own."""
        memory = set(_memory_of(written))
        for result, versions in zip(self.results, self.versions, strict=True):
            for place, tensor in enumerate(tensors_of(result)):
                if not memory.isdisjoint(_memory_of(tensor)):
                    versions[place] = _LOST


def _memory_of(x: Tensor) -> Iterator[int]:
    """The storages of a tensor, or of those that a DTensor and its like are made of; none of a sparse one."""
    if is_traceable_wrapper_subclass(x):
        for part in (getattr(x, name) for name in x.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):  # DTensor names its mesh as well
                yield from _memory_of(part)
    elif x.layout == torch.strided:
        yield x.untyped_storage()._cdata


class _Head(threading.local):
    """The place of this thread on a tape."""

    tape: Tape | None = None
    position = 0
    is_replaying = False


_head = _Head()


def is_taping() -> bool:
    """Whether `kept` would do more than call what it is given; for callers whom a closure would cost."""
    return _head.tape is not None


def writes_to(x: Tensor) -> None:
    """Says that a tensor is about to be written to, where its version may not show it: before a call within `recording`
    that takes the place of one that autograd sees."""
    if _head.tape is not None and not _head.is_replaying:
        _head.tape.lose(x)


def kept(compute: Callable[[], T]) -> T:
    """`compute()`, or what it returned when the tape was recorded: a tensor, or tuples and lists of them."""
    if torch.compiler.is_compiling() or _head.tape is None:
        return compute()
    tape = _head.tape
    if not _head.is_replaying:
        # What is kept inside is a part of this result, and must not be on the tape twice.
        with _at(None):
            result = compute()
        tape.results.append(map_tensors(result, _without_history))
        # A later write in place would be replayed
        tape.versions.append([tensor._version for tensor in tensors_of(result)])
        return result
    position = _head.position
    _head.position += 1
    if position >= len(tape.results):
        raise RuntimeError(
            f"a recomputed forward asks for a collective's result number {position + 1}, but its first run had "
            f"{len(tape.results)}; both must run the same operations"
        )
    result = tape.results[position]
    if [tensor._version for tensor in tensors_of(result)] != tape.versions[position]:
        # Lost to a write in place (x += y). That is in the model's code, and so the same on all ranks of a collective.
        with _at(None):
            return compute()
    replayed: T = map_tensors(result, _without_history)
    return replayed


def _without_history(x: Tensor) -> Tensor:
    """The same memory as a tensor that autograd knows nothing of; changes in place show in the versions of both."""
    # Within a TorchDispatchMode the key that counts versions is excluded, as if this were a kernel.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


@contextmanager
def _at(tape: Tape | None, *, is_replaying: bool = False) -> Iterator[None]:
    before = _head.tape, _head.position, _head.is_replaying
    _head.tape, _head.position, _head.is_replaying = tape, 0, is_replaying
    try:
        yield
    finally:
        _head.tape, _head.position, _head.is_replaying = before


def recording(tape: Tape) -> AbstractContextManager[None]:
    """Within the block, what `kept` computes is put on the tape as well."""
    return _at(tape)


def replaying(tape: Tape) -> AbstractContextManager[None]:
    """Within the block, `kept` calls take the tape's results, from its beginning, and compute nothing."""
    return _at(tape, is_replaying=True)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The value with the function applied to each tensor in it, through tuples and lists."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in the value, through tuples and lists, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
