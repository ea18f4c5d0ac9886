"""Experts whose ranks reach each other's memory, where there is no GPU: in Triton's interpreter; what the ops refuse to
send that way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastpar.expert import MoELayer
from fastpar.ops.moe.plan import Dispatch, Padding
from fastpar.ops.moe.transports import symmetric as _moe_push
from tests.moe.moe_calls import moe_dispatch, moe_mlp
from tests.triton_interpreter import run_interpreted


@pytest.mark.timeout(600)
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "slow"])
def test_experts_match_the_reference_in_the_interpreter(slow: bool) -> None:
    run_interpreted("check_moe_push_mlp.py", markers="slow" if slow else "not slow")


def asked(**options: Any) -> dict[str, Any]:
    return {"options": Dispatch("symmetric", **options)}


def test_what_the_exchange_does_not_take_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    x, indices, weights = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    right: dict[str, Any] = {
        "x": x, "indices": indices, "weights": weights, "add": None, "num_experts": 4,
        **asked(),
    }  # fmt: skip
    assert "takes CUDA tensors, and Triton; x is on cpu" in str(_moe_push._problem(**right))
    monkeypatch.setattr(_moe_push, "_DEVICES", ("cpu",))
    assert _moe_push._problem(**right) is None
    for wrong, message in (
        ({"x": x.double()}, "takes bfloat16, float16 or float32, got torch.float64"),
        ({"x": x[:2]}, r"x must be [T, H] and indices [T, K], got (2, 4) and (3, 2)"),
        ({"indices": indices.short()}, "indices must be int64 or int32, got torch.int16"),
        ({"weights": weights[:, :1]}, "weights must have the shape of indices, (3, 2), got (3, 1)"),
        ({"weights": weights.to("meta")}, "must be on one device, got cpu, cpu and meta"),
        ({"add": x[:, :1]}, "add must be as x is, (3, 4) on cpu, got (3, 1) on cpu"),
        ({"num_experts": 0}, "every rank must have an expert"),
        (
            {"options": Dispatch("symmetric", padding=Padding(align=8))},
            "pads no rows, got Padding(align=8, capacity=None)",
        ),
        (
            {"options": Dispatch("symmetric", payload="float8_e4m3fn")},
            "sends tokens as they are, got payload='float8_e4m3fn'",
        ),
        ({"options": Dispatch("symmetric", max_rows=0)}, "max_rows must be at least 1, got 0"),
    ):
        assert message in str(_moe_push._problem(**right | wrong)), wrong


def test_the_worst_case_is_that_all_tokens_go_to_one_rank() -> None:
    assert _moe_push.worst_case(4, 10, 8, 16) == 160
    assert _moe_push.worst_case(4, 10, 2, 16) == 80
    assert _moe_push.worst_case(2, 0, 2, 4) == 1


def test_one_rank_needs_no_symmetric_memory() -> None:
    layer = MoELayer.from_preset("mixtral", 8, 6, 4, dispatch=Dispatch("symmetric", max_rows=1))
    other = MoELayer.from_preset("mixtral", 8, 6, 4)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(5, 8)
    assert torch.equal(layer(x), other(x))
    rows, _, _ = moe_dispatch(x, torch.zeros(5, 1, dtype=torch.int64), num_experts=4, transport="symmetric")
    assert torch.equal(rows, x)


def test_a_limit_of_rows_where_there_is_none_is_an_error() -> None:
    x, weights = torch.zeros(3, 4), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"max_rows is for transport='symmetric', got 'auto'"):
        moe_mlp(x, weights.long(), weights, torch.zeros(2, 6, 4), torch.zeros(2, 4, 3), max_rows=5)
