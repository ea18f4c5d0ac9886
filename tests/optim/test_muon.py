"""fp.optim.Muon: against torch.optim.Muon, over every layout, its plan, its bytes, and what optimizers have to do.

One rank and torch.optim.Muon are compared bit for bit. Layouts are compared with one rank bit for bit where matrices
are put together on one rank; where they stay split, products are rounded differently: the updates, of size lr = 0.02,
agree to 1e-6 in float32 and to 0.05 * lr in bfloat16, which is what five rounded steps make of 2^-9.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard

from fastpar import comm
from fastpar.optim import Muon
from fastpar.optim import _matrix_plan as planning
from fastpar.optim._matrix_layout import LayoutReader, MatrixSpec
from fastpar.optim._matrix_plan import Rates, assign, flops
from tests.dist import run_ranks

LR = 0.02
# Wide, tall, square; a convolution; fewer rows than ranks; a row.
SHAPES = [(12, 31), (33, 9), (24, 24), (6, 5, 3, 2), (3, 10), (1, 5), (17, 8)]
STEPS = 3


def values(index: int, step: int = -1, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * index + step + 1)
    return torch.randn(SHAPES[index], generator=generator).to(dtype)


def plain_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(values(i, dtype=dtype)) for i in range(len(SHAPES))]


def train_plain(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = STEPS) -> list[Tensor]:
    for step in range(steps):
        for i, param in enumerate(params):
            param.grad = values(i, step, param.dtype)
        optimizer.step()
    return [param.detach() for param in params]


def one_rank(dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    params = plain_parameters(dtype)
    return train_plain(Muon(params, lr=LR, **options), params)


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), (SHAPES[i], (a - b).abs().max())


# ---- one rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_bits_are_those_of_torch_muon(adjust_lr_fn: str | None, nesterov: bool) -> None:
    options: dict[str, Any] = {"lr": LR, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "weight_decay": 0.3}
    results = []
    for make, coefficients in ((torch.optim.Muon, (3.4445, -4.7750, 2.0315)), (Muon, "quintic")):
        params = [p for p in plain_parameters() if p.ndim == 2]  # all that torch's takes
        optimizer = make(params, ns_coefficients=coefficients, momentum=0.9, ns_steps=4, **options)  # type: ignore
        for step in range(STEPS):
            for i, param in enumerate(params):
                param.grad = values(i if i < 3 else i + 1, step)
            optimizer.step()
        results.append([param.detach() for param in params])
    assert_equal(results[1], results[0])


def test_bfloat16_parameters_follow_torch_and_round_once() -> None:
    shape = (33, 17)
    weight, grad = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    ours.grad, theirs.grad = grad.clone(), grad.clone()
    Muon([ours], lr=LR).step()
    torch.optim.Muon([theirs], lr=LR).step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=2.0**-7, atol=1e-3)
    buffer = torch.zeros(shape).bfloat16().lerp_(grad, 1 - 0.95)
    from fastpar.ops import newton_schulz

    update = newton_schulz(grad.lerp(buffer, 0.95)).float()
    exact = weight.float() * (1 - LR * 0.1) - LR * (33 / 17) ** 0.5 * update
    torch.testing.assert_close(ours.detach(), exact.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "factor"),
    [("original", (30 / 6) ** 0.5), ("match_rms_adamw", 0.2 * 30**0.5), ("spectral", (30 / 6) ** 0.5), ("none", 1.0)],
)
def test_step_sizes_of_the_adjustments(name: str, factor: float) -> None:
    # One singular value, so after many cubic steps the update is the matrix of one entry 1 that the gradient names.
    for shape, ratio in (((30, 6), factor), ((6, 30), {"spectral": 0.2**0.5, "original": 1.0}.get(name, factor))):
        param = nn.Parameter(torch.zeros(shape))
        param.grad = torch.zeros(shape)
        param.grad[2, 3] = 5.0
        Muon([param], lr=0.1, adjust_lr_fn=name, ns_coefficients="cubic", ns_steps=9, ns_dtype=torch.float32).step()
        wanted = torch.zeros(shape)
        wanted[2, 3] = -0.1 * ratio
        torch.testing.assert_close(param.detach(), wanted)


def test_a_convolution_is_one_matrix_and_batch_dims_are_many() -> None:
    weight, grad = torch.randn(4, 6, 3, 2), torch.randn(4, 6, 3, 2)
    flat = nn.Parameter(weight.reshape(4, 36).clone())
    conv = nn.Parameter(weight.clone(memory_format=torch.channels_last))
    flat.grad, conv.grad = grad.reshape(4, 36).clone(), grad.clone()
    for param in (flat, conv):
        Muon([param], lr=LR).step()
    assert torch.equal(conv.detach().reshape(4, 36), flat.detach())

    experts = nn.Parameter(weight.clone())
    experts.grad = grad.clone()
    Muon([{"params": [experts], "batch_dims": 1}], lr=LR).step()
    for i in range(4):
        alone = nn.Parameter(weight[i].clone())
        alone.grad = grad[i].clone()
        Muon([alone], lr=LR).step()
        assert torch.equal(experts.detach()[i], alone.detach())


def test_parameters_without_a_gradient_and_added_later() -> None:
    params = plain_parameters()[:3]
    before = params[1].detach().clone()
    optimizer = Muon(params[:2], lr=LR)
    params[0].grad = values(0, 0)
    optimizer.step()
    assert torch.equal(params[1].detach(), before)
    assert params[1] not in optimizer.state
    optimizer.add_param_group({"params": [params[2]], "lr": 0.5, "ns_steps": 3})
    params[2].grad = values(2, 0)
    optimizer.step()
    alone = nn.Parameter(values(2))
    alone.grad = values(2, 0)
    Muon([alone], lr=0.5, ns_steps=3).step()
    assert torch.equal(params[2].detach(), alone.detach())


def test_closure_scheduler_and_tensor_lr() -> None:
    param = nn.Parameter(values(0))
    optimizer = Muon([param], lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    first, _, second = optimizer.step(closure), scheduler.step(), optimizer.step(closure)
    assert first is not None
    assert second is not None
    assert second < first
    assert optimizer.param_groups[0]["lr"] == LR / 2

    as_tensor = nn.Parameter(values(0))
    other = Muon([as_tensor], lr=torch.tensor(LR, dtype=torch.float64))
    as_tensor.grad = 2 * values(0)
    other.step()
    again = nn.Parameter(values(0))
    again.grad = 2 * values(0)
    Muon([again], lr=LR).step()
    assert torch.equal(as_tensor.detach(), again.detach())


def test_gradient_factor_non_finite_flag_and_outputs() -> None:
    params, scaled = plain_parameters(), plain_parameters()
    plain, optimizer = Muon(params, lr=LR), Muon(scaled, lr=LR)
    low = {param: torch.zeros_like(param, dtype=torch.bfloat16) for param in scaled}
    optimizer.outputs.update(low)
    for i, (a, b) in enumerate(zip(params, scaled, strict=True)):
        a.grad, b.grad = values(i, 0), 8 * values(i, 0)
    before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in scaled]
    optimizer.grad_factor, optimizer.found_inf = 0.125, torch.tensor(1.0)
    optimizer.step()
    assert (optimizer.grad_factor, optimizer.found_inf) == (None, None)
    assert optimizer.state_dict() == before[0]
    assert_equal([p.detach() for p in scaled], before[1])

    optimizer.grad_factor, optimizer.found_inf = torch.tensor(0.125), torch.tensor(0.0)
    optimizer.step()
    plain.step()
    assert_equal([p.detach() for p in scaled], [p.detach() for p in params])
    for a, b in zip(params, scaled, strict=True):  # the update does not depend on the gradient's scale, the buffer does
        assert torch.equal(plain.state[a]["momentum_buffer"], optimizer.state[b]["momentum_buffer"])
    for param, copied in low.items():
        assert torch.equal(copied, param.detach().bfloat16())
    assert optimizer.grad_factor is None


def test_works_under_torch_grad_scaler() -> None:
    param = nn.Parameter(values(0))
    optimizer = Muon([param], lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((param * values(0, 0)).sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    alone = nn.Parameter(values(0))
    alone.grad = values(0, 0)
    Muon([alone], lr=LR).step()
    assert torch.equal(param.detach(), alone.detach())

    optimizer.zero_grad()
    before = param.detach().clone()
    scaler.scale((param * torch.inf).sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param.detach(), before)
    assert scaler.get_scale() == 4.0


def test_state_goes_on_in_another_optimizer_and_in_a_copy() -> None:
    wanted = one_rank()
    params = plain_parameters()
    first = Muon(params, lr=LR)
    train_plain(first, params, steps=2)
    resumed = [nn.Parameter(p.detach().clone()) for p in params]
    second = Muon(resumed, lr=7.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    copied_optimizer, copied = copy.deepcopy((first, params))
    for optimizer, those in ((second, resumed), (copied_optimizer, copied)):
        for i, param in enumerate(those):
            param.grad = values(i, 2)
        optimizer.step()
        assert_equal([p.detach() for p in those], wanted)


def test_empty_parameters_are_left_alone() -> None:
    for shape in ((0, 4), (4, 0)):
        param = nn.Parameter(torch.zeros(shape))
        param.grad = torch.zeros(shape)
        for name in (None, "match_rms_adamw", "spectral"):
            Muon([param], adjust_lr_fn=name).step()


# ---- layouts ---------------------------------------------------------------------------------------------------------

Placements = tuple[Placement, ...]


def test_parts_are_put_together_in_the_reverse_of_the_order_of_cuts() -> None:
    """Along several dims of tensor parallelism from left to right, and then by ZeRO: a weight [K, N] on a grid."""
    orders = {
        (Replicate(), _StridedShard(0, split_factor=4), Shard(0), Replicate(), Shard(0)): (0, 1, 4, 3, 2),
        (_StridedShard(0, split_factor=2), Shard(0)): (0, 1),
        (Shard(0), Shard(0), Shard(1)): (2, 1, 0),
    }
    for placements, order in orders.items():
        parameter: Any = mock.Mock(placements=placements, device_mesh=mock.Mock(ndim=len(placements)))
        assert LayoutReader._order(parameter) == order


def new_mesh(shape: tuple[int, ...], **names: Any) -> DeviceMesh:
    """A mesh of this run's groups. DTensor remembers results by meshes that compare equal, and the pool's ranks have
    seen equal ones, of groups that are gone.
    """
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", shape, **names)


def sharded_parameters(mesh: Any, placements: list[Placements], dtype: torch.dtype) -> list[nn.Parameter]:
    return [
        nn.Parameter(distribute_tensor(values(i, dtype=dtype), mesh, those))
        for i, those in zip(range(len(SHAPES)), placements, strict=False)
    ]


def train_sharded(params: list[nn.Parameter], optimizer: Muon) -> list[Tensor]:
    for step in range(STEPS):
        for i, param in enumerate(params):
            assert isinstance(param, DTensor)
            param.grad = distribute_tensor(values(i, step, param.dtype), param.device_mesh, param.placements)
        optimizer.step()
    for param in params:
        buffer = optimizer.state[param]["momentum_buffer"]
        assert isinstance(buffer, DTensor)
        assert (buffer.placements, buffer.shape) == (param.placements, param.shape)  # type: ignore[attr-defined]
    return [param.full_tensor().detach() for param in params]  # type: ignore[attr-defined]


R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placements]]] = {
    "zero": ((0,), [(S0,)]),
    "columns": ((0,), [(S1,)]),
    "replicated": ((0,), [(R,)]),
    "mixed": ((0,), [(S0,), (S1,), (R,)]),
    "zero x tp": ((2, 2), [(S0, S1), (S0, S0), (S0, R)]),
    "hybrid": ((2, 2), [(R, S0), (R, S1), (R, R)]),
    "everything": ((2, 2), [(S1, S0), (S1, S1), (R, S0), (S0, R), (S0, S1), (S1, R), (S0, S0)]),
}


def run_layout(name: str, distribute: str, dtype: torch.dtype, ns_dtype: torch.dtype) -> list[Tensor]:
    shape, placements = LAYOUTS[name]
    mesh = new_mesh(shape if shape != (0,) else (dist.get_world_size(),))
    cycle = [placements[i % len(placements)] for i in range(len(SHAPES))]
    params = sharded_parameters(mesh, cycle, dtype)
    return train_sharded(params, Muon(params, lr=LR, ns_dtype=ns_dtype, distribute=distribute))


def run_one_rank(dtype: torch.dtype, ns_dtype: torch.dtype) -> list[Tensor]:
    return one_rank(dtype, ns_dtype=ns_dtype)


def run_all(names: list[str], distribute: str, dtype: torch.dtype, ns_dtype: torch.dtype) -> dict[str, list[Tensor]]:
    return {name: run_layout(name, distribute, dtype, ns_dtype) for name in names}


def names_for(ranks: int) -> list[str]:
    return [name for name, (shape, _) in LAYOUTS.items() if shape == (0,) or ranks == 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_owners_give_the_bits_of_one_rank_under_every_layout(ranks: int, dtype: torch.dtype) -> None:
    # Products in float32 for float32: rounding to bfloat16 would hide rows that are put together in a wrong order.
    (wanted,) = run_ranks(1, run_one_rank, dtype, dtype)
    for found in run_ranks(ranks, run_all, names_for(ranks), "owners", dtype, dtype):
        for name in found:
            assert_equal(found[name], wanted)


@pytest.mark.parametrize(("ns_dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.05 * LR * 3)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_split_matrices_agree_with_one_rank_and_among_ranks(
    ranks: int, ns_dtype: torch.dtype, tolerance: float
) -> None:
    (wanted,) = run_ranks(1, run_one_rank, torch.float32, ns_dtype)
    results = run_ranks(ranks, run_all, names_for(ranks), "shards", torch.float32, ns_dtype)
    for name in results[0]:
        for found, exact in zip(results[0][name], wanted, strict=True):
            torch.testing.assert_close(found, exact, rtol=0, atol=tolerance * max(1, exact.shape[0] / exact[0].numel()))
        for other in results[1:]:
            assert_equal(other[name], results[0][name])


def _stacked_parameters() -> list[Tensor]:
    shapes = ((13, 31), (33, 13))
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]


def _stacked_gradients(step: int) -> list[Tensor]:
    return [torch.randn(p.shape, generator=torch.Generator().manual_seed(10 + step)) for p in _stacked_parameters()]


def _strided_plain() -> list[Tensor]:
    params = [nn.Parameter(p) for p in _stacked_parameters()]
    optimizer = Muon(params, lr=LR, ns_dtype=torch.float32)
    for step in range(2):
        for param, grad in zip(params, _stacked_gradients(step), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params]


def _strided(distribute: str) -> list[Tensor]:
    """Tensor parallelism first and FSDP2 over its shards: with rows cut twice, tp cuts first and dp its parts."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = new_mesh((2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(31, 13, bias=False), nn.Linear(13, 33, bias=False))
    with torch.no_grad():
        for layer, weight in zip(model, _stacked_parameters(), strict=True):
            layer.weight.copy_(weight)  # type: ignore[operator, union-attr]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    params = list(model.parameters())
    optimizer = Muon(params, lr=LR, ns_dtype=torch.float32, distribute=distribute)
    for step in range(2):
        for param, grad in zip(params, _stacked_gradients(step), strict=True):
            param.grad = _like_parameter(param, grad)  # type: ignore[arg-type]
        optimizer.step()
    return [param.full_tensor().detach() for param in params]  # type: ignore[attr-defined]


def _like_parameter(param: DTensor, full: Tensor) -> DTensor:
    """`full` cut as FSDP2 cut the parameter."""
    numbers = torch.arange(param.numel(), dtype=torch.float32).view(param.shape)
    mesh = param.device_mesh
    tp = distribute_tensor(numbers, mesh["tp"], [param.placements[1]])
    local = tp.to_local().chunk(mesh["dp"].size(), dim=0)[mesh["dp"].get_local_rank()]
    assert local.shape == param.to_local().shape
    mine = full.reshape(-1)[local.reshape(-1).long()].view(local.shape)
    return DTensor.from_local(mine, mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())


@pytest.mark.parametrize("distribute", ["owners", "shards"])
def test_fsdp_over_tensor_parallel_shards(distribute: str) -> None:
    (wanted,) = run_ranks(1, _strided_plain)
    for found in run_ranks(4, _strided, distribute):
        for a, b in zip(found, wanted, strict=True):
            if distribute == "owners":
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def _experts(distribute: str) -> list[Tensor]:
    """[experts, m, n]: experts over ranks, and rows of all of them."""
    mesh = new_mesh((2, 2))
    weight, grad = torch.randn(5, 7, 12), torch.randn(5, 7, 12)
    found = []
    for placements in ((S0, R), (S0, S1), (S0, Shard(2)), (S1, S0), (S0, S0), (R, R)):
        param = nn.Parameter(distribute_tensor(weight.clone(), mesh, placements))
        optimizer = Muon([param], lr=LR, batch_dims=1, distribute=distribute)
        param.grad = distribute_tensor(grad, mesh, placements)
        optimizer.step()
        found.append(param.full_tensor().detach())  # type: ignore[attr-defined]
    alone = nn.Parameter(weight)
    alone.grad = grad
    Muon([alone], lr=LR, batch_dims=1).step()
    return [*found, alone.detach()]


@pytest.mark.parametrize("distribute", ["owners", "shards"])
def test_stacked_experts_over_ranks(distribute: str) -> None:
    for *found, wanted in run_ranks(4, _experts, distribute):
        for result in found:
            if distribute == "owners":
                assert torch.equal(result, wanted)
            else:
                torch.testing.assert_close(result, wanted, rtol=0, atol=0.1 * LR)


# ---- replicas, work and bytes ----------------------------------------------------------------------------------------


def count_products() -> Any:
    """Patches Newton-Schulz as Muon calls it, so that it counts the shapes."""
    module = sys.modules["fastpar.optim.muon"]
    real = module.newton_schulz  # type: ignore[attr-defined]
    counter: Counter[tuple[int, ...]] = Counter()

    def counting(x: Tensor, **options: Any) -> Tensor:
        counter[tuple(x.shape[-2:])] += 1
        return real(x, **options)  # type: ignore[no-any-return]

    return mock.patch.object(module, "newton_schulz", counting), counter


def _data_parallel() -> tuple[list[Tensor], dict[tuple[int, ...], int], list[tuple[str, int]]]:
    params = [nn.Parameter(torch.randn(256, 256, generator=torch.Generator().manual_seed(i))) for i in range(6)]
    optimizer = Muon(params, lr=LR, replicas=dist.group.WORLD)
    for i, param in enumerate(params):
        param.grad = torch.randn(256, 256, generator=torch.Generator().manual_seed(100 + i))
    patch, counter = count_products()
    with patch, comm.record() as log:
        optimizer.step()
    return [p.detach() for p in params], dict(counter), [(entry.op, entry.numel) for entry in log]


def test_replicas_share_the_matrices_and_send_each_result_once() -> None:
    (wanted, all_products, silence), *_ = run_ranks(1, _data_parallel)
    assert (all_products, silence) == ({(256, 256): 6}, [])
    for found, products, log in run_ranks(3, _data_parallel):
        assert products == {(256, 256): 2}
        assert log == [("all_gather", 6 * 256 * 256)]
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


def _data_over_tensor_parallel() -> list[Tensor]:
    """Data parallelism whose ranks are not in the parameters' mesh, with tensor-parallel and plain parameters."""
    mesh = new_mesh((2, 2), mesh_dim_names=("dp", "tp"))
    params: list[nn.Parameter] = []
    for i in range(len(SHAPES)):
        whole = values(i)
        params.append(nn.Parameter(whole if i % 3 == 2 else distribute_tensor(whole, mesh["tp"], [(S0, S1)[i % 3]])))
    optimizer = Muon(params, lr=LR, replicas=mesh["dp"], distribute="owners")
    for step in range(STEPS):
        for i, param in enumerate(params):
            grad = values(i, step)
            param.grad = distribute_tensor(grad, mesh["tp"], param.placements) if isinstance(param, DTensor) else grad
        optimizer.step()
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in params]


def test_replicas_come_on_top_of_tensor_parallel_shards() -> None:
    (wanted,) = run_ranks(1, run_one_rank, torch.float32, torch.bfloat16)
    for found in run_ranks(4, _data_over_tensor_parallel):
        assert_equal(found, wanted)


def _replica_errors() -> str:
    mesh = new_mesh((2, 2), mesh_dim_names=("dp", "tp"))
    whole_job = dist.group.WORLD
    for inside in (mesh["tp"].get_group(), mesh["dp"].get_group()):  # within the mesh, and outside but for this rank
        param = nn.Parameter(distribute_tensor(values(0), mesh["tp"], [S0]))
        param.grad = distribute_tensor(values(0, 0), mesh["tp"], [S0])
        Muon([param], replicas=inside).step()
    with pytest.raises(ValueError, match="ranks") as caught:
        Muon([param], replicas=whole_job).step()
    return str(caught.value)


def test_replicas_that_cut_across_the_mesh_are_refused() -> None:
    for error in run_ranks(4, _replica_errors):
        assert "it must have all of its ranks there, or this rank only" in error


def _zero_bytes(dtype: torch.dtype) -> list[tuple[str, int, torch.dtype]]:
    mesh = new_mesh((dist.get_world_size(),))
    params = [nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [S0])) for _ in range(4)]
    optimizer = Muon(params, ns_dtype=dtype, distribute="owners")
    for param in params:
        param.grad = torch.ones_like(param)
    with comm.record() as log:
        optimizer.step()
    return [(entry.op, entry.numel, entry.dtype) for entry in log]


def test_shards_travel_to_the_owners_and_back_once() -> None:
    for ranks, dtype in ((2, torch.bfloat16), (4, torch.float32)):
        elements = 4 * 64 * 64
        moved = elements // ranks * (ranks - 1) // ranks  # what a rank keeps is not sent
        for log in run_ranks(ranks, _zero_bytes, dtype):
            assert log == [("all_to_all", moved, dtype)] * 2


def _frozen_and_changing() -> list[Tensor]:
    mesh = new_mesh((dist.get_world_size(),))
    params = sharded_parameters(mesh, [(S0,)] * len(SHAPES), torch.float32)
    optimizer = Muon(params, lr=LR, distribute="owners")
    for step in range(STEPS):
        for i, param in enumerate(params):
            param.grad = None if (i + step) % 3 == 0 else distribute_tensor(values(i, step), mesh, [S0])
        optimizer.step()
    return [param.full_tensor().detach() for param in params]  # type: ignore[attr-defined]


def test_other_gradients_in_every_step_make_other_plans() -> None:
    (wanted,) = run_ranks(1, _frozen_and_changing)
    for found in run_ranks(3, _frozen_and_changing):
        assert_equal(found, wanted)


def _resumed(first: int) -> list[Tensor]:
    """Two steps with shards along dim `first`, the third with shards along the other."""
    mesh = new_mesh((dist.get_world_size(),))
    params = sharded_parameters(mesh, [((S0, S1)[first % 2],)] * len(SHAPES), torch.float32)
    optimizer = Muon(params, lr=LR, distribute="owners")

    def advance(those: list[nn.Parameter], which: Muon, step: int) -> None:
        for i, param in enumerate(those):
            assert isinstance(param, DTensor)
            param.grad = distribute_tensor(values(i, step), mesh, param.placements)
        which.step()

    advance(params, optimizer, 0)
    advance(params, optimizer, 1)
    state = optimizer.state_dict()
    other = [
        nn.Parameter(p.detach().redistribute(placements=[(S1, S0)[first % 2]]))  # type: ignore[attr-defined]
        for p in params
    ]
    for entry, param in zip(state["state"].values(), other, strict=True):
        entry["momentum_buffer"] = entry["momentum_buffer"].redistribute(placements=param.placements)  # type: ignore
    second = Muon(other, lr=LR, distribute="owners")
    second.load_state_dict(state)
    advance(other, second, 2)
    return [param.full_tensor().detach() for param in other]  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", [0, 1])
def test_state_resharded_to_another_layout_goes_on_with_the_same_bits(first: int) -> None:
    (wanted,) = run_ranks(1, run_one_rank, torch.float32, torch.bfloat16)
    for found in run_ranks(3, _resumed, first):
        assert_equal(found, wanted)


# ---- the plan --------------------------------------------------------------------------------------------------------

CPU = Rates(400e9, 5e9, 20e-6)


def spec(rows: int, columns: int, *kinds: str, count: int = 1) -> MatrixSpec:
    return MatrixSpec(count, rows, columns, 1, kinds, 5)


def test_equal_matrices_are_dealt_out_evenly() -> None:
    places = assign([spec(1024, 1024, "rows")] * 16, [4], CPU, 2)
    assert Counter(place.owner for place in places) == {(rank,): 4 for rank in range(4)}
    assert all(place.split is None for place in places)


def test_large_matrices_come_first_so_that_small_ones_fill_the_gaps() -> None:
    small, large = spec(512, 512, "rows"), spec(1024, 1024, "rows")  # 8 times the work
    places = assign([*[small] * 8, large], [2], CPU, 2, "owners")
    assert sorted(Counter(place.owner for place in places).values()) == [1, 8]


def test_one_large_matrix_stays_split_unless_owners_are_asked_for() -> None:
    specs = [spec(2048, 8192, "columns")]
    assert assign(specs, [4], CPU, 2)[0].split == 0
    assert assign(specs, [4], CPU, 2, "owners")[0] == planning.Place((0,), None)


def test_small_matrices_are_not_worth_a_collective_each_step() -> None:
    # A quarter of 21 MFLOP is saved, and eleven times 20 us waited.
    (place,) = assign([spec(32, 1024, "columns")], [4], CPU, 2)
    assert place.split is None
    (place,) = assign([spec(32, 1024, "columns")], [4], CPU, 2, "shards")
    assert place.split == 0


def test_the_odd_matrix_is_split_and_the_others_have_owners() -> None:
    places = assign([spec(2048, 2048, "rows")] * 5, [4], CPU, 2)
    assert Counter(place.split for place in places) == {None: 4, 0: 1}
    assert sorted(place.owner for place in places if place.split is None) == [(rank,) for rank in range(4)]


def test_replicas_divide_work_that_is_dearer_than_its_result() -> None:
    assert assign([spec(1024, 1024, "copy")] * 2, [2], CPU, 2) == [planning.Place((0,)), planning.Place((1,))]
    slow_wire = Rates(400e9, 1e6, 20e-6)
    assert assign([spec(1024, 1024, "copy")] * 2, [2], slow_wire, 2) == [planning.Place((None,))] * 2


def test_stacks_apart_stay_where_they_are_and_count_as_load() -> None:
    experts, other = spec(512, 512, "apart", "rows", count=4), spec(512, 512, "rows", "rows")
    places = assign([experts, *[other] * 4], [2, 2], CPU, 2, "owners")
    assert places[0].owner[0] is None
    busy = places[0].owner[1]  # both ranks with this coordinate along the second axis have the experts to do
    assert all(place.owner[1] != busy for place in places[1:])


def test_all_axes_have_an_owner_but_the_one_that_stays_split() -> None:
    (place,) = assign([spec(4096, 4096, "rows", "columns", "copy")], [2, 4, 2], CPU, 2, "shards")
    assert place.split == 1
    assert place.owner[1] is None
    assert place.owner[0] is not None


def test_flops_of_the_plan_count_the_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from fastpar.ops import newton_schulz

    for shape in ((40, 100), (100, 40), (64, 64)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(shape), steps=5)
        assert counter.get_total_flops() == flops(spec(*shape))


def test_parts_of_nested_cuts_add_up() -> None:
    both = spec(13, 7, "rows", "rows", "columns")
    sizes = [2, 3, 4]
    parts = [[both.extent("rows", sizes, {0: a, 1: b}) for a in range(2)] for b in range(3)]
    # The axis that is put together last, the second, cut first: 13 = 5 + 5 + 3, then each in two.
    assert parts == [[3, 2], [3, 2], [2, 1]]
    assert both.extent("rows", sizes, {0: 0}) == 8
    assert [both.extent("columns", sizes, {2: c}) for c in range(4)] == [2, 2, 2, 1]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "error", "message"),
    [
        ((3,), {}, ValueError, r"at least 2 dims.*\(3,\).*AdamW"),
        ((3, 4), {"batch_dims": 1}, ValueError, r"at least 3 dims \(batch_dims=1\)"),
        ((3, 4), {"lr": -1.0}, ValueError, "lr must not be negative, got -1"),
        ((3, 4), {"lr": torch.ones(2)}, ValueError, r"shape \(2,\)"),
        ((3, 4), {"momentum": float("nan")}, ValueError, "momentum must not be negative, got nan"),
        ((3, 4), {"weight_decay": -0.1}, ValueError, "weight_decay"),
        ((3, 4), {"ns_steps": 0}, ValueError, "from 1 to 99"),
        ((3, 4), {"ns_coefficients": "best"}, ValueError, "got 'best'"),
        ((3, 4), {"adjust_lr_fn": "rms"}, ValueError, "got 'rms'"),
        ((3, 4), {"ns_dtype": torch.float16}, TypeError, "got torch.float16"),
        ((3, 4), {"distribute": "everywhere"}, ValueError, "got 'everywhere'"),
    ],
)
def test_bad_options_are_named(
    shape: tuple[int, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Muon([nn.Parameter(torch.zeros(shape))], **options)


def test_a_refused_group_is_not_added() -> None:
    optimizer = Muon([nn.Parameter(torch.zeros(2, 3))])
    with pytest.raises(ValueError, match="at least 2 dims"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match="complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


def _layout_errors() -> list[str]:
    mesh = new_mesh((2,))
    errors = []

    def attempt(param: nn.Parameter, grad: Tensor) -> None:
        param.grad = grad
        try:
            Muon([param]).step()
        except (TypeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    def cut(shape: tuple[int, ...], placement: Placement) -> DTensor:
        return distribute_tensor(torch.zeros(shape), mesh, [placement])

    attempt(nn.Parameter(cut((4, 6, 4, 2), Shard(2))), cut((4, 6, 4, 2), Shard(2)))
    partial = DTensor.from_local(torch.zeros(4, 6), mesh, [Partial()])
    attempt(nn.Parameter(partial), partial.detach())
    mismatched = nn.Parameter(cut((4, 6), S0))
    with mock.patch.object(type(mismatched), "grad", cut((4, 6), S1)):
        try:
            Muon([mismatched]).step()
        except ValueError as error:
            errors.append(f"ValueError: {error}")
    uneven = torch.zeros(1 + 2 * dist.get_rank(), 6)
    own = DTensor.from_local(uneven, mesh, [S0], run_check=False, shape=torch.Size((4, 6)), stride=(6, 1))
    attempt(nn.Parameter(own), torch.zeros_like(own))
    return errors


def test_layouts_that_are_no_matrices_are_refused() -> None:
    for rank, errors in enumerate(run_ranks(2, _layout_errors)):
        third, partial, placements, uneven = errors
        assert "one of its first 2 dims, got S(2) on mesh dim 0" in third or "Shard(dim=2)" in third
        assert "Partial" in partial or "P(sum)" in partial or "P" in partial
        assert "must have its placements" in placements
        assert f"must be [2, 6], the chunk of torch.chunk along rows, got [{1 + 2 * rank}, 6]" in uneven
