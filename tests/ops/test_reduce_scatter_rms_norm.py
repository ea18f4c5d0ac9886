"""Reduce-scatter, residual and RMSNorm as one op, against the norm of the sum in float64.

Tolerances: sums in float32 of up to 257 terms, so 1e-5 relative to results of order one.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops, reference
from fastpar.comm import Communicator, record
from tests.dist import run_ranks

EPS = 1e-5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(found: Tensor, exact: Tensor, name: str) -> None:
    torch.testing.assert_close(found.double(), exact.double(), rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


def compare(dim: int, sizes: list[int] | None, with_residual: bool) -> None:
    comm = Communicator(dist.group.WORLD)
    tokens = 7 if sizes is None else sum(sizes)
    shape = (tokens, 3, 257) if dim == 0 else (3, tokens, 257)
    parts = torch.stack([random(*shape, seed=rank) for rank in range(comm.size)])
    weight, residual, grad_out, grad_h = random(257), random(*shape, seed=50), random(*shape, seed=51), random(*shape)
    mine = (list(torch.chunk(torch.arange(tokens), comm.size)) + [torch.arange(0)] * comm.size)[comm.rank]
    if sizes is not None:
        mine = torch.arange(tokens).split(sizes)[comm.rank]

    exact_x = parts.double().requires_grad_()
    summed = exact_x.sum(0)
    h = summed + residual.double() if with_residual else summed
    own_weight = weight.double().requires_grad_()
    out = F.rms_norm(h.index_select(dim, mine), (257,), own_weight + 1.0, EPS)
    (own_dw,) = torch.autograd.grad(out, own_weight, grad_out.index_select(dim, mine).double(), retain_graph=True)
    whole = F.rms_norm(h, (257,), weight.double() + 1.0, EPS)
    (dx,) = torch.autograd.grad((whole, h), exact_x, (grad_out.double(), grad_h.double()))

    for function in (ops.reduce_scatter_rms_norm, reference.reduce_scatter_rms_norm):
        x, w = parts[comm.rank].clone().requires_grad_(), weight.clone().requires_grad_()
        r = residual.index_select(dim, mine).requires_grad_() if with_residual else None
        found, mine_h = function(
            x, w, group=comm, residual=r, eps=EPS, weight_offset=1.0, dim=dim - 3 if dim else 0, sizes=sizes
        )
        grads = [grad.index_select(dim, mine) for grad in (grad_out, grad_h)]
        leaves = [x, w] if r is None else [x, w, r]
        found_dx, found_dw, *found_dr = torch.autograd.grad((found, mine_h), leaves, grads)
        close(found, out.detach(), "out")
        close(mine_h, h.detach().index_select(dim, mine), "h")
        close(found_dx, dx[0], "dx")
        close(found_dw, own_dw, "dweight")
        for found_r in found_dr:
            close(found_r, dx[0].index_select(dim, mine), "dresidual")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_output_dgrad_and_wgrad_are_those_of_the_norm_of_the_sum(world_size: int) -> None:
    run_ranks(world_size, compare, 1, None, True)
    run_ranks(world_size, compare, 0, [4, 0, 3][:world_size], False)


def example() -> None:
    comm = Communicator(dist.group.WORLD)
    x = torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[1.0, 2.0], [3.0, 4.0]]])[comm.rank]
    residual = torch.tensor([[[1.0, 1.0]], [[0.0, 0.0]]])[comm.rank]
    out, h = ops.reduce_scatter_rms_norm(x, torch.tensor([1.0, 2.0]), group=comm, residual=residual, eps=0.0)
    assert h.tolist() == [[3, 4]]
    torch.testing.assert_close(out, torch.tensor([[0.848528, 2.262742]]), rtol=1e-6, atol=0.0)


def test_the_numbers_of_the_example() -> None:
    run_ranks(2, example)


def collectives() -> None:
    comm = Communicator(dist.group.WORLD)
    x, weight = random(6, 10).requires_grad_(), random(10).requires_grad_()
    with record() as forward:
        out, _ = ops.reduce_scatter_rms_norm(x, weight, group=comm)
    with record() as backward:
        torch.autograd.grad(out.sum(), weight, retain_graph=True)
        torch.autograd.grad(out.sum(), x)
    assert [(r.op, r.numel) for r in forward] == [("reduce_scatter", 60)]
    assert [(r.op, r.numel) for r in backward] == [("all_gather", 60)]  # none for the weight


def test_one_collective_each_way_and_none_for_the_weight() -> None:
    run_ranks(2, collectives)


def test_bad_arguments_are_named() -> None:
    x, weight = torch.zeros(4, 8), torch.ones(8)
    for function in (ops.reduce_scatter_rms_norm,):
        for options, message in (
            (
                {"residual": torch.zeros(3, 8)},
                r"residual must have the tokens that rank 0 keeps, \[4, 8\], got \[3, 8\]",
            ),
            ({"dim": -1}, "dim must be a dim of x other than its last"),
            ({"sizes": [3]}, "add up to 4, got"),
            ({"eps": -1.0}, "eps must be finite"),
        ):
            with pytest.raises(ValueError, match=message):
                function(x, weight, group=None, **options)
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        ops.reduce_scatter_rms_norm(x.long(), weight, group=None)


def test_no_tokens_have_an_empty_result() -> None:
    out, h = ops.reduce_scatter_rms_norm(torch.empty(0, 8), torch.ones(8), group=None)
    assert out.shape == h.shape == (0, 8)


def test_compiled_fullgraph_equals_eager() -> None:
    def step(x: Tensor, residual: Tensor) -> Tensor:
        out, h = ops.reduce_scatter_rms_norm(x * 2.0, None, group=None, residual=residual)
        return out + h

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    a, b = (random(5, 34).requires_grad_() for _ in range(2))
    found, wanted = compiled(a, random(5, 34, seed=1)), step(b, random(5, 34, seed=1))
    assert torch.equal(found, wanted)
    found.sum().backward()
    wanted.sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, b.grad)
