"""Checks of the kinds of arguments, taken from a public function's annotations.

What a function says of its arguments in its signature is checked in one place, so that a wrong kind is a TypeError that
names the argument, whatever the function would have made of it. Ranges, shapes and dtypes are the functions' own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling

Function = TypeVar("Function", bound=Callable[..., Any])
INT64 = range(-(2**63), 2**63)
_LEAST, _MOST = INT64[0], INT64[-1]
_STRIDED = torch.strided
_PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})
_PLAIN_DTYPES = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
)


class Kind(NamedTuple):
    """What one argument may be: a test of its type, what is wrong with a value of that type (or None), and words.

    is_plain: a cheap test that most values pass; one that does is accepted and has no problem.
    """

    accepts: Callable[[Any], bool]
    problem: Callable[[Any], str | None]
    words: str
    is_plain: Callable[[Any], bool]


def checked(
    *, meta: bool = False, nan: tuple[str, ...] = (), unless_agreed: str = ""
) -> Callable[[Function], Function]:
    """A function whose arguments are of the kinds of its annotations, or TypeError or ValueError.

    meta: tensors on the meta device are taken as well; nan: the numbers that may be NaN; unless_agreed: the argument
    (a group, or a plan that has one) with which the function itself raises on all ranks what is wrong on one, so that
    nothing may be raised here.
    """

    def decorate(function: Function) -> Function:
        parameters = list(inspect.signature(function).parameters.values())
        kinds = {
            p.name: _kind_of(str(p.annotation), meta=meta, nan=p.name in nan)
            for p in parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        kinds |= {
            key: _kind_of(annotation, meta=meta, nan=key in nan)
            for p in parameters
            if p.kind == p.VAR_KEYWORD
            for key, annotation in _unpacked(str(p.annotation), function)
        }
        positional = [(p.name, kinds[p.name]) for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        plain = [kind.is_plain for _, kind in positional]
        plain_by_name = {key: kind.is_plain for key, kind in kinds.items()}
        name = function.__name__

        def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if unless_agreed and _agrees(kwargs.get(unless_agreed, args[1] if len(args) > 1 else None)):
                return
            for (argument, kind), value in zip(positional, args, strict=False):
                _check(name, argument, kind, value)
            for argument, value in kwargs.items():
                if argument in kinds:
                    _check(name, argument, kinds[argument], value)

        # The loops are all that most calls pay, a fraction of a microsecond: an op of a few rows takes about seven.
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                for is_plain, value in zip(plain, args):  # noqa: B905  (strict= costs as much as half a test)
                    if not is_plain(value):
                        check(args, kwargs)
                        return function(*args, **kwargs)
                for argument, value in kwargs.items():
                    if argument in plain_by_name and not plain_by_name[argument](value):
                        check(args, kwargs)
                        break
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _agrees(group: Any) -> bool:
    """Whether several ranks take part: of a group of fastpar's or torch's, or of a plan by its loads."""
    if isinstance(group, Tensor):
        return False  # another argument at the group's place
    loads = getattr(group, "loads", None)
    if isinstance(loads, Tensor):
        return loads.dim() > 0 and len(loads) > 1
    size = getattr(group, "size", None)
    return (size() if callable(size) else size or 1) > 1


def _check(function: str, argument: str, kind: Kind, value: Any) -> None:
    if not kind.accepts(value):
        raise TypeError(f"{function}: {argument} must be {kind.words}, got {_shown(value)}")
    problem = kind.problem(value)
    if problem is not None:
        raise ValueError(f"{function}: {argument} {problem}")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} {value.dtype}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


# ---- annotations -----------------------------------------------------------------------------------------------------


def _split(text: str, separator: str) -> list[str]:
    """`text` at the separators outside of brackets."""
    parts, depth, last = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth == 0 and character == separator:
            parts.append(text[last:position].strip())
            last = position + 1
    return [*parts, text[last:].strip()]


def _unpacked(annotation: str, function: Callable[..., Any]) -> list[tuple[str, str]]:
    """(option, annotation) of Unpack[a TypedDict]."""
    base, _, inner = annotation.partition("[")
    if base != "Unpack":
        return []
    options = inspect.unwrap(function).__globals__[inner[:-1]].__annotations__
    return [(key, getattr(value, "__forward_arg__", str(value))) for key, value in options.items()]


def _kind_of(annotation: str, *, meta: bool, nan: bool) -> Kind:
    choices = [_single(part, meta=meta, nan=nan) for part in _split(annotation, "|")]
    if len(choices) == 1:
        return choices[0]

    def problem(value: Any) -> str | None:
        return next((choice.problem(value) for choice in choices if choice.accepts(value)), None)

    words = " or ".join(choice.words for choice in choices)
    return Kind(lambda value: any(choice.accepts(value) for choice in choices), problem, words, _any_plain(choices))


def _any_plain(choices: Sequence[Kind]) -> Callable[[Any], bool]:
    tests = [choice.is_plain for choice in choices if choice.words != "None"]
    if len(tests) == 1:  # the commonest: ... | None
        only = tests[0]
        return lambda value: value is None or only(value)
    has_none = len(tests) < len(choices)
    return lambda value: (value is None and has_none) or any(test(value) for test in tests)


def _nothing(value: Any) -> None:
    return None


def _single(text: str, *, meta: bool, nan: bool) -> Kind:
    base, _, inner = text.partition("[")
    simple: dict[str, Kind] = {
        "Tensor": Kind(_is_tensor, functools.partial(_tensor_problem, meta), "a tensor", _is_plain_tensor),
        "float": Kind(_is_number, _nothing if nan else _number_problem, "a number", lambda value: type(value) is float),
        "int": Kind(_is_int, _int_problem, "an int", lambda value: type(value) is int and _LEAST <= value <= _MOST),
        "bool": _typed(bool, "True or False"),
        "str": _typed(str, "a string"),
        "None": _typed(type(None), "None"),
        "torch.dtype": _typed(torch.dtype, "a torch.dtype"),
        "GroupLike": Kind(_always, _nothing, "a group", _always),  # fastpar.comm knows its kinds
        "Callable": Kind(callable, _nothing, "a function", callable),
    }
    if base in simple:
        return simple[base]
    if base in ("Sequence", "tuple", "Iterable"):
        return _several(base, _split(inner[:-1], ","), meta=meta, nan=nan)
    named = base.rpartition(".")[2]
    return Kind(
        lambda value: any(c.__name__ == named for c in type(value).__mro__),
        _nothing,
        f"of type {named}",
        lambda value: type(value).__name__ == named,
    )


def _always(value: Any) -> bool:
    return True


def _typed(cls: type, words: str) -> Kind:
    return Kind(lambda value: isinstance(value, cls), _nothing, words, lambda value: type(value) is cls)


def _several(base: str, members: list[str], *, meta: bool, nan: bool) -> Kind:
    kinds = [_kind_of(member, meta=meta, nan=nan) for member in members]
    count = len(kinds) if base == "tuple" else None

    def member(position: int) -> Kind:
        return kinds[position if count is not None else 0]

    def accepts(value: Any) -> bool:
        if base == "Iterable":
            return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Tensor, dict))
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            return False
        return (count is None or len(value) == count) and all(member(i).accepts(v) for i, v in enumerate(value))

    def problem(value: Any) -> str | None:
        if base == "Iterable":
            return None
        found = ((i, member(i).problem(v)) for i, v in enumerate(value))
        return next((f"[{i}] {text}" for i, text in found if text is not None), None)

    def is_plain(value: Any) -> bool:
        return accepts(value) and problem(value) is None

    if count is not None:
        return Kind(accepts, problem, f"({', '.join(kind.words for kind in kinds)})", is_plain)
    return Kind(accepts, problem, f"a sequence, each {kinds[0].words}", is_plain)


# ---- kinds -----------------------------------------------------------------------------------------------------------


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_plain_tensor(value: Any) -> bool:
    """Whether `_tensor_problem` has nothing to say. Asks what takes some 50 ns each; the name of a device takes 500."""
    return (
        type(value) in _PLAIN_TENSORS
        and value.dtype in _PLAIN_DTYPES
        and value.layout is _STRIDED
        and not value.is_meta
        and not is_functorch_wrapped_tensor(value)
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def _int_problem(value: Any) -> str | None:
    return f"must fit 64 bits, got {value}" if isinstance(value, int) and value not in INT64 else None


def _number_problem(value: Any) -> str | None:
    if isinstance(value, int):
        return (
            None
            if abs(value) < 2**1000
            else f"must be a number of ordinary size, got an int of {value.bit_length()} bits"
        )
    return None  # NaN is outside of every range that a function checks


def _tensor_problem(meta: bool, value: Tensor) -> str | None:
    if is_functorch_wrapped_tensor(value):
        return (
            "is inside a torch.func transform (grad, vmap, jvp, ...), which cannot look into this function: "
            "differentiate with backward() or torch.autograd.grad, and call it with whole batches"
        )
    if value.layout is not torch.strided:
        return f"must be a dense tensor, got one of layout {value.layout}: pass its to_dense()"
    if value.is_floating_point() and value.element_size() < 2:
        return f"must be of a dtype that is computed with, got {value.dtype}: convert it first"
    if value.is_quantized:
        return f"must not be quantized, got {value.dtype}: pass its dequantize()"
    if value.device.type == "meta" and not meta:
        return f"is on the meta device, where a tensor has no numbers: shape {tuple(value.shape)}"
    return None
