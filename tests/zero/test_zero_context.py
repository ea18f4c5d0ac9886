"""Data parallelism on meshes with context parallelism: parameters are sharded over dp_shard x cp, gradients are summed
over cp and averaged over data parallelism, and the exact norm counts a replica once."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastpar as fp
from fastpar.tensor import ColumnParallelLinear, RowParallelLinear
from fastpar.zero.groups import Groups, local
from tests.dist import run_ranks
from tests.zero.test_zero_experts_stage3 import check
from tests.zero.zero_expert_ranks import Case
from tests.zero.zero_ranks import assert_same, one_thread, whole_of

HIDDEN, INNER, TOKENS = 5, 7, 6  # sizes that do not divide
MAX_NORM = 0.05  # below every norm here, so that every step clips
MESHES = [{"cp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2}]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, INNER), nn.Tanh(), nn.Linear(INNER, HIDDEN))


def sequence(step: int, data_rank: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 * step + data_rank))


def loss_of(model: nn.Module, step: int, data_rank: int, part: int, num_parts: int) -> Tensor:
    """A rank's part of the loss: of its tokens, over the count of the whole sequence."""
    x = sequence(step, data_rank)
    mine = x[part * TOKENS // num_parts : (part + 1) * TOKENS // num_parts]
    return model(mine).float().square().sum() / x.numel()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained_in_one_process(dp: int, replicas: int, cp: int, steps: int = 3) -> list[dict[str, Tensor]]:
    """Values after each step, gradients ("grad.") and the norm before clipping, with the ranks' arithmetic: the mean
    over ranks within a replica, then over replicas, times cp."""
    model = build()
    optimizer = adamw(model)
    found = []
    for step in range(steps):
        gradients = []
        for rank in range(dp * cp):
            model.zero_grad()
            loss_of(model, step, rank // cp, rank % cp, cp).backward()
            gradients.append([p.grad for p in model.parameters()])
        within = len(gradients) // replicas
        means = [mean(gradients[at : at + within]) for at in range(0, len(gradients), within)]
        for p, gradient in zip(model.parameters(), mean(means), strict=True):
            p.grad = gradient * cp
        taken = {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters()}
        taken["norm"] = fp.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        found.append({**taken, **{name: p.detach().clone() for name, p in model.named_parameters()}})
    return found


def mean(gradients: list[list[Tensor]]) -> list[Tensor]:
    total = [x.clone() for x in gradients[0]]
    for each in gradients[1:]:
        total = [x + y for x, y in zip(total, each, strict=True)]
    return [x / len(gradients) for x in total]


def trained_on(mesh: fp.Mesh, stage: int, steps: int = 3, **options: Any) -> list[dict[str, Tensor]]:
    model = build()
    optimizer = adamw(model)
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=stage, max_norm=MAX_NORM, persistent_share=0.1, **options)
    found = []
    for step in range(steps):
        loss_of(model, step, mesh.rank("dp"), mesh.rank("cp"), mesh.size("cp")).backward()
        taken = {f"grad.{name}": whole_of(p.grad).clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        assert zero.norm is not None
        values = {name: whole_of(p.detach()).clone() for name, p in model.named_parameters()}
        found.append({**taken, "norm": zero.norm.clone(), **values})
    zero.detach()
    return found


def every_stage(sizes: dict[str, int]) -> list[list[dict[str, Tensor]]]:
    mesh = fp.init_mesh(**sizes, device="cpu")
    return [trained_on(mesh, stage) for stage in range(4)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_gradients_are_summed_over_cp_and_averaged_over_data_parallelism(sizes: dict[str, int]) -> None:
    """Gradients, exact norms and updates with the bits of one process, in every stage, on every rank."""
    replicas, dp = sizes.get("dp_replicate", 1), sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
    with one_thread():
        flat, nested = trained_in_one_process(dp, 1, 2), trained_in_one_process(dp, replicas, 2)
        for stages in run_ranks(2 * dp, every_stage, sizes):
            for stage, found in enumerate(stages):
                for step, wanted in enumerate(nested if stage else flat):  # stage 0 averages over all ranks at once
                    assert_same(found[step], wanted, (stage, step))


def test_parts_of_a_sequence_train_as_the_whole_sequence_does() -> None:
    """Without the ranks' arithmetic: the mean over sequences of the loss of a whole one."""
    model = build().double()
    start = copy.deepcopy(dict(model.named_parameters()))
    for data_rank in range(2):
        x = sequence(0, data_rank).double()
        (model(x).square().sum() / x.numel() / 2).backward()
    for stages in run_ranks(4, every_stage, {"dp_shard": 2, "cp": 2}):
        for found in stages:
            for name, p in model.named_parameters():
                torch.testing.assert_close(found[0][f"grad.{name}"].double(), p.grad, rtol=1e-5, atol=1e-7)
                assert not torch.equal(found[0][name].double(), start[name])


def tensor_parallel() -> None:
    """Column- and row-parallel layers over tp, sharded once more over dp_shard x cp."""
    mesh = fp.init_mesh(cp=2, tp=2, device="cpu")
    whole = build()
    x = sequence(0, 0)
    (whole(x).square().sum() / x.numel()).backward()
    wanted = fp.clip.grad_norm(whole.parameters())
    for stage in range(4):
        source = build()
        twin = nn.Sequential(
            ColumnParallelLinear.from_linear(source[0], group=mesh["tp"]),
            nn.Tanh(),
            RowParallelLinear.from_linear(source[2], group=mesh["tp"]),
        )
        zero = fp.zero.shard(twin, adamw(twin), group=mesh, stage=stage, max_norm=MAX_NORM, persistent_share=0.0)
        loss_of(twin, 0, 0, mesh.rank("cp"), 2).backward()
        for p, q in zip(twin.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(whole_of(p.grad), q.grad, rtol=1e-5, atol=1e-7)
        zero.optimizers[0].step()
        torch.testing.assert_close(zero.norm, wanted, rtol=1e-6, atol=0)


def test_tensor_parallel_parameters_are_sharded_over_cp_too() -> None:
    run_ranks(4, tensor_parallel)


def test_experts_over_context_parallel_ranks_get_the_same_sum() -> None:
    """Experts that ep spreads over cp ranks: stage 3 has the bits of stage 1, both the values of one process. Copies of
    experts (efsdp 2), and experts that one rank has alone (efsdp 1)."""
    check(4, [Case(persistent_share=0.1)], [{"dp_shard": 2, "cp": 2, "ep": 2}, {"cp": 4, "ep": 2}])
    check(2, [Case(persistent_share=0.1)], [{"cp": 2, "ep": 2}])


PASSES = ("pass", "pass pass", "pass no_sync", "pass no_sync pass", "pass forward", "forwards", "leftover")


def gradients_after(mesh: fp.Mesh, passes: str, wire: Any, reduce: torch.dtype | None) -> tuple[list[Tensor], int]:
    """Of stage 0, in float64 where nothing is rounded, after these passes; and reductions that the step adds."""
    model = build() if wire or reduce else build().double()
    optimizer = adamw(model)
    precision = None if reduce is None else fp.Precision(reduce=reduce)
    accumulate = 2 if passes == "leftover" else 1
    zero = fp.zero.shard(
        model, optimizer, group=mesh, stage=0, wire=wire, precision=precision, accumulate=accumulate, max_norm=1e9
    )

    def loss(step: int) -> Tensor:
        x = sequence(step, mesh.rank("cp")).to(next(model.parameters()).dtype)
        return model(x).square().sum()

    if passes == "forwards":
        for each in [loss(0), loss(1)]:
            each.backward()
    else:
        words = ["pass"] * 3 if passes == "leftover" else passes.split()
        for step, word in enumerate(words):
            with zero.no_sync() if word == "no_sync" else nullcontext():
                value = loss(step)
                if word != "forward":
                    value.backward()
    with fp.comm.record() as log:
        zero.reduce_gradients()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    zero.detach()
    # Beside those that ask whether there is anything, and compare the options of optimizers.
    return found, sum(each.dtype not in (torch.int32, torch.int64) for each in log)


def gradients_of_all(passes: str, num_parts: int) -> list[Tensor]:
    count = {"pass": 1, "pass forward": 1, "pass no_sync pass": 3, "leftover": 3}.get(passes, 2)
    model = build().double()
    for step in range(count):
        for part in range(num_parts):
            model(sequence(step, part).double()).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


WIRES = [(fp.comm.BlockWire("int8", 64), None), (fp.comm.PlainWire(), None), (None, torch.bfloat16)]


def sums_in_stage_0() -> list[tuple[str, list[Tensor], int]]:
    mesh = fp.init_mesh(cp=2, device="cpu")
    found = [(passes, *gradients_after(mesh, passes, None, None)) for passes in PASSES]
    return found + [("pass", *gradients_after(mesh, "pass", *each)) for each in WIRES]


def test_in_stage_0_sums_over_cp_stay_sums_whatever_follows() -> None:
    """A gradient that comes on top of a sum, a forward after it, and means that do not lie in their buckets."""
    wanted = {passes: gradients_of_all(passes, 2) for passes in PASSES}
    for rank in run_ranks(2, sums_in_stage_0):
        for index, (passes, found, extra) in enumerate(rank):
            tolerance = 1e-12 if index < len(PASSES) else 2e-2  # of 8 bits
            for x, y in zip(found, wanted[passes], strict=True):
                assert (x.double() - y).abs().max() <= tolerance * y.abs().max(), (index, passes)
            assert extra == 0 or passes in ("pass no_sync", "leftover"), (index, passes)  # what was reduced stays


def layouts(sizes: dict[str, int]) -> None:
    mesh = fp.init_mesh(**sizes, device="cpu")
    parameter = nn.Parameter(torch.zeros(16, 3))
    groups = Groups(mesh, is_sharded=True)
    assert (groups.shard.size, groups.replicate.size) == (mesh.size("fsdp"), mesh.size("dp_replicate"))
    assert groups.mode == "background"  # attention waits for other ranks in between
    spec = groups.row_spec(parameter)
    assert spec is not None
    assert spec.placements[-1] == Shard(0)
    assert all(placement == Replicate() for placement in spec.placements[:-1])
    model = nn.Linear(4, 16)
    zero = fp.zero.shard(model, adamw(model), group=mesh, stage=3, persistent_share=0.0)
    weight: Any = model.weight
    assert isinstance(weight, DTensor)
    assert local(weight).shape == (16 // mesh.size("fsdp"), 4)
    zero.detach()


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_rank_keeps_its_rows_of_dp_shard_times_cp(sizes: dict[str, int]) -> None:
    run_ranks(2 * sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1), layouts, sizes)


def differing() -> None:
    mesh = fp.init_mesh(cp=2, device="cpu")
    torch.manual_seed(mesh.rank("cp"))
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="ranks that average gradients have different values of weight"):
        fp.zero.shard(model, adamw(model), group=mesh, stage=1, sync_weights="check")


def test_context_parallel_ranks_with_different_weights_are_refused() -> None:
    run_ranks(2, differing)
