"""Experts of several ranks over each other's memory, in Triton's interpreter; run by tests/moe/test_moe_push_triton.py.

Sums are float32, of 10 to 100 terms of size 1. What is computed is tested with virtual ranks in one process, what is
waited for with processes, through the public function. Memory that is not initialised holds NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastpar.contracts.moe import ExpertRule
from fastpar.kernels import moe_push_mlp as kernels
from fastpar.kernels.moe_mlp import ExpertParams
from fastpar.kernels.moe_push import FLAGS, PushExchange, buffer_bytes, run_together
from fastpar.kernels.moe_push_mlp import PushGradNeeds, PushSaved
from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer
from tests.dist import run_ranks
from tests.moe.moe_calls import reference_mlp
from tests.moe.moe_mlp_ranks import EXPERTS, HIDDEN, TOP_K, gradients, part, problem
from tests.moe.moe_push_ranks import raise_symmetric, run_symmetric
from tests.ops.overlap_gemm_cases import MappedBuffer, create_files

ALL = PushGradNeeds(True, True, True, True, True, True)
GRADS = ("x", "weights", "first", "second", "first_bias", "second_bias")
RULES = {
    "after": ExpertRule(),
    "before": ExpertRule("gelu", weigh="before"),
    "input": ExpertRule(weigh="input", transposed=True),
    "gpt-oss": ExpertRule("clamped_swiglu", transposed=True, interleaved=True, limit=1.0),
}
SCALE = 0.25


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def open_exchanges(folder: Path, size: int, capacity: int, timeout: float = 20.0) -> list[PushExchange]:
    nbytes = buffer_bytes(size, EXPERTS, 4 * HIDDEN, capacity)
    paths = create_files(folder, size, nbytes)
    return [
        PushExchange(
            OverlapBuffer(MappedBuffer(paths, rank, nbytes), flag_capacity=FLAGS, timeout=timeout),
            num_experts=EXPERTS, width=HIDDEN, dtype=torch.float32, capacity=capacity,
        )
        for rank in range(size)
    ]  # fmt: skip


def experts_of(given: dict[str, Tensor]) -> ExpertParams:
    return ExpertParams(given["first"], given["second"], given.get("first_bias"), given.get("second_bias"))


def forward(
    exchanges: list[PushExchange], parts: list[dict[str, Tensor]], rule: ExpertRule
) -> list[tuple[Tensor, PushSaved]]:
    return run_together([
        kernels.forward_phases(e, g["x"], g["indices"], g["weights"], experts_of(g), rule, g["add"])
        for e, g in zip(exchanges, parts, strict=True)
    ])  # fmt: skip


def backward(
    exchanges: list[PushExchange],
    parts: list[dict[str, Tensor]],
    rule: ExpertRule,
    saved: list[PushSaved],
    wants: PushGradNeeds,
) -> list[kernels.PushGrads]:
    return run_together([
        kernels.backward_phases(
            e, g["dout"], g["x"] if wants.inputs(rule) else None, g["weights"] if rule.weigh == "input" else None,
            experts_of(g), rule, s, wants, grad_scale=SCALE,
        )
        for e, g, s in zip(exchanges, parts, saved, strict=True)
    ])  # fmt: skip


def exact(rule: ExpertRule) -> dict[str, Tensor]:
    """Of all ranks in one process, in float64."""
    given = {n: t.double() if t.is_floating_point() else t for n, t in problem(torch.float32, rule).items()}
    found = gradients(reference_mlp, given, rule=rule)
    for name in ("first", "second", "first_bias", "second_bias"):
        found[name] *= SCALE
    return found


def assert_exact(found: dict[str, Tensor], rule: ExpertRule) -> None:
    for name, want in exact(rule).items():
        torch.testing.assert_close(found[name].double(), want, rtol=1e-5, atol=3e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("input", (17, 6)),
        ("before", (23, 0)),
        pytest.param("after", (17, 6), marks=pytest.mark.slow),
        pytest.param("gpt-oss", (5, 0, 11, 7), marks=pytest.mark.slow),
    ],
)
def test_outputs_and_all_gradients_match_float64(tmp_path: Path, name: str, sizes: tuple[int, ...]) -> None:
    """Another layer's forward comes before the backward. The last expert has no token: its gradients are zeros."""
    rule, size = RULES[name], len(sizes)
    exchanges = open_exchanges(tmp_path, size, 23 * TOP_K)
    parts = [part(problem(torch.float32, rule), sizes, rank) for rank in range(size)]
    outs, saved = zip(*forward(exchanges, parts, rule), strict=True)
    forward(exchanges, [given | {"x": given["dout"], "weights": 1 - given["weights"]} for given in parts], rule)
    grads = backward(exchanges, parts, rule, list(saved), ALL)
    found = {"out": torch.cat(outs), "add": problem(torch.float32, rule)["dout"]}
    for grad in GRADS:
        found[grad] = torch.cat([getattr(g, grad) for g in grads])
    assert_exact(found, rule)
    assert found["first"][-1].count_nonzero() == found["second"][-1].count_nonzero() == 0


def test_a_step_can_begin_with_the_channel_that_the_last_one_has_ended_with(tmp_path: Path) -> None:
    """As when a CUDA graph with its five calls is replayed."""
    rule = RULES["after"]
    exchanges = open_exchanges(tmp_path, 1, 5 * TOP_K, timeout=0.05)
    parts = [problem(torch.float32, rule, 5, biased=False)]
    wants = PushGradNeeds(True, True, True, True, False, False)
    steps = []
    for _ in range(2):
        exchanges[0].buffer._calls = 0
        ((out, saved),) = forward(exchanges, parts, rule)
        (grads,) = backward(exchanges, parts, rule, [saved], wants)
        assert exchanges[0].buffer._calls == 5
        steps.append([out, *(grad for grad in grads if grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_what_is_not_wanted_is_neither_sent_nor_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES["after"]
    exchanges = open_exchanges(tmp_path, 1, 23 * TOP_K)
    parts = [problem(torch.float32, rule)]
    ((_, saved),) = forward(exchanges, parts, rule)
    (everything,) = backward(exchanges, parts, rule, [saved], ALL)
    calls: list[str] = []
    for module, name in ((PushExchange, "send_phases"), (PushExchange, "give_back_phases"), (kernels, "_wgrad")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=original, **k: (calls.append(n), f(*a, **k))[1])
    there, back = "send_phases", "give_back_phases"
    nothing = PushGradNeeds(*[False] * 6)
    for wants, wanted in (
        (nothing._replace(weights=True), [there, back]),
        (nothing._replace(first=True), [there, there, "_wgrad"]),
        (nothing._replace(x=True, second=True), [there, "_wgrad", back]),
    ):
        calls.clear()
        (found,) = backward(exchanges, parts, rule, [saved], wants)
        assert calls == wanted, wants
        for name, grad, value in zip(GRADS, found, everything, strict=True):
            assert (grad is not None) == getattr(wants, name), name
            assert grad is None or torch.equal(grad, value), name


def test_gradients_from_rows_that_never_come_are_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients of x and of weights nothing else would tell. The host of a device hears of it later."""
    rule = RULES["after"]
    exchanges = open_exchanges(tmp_path, 2, 23 * TOP_K, timeout=0.05)
    parts = [part(problem(torch.float32, rule), (17, 6), rank) for rank in range(2)]
    (_, saved), _ = forward(exchanges, parts, rule)
    monkeypatch.setattr(OverlapBuffer, "check", lambda _: None)
    (found,) = backward(exchanges[:1], parts[:1], rule, [saved], PushGradNeeds(False, False, True, True, False, False))
    monkeypatch.undo()
    assert found.first is not None
    assert found.second is not None
    assert found.first.isnan().all()
    assert found.second.isnan().all()
    with pytest.raises(TimeoutError, match="for rank 1 to send its rows to the experts of this rank"):
        exchanges[0].empty_rows()


def test_rows_know_their_expert() -> None:
    splits = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    assert kernels._expert_of_rows(splits, 4).tolist() == [0, 0, 2, -1]
    assert kernels._in_use(splits, 4).tolist() == [0, 1, 2, -1]


# ---- processes -------------------------------------------------------------------------------------------------------


def test_processes_give_what_one_gives_through_the_public_function() -> None:
    rule, sizes = RULES["after"], (17, 6)
    results = run_ranks(2, run_symmetric, sizes, rule, "cpu", 1, timeout=120.0)
    names = ("x", "weights", "add", "out")
    found = {name: torch.cat([result[name] for result, _ in results]) for name in (*names, *GRADS[2:])}
    assert_exact(found, rule)
    for _, calls in results:
        assert calls == [5, 0], "dispatch and give back; send dout, send x, give back; a recomputation calls nothing"


@pytest.mark.slow
def test_steps_repeat_their_bits() -> None:
    for _, calls in run_ranks(2, run_symmetric, (17, 6), RULES["before"], "cpu", 3, timeout=280.0):
        assert calls == [5, 0]


def test_what_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    """The interpreter's host hears of it within the call."""
    first, second = run_ranks(2, raise_symmetric, "cpu", timeout=120.0)
    fits = r"RuntimeError: rank 0 would have got \d+ rows for its experts, but there is room for 2; .*max_rows"
    refused = "ValueError: rank 1 has refused its arguments"
    alone = "transport='symmetric' is for moe_mlp: how many rows there are is known on the device alone"
    shape = "ValueError: weights must have the shape of indices"
    told = "ValueError: moe_mlp: wrong arguments on rank 1 of the group: see its error"
    for found, wanted in (
        (first, [alone, told, fits, fits, "", refused, refused]),
        (second, [alone, shape, fits, fits, "", shape, refused]),
    ):
        assert len(found) == len(wanted)
        assert all(re.match(want, got) if want else not got for got, want in zip(found, wanted, strict=True)), found
