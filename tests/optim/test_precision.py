"""Precision policies, and loss scaling that all ranks agree on.

LossScaler is compared with torch.amp.GradScaler step by step. Ranks are compared bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fastpar as fp
from fastpar import LossScaler, Precision
from tests.dist import run_ranks

# ---- Precision -------------------------------------------------------------------------------------------------------


def test_presets_say_which_dtype_is_used_where() -> None:
    bf16 = Precision.bf16(full=("*.bias", "norm.*"))
    assert (bf16.param, bf16.compute, bf16.reduce, bf16.master) == (torch.bfloat16, None, torch.bfloat16, torch.float32)
    assert bf16.param_dtype("layer.weight", torch.float32) == torch.bfloat16
    assert bf16.param_dtype("layer.bias", torch.float32) == torch.float32
    assert bf16.master_dtype("layer.weight", torch.float32) == torch.float32
    assert bf16.reduce_dtype("layer.weight", torch.float32) == torch.bfloat16
    assert bf16.reduce_dtype("norm.weight", torch.float32) == torch.float32
    assert bf16.param_dtype("layer.steps", torch.int64) == torch.int64
    assert Precision.fp16().param == torch.float16
    assert Precision.fp32().param_dtype("w", torch.bfloat16) == torch.float32
    assert Precision().param_dtype("w", torch.bfloat16) == torch.bfloat16
    assert Precision().reduce_dtype("w", torch.bfloat16) == torch.bfloat16
    assert bf16 == Precision.bf16(full=["*.bias", "norm.*"])
    assert len({bf16, Precision.bf16()}) == 2  # hashable


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"param": "bf16"}, TypeError, r"param must be a torch\.dtype or None, got 'bf16'"),
        ({"reduce": torch.int8}, ValueError, r"reduce must be one of torch\.float32, .*got torch\.int8"),
        ({"full": "*.bias"}, TypeError, r"write \('\*\.bias',\)"),
        ({"compute": torch.float32}, ValueError, "autocast to float32 does nothing"),
        ({"compute": torch.bfloat16, "param": torch.bfloat16}, ValueError, "leave compute out"),
        ({"param": torch.float32, "master": torch.bfloat16}, ValueError, "must not be narrower than param"),
        ({"param": torch.bfloat16, "master": torch.float16}, ValueError, r"needs param=torch\.float16"),
    ],
)
def test_policies_that_make_no_sense_are_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Precision(**arguments)


def test_a_pattern_that_matches_nothing_is_an_error_with_names() -> None:
    policy = Precision.bf16(full=("*.bias", "head.*"))
    policy.check_names(["a.bias", "head.weight"])
    with pytest.raises(ValueError, match=r"'head\.\*' matches no parameter; the names are a\.bias, b\.weight"):
        policy.check_names(["a.bias", "b.weight"])


def test_autocast_is_the_context_of_forward() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with Precision(compute=torch.bfloat16).autocast("cpu"):
        assert layer(x).dtype == torch.bfloat16
    with Precision.fp32().autocast("cpu"):
        assert layer(x).dtype == torch.float32


# ---- LossScaler on one rank ------------------------------------------------------------------------------------------


def model_and_optimizer(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.named_parameters(), lr=0.01, **options)


def backward(model: nn.Module, scaler: Any, index: int, bad: bool) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(index))
    loss = model(x).square().mean()
    scaler.scale(loss * math.inf if bad else loss).backward()


@pytest.mark.parametrize("fused", [False, True])  # fused optimizers divide by the scale themselves
@pytest.mark.parametrize("unscale", [False, True])
def test_twelve_steps_equal_those_of_torchs_scaler(fused: bool, unscale: bool) -> None:
    scalers = LossScaler(2.0**10, growth_interval=3), torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3)
    runs = [(*model_and_optimizer(fused=fused), scaler) for scaler in scalers]
    for index in range(12):
        for model, optimizer, scaler in runs:
            backward(model, scaler, index, bad=index in (4, 5))
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for ours, theirs in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
            assert torch.equal(ours, theirs)
    ours = scalers[0].state_dict()
    assert ours.pop("skipped") == scalers[0].skipped == 2
    assert ours == scalers[1].state_dict()
    assert not hasattr(runs[0][1], "grad_scale")


def test_state_goes_to_and_from_torchs_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu", 2.0**9, growth_interval=7)
    ours = LossScaler()
    ours.load_state_dict(theirs.state_dict())
    assert (ours.get_scale(), ours.state_dict()["growth_interval"]) == (512.0, 7)
    ours.update(64.0)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == 64.0
    with pytest.raises(ValueError, match="nothing to load"):
        ours.load_state_dict({})


def test_report_names_parameters_and_counts() -> None:
    model, optimizer = model_and_optimizer()
    scaler = LossScaler()
    backward(model, scaler, 0, bad=False)
    model[0].weight.grad[1, 2] = math.nan
    model[2].bias.grad[0] = -math.inf
    before = [p.detach().clone() for p in model.parameters()]
    assert scaler.step(optimizer) is None
    assert scaler.report == ("gradients that are not finite: rank 0: 0.weight (1 NaN of 32), 2.bias (1 infinite of 1)")
    assert optimizer.state == {}
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    named = LossScaler(names=[("first", model[0].weight)])
    named.step(optimizer)
    assert named.report is not None
    assert "rank 0: first (1 NaN" in named.report


def test_scale_takes_what_torchs_scaler_takes_and_float16_does_not_overflow() -> None:
    scaler = LossScaler(2.0**16)
    scaled = scaler.scale([torch.tensor(3.0, dtype=torch.float16), (torch.ones(2), torch.ones(1))])
    assert scaled[0].item() == 3.0 * 2**16
    assert isinstance(scaled, list)
    assert isinstance(scaled[1], tuple)
    assert next(iter(scaler.scale(x for x in [torch.ones(1)]))).item() == 2.0**16
    with pytest.raises(TypeError, match="got float"):
        scaler.scale(1.0)
    off = LossScaler(enabled=False)
    loss = torch.ones(())
    _, optimizer = model_and_optimizer()
    assert off.scale(loss) is loss
    assert (off.get_scale(), off.state_dict(), off.is_enabled()) == (1.0, {}, False)
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()


def test_calls_out_of_order_are_refused() -> None:
    model, optimizer = model_and_optimizer()
    scaler = LossScaler()
    with pytest.raises(RuntimeError, match=r"needs a step\(\) or unscale_\(\) before it"):
        scaler.update()
    backward(model, scaler, 0, bad=False)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="since the last update"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="since the last update"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(ValueError, match="no closure"):
        scaler.step(optimizer, lambda: 0.0)
    for arguments, text in (({"growth": 1.0}, "growth"), ({"backoff": 1.5}, "backoff"), ({"init": 0.0}, "positive")):
        with pytest.raises(ValueError, match=text):
            LossScaler(**arguments)
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="float16 divided by the scale would be rounded again"):
        scaler.unscale_(torch.optim.SGD([half], lr=0.1))


def test_scale_stays_finite() -> None:
    model, optimizer = model_and_optimizer()
    scaler = LossScaler(2.0**127, growth_interval=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**127


class Unfinished(torch.optim.SGD):
    finished = False

    def finish_gradients(self) -> None:
        self.finished = True
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 2.0**16)


def test_gradients_are_finished_before_they_are_looked_at() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer, scaler = Unfinished([parameter], lr=1.0), LossScaler(2.0**16)
    scaler.step(optimizer)
    assert optimizer.finished
    assert torch.equal(parameter.detach(), -torch.ones(3))


# ---- on several ranks ------------------------------------------------------------------------------------------------


def skip_together(kind: str, fused: bool) -> tuple[list[Tensor], list[Any], str, int, float]:
    """Three steps; in the second one rank 1 has a NaN. No gradient is reduced, all ranks compute the same."""
    mesh = fp.init_mesh(dp_shard=2, tp=2, device="cpu") if kind == "mesh" else None
    group = dist.group.WORLD if kind == "group" else None
    model, optimizer = model_and_optimizer(fused=fused)
    scaler = LossScaler(2.0**8, mesh=mesh, group=group)
    states = []
    for index in range(3):
        backward(model, scaler, index, bad=False)
        if index == 1 and dist.get_rank() == 1:
            model[2].weight.grad[0, 3] = math.nan
        before = [p.detach().clone() for p in model.parameters()]
        kept = [s["exp_avg"].clone() for s in optimizer.state.values()]
        scaler.step(optimizer)
        if index == 1:
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            assert all(torch.equal(s["exp_avg"], k) for s, k in zip(optimizer.state.values(), kept, strict=True))
        scaler.update()
        optimizer.zero_grad()
        states = [s["exp_avg"] for s in optimizer.state.values()]
    if mesh is not None:
        mesh.close()
    report = scaler.report
    assert report is not None
    return [p.detach() for p in model.parameters()], states, report, scaler.skipped, scaler.get_scale()


@pytest.mark.parametrize(("kind", "fused"), [("mesh", False), ("group", True)])
def test_a_nan_on_one_rank_skips_the_step_on_all(kind: str, fused: bool) -> None:
    results = run_ranks(4, skip_together, kind, fused)
    for parameters, states, report, skipped, scale in results:
        assert all(torch.equal(p, q) for p, q in zip(parameters, results[0][0], strict=True))
        assert all(torch.equal(p, q) for p, q in zip(states, results[0][1], strict=True))
        assert report == "gradients that are not finite: rank 1: 2.weight (1 NaN of 8)"
        assert (skipped, scale) == (1, 2.0**7)


def uneven_optimizers() -> list[str]:
    """Rank 0 has one optimizer, rank 1 two, as stages of a pipeline may; in the second step rank 1 has a NaN."""
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(parameters[:1] if rank else parameters, lr=1.0)]
    if rank:
        optimizers.append(torch.optim.SGD(parameters[1:], lr=1.0, fused=True))
    scaler = LossScaler(4.0, group=dist.group.WORLD)
    found = []
    for value in (8.0, math.nan, 8.0):
        for parameter in parameters:
            parameter.grad = torch.full((3,), value if parameter is parameters[rank] else 8.0)
        scaler.step(optimizers)
        scaler.update()
        found.append(f"{scaler.get_scale()} {scaler.skipped} {[p[0].item() for p in parameters]}")

    def one_after_the_other() -> None:
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scaler.step(optimizers[0])

    with pytest.raises(RuntimeError, match="for the time 1 and 2 since"):
        one_after_the_other()
    return found


def test_ranks_with_other_numbers_of_optimizers_agree_once_or_are_refused() -> None:
    for found in run_ranks(2, uneven_optimizers):
        assert found == ["4.0 0 [-2.0, -2.0]", "2.0 1 [-2.0, -2.0]", "2.0 1 [-6.0, -6.0]"]


def optimizers_of_one_rank(unscales: bool) -> list[Any]:
    """Rank 0 has no optimizer, as a frozen stage of a pipeline; in the second step rank 1 has a NaN."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD([parameter], lr=1.0)] if dist.get_rank() else []
    scaler = LossScaler(4.0, growth_interval=1, group=dist.group.WORLD)
    found = []
    for value in (8.0, math.nan, 8.0):
        parameter.grad = torch.full((3,), value) if optimizers else None
        if unscales:
            scaler.unscale_(optimizers)
        stepped = scaler.step(optimizers)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizers)
        scaler.update()
        found.append((scaler.get_scale(), scaler.skipped, stepped is None))
    assert parameter[0].item() == (-(8.0 / 4.0) - 8.0 / 4.0 if optimizers else 0.0)
    return found


@pytest.mark.parametrize("unscales", [False, True])
def test_a_rank_without_optimizers_agrees_with_the_others(unscales: bool) -> None:
    for found in run_ranks(2, optimizers_of_one_rank, unscales, timeout=60.0):
        assert found == [(8.0, 0, False), (4.0, 1, True), (8.0, 1, False)]


def halves(divides: bool) -> str:
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16 if dist.get_rank() else torch.float32))
    half.grad = torch.ones_like(half)
    scaler = LossScaler(group=dist.group.WORLD)
    optimizer = fp.optim.AdamW([half], lr=0.1) if divides and dist.get_rank() else torch.optim.SGD([half], lr=0.1)
    with pytest.raises(ValueError, match="float16 divided by the scale") as caught:
        scaler.step(optimizer)
    return str(caught.value)


@pytest.mark.parametrize("divides", [False, True])
def test_float16_gradients_of_one_rank_are_refused_on_all(divides: bool) -> None:
    first, second = run_ranks(2, halves, divides)
    assert "on another rank" in first
    assert "on another rank" not in second


@pytest.mark.parametrize("fused", [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("unscales", [False, True])
def test_optimizers_with_one_norm_are_unscaled_before_it_is_taken(fused: tuple[bool, bool], unscales: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], lr=1.0, fused=f) for p, f in zip(parameters, fused, strict=True)]
    zero = fp.zero.shard(parameters, optimizers, group=fp.Communicator(None), max_norm=1.0)
    scaler = LossScaler(2.0**10)
    scaler.scale(3.0 * parameters[0] + 4.0 * parameters[1]).backward()
    for optimizer in optimizers:
        if unscales and not all(fused):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    assert float(zero.norm) == 5.0
    assert [p.item() for p in parameters] == pytest.approx([-0.6, -0.8], rel=1e-5)
    zero.close()


def scale_shards(scaler_kind: str) -> tuple[float, Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]))
    absent = nn.Parameter(torch.zeros(1))  # has no gradient anywhere
    optimizer = torch.optim.SGD([parameter, absent], lr=1.0)
    scaler: Any = LossScaler(4.0) if scaler_kind == "ours" else torch.amp.GradScaler("cpu", 4.0)
    for value in (8.0, math.inf, 8.0):
        local = torch.full((3, 2), 8.0)
        local[1, 1] = value if dist.get_rank() == 1 else 8.0
        scaler.scale(torch.ones(()))
        parameter.grad = DTensor.from_local(local, mesh, [Shard(0)])
        scaler.step(optimizer)
        scaler.update()
    full = parameter.detach().full_tensor()
    return scaler.get_scale(), full


@pytest.mark.parametrize("scaler_kind", ["ours", "torch's"])
def test_dtensor_gradients_agree_by_their_mesh(scaler_kind: str) -> None:
    for scale, values in run_ranks(2, scale_shards, scaler_kind):
        assert scale == 2.0
        assert torch.equal(values, torch.full((6, 2), -(8.0 / 4.0) - 8.0 / 2.0))


def many_reports() -> str | None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(6)]
    for parameter in parameters:
        parameter.grad = torch.full((2,), math.inf)
    scaler = LossScaler(group=dist.group.WORLD)
    scaler.step(torch.optim.SGD([(f"{'long' * 40}.{i}", p) for i, p in enumerate(parameters)], lr=1.0))
    return scaler.report


def test_reports_are_short_and_equal() -> None:
    reports = run_ranks(3, many_reports)
    assert reports[0] == reports[1] == reports[2]
    assert reports[0] is not None
    assert len(reports[0]) < 4 * 512 + 100
    assert all(f"rank {rank}: longlong" in reports[0] for rank in range(3))
