"""What an annotation says that an argument may be: a test of its type, of what else can be said of it, and words.

torch is not imported here, but used where it is there: schedules of pipelines do without it.
"""

from __future__ import annotations

import builtins
import collections.abc
import functools
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ForwardRef, Literal, NamedTuple, TypeVar, Union

INT64 = range(-(2**63), 2**63)
_LEAST, _MOST = INT64[0], INT64[-1]


def _never(value: Any) -> bool:
    return False


class ArgumentKind(NamedTuple):
    """What one argument may be: a test of its type, what is wrong with a value of that type (or None), and words.

    is_plain: a cheap test that most values pass; one that does is accepted and has no problem.
    are_plain: the same of all members of a list or tuple at once, where that is cheaper than one by one.
    """

    accepts: Callable[[Any], bool]
    problem: Callable[[Any], str | None]
    words: str
    is_plain: Callable[[Any], bool] = _never
    are_plain: Callable[[Sequence[Any]], bool] | None = None


class Tensors(NamedTuple):
    """Which tensors and numbers a function takes.

    meta      tensors on the meta device as well
    tangents  tensors of forward-mode differentiation as well, for what runs operations of torch alone
    computed  tensors that can be computed with, of dense memory and ordinary dtypes; False: that is the function's own
              to check
    """

    meta: bool = False
    tangents: bool = False
    computed: bool = True


# ---- annotations -----------------------------------------------------------------------------------------------------


class _Scope(Mapping[str, Any]):
    """The names of a module, and a stand-in for each that only type checkers import: a class of that name."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def __getitem__(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        if name == "GroupLike":  # that of fastpar.comm, which is above what is below it
            from torch.distributed import ProcessGroup
            from torch.distributed.device_mesh import DeviceMesh

            return Union[ProcessGroup, DeviceMesh, ForwardRef("Communicator"), None]  # noqa: UP007
        return getattr(builtins, name) if hasattr(builtins, name) else type(name, (_ByName,), {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _ByName:
    """The kind of a class that is known by its name alone."""


def unpacked_options(annotation: str, scope: dict[str, Any]) -> list[tuple[str, Any]]:
    """(option, annotation) of Unpack[a TypedDict]."""
    base, _, inner = annotation.partition("[")
    if base != "Unpack":
        return []
    return list(scope[inner[:-1]].__annotations__.items())


def kind_of(annotation: Any, scope: dict[str, Any], tensors: Tensors) -> ArgumentKind:
    """The kind of an annotation: text, or what it stands for."""
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        annotation = eval(annotation, {}, _Scope(scope))  # an annotation of the package's own
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _one_of(_choices(list(typing.get_args(annotation)), scope, tensors))
    if isinstance(annotation, TypeVar):
        if annotation.__constraints__:
            return _one_of(_choices(list(annotation.__constraints__), scope, tensors))
        return _ANYTHING if annotation.__bound__ is None else kind_of(annotation.__bound__, scope, tensors)
    if origin is Literal:
        values = typing.get_args(annotation)
        return ArgumentKind(
            lambda value: isinstance(value, str) and value in values,
            _nothing,
            " or ".join(map(repr, values)),
            lambda value: type(value) is str and value in values,
        )
    members = [] if origin in (None, collections.abc.Callable, type) else list(typing.get_args(annotation))
    base = annotation if origin is None else origin
    if base in _SEQUENCES:
        return _several(base, [kind_of(member, scope, tensors) for member in members if member is not ...])
    if isinstance(base, type) and issubclass(base, Mapping):
        return _mapping(base, [kind_of(member, scope, tensors) for member in members])
    return _single(base, tensors)


def _choices(parts: list[Any], scope: dict[str, Any], tensors: Tensors) -> list[ArgumentKind]:
    """The kinds of a union's parts. What groups may be is one kind, with words of its own."""
    named = [getattr(part, "__forward_arg__", getattr(part, "__name__", "")) for part in parts]
    if "ProcessGroup" not in named:
        return [kind_of(part, scope, tensors) for part in parts]
    group = ("ProcessGroup", "DeviceMesh", "Communicator", "NoneType")
    others = [part for part, name in zip(parts, named, strict=True) if name not in group]
    of_group = _GROUP if "Communicator" in named else _TORCH_GROUP
    return [*(kind_of(part, scope, tensors) for part in others), of_group]


def _one_of(choices: list[ArgumentKind]) -> ArgumentKind:
    words = [choice.words for choice in choices]
    if "a torch.device" in words:  # and what torch makes one of
        choices = [c._replace(problem=_device_problem) if c.words in _DEVICES else c for c in choices]

    def problem(value: Any) -> str | None:
        return next((choice.problem(value) for choice in choices if choice.accepts(value)), None)

    text = " or ".join(dict.fromkeys(words))
    # A test that something else of the union would fail is no proof: of "a device" a plain string has a problem.
    is_plain = _never if any(c.problem is _device_problem for c in choices) else _any_plain(choices)
    return ArgumentKind(lambda value: any(choice.accepts(value) for choice in choices), problem, text, is_plain)


def _any_plain(choices: Sequence[ArgumentKind]) -> Callable[[Any], bool]:
    tests = [choice.is_plain for choice in choices if choice.words != "None"]
    has_none = len(tests) < len(choices)
    if len(tests) == 1 and has_none:  # the commonest: ... | None
        only = tests[0]
        return lambda value: value is None or only(value)
    return lambda value: (value is None and has_none) or any(test(value) for test in tests)


_DEVICES = ("a torch.device", "a string", "an int")


def _device_problem(value: Any) -> str | None:
    torch = imported_torch()
    try:
        device = torch.device(value)
    except (RuntimeError, ValueError, OverflowError):
        return f"must be a device such as 'cpu' or 'cuda:0', got {value!r}"
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        return f"is {str(device)!r}, but this process has {count} CUDA devices"
    return None


def _nothing(value: Any) -> None:
    return None


def _single(base: Any, tensors: Tensors) -> ArgumentKind:
    """The kind of one class, or of what stands for one."""
    if base in (Any, object, inspect.Parameter.empty):
        return _ANYTHING
    if base is float:
        return ArgumentKind(
            _is_number,
            _number_problem,
            "a number",
            lambda value: type(value) is float,
        )
    torch = imported_torch()
    if torch is not None and base is torch.Tensor:
        if not tensors.computed:
            return ArgumentKind(is_tensor, _nothing, "a tensor", is_tensor)
        return ArgumentKind(
            is_tensor,
            functools.partial(_tensor_problem, tensors),
            "a tensor",
            _plain_tensor_test(torch),
            _plain_tensors_test(torch),
        )
    simple = {
        int: ArgumentKind(
            _is_int, _int_problem, "an int", lambda value: type(value) is int and _LEAST <= value <= _MOST
        ),
        bool: _typed(bool, "True or False"),
        str: _typed(str, "a string"),
        bytes: _typed(bytes, "bytes"),
        None: _typed(type(None), "None"),
        type(None): _typed(type(None), "None"),
        collections.abc.Callable: ArgumentKind(callable, _nothing, "a function", callable),
        type: ArgumentKind(
            lambda value: isinstance(value, type), _nothing, "a class", lambda value: isinstance(value, type)
        ),
    }
    if base in simple:
        return simple[base]
    if getattr(base, "_is_protocol", False):
        needed = [name for name in vars(base) if not name.startswith("_")]
        return ArgumentKind(lambda value: all(hasattr(value, name) for name in needed), _nothing, _a(base.__name__))
    if isinstance(base, type) and not issubclass(base, _ByName):
        return _typed(base, _a(_title(base)))
    named = getattr(base, "__name__", str(base))
    return ArgumentKind(
        lambda value: any(c.__name__ == named for c in type(value).__mro__),
        _nothing,
        _a(named),
        lambda value: type(value).__name__ == named,
    )


def always(value: Any) -> bool:
    return True


def _typed(cls: type, words: str) -> ArgumentKind:
    return ArgumentKind(lambda value: isinstance(value, cls), _nothing, words, lambda value: type(value) is cls)


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def _title(cls: type) -> str:
    """The name as users write it: torch.dtype, nn.Module, Mesh."""
    package = cls.__module__.partition(".")[0]
    if package != "torch":
        return cls.__name__
    return f"nn.{cls.__name__}" if cls.__module__.startswith("torch.nn") else f"torch.{cls.__name__}"


_SEQUENCES = (collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection, tuple, list)


def _several(base: Any, kinds: list[ArgumentKind]) -> ArgumentKind:
    count = len(kinds) if base is tuple and len(kinds) > 1 else None
    kinds = kinds or [_ANYTHING]

    def member(position: int) -> ArgumentKind:
        return kinds[position if count is not None else 0]

    def accepts(value: Any) -> bool:
        if base in (collections.abc.Iterable, collections.abc.Collection) and not isinstance(value, Sequence):
            return isinstance(value, base) and not isinstance(value, dict) and not hasattr(value, "__array__")
        if not isinstance(value, (list if base is list else Sequence)) or isinstance(value, (str, bytes)):
            return False
        return (count is None or len(value) == count) and all(member(i).accepts(v) for i, v in enumerate(value))

    def problem(value: Any) -> str | None:
        if not isinstance(value, Sequence):  # which can be gone through once
            return None
        found = ((i, member(i).problem(v)) for i, v in enumerate(value))
        return next((f"[{i}] {text}" for i, text in found if text is not None), None)

    lists, test, are_plain = (list,) if base is list else (list, tuple), kinds[0].is_plain, kinds[0].are_plain

    def is_plain(value: Any) -> bool:
        if not isinstance(value, lists):
            return isinstance(value, Sequence) and accepts(value) and problem(value) is None
        return all(map(test, value)) if are_plain is None else are_plain(value)

    if count is not None:
        tests = [kind.is_plain for kind in kinds]

        def is_plain_tuple(value: Any) -> bool:
            is_one = type(value) is tuple and len(value) == count
            return is_one and all(test(v) for test, v in zip(tests, value))  # noqa: B905  (as above)

        return ArgumentKind(accepts, problem, f"({', '.join(kind.words for kind in kinds)})", is_plain_tuple)
    return ArgumentKind(accepts, problem, f"a sequence, each {kinds[0].words}", is_plain)


def _mapping(base: type, kinds: list[ArgumentKind]) -> ArgumentKind:
    key, item = kinds if len(kinds) == 2 else (_ANYTHING, _ANYTHING)

    def accepts(value: Any) -> bool:
        return isinstance(value, Mapping) and all(key.accepts(k) and item.accepts(v) for k, v in value.items())

    words = "a mapping" if item is _ANYTHING else f"a mapping from {key.words} to {item.words}"
    return ArgumentKind(accepts, _nothing, words, accepts)


# ---- kinds -----------------------------------------------------------------------------------------------------------


def _is_group(value: Any) -> bool:
    """Anything that `resolve_group` of fastpar.comm takes, or has its own words for."""
    from torch.distributed import GroupMember, ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if value is None or value is GroupMember.NON_GROUP_MEMBER or isinstance(value, (ProcessGroup, DeviceMesh)):
        return True
    return any(c.__name__ == "Communicator" for c in type(value).__mro__)


def _is_plain_group(value: Any) -> bool:
    return value is None or type(value).__name__ in ("ProcessGroup", "DeviceMesh", "Communicator")


_TORCH_GROUP = ArgumentKind(_is_group, _nothing, "a ProcessGroup, a 1-D DeviceMesh or None", _is_plain_group)
_GROUP = ArgumentKind(_is_group, _nothing, "a ProcessGroup, a 1-D DeviceMesh, a Communicator or None", _is_plain_group)
_ANYTHING = ArgumentKind(always, _nothing, "anything", always)


def imported_torch() -> Any:
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    torch = imported_torch()
    return torch is not None and isinstance(value, torch.Tensor)


def _plain_classes_and_dtypes(torch: Any) -> tuple[frozenset[type], frozenset[Any]]:
    floats = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    integers = {torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool}
    return frozenset({torch.Tensor, torch.nn.Parameter}), frozenset(floats | integers)


@functools.cache
def _plain_tensor_test(torch: Any) -> Callable[[Any], bool]:
    """Whether `_tensor_problem` has nothing to say. Asks what takes some 50 ns each; the name of a device takes 500."""
    (classes, dtypes), strided = _plain_classes_and_dtypes(torch), torch.strided
    is_wrapped, forward = torch._C._functorch.is_functorch_wrapped_tensor, torch.autograd.forward_ad

    def is_plain(value: Any) -> bool:
        return (
            type(value) in classes
            and value.dtype in dtypes
            and value.layout is strided
            and not value.is_meta
            and not is_wrapped(value)
            and forward._current_level < 0
        )

    return is_plain


@functools.cache
def _plain_tensors_test(torch: Any) -> Callable[[Sequence[Any]], bool]:
    """The same of every member, without a step of Python for each: a quarter of the time."""
    (classes, dtypes), layouts = _plain_classes_and_dtypes(torch), frozenset({torch.strided})
    dtype, layout, is_meta = map(operator.attrgetter, ("dtype", "layout", "is_meta"))
    is_wrapped, forward = torch._C._functorch.is_functorch_wrapped_tensor, torch.autograd.forward_ad

    def are_plain(values: Sequence[Any]) -> bool:
        return (
            classes.issuperset(map(type, values))
            and dtypes.issuperset(map(dtype, values))
            and layouts.issuperset(map(layout, values))
            and not any(map(is_meta, values))
            and not any(map(is_wrapped, values))
            and forward._current_level < 0
        )

    return are_plain


def _is_int(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool)
    torch = imported_torch()
    return torch is not None and isinstance(value, torch.SymInt)


def _is_number(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    torch = imported_torch()
    return torch is not None and isinstance(value, (torch.SymInt, torch.SymFloat))


def _int_problem(value: Any) -> str | None:
    return f"must fit 64 bits, got {_number(value)}" if isinstance(value, int) and value not in INT64 else None


def _number(value: int) -> str:
    """Digits of a number that has not too many of them."""
    return str(value) if abs(value) < 2**1000 else f"an int of {value.bit_length()} bits"


def _number_problem(value: Any) -> str | None:
    if isinstance(value, int) and abs(value) >= 2**1000:  # what no float is near to
        return f"must be a number of ordinary size, got {_number(value)}"
    return None  # NaN is outside of every range that a function checks


def _tensor_problem(tensors: Tensors, value: Any) -> str | None:
    torch = imported_torch()
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return (
            "is inside a torch.func transform (grad, vmap, jvp, ...), which cannot look into this function: "
            "differentiate with backward() or torch.autograd.grad, and call it with whole batches"
        )
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and not tensors.tangents and forward.unpack_dual(value).tangent is not None:
        return (
            "has a tangent of forward-mode differentiation, which this function would lose: differentiate with "
            "backward() or torch.autograd.grad"
        )
    if value.layout is not torch.strided:
        return f"must be a dense tensor, got one of layout {value.layout}: pass its to_dense()"
    if value.is_floating_point() and value.element_size() < 2:
        return f"must be of a dtype that is computed with, got {value.dtype}: convert it first"
    if value.is_quantized:
        return f"must not be quantized, got {value.dtype}: pass its dequantize()"
    if value.device.type == "meta" and not tensors.meta:
        return f"is on the meta device, where a tensor has no numbers: shape {tuple(value.shape)}"
    return None
