"""Checks of arguments: what passes the cheap tests would pass the thorough ones, and ordinary calls pay no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from fastpar import argument_kinds, arguments
from fastpar.arguments import checked

KINDS = [
    "Tensor",
    "Tensor | None",
    "float",
    "float | int | None",
    "int",
    "bool",
    "str",
    "str | None",
    "torch.dtype",
    "Sequence[Tensor]",
    "Sequence[int] | None",
    "tuple[int, float]",
    "str | torch.device",
    "int | str | torch.device | None",
    "Mapping[str, int]",
    "Literal['words', 'more']",
    "Callable[[int], int]",
    "Rule | None",
    "GroupLike",
]


class Rule:
    pass


class Narrow(Rule):
    pass


class OwnTensor(Tensor):
    pass


SCOPE = globals() | {"Callable": Callable, "Mapping": Mapping, "Literal": Literal}


def values() -> list[Any]:
    x = torch.ones(2, 3)
    tensors = [x, nn.Parameter(x), x.as_subclass(OwnTensor), x.to_sparse(), x.to("meta"), x.to(torch.float8_e4m3fn)]
    tensors += [x.to(torch.complex64), x.bool(), x.to(torch.int16), x.half()]
    numbers = [0, -(2**63), 2**63 - 1, 2**63, -(2**63) - 1, 2**2000, 1.5, float("nan"), float("inf"), True, False]
    others: list[Any] = [
        None,
        "words",
        torch.float32,
        Rule(),
        Narrow(),
        [x, x],
        (x,),
        [1, 2],
        [2**70],
        (1, 1.5),
        (1, "a"),
        {},
    ]
    return [*tensors, *numbers, *others]


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("annotation", KINDS)
def test_what_passes_the_cheap_test_is_accepted_and_has_no_problem(annotation: str, meta: bool) -> None:
    kind = argument_kinds.kind_of(annotation, SCOPE, argument_kinds.Tensors(meta=meta))
    for value in values():
        if kind.is_plain(value):
            assert kind.accepts(value)
            assert kind.problem(value) is None


def test_a_tensor_inside_a_transform_does_not_pass_the_cheap_test() -> None:
    kind = argument_kinds.kind_of("Tensor", globals(), argument_kinds.Tensors())
    seen: list[bool] = []

    def look(row: Tensor) -> Tensor:
        seen.append(kind.is_plain(row))
        return row

    torch.func.vmap(look)(torch.ones(2, 3))
    assert seen == [False]


@checked()
def some_op(x: Tensor, eps: float = 1e-6, *, rule: Rule | None = None, sizes: Sequence[int] = (), top: int = 1) -> str:
    return "called"


def test_ordinary_calls_pay_for_no_other_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def thorough(*_: Any) -> None:
        raise AssertionError("a thorough check of an ordinary call")

    monkeypatch.setattr(arguments, "_check", thorough)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.ones(2, 3, dtype=dtype)
        assert some_op(x) == "called"
        assert some_op(x, 1e-5, rule=Rule(), sizes=[1, 2], top=3) == "called"
        assert some_op(x=nn.Parameter(x, requires_grad=False), rule=None) == "called"
    with pytest.raises(AssertionError, match="thorough"):
        some_op(torch.ones(2, 3), 1, rule=Narrow())


def test_what_does_not_pass_the_cheap_test_is_judged_by_the_thorough_one() -> None:
    assert some_op(torch.ones(2).as_subclass(OwnTensor), 1, rule=Narrow(), top=2) == "called"
    with pytest.raises(TypeError, match="some_op: rule must be a Rule or None, got str 'x'"):
        some_op(torch.ones(2), rule="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="some_op: eps must be a number, got bool True"):
        some_op(torch.ones(2), True)
    with pytest.raises(ValueError, match="some_op: top must fit 64 bits"):
        some_op(torch.ones(2), top=2**63)
    with pytest.raises(ValueError, match="some_op: x is on the meta device"):
        some_op(torch.ones(2, device="meta"), "wrong too", top="and this")  # type: ignore[arg-type]


@checked(but=("tensors",))
def leaves_out(tensors: Sequence[Tensor], eps: float = 1e-6) -> str:
    return "called"


def test_what_was_left_out_is_checked_when_the_function_asks_for_it() -> None:
    assert leaves_out("abc") == "called"  # type: ignore[arg-type]
    arguments.check_left_out(leaves_out, tensors=[torch.ones(2).as_subclass(OwnTensor)])
    with pytest.raises(TypeError, match="leaves_out: tensors must be a sequence, each a tensor, got str 'abc'"):
        arguments.check_left_out(leaves_out, tensors="abc")
    with pytest.raises(ValueError, match=r"leaves_out: tensors \[1\] is on the meta device"):
        arguments.check_left_out(torch.no_grad()(leaves_out), tensors=[torch.ones(2), torch.ones(2, device="meta")])
