"""Exact norms of gradients: the same bits under every layout, every element counted once.

What is expected is the norm of the whole gradients on one process, equal in every bit; that one is compared with
fractions in tests/ops/test_square_sum.py. torch's own norm is a float sum, good to a few ulp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fastpar as fp
from fastpar import clip_grad_norm_, grad_norm
from tests.dist import run_ranks

SHAPES = [(7, 5), (4, 3, 6), (1,), (2, 64), (130, 33)]  # uneven rows, fewer rows than ranks, a single element
MAX_NORM = 0.37


def whole_gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    wide = [torch.randn(shape, generator=generator) * 2.0 ** (6 * i - 12) for i, shape in enumerate(SHAPES)]
    return [grad * torch.rand(grad.shape, generator=generator) for grad in wide]


def as_parameters(grads: Sequence[Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    return parameters


def expected() -> tuple[Tensor, list[Tensor]]:
    """(norm, clipped gradients) of one process that holds everything."""
    parameters = as_parameters(whole_gradients())
    norm = clip_grad_norm_(parameters, MAX_NORM)
    return norm, [p.grad for p in parameters if p.grad is not None]


def distributed(grad: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(grad), mesh, placements))
    parameter.grad = distribute_tensor(grad.clone(), mesh, placements)
    return parameter


def assert_clipped(parameters: Sequence[nn.Parameter], **options: Any) -> None:
    """Clips, and compares bits with one process."""
    norm, clipped = expected()
    assert torch.equal(grad_norm(parameters, **options), norm)
    assert torch.equal(
        grad_norm(parameters, norm_type=math.inf, **options),
        torch.stack([grad.abs().max() for grad in whole_gradients()]).max(),
    )
    assert torch.equal(clip_grad_norm_(parameters, MAX_NORM, **options), norm)
    for parameter, wanted in zip(parameters, clipped, strict=True):
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert torch.equal(grad, wanted)


# ---- one process -----------------------------------------------------------------------------------------------------


def test_one_process_agrees_with_torch() -> None:
    norm, clipped = expected()
    reference = as_parameters(whole_gradients())
    torch.testing.assert_close(nn.utils.clip_grad_norm_(reference, MAX_NORM), norm, rtol=1e-6, atol=0.0)
    for parameter, found in zip(reference, clipped, strict=True):
        torch.testing.assert_close(parameter.grad, found, rtol=1e-6, atol=0.0)


def test_order_of_parameters_and_their_dtype_mix_do_not_matter() -> None:
    grads = [grad.bfloat16() if i % 2 else grad for i, grad in enumerate(whole_gradients())]
    norms = {grad_norm(as_parameters(order)).item() for order in (grads, grads[::-1], [g.float() for g in grads])}
    assert len(norms) == 1


def test_gradients_below_the_limit_keep_their_bits() -> None:
    parameters = as_parameters(whole_gradients())
    versions = [p.grad._version for p in parameters if p.grad is not None]
    norm = clip_grad_norm_(parameters, 1e9)
    assert norm > 0
    assert [p.grad._version for p in parameters if p.grad is not None] == versions


def test_worked_example() -> None:
    x = nn.Parameter(torch.zeros(2))
    x.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(x, 2.5).item() == 5.0
    torch.testing.assert_close(x.grad, torch.tensor([1.5, 2.0]))
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert grad_norm(nn.Linear(2, 2)).item() == 0.0  # no gradients yet


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(bad: float) -> None:
    parameters = as_parameters(whole_gradients())
    assert parameters[1].grad is not None
    parameters[1].grad[0, 0, 0] = bad
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    found = clip_grad_norm_(parameters, MAX_NORM)
    assert math.isnan(found) if math.isnan(bad) else found == math.inf
    largest = grad_norm(parameters, norm_type=math.inf)
    assert math.isnan(largest) if math.isnan(bad) else largest == math.inf
    with pytest.raises(RuntimeError, match=r"the norm of the gradients is (nan|inf)"):
        clip_grad_norm_(parameters, MAX_NORM, error_if_nonfinite=True)
    for parameter, grad in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0.0, atol=0.0, equal_nan=True)


def test_wrong_arguments_are_refused() -> None:
    parameters = as_parameters(whole_gradients())
    with pytest.raises(ValueError, match=r"norm_type must be 2\.0 or inf, got 1\.0"):
        clip_grad_norm_(parameters, 1.0, norm_type=1.0)
    with pytest.raises(ValueError, match="max_norm must be at least 0, got -1"):
        clip_grad_norm_(parameters, -1.0)
    with pytest.raises(ValueError, match=r"one entry for each parameter \(5\), got 1"):
        fp.GradSum.of(parameters, grads=[None])
    with pytest.raises(ValueError, match=r"0 <= index < count, got \(2, 2\)"):
        fp.GradSum().add([], share=(2, 2))
    for device in (-3, "gpu"):  # torch's own error for the first names no argument
        with pytest.raises(ValueError, match=f"GradSum: device must be a device such as .*, got {device!r}"):
            fp.GradSum(device)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="GradSum: device 'cuda:99' cannot be used"):
        fp.GradSum("cuda:99")


class WithFactor(torch.optim.SGD):
    """Multiplies gradients in its step, and finishes them when it is asked to."""

    grad_factor: Tensor | float | None = None
    finished = 0

    def finish_gradients(self) -> None:
        self.finished += 1


def test_an_optimizer_that_multiplies_itself_gets_the_factor_and_gradients_stay() -> None:
    norm, _ = expected()
    parameters = as_parameters(whole_gradients())
    optimizer = WithFactor(parameters, lr=0.1)
    assert torch.equal(clip_grad_norm_(optimizer, MAX_NORM), norm)
    assert torch.equal(torch.as_tensor(optimizer.grad_factor), MAX_NORM / (norm + 1e-6))
    assert optimizer.finished == 1
    for parameter, grad in zip(parameters, whole_gradients(), strict=True):
        assert torch.equal(parameter.grad, grad)
    optimizer.grad_factor = 0.25  # as by a loss scale
    assert torch.equal(clip_grad_norm_(optimizer, MAX_NORM), norm * 0.25)
    assert torch.equal(torch.as_tensor(optimizer.grad_factor), 0.25 * (MAX_NORM / (norm * 0.25 + 1e-6)))


def test_factor_includes_the_scale_of_the_gradients() -> None:
    norm, _ = expected()
    total = fp.GradSum().add([grad * 1024.0 for grad in whole_gradients()])
    assert torch.equal(total.clip_factor(MAX_NORM, scale=1 / 1024.0), (MAX_NORM / (norm + 1e-6)) / 1024.0)
    assert total.clip_factor(1e9, scale=1 / 1024.0) == 1 / 1024.0
    assert total.clip_factor(2**64, scale=1 / 1024.0) == 1 / 1024.0  # ints beyond those of tensors
    assert total.clip_factor(MAX_NORM, eps=2**64) == MAX_NORM / 2.0**64
    assert total.found_inf == 0.0
    total.add([torch.tensor([math.nan, math.inf])])
    assert (total.nonfinite, total.found_inf) == (2, 1.0)
    assert total.clip_factor(MAX_NORM, scale=0.5) == 0.5  # never NaN


# ---- layouts ---------------------------------------------------------------------------------------------------------


def clip_on_one_dim(world_size: int) -> None:
    mesh = fp.init_mesh(tp=world_size, device="cpu")
    grads = whole_gradients()
    for placements in ([Shard(0)] * 5, [Replicate()] * 5, [Shard(1), Shard(2), Shard(0), Shard(1), Replicate()]):
        assert_clipped([distributed(g, mesh["tp"], [p]) for g, p in zip(grads, placements, strict=True)])
    for options in ({}, {"mesh": mesh}, {"mesh": mesh.device_mesh}):
        some = [distributed(g, mesh["tp"], [Shard(0)]) for g in grads[:3]] + as_parameters(grads[3:])
        assert_clipped(some, **options)
    assert_clipped(as_parameters(grads), mesh=mesh)
    assert_clipped(as_parameters(grads), mesh=mesh.device_mesh)
    assert_clipped(as_parameters(grads))
    mesh.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bits_are_equal_under_one_dim_of_shards(world_size: int) -> None:
    run_ranks(world_size, clip_on_one_dim, world_size)


def clip_on_two_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    grads = whole_gradients()
    layouts: list[list[Placement]] = [
        [Shard(0), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
        [Shard(0), Replicate()],
        [Replicate(), Replicate()],
    ]
    for layout in layouts:
        fits = [g.dim() > 1 and (g.size(0) % 4 == 0 or not isinstance(layout[0], _StridedShard)) for g in grads]
        placed = [layout if fit else [Replicate(), Shard(0)] for fit in fits]
        assert_clipped([distributed(g, mesh, each) for g, each in zip(grads, placed, strict=True)])
    mixed = [distributed(g, mesh, layouts[i]) for i, g in enumerate(grads[:2])]
    mixed += [distributed(g, mesh["dp"], [Shard(0)]) for g in grads[2:3]]  # alike along tp
    mixed += [distributed(g, mesh["tp"], [Shard(0)]) for g in grads[3:4]] + as_parameters(grads[4:])
    assert_clipped(mixed)
    some = [distributed(g, mesh["tp"], [Shard(0)]) for g in grads[:4]] + as_parameters(grads[4:])
    assert_clipped(some, mesh=mesh)


def test_bits_are_equal_under_two_dims_of_shards() -> None:
    run_ranks(4, clip_on_two_dims)


def clip_stages(pp: int, tp: int) -> None:
    """Stages hold different parameters; the last, by far the largest, is shared by the first and the last stage."""
    mesh = fp.init_mesh(pp=pp, tp=tp, device="cpu")
    stage, grads = mesh.rank("pp"), whole_gradients()
    own = [i for i in range(len(grads) - 1) if i % pp == stage]
    shared = stage in (0, pp - 1)
    parameters = [distributed(g, mesh["tp"], [Shard(0)]) if tp > 1 else as_parameters([g])[0] for g in grads]
    kept = [parameters[i] for i in own]
    if shared:
        parameters[-1].pipeline_share = (0 if stage == 0 else 1, 2)
        second = as_parameters([whole_gradients()[-1]])[0]  # another copy on the same rank
        second.pipeline_share = None
        kept += [parameters[-1], second]
    norm, clipped = expected()
    assert torch.equal(clip_grad_norm_(kept, MAX_NORM, mesh=mesh), norm)
    for i in own:
        grad = parameters[i].grad
        assert torch.equal(grad.full_tensor() if isinstance(grad, DTensor) else grad, clipped[i])
    mesh.close()


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_stages_are_summed_and_what_they_share_counts_once(pp: int, tp: int) -> None:
    run_ranks(pp * tp, clip_stages, pp, tp)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))


class First(Embedded):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight[x]


class Last(Embedded):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def norm_of_tied_pipeline() -> tuple[float, list[Any]]:
    from fastpar.pipeline.stages.stage import Stage, Tied

    tied = Tied({0: ("weight",), 1: ("weight",)})
    part = dist.get_rank()
    stage = Stage.of_module(First() if part == 0 else Last(), part, 2)
    stage = type(stage)(**{**vars(stage), "tied": (tied,)})
    schedule = fp.pipeline.make_schedule("gpipe", num_ranks=2, num_microbatches=2)
    pipe = fp.pipeline.Pipeline([stage], schedule, dist.group.WORLD, loss=nn.functional.cross_entropy)
    ids = torch.arange(8) % 6
    pipe.step(ids, target=(ids + 1) % 6)
    norm = grad_norm(pipe.parameters(), groups={dist.group.WORLD: None})
    grad = next(pipe.parameters()).grad
    pipe.close()
    return norm.item(), grad


def test_tied_embeddings_of_a_pipeline_count_once() -> None:
    results = run_ranks(2, norm_of_tied_pipeline)
    assert torch.equal(results[0][1], results[1][1])
    parameter = as_parameters([results[0][1]])
    assert results[0][0] == results[1][0] == grad_norm(parameter).item() > 0


def clip_experts() -> None:
    mesh = fp.init_mesh(dp_shard=2, tp=2, ep=2, device="cpu")
    grads, ep = whole_gradients(), mesh.group("ep")
    index = mesh.rank("ep")
    experts = as_parameters([grads[3][index : index + 1], grads[0] if index else grads[0][:0]])
    parameters = [*as_parameters([grads[1], grads[2], grads[4]]), *experts]
    norm, _ = expected()
    assert torch.equal(grad_norm(parameters, mesh=mesh, groups={ep: experts}), norm)
    assert torch.equal(grad_norm(parameters, groups={mesh["ep"]: experts}), norm)
    mesh.close()


def test_experts_are_summed_over_their_group() -> None:
    run_ranks(4, clip_experts)


def combine_by_hand() -> None:
    rank, grads = dist.get_rank(), whole_gradients()
    apart = fp.GradSum("cpu").add(grads[rank::2]).combine(dist.group.WORLD)
    alike = fp.GradSum("cpu").add(grads, share=(rank, 2)).combine(None, dist.group.WORLD)
    assert apart.norm() == alike.norm() == expected()[0]


def test_a_sum_is_combined_by_hand_as_its_docstring_says() -> None:
    run_ranks(2, combine_by_hand)


def refuse_partial() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
    assert grad_norm([parameter]).item() == 2.0
    with pytest.raises(ValueError, match="Partial gradient has no norm before it is summed"):
        fp.GradSum.of([parameter], grads=[DTensor.from_local(torch.ones(4), mesh, [Partial()])])


def test_partial_gradients_are_refused() -> None:
    run_ranks(2, refuse_partial)


def share_of_missing_gradients() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    if dist.get_rank() == 1:
        parameter.grad = distribute_tensor(torch.full((4,), 3.0), mesh, [Shard(0)], src_data_rank=None)
    assert grad_norm([parameter]).item() == torch.tensor(18.0).sqrt().item()
    bad = DTensor.from_local(torch.tensor([math.nan if dist.get_rank() else 1.0]), mesh, [Shard(0)])
    parameter.grad = None
    total = fp.GradSum.of([parameter], grads=[bad])
    assert total.found_inf == 1.0  # on both ranks


def test_a_gradient_that_one_rank_lacks_and_a_nan_that_one_rank_has_reach_all() -> None:
    run_ranks(2, share_of_missing_gradients)


def count_collectives() -> list[tuple[str, int, int]]:
    mesh = fp.init_mesh(dp_replicate=2, tp=2, device="cpu")
    grads = whole_gradients()
    parameters = [distributed(g, mesh["tp"], [Shard(0)]) for g in grads[:3]] + as_parameters(grads[3:])
    with fp.comm.record() as records:
        grad_norm(parameters, mesh=mesh)
    mesh.close()
    return [(r.op, r.size, r.numel) for r in records]


def test_one_small_all_reduce_for_each_group() -> None:
    # tp: the sharded parameters and the plain ones together; dp: the plain ones, of which each rank reads a quarter
    for found in run_ranks(4, count_collectives):
        assert found == [("all_reduce", 2, 21), ("all_reduce", 2, 42)]
