"""Checks of the kinds of arguments, taken from a public function's annotations.

What a function says of its arguments in its signature is checked in one place, so that a wrong kind is a TypeError that
names the argument, whatever the function would have made of it. Ranges, shapes and dtypes are the functions' own.

What an annotation stands for is in argument_kinds.py.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fastpar.argument_kinds import (
    ArgumentKind,
    Tensors,
    always,
    imported_torch,
    is_tensor,
    kind_of,
    unpacked_options,
)

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


def checked(
    *,
    meta: bool = False,
    tangents: bool = False,
    computed: bool = True,
    unless_agreed: str = "",
    but: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """A function or method whose arguments are of the kinds of its annotations, or TypeError or ValueError.

    meta, tangents, computed  see `Tensors`
    unless_agreed             the argument (a group, or a plan that has one) with which the function itself raises on
                              all ranks what is wrong on one, so that nothing may be raised here
    but                       the arguments that the function checks itself, with more to say of them; or by
                              `check_left_out`
    """

    def decorate(function: Function) -> Function:
        tensors = Tensors(meta, tangents, computed)
        scope = inspect.unwrap(function).__globals__
        return _checking(function, _name_of(function), scope, tensors, unless_agreed, but)

    return decorate


def checked_fields(cls: Class) -> Class:
    """A dataclass whose fields are of the kinds of their annotations when it is made, or TypeError or ValueError. What
    `__post_init__` checks comes after that."""
    made = vars(cls)["__init__"]
    scope = vars(sys.modules[cls.__module__])
    cls.__init__ = _checking(made, cls.__name__, scope, Tensors(computed=False))  # type: ignore[misc]
    return cls


def _name_of(function: Callable[..., Any]) -> str:
    """The name as a caller writes it: `init_mesh`, `Pipeline`, `Pipeline.step`."""
    parts = function.__qualname__.rpartition("<locals>.")[2].split(".")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _checking(
    function: Function,
    name: str,
    scope: dict[str, Any],
    tensors: Tensors,
    unless_agreed: str = "",
    but: tuple[str, ...] = (),
) -> Function:
    # The object that a method belongs to has no annotation, and is not checked. No functools.cache among what `call`
    # closes over: Dynamo cannot take one up where it traces a constructor.
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    free = {p.name for p in parameters if p.annotation is p.empty or p.name in but}

    made: dict[str, ArgumentKind] = {}

    def kinds() -> dict[str, ArgumentKind]:
        """Made by the first call: then all names of the module are there."""
        if made:
            return made
        made.update(
            {
                p.name: kind_of(p.annotation, scope, tensors)
                for p in parameters
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in free
            }
        )
        for p in parameters:
            if p.kind == p.VAR_KEYWORD:
                options = unpacked_options(str(p.annotation), scope)
                made.update({key: kind_of(kind, scope, tensors) for key, kind in options})
        return made

    has_iterables = any("Iterable[" in str(p.annotation) for p in parameters)
    torch = imported_torch()  # a module that computes has imported it
    is_compiling: Callable[[], bool] = bool if torch is None else torch.compiler.is_compiling

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with what can be gone through once, and is looked at here, as a list."""
        args, kwargs, known = tuple(args), dict(kwargs), kinds()
        if unless_agreed and _agrees(kwargs.get(unless_agreed, args[1] if len(args) > 1 else None)):
            return args, kwargs
        if has_iterables:
            args = tuple(_settled(value, known.get(name)) for name, value in zip(positional, args, strict=False))
            kwargs = {name: _settled(value, known.get(name)) for name, value in kwargs.items()}
        for argument, value in zip(positional, args, strict=False):
            if argument in known:
                _check(name, argument, known[argument], value)
        for argument, value in kwargs.items():
            if argument in known:
                _check(name, argument, known[argument], value)
        return args, kwargs

    tests: list[Callable[[Any], bool]] = []  # of the positional arguments; both are filled by the first call
    tests_by_name: dict[str, Callable[[Any], bool]] = {}

    # The loops are all that most calls pay, a fraction of a microsecond: an op of a few rows takes about seven.
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return function(*args, **kwargs)
        if not tests_by_name:
            tests_by_name.update({key: kind.is_plain for key, kind in kinds().items()} or {"": always})
            tests.extend(tests_by_name.get(argument, always) for argument in positional)
        for is_plain, value in zip(tests, args):  # noqa: B905  (strict= costs as much as half a test)
            if not is_plain(value):
                args, kwargs = check(args, kwargs)
                return function(*args, **kwargs)
        for argument, value in kwargs.items():
            if argument in tests_by_name and not tests_by_name[argument](value):
                args, kwargs = check(args, kwargs)
                break
        return function(*args, **kwargs)

    left_out: dict[str, ArgumentKind] = {}

    def check_left_out(values: Mapping[str, Any]) -> None:
        if not left_out:
            left_out.update({p.name: kind_of(p.annotation, scope, tensors) for p in parameters if p.name in but})
        for argument, value in values.items():
            if not left_out[argument].is_plain(value):
                _check(name, argument, left_out[argument], value)

    call.__dict__["check_left_out"] = check_left_out
    return call  # type: ignore[return-value]


def check_left_out(function: Callable[..., Any], **values: Any) -> None:
    """Checks arguments of a `checked` function that it was told to leave to the function (`but`), as it checks others:
    for a function that seldom needs it."""
    torch = imported_torch()
    if torch is None or not torch.compiler.is_compiling():
        vars(function)["check_left_out"](values)


def check_counts(most: int = 1 << 40, /, *, least: int = 1, **counts: int) -> None:
    """ValueError that names the first of these numbers that is not in [least, most]."""
    for name, value in counts.items():
        if not least <= value <= most:
            raise ValueError(f"{name} must be at least {least} and at most {most}, got {value}")


def _settled(value: Any, kind: ArgumentKind | None) -> Any:
    return list(value) if kind is not None and isinstance(value, Iterator) and kind.accepts(value) else value


MAX_SECONDS = 1e9  # thirty years: it fits what clocks count with


def check_seconds(seconds: float, name: str = "timeout") -> float:
    """The seconds of a deadline, for ever as MAX_SECONDS. Raises TypeError or ValueError for what are none."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {seconds!r}")
    if not seconds > 0:
        raise ValueError(f"{name} must be positive (seconds), got {seconds}")
    return float(min(seconds, MAX_SECONDS))


def _agrees(group: Any) -> bool:
    """Whether several ranks take part: of a group of fastpar's or torch's, or of a plan by its loads."""
    if is_tensor(group):
        return False  # another argument at the group's place
    loads: Any = getattr(group, "loads", None)
    if is_tensor(loads):
        return loads.dim() > 0 and len(loads) > 1
    size = getattr(group, "size", None)
    return (size() if callable(size) else size or 1) > 1


def _check(function: str, argument: str, kind: ArgumentKind, value: Any) -> None:
    if not kind.accepts(value):
        raise TypeError(f"{function}: {argument} must be {kind.words}, got {shown(value)}")
    problem = kind.problem(value)
    if problem is not None:
        raise ValueError(f"{function}: {argument} {problem}")


def shown(value: Any) -> str:
    if is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)} {value.dtype}"
    try:
        text = repr(value)
    except Exception:  # of an object that is half made, or closed
        text = ""
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
