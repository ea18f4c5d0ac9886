"""All-reduce, residual and RMSNorm as one op: on CPU ranks the two ops after each other, and the fused path's autograd
with a stand-in for its kernel (tests/gpu/test_gpu_symmetric.py has the kernel itself).

Tolerances: sums in float32 of up to 257 terms, so 1e-5 relative to results of order one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastpar import ops, reference
from fastpar.comm import Communicator
from fastpar.comm.symmetric import collectives as module
from fastpar.comm.symmetric.collectives import SymmetricCollectives
from tests.comm.test_symmetric import StandIns
from tests.dist import run_ranks


def problem(world_size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [world_size, 5, 257], residual, weight, and upstream gradients of out and h."""
    generator = torch.Generator().manual_seed(0)
    x, residual, weight, grad_out, grad_h = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((world_size, 5, 257), (5, 257), (257,), (5, 257), (5, 257))
    )
    return x, residual, weight, grad_out, grad_h


def norm_of_sum(x: Tensor, weight: Tensor, residual: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(x, residual, weight, **options)


def gradients_of(function, x: Tensor, residual: Tensor, weight: Tensor, grads: list[Tensor]) -> list[Tensor]:  # type: ignore[no-untyped-def]
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
    outputs = function(leaves[0], leaves[2], residual=leaves[1], eps=1e-5, weight_offset=1.0)
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, leaves, grads)]


def compare_with_the_sum() -> None:
    comm = Communicator(dist.group.WORLD)
    x, residual, weight, *grads = problem(comm.size)
    wanted = gradients_of(norm_of_sum, x.sum(0), residual, weight, grads)
    for function in (ops.all_reduce_rms_norm, reference.all_reduce_rms_norm):

        def call(x, weight, function=function, **options):  # type: ignore[no-untyped-def]
            return function(x, weight, group=comm, **options)

        found = gradients_of(call, x[comm.rank], residual, weight, grads)
        for name, mine, exact in zip(("out", "h", "dx", "dresidual", "dweight"), found, wanted, strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    out, h = ops.all_reduce_rms_norm(x[comm.rank], weight, group=comm)
    torch.testing.assert_close(h, x.sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, ops.rms_norm(h, weight), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_output_and_gradients_are_those_of_the_norm_of_the_sum(world_size: int) -> None:
    run_ranks(world_size, compare_with_the_sum)


def example() -> None:
    comm = Communicator(dist.group.WORLD)
    x = torch.tensor([[1.0, 1.0], [1.0, 2.0]])[comm.rank]
    out, h = ops.all_reduce_rms_norm(x, torch.tensor([1.0, 2.0]), group=comm, residual=torch.ones(2), eps=0.0)
    assert h.tolist() == [3, 4]
    torch.testing.assert_close(out, torch.tensor([0.848528, 2.262742]), rtol=1e-6, atol=0.0)


def test_the_numbers_of_the_example() -> None:
    run_ranks(2, example)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[SymmetricCollectives]:
    monkeypatch.setattr(module, "_check_device", lambda device: None)
    stand_ins = StandIns()
    yield SymmetricCollectives.create(None, "cpu")
    stand_ins.library._destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_path_has_the_gradients_of_the_norm(one_rank: SymmetricCollectives, dtype: torch.dtype) -> None:
    x, residual, weight, *grads = problem(1, dtype)

    def call(x, weight, **options):  # type: ignore[no-untyped-def]
        return ops.all_reduce_rms_norm(x, weight, group=one_rank, **options)

    found = gradients_of(call, x[0], residual, weight, grads)
    wanted = gradients_of(norm_of_sum, x[0], residual, weight, grads)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7  # a unit in the last place
    for name, mine, exact in zip(("out", "h", "dx", "dresidual", "dweight"), found, wanted, strict=True):
        torch.testing.assert_close(
            mine, exact, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_fused_path_needs_one_dtype_and_falls_back(one_rank: SymmetricCollectives) -> None:
    x, residual, weight, *_ = problem(1, torch.bfloat16)
    leaf = x[0].clone().requires_grad_()
    out, h = ops.all_reduce_rms_norm(leaf, weight.float(), group=one_rank, residual=residual)
    wanted_out, wanted_h = ops.add_rms_norm(x[0], residual, weight.float())
    assert torch.equal(out, wanted_out)
    assert torch.equal(h, wanted_h)
    out.sum().backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()


def test_only_h_or_only_some_inputs_may_be_differentiated(one_rank: SymmetricCollectives) -> None:
    x, residual, weight, *_ = problem(1)
    leaf = x[0].clone().requires_grad_()
    _, h = ops.all_reduce_rms_norm(leaf, weight, group=one_rank, residual=residual)
    assert torch.equal(torch.autograd.grad(h.sum(), leaf)[0], torch.ones_like(leaf))
    scale = weight.clone().requires_grad_()
    out, _ = ops.all_reduce_rms_norm(x[0], scale, group=one_rank)
    assert torch.autograd.grad(out.sum(), scale)[0].shape == scale.shape


def test_virtual_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_check_device", lambda device: None)
    group = SymmetricCollectives.virtual(2, "cpu")
    with pytest.raises(ValueError, match="one of real ranks"):
        ops.all_reduce_rms_norm(torch.zeros(2, 8), torch.ones(8), group=group)
