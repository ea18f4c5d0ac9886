"""Experts between dispatch and combine against a loop over tokens in float64, alone and on ranks.

Tolerances: float32 sums of at most 24 products and a few roundings, 5e-6 of the largest value; in bfloat16 activations
and results are rounded on the way, three times forward and four times backward: 4 * 2^-8.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastpar.contracts.moe import ACTIVATIONS, WEIGH, ExpertRule
from fastpar.ops.moe import chunks as _moe_chunks
from fastpar.ops.moe import experts as _moe_mlp
from fastpar.ops.moe.fp8 import quantize_dequantize
from fastpar.ops.moe.plan import Padding
from tests.dist import run_ranks
from tests.moe.moe_calls import moe_mlp, reference_mlp
from tests.moe.moe_mlp_ranks import (
    EXPERTS,
    HIDDEN,
    INNER,
    gradients,
    problem,
    record_chunks,
    run_chunks,
    run_experts,
    wrong_experts_on_one_rank,
    wrong_on_one_rank,
)

RULES = {
    **{name: ExpertRule(name) for name in ACTIVATIONS},
    "weighed before": ExpertRule(weigh="before"),
    "weighed input": ExpertRule(weigh="input"),
    "gelu before": ExpertRule("gelu", weigh="before"),
    "relu input": ExpertRule("relu", weigh="input"),
    "transposed": ExpertRule(transposed=True),
    "gpt-oss": ExpertRule("clamped_swiglu", transposed=True, interleaved=True, limit=1.0),
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 2.0**-6}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """In the largest norm, relative to the largest value."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        limit = tolerance * float(want.abs().max())
        error = float((found[name].double() - want.double()).abs().max())
        assert error <= limit, f"{name} is off by {error:.3g}, allowed {limit:.3g}"


def exact(given: dict[str, Tensor], rule: ExpertRule) -> dict[str, Tensor]:
    return gradients(
        reference_mlp, {n: t.double() if t.is_floating_point() else t for n, t in given.items()}, rule=rule
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_output_and_all_gradients_match_a_float64_loop(rule):
    given = problem(torch.float32, rule)
    assert_close(gradients(moe_mlp, given, rule=rule), exact(given, rule), TOLERANCE[torch.float32])


@pytest.mark.parametrize("weigh", WEIGH)
def test_float64_is_nowhere_less(weigh):
    rule = ExpertRule(weigh=weigh)
    given = problem(torch.float64, rule)
    assert_close(gradients(moe_mlp, given, rule=rule), exact(given, rule), TOLERANCE[torch.float64])


@pytest.mark.parametrize("weigh", WEIGH)
def test_bfloat16_is_the_rounded_result(weigh):
    rule = ExpertRule(weigh=weigh)
    given = problem(torch.bfloat16, rule)
    assert_close(gradients(moe_mlp, given, rule=rule), exact(given, rule), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("rule", [ExpertRule(weigh=weigh) for weigh in WEIGH], ids=WEIGH)
def test_the_composition_of_autograd_nodes_is_the_same_function(rule, monkeypatch):
    given = problem(torch.float32, rule)
    fused = gradients(moe_mlp, given, rule=rule, grad_scale=0.25, padding=Padding(align=4))
    calls: list[int] = []
    monkeypatch.setattr(sys.modules["fastpar.ops.moe.mlp"], "_is_fused", lambda _: bool(calls.append(1)))
    apart = gradients(moe_mlp, given, rule=rule, grad_scale=0.25, padding=Padding(align=4))
    assert calls
    assert_close(fused, apart, TOLERANCE[torch.float32])


def test_worked_example_of_the_docstring():
    names = ("x", "weights", "first", "second")
    values = ([[2.0]], [[0.5, 0.25]], [[[1.0]], [[3.0]]], [[[10.0]], [[20.0]]])
    leaves = {name: torch.tensor(value).requires_grad_() for name, value in zip(names, values, strict=True)}
    out = moe_mlp(indices=torch.tensor([[0, 1]]), rule=ExpertRule("relu"), **leaves)
    found = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert [t.flatten().tolist() for t in (out, *found)] == [[40], [20], [20, 120], [10, 10], [1, 1.5]]


# ---- what is saved, computed and left alone --------------------------------------------------------------------------


def test_x_and_the_first_products_are_all_that_is_saved():
    rule = ExpertRule()
    given = problem(torch.float32, rule)
    leaves = {name: given[name].requires_grad_() for name in ("x", "weights", "first", "second", "first_bias")}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = moe_mlp(indices=given["indices"], rule=rule, **leaves)
    for parameter in ("first", "second", "first_bias"):
        saved.pop(given[parameter].untyped_storage().data_ptr(), None)
    pairs = int((given["indices"] >= 0).sum())
    assert sum(saved.values()) == 4 * (given["x"].numel() + pairs * 2 * INNER)
    out.sum().backward()


def test_what_is_frozen_costs_no_product(monkeypatch):
    rule = ExpertRule()
    given = problem(torch.float32, rule, biased=False)
    active = len(set(given["indices"].flatten().tolist()) - {-1})
    everything = gradients(moe_mlp, given, rule=rule)
    counted: list[int] = []
    inputs = ("x", "weights", "first", "second")
    for module in (_moe_mlp, sys.modules["fastpar.ops.moe.gemms"]):
        original = module.matmul
        monkeypatch.setattr(module, "matmul", lambda *a, o=original, **k: counted.append(1) or o(*a, **k))
    products = {("x",): 2, ("weights",): 1, ("first",): 2, ("second",): 2, ("x", "first", "second"): 4}
    for names, of_each in products.items():
        leaves = {name: given[name].clone().requires_grad_(name in names) for name in inputs}
        out = moe_mlp(indices=given["indices"], rule=rule, add=given["add"], **leaves)
        counted.clear()
        found = torch.autograd.grad(out, [leaves[name] for name in names], given["dout"])
        assert len(counted) == of_each * active, names
        assert all(torch.equal(grad, everything[name]) for name, grad in zip(names, found, strict=True))


def test_a_gradient_of_what_is_added_alone_sends_nothing(monkeypatch):
    given = problem(torch.float32, ExpertRule())
    dout = given.pop("dout")
    given["add"].requires_grad_()
    out = moe_mlp(**given)
    monkeypatch.setattr(_moe_mlp, "redispatch_chunks", None)
    (found,) = torch.autograd.grad(out, given["add"], dout)
    assert torch.equal(found, dout)


def test_a_profile_names_dispatch_experts_and_combine():
    given = problem(torch.float32, ExpertRule())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(moe_mlp, given)
    ranges = [event.name for event in profile.events() if event.name.startswith("fastpar::moe::")]
    assert {name: ranges.count(f"fastpar::moe::{name}") for name in ("dispatch", "experts", "combine")} == {
        "dispatch": 2,
        "experts": 2,
        "combine": 3,  # in forward a launch and a wait
    }


def test_without_gradients_the_bits_are_the_same():
    rule = ExpertRule()
    given = problem(torch.float32, rule)
    wanted = gradients(moe_mlp, given, rule=rule)["out"]
    dout = given.pop("dout")
    assert torch.equal(moe_mlp(**given, rule=rule), wanted)
    for name in ("x", "first"):
        given[name].requires_grad_()
    with torch.no_grad():
        assert torch.equal(moe_mlp(**given, rule=rule), wanted)
    assert dout.shape == wanted.shape


def test_backward_may_run_twice_and_in_a_checkpoint():
    rule = ExpertRule()
    given = problem(torch.float32, rule, biased=False)
    wanted = gradients(moe_mlp, given, rule=rule)
    dout = given.pop("dout")
    given["x"].requires_grad_()
    out = moe_mlp(**given, rule=rule)
    for _ in range(2):
        (found,) = torch.autograd.grad(out, given["x"], dout, retain_graph=True)
        assert torch.equal(found, wanted["x"])
    again = checkpoint(lambda: moe_mlp(**given, rule=rule), use_reentrant=False)
    (found,) = torch.autograd.grad(again, given["x"], dout)
    assert torch.equal(found, wanted["x"])


@pytest.fixture
def poisoned_buffers(monkeypatch):
    """Memory that is not written shows as NaN."""

    def poisoned(like, shape, dtype=None):
        return torch.full(shape, torch.nan, dtype=dtype or like.dtype)

    for name in ("experts", "dispatcher", "gemms"):
        monkeypatch.setattr(sys.modules[f"fastpar.ops.moe.{name}"], "new_buffer", poisoned)


@pytest.mark.parametrize("weigh", WEIGH)
def test_padding_and_experts_without_rows_leak_nothing(poisoned_buffers, weigh):
    rule = ExpertRule(weigh=weigh)
    given = problem(torch.float32, rule)
    found = gradients(moe_mlp, given, rule=rule, padding=Padding(align=16))
    assert_close(found, exact(given, rule), TOLERANCE[torch.float32])
    for name in ("first", "second", "first_bias", "second_bias"):
        assert torch.equal(found[name][-1], torch.zeros_like(found[name][-1]))


@pytest.mark.parametrize("tokens", [0, 5])
def test_tokens_that_go_nowhere_come_out_as_what_is_added(poisoned_buffers, tokens):
    given = problem(torch.float32, ExpertRule(), tokens)
    given["indices"].fill_(-1)
    found = gradients(moe_mlp, given)
    assert torch.equal(found["out"], given["add"])
    assert torch.equal(found["add"], given["dout"])
    assert not any(found[name].any() for name in found if name not in ("out", "add"))


def test_grad_scale_scales_the_gradients_of_the_experts_only():
    rule = ExpertRule()
    for dtype in (torch.float32, torch.bfloat16):
        given = problem(dtype, rule)
        plain, scaled = (gradients(moe_mlp, given, rule=rule, grad_scale=scale) for scale in (1.0, 0.125))
        for name, value in plain.items():
            of_experts = name.startswith(("first", "second"))
            assert torch.equal(scaled[name], value * 0.125 if of_experts else value), name


def test_autocast_computes_in_its_dtype_and_gives_gradients_in_theirs():
    rule = ExpertRule()
    given = problem(torch.float32, rule)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(moe_mlp, given | {"dout": given["dout"].bfloat16()}, rule=rule)
    assert found["out"].dtype == torch.bfloat16
    assert all(found[name].dtype == torch.float32 for name in found if name != "out")
    assert_close(found, exact(given, rule), TOLERANCE[torch.bfloat16])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch, tracing on after it
def test_a_compiled_model_runs_the_experts_between_its_graphs():
    rule = ExpertRule()
    given = problem(torch.float32, rule)

    def model(*args: Tensor, **options: object) -> Tensor:
        return moe_mlp(*args, **options) * 2

    compiled = torch.compile(model, backend="eager")
    found, wanted = gradients(compiled, given, rule=rule), gradients(model, given, rule=rule)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_second_derivative_is_refused_with_an_alternative():
    given = problem(torch.float32, ExpertRule(), biased=False)
    dout = given.pop("dout").requires_grad_()
    given["x"].requires_grad_()
    (dx,) = torch.autograd.grad(moe_mlp(**given), given["x"], dout, create_graph=True)
    with pytest.raises(RuntimeError, match="moe_mlp has a first derivative only; moe_dispatch"):
        dx.sum().backward()


def test_tokens_in_8_bits_arrive_rounded_in_backward_too():
    rule = ExpertRule()
    given = problem(torch.float32, rule)
    rounded = quantize_dequantize(given["x"], "float8_e4m3fn")
    assert not torch.equal(rounded, given["x"])
    found, wanted = gradients(moe_mlp, given, payload="float8_e4m3fn"), gradients(moe_mlp, given | {"x": rounded})
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# ---- ranks -----------------------------------------------------------------------------------------------------------

SIZES = {1: (23,), 2: (17, 6), 4: (9, 0, 13, 1)}


def assert_ranks_match_one(size: int, dtype: torch.dtype, rule: ExpertRule, options: dict[str, object]) -> None:
    found = run_ranks(size, run_experts, SIZES[size], dtype, rule, options)
    whole = gradients(moe_mlp, problem(dtype, rule), rule=rule)
    joined = {name: torch.cat([each[name] for each in found]) for name in whole}
    assert_close(joined, whole, {torch.bfloat16: 4 * 2.0**-9, torch.float32: 1e-6, torch.float64: 1e-13}[dtype])


@pytest.mark.parametrize("weigh", WEIGH)
@pytest.mark.parametrize("transport", ["shared_memory", "all_to_all"])
def test_two_ranks_match_one(transport, weigh):
    for dtype in (torch.float32, torch.float64):
        assert_ranks_match_one(2, dtype, ExpertRule(weigh=weigh), {"transport": transport})


@pytest.mark.parametrize(
    "options",
    [{"transport": "shared_memory", "padding": Padding(align=8)}, {"transport": "all_to_all", "exact": True}],
    ids=["shared memory, padded", "all-to-all, exact"],
)
def test_four_ranks_of_which_one_has_no_tokens_match_one(options):
    assert_ranks_match_one(4, torch.bfloat16, ExpertRule("geglu"), options)


@pytest.mark.parametrize(
    ("size", "weigh", "options"),
    [
        (2, "input", {}),
        (4, "input", {"payload": "float8_e4m3fn"}),
        (2, "after", {"exact": True, "padding": Padding(align=8)}),
    ],
)
def test_any_number_of_chunks_gives_the_same_bits(size, weigh, options):
    rule = ExpertRule(weigh=weigh)
    options = {"transport": "all_to_all", **options}
    for whole, *chunked in run_ranks(size, run_chunks, SIZES[size], rule, options, (1, 2, 3, 9)):
        for found in chunked:
            assert found.keys() == whole.keys()
            assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_chunks_are_exchanges_of_their_own_and_send_no_byte_more():
    options = {"transport": "all_to_all"}
    for records in run_ranks(2, record_chunks, SIZES[2], options, (1, 3)):
        (whole, whole_bytes), (chunked, nbytes) = records
        assert whole == ["all_gather"] + ["all_to_all"] * 4
        assert chunked == ["all_gather"] + ["all_to_all"] * (1 + 3 + 3 + 3 + 3)  # numbers, x, out; x and dout, dx
        assert nbytes == whole_bytes


def test_worked_example_of_chunks():
    rows = torch.tensor([[-1, 2], [0, 3], [1, -1]])
    plan = SimpleNamespace(route=SimpleNamespace(sent=SimpleNamespace(experts=rows), back=[3]))
    plan.splits, plan.source = (0, 1, 2, 3, 4), torch.tensor([1, 2, 0, 1])
    group_of = torch.tensor([0, 0, 1, 1])
    assert _moe_chunks._first_sent(plan, group_of, 2).tolist() == [1, 0, 0]
    assert _moe_chunks._first_received(plan, group_of, 2).tolist() == [1, 0, 0]


def test_wrong_parameters_on_one_rank_are_an_error_on_all_and_the_next_call_is_right():
    changes = {
        r"ValueError: first must be \(4, 20, 12\)": {"first": torch.zeros(4, 7, HIDDEN)},
        "TypeError: second must have the dtype of x": {"second": torch.zeros(4, HIDDEN, INNER).double()},
        r"ValueError: add must be as x is, \(6, 12\) on cpu, got \(5, 12\)": {"add": torch.zeros(5, HIDDEN)},
    }
    for message, change in changes.items():
        found = run_ranks(2, wrong_on_one_rank, change)
        assert re.match(message, found[1][0])
        assert re.match("ValueError: moe_dispatch: wrong arguments on rank 1", found[0][0])
        assert [each[1] for each in found] == ["", ""]


@pytest.mark.parametrize("kind", ["tuple", "copies"])
def test_experts_of_a_wrong_kind_on_one_rank_are_an_error_on_all(kind):
    first, second = run_ranks(2, wrong_experts_on_one_rank, kind)
    assert second[0].startswith("TypeError")
    assert re.match("ValueError: moe_dispatch: wrong arguments on rank 1", first[0])
    assert [first[1], second[1]] == ["", ""]


def test_wrong_shapes_are_named():
    given = problem(torch.float32, ExpertRule())
    given.pop("dout")
    with pytest.raises(ValueError, match=rf"first_bias must be \({EXPERTS}, {2 * INNER}\)"):
        moe_mlp(**(given | {"first_bias": torch.zeros(EXPERTS, 3)}))
    with pytest.raises(ValueError, match=rf"second must be \({EXPERTS}, {HIDDEN}, {INNER}\)"):
        moe_mlp(**(given | {"second": torch.zeros(EXPERTS, 5, INNER)}))
