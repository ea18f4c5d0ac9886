"""Steps that are not taken, and steps that are clipped: one decision of all ranks, the same bits in every stage."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.zero.groups import local
from tests.dist import run_ranks
from tests.zero.zero_ranks import Net, Parameters, assert_same, batch, make_optimizer, optimizer_values

STAGES = (0, 1, 2, 3)
BAD_STEP, BAD_RANK = 2, 1


class _Spoil(torch.autograd.Function):
    """x; its gradient times `factor` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class Spoiled(nn.Module):
    """The gradient of `bias` alone can be made what one likes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.net(x) + _Spoil.apply(self.bias, factor)


def bits(zero: fp.zero.Zero) -> Parameters:
    """Copies of all that a step changes."""
    found = optimizer_values(zero)
    for param in zero.params:
        found[f"{param.name} of the model"] = (
            local(param.model_rows).clone() if param.model_rows is not None else found[param.name]
        )
        for optimizer in zero.optimizers:
            for key, value in optimizer.state.get(param.model_param, {}).items():
                found[f"{param.name}.{key}"] = local(torch.as_tensor(value)).clone()
    return found


def skip_run(stage: int, dtype: torch.dtype, kind: str, bad: float | None) -> tuple[Parameters, int, str]:
    """Five steps, of which one is spoiled on one rank (None: that step is left out)."""
    model = Spoiled()
    optimizer = make_optimizer(kind, model.parameters())
    precision = fp.Precision.bf16() if dtype == torch.bfloat16 else None
    zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage, precision=precision)
    report = ""
    for step in range(5):
        is_bad = step == BAD_STEP
        if is_bad and bad is None:
            continue
        before = bits(zero) if is_bad else {}
        x, y = batch(step, 0, dist.get_rank())
        factor = bad if is_bad and bad is not None and dist.get_rank() == BAD_RANK else 1.0
        nn.functional.mse_loss(model(x, factor).float(), y).backward()
        optimizer.step()
        if is_bad:
            assert_same(bits(zero), before, "after a step that was skipped")
            report = zero.report
        optimizer.zero_grad()
    return bits(zero), zero.skipped, report


def skip_runs(kind: str) -> list[tuple[int, str]]:
    found = []
    for stage, dtype in product(STAGES, (torch.float32, torch.bfloat16)):
        expected, none_skipped, _ = skip_run(stage, dtype, kind, None)
        assert none_skipped == 0
        for bad in (float("nan"), float("inf")):
            after, skipped, report = skip_run(stage, dtype, kind, bad)
            assert_same(after, expected, f"stage {stage}, {dtype}, {bad}")
            found.append((skipped, report))
    return found


@pytest.mark.parametrize("kind", ["adamw", "ours"])
def test_a_nonfinite_gradient_on_one_rank_skips_the_step_on_all(kind: str) -> None:
    """Not a bit changes, and training goes on as if the step had not been; all ranks say the same of it."""
    for found in run_ranks(3, skip_runs, kind):
        assert found == [(1, f"gradients that are not finite: bias (rank {BAD_RANK})")] * (len(STAGES) * 2 * 2)


def parallel_skip_run(sizes: dict[str, int]) -> list[tuple[int, str]]:
    """Of the two halves of a weight that is split by tensor parallelism, one is spoiled on one data-parallel rank."""
    mesh = fp.init_mesh(**sizes, device="cpu")
    found = []
    for stage in STAGES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        fp.parallelize(model, mesh, {"0": "colwise", "2": "rowwise"})
        optimizer = make_optimizer("adamw", model.parameters())
        zero = fp.zero.shard(model, optimizer, group=mesh, stage=stage, persistent_share=0.0, overlap=False)
        before = bits(zero)
        model(torch.ones(2, 6)).sum().backward()
        if dist.get_rank() == BAD_RANK:
            param = zero.params[0]
            local(param.unsent).fill_(float("nan"))
        optimizer.step()
        assert_same(bits(zero), before, f"stage {stage}")
        found.append((zero.skipped, zero.report))
    return found


def test_ranks_of_other_parallelism_skip_and_report_alike() -> None:
    for found in run_ranks(4, parallel_skip_run, {"dp_shard": 2, "tp": 2}):
        assert found == [(1, f"gradients that are not finite: 0.weight (rank {BAD_RANK})")] * len(STAGES)


def unchecked_run() -> None:
    for stage in STAGES:
        model = Spoiled()
        optimizer = make_optimizer("sgd", model.parameters())
        zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage, skip_nonfinite=False)
        model(torch.ones(2, 7), float("nan") if dist.get_rank() == 0 else 1.0).sum().backward()
        optimizer.step()
        assert zero.skipped == 0
        assert optimizer_values(zero)["bias"].isnan().all()


def test_steps_are_taken_as_they_are_where_nobody_asks_for_a_check() -> None:
    run_ranks(2, unchecked_run)


def clip_run(kind: str, max_norm: float) -> list[tuple[list[float], Parameters]]:
    found = []
    for stage in STAGES:
        model = Net()
        optimizer = make_optimizer(kind, model.parameters())
        zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage, max_norm=max_norm)
        norms = []
        for step in range(5):
            nn.functional.mse_loss(model(batch(step, 0, dist.get_rank())[0]), torch.ones(4, 2)).backward()
            optimizer.step()
            norms.append(zero.norm.item())
            optimizer.zero_grad()
        found.append((norms, optimizer_values(zero)))
    return found


def clipped_plainly(kind: str, max_norm: float, size: int) -> tuple[list[float], Parameters]:
    model = Net()
    optimizer = make_optimizer(kind, model.parameters())
    norms = []
    for step in range(5):
        for rank in range(size):
            loss = nn.functional.mse_loss(model(batch(step, 0, rank)[0]), torch.ones(4, 2))
            (loss / size).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["ours", "sgd"])
def test_clipping_has_the_same_bits_in_every_stage(kind: str) -> None:
    """And those of torch's clip_grad_norm_ on the whole model up to rounding, which is inexact in its norm."""
    max_norm = 0.2
    norms, parameters = clipped_plainly(kind, max_norm, 3)
    assert min(norms) > max_norm
    for found in run_ranks(3, clip_run, kind, max_norm):
        for stage in STAGES:
            assert found[stage][0] == found[0][0], f"stage {stage}"
            assert_same(found[stage][1], found[0][1], f"stage {stage}")
        assert found[0][0] == pytest.approx(norms, rel=1e-4)
        for name, value in parameters.items():
            torch.testing.assert_close(found[0][1][name], value, rtol=1e-4, atol=1e-5, msg=name)
