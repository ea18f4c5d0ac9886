"""`all_gather_linear` of an x that is split by feature: forward, dgrad and wgrad against the whole product, in
integers, so that every sum is exact."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops, reference
from fastpar.comm import Communicator, record
from tests.dist import run_ranks

WIDTHS = {1: [12], 2: [9, 3], 3: [5, 0, 7]}


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed + sum(shape))).float()


def compare(several: bool, transposed: bool) -> None:
    comm = Communicator(dist.group.WORLD)
    widths, rank = WIDTHS[comm.size], comm.rank
    mine = slice(sum(widths[:rank]), sum(widths[: rank + 1]))
    x = integers(2, 5, 12)
    weights = [[integers(3 + r, 12, seed=10 * r + i) for i in range(1 + several)] for r in range(comm.size)]
    biases = [integers(3 + rank, seed=90 + i) for i in range(1 + several)]
    upstream = [[integers(2, 5, 3 + r, seed=20 * r + i) for i in range(1 + several)] for r in range(comm.size)]

    whole = [F.linear(x, w, b) for w, b in zip(weights[rank], biases, strict=True)]
    dx = torch.zeros_like(x)
    for parts, grads in zip(weights, upstream, strict=True):
        for w, dout in zip(parts, grads, strict=True):
            dx += dout @ w
    for function in (ops.all_gather_linear, reference.all_gather_linear):
        own = x[..., mine].clone().requires_grad_()
        given = [(w.t().contiguous() if transposed else w.clone()).requires_grad_() for w in weights[rank]]
        bias = [b.clone().requires_grad_() for b in biases]
        arguments = (given, bias) if several else (given[0], bias[0])
        found = function(own, *arguments, group=comm, dim=-1, sizes=widths, transposed=transposed)
        outs = list(found) if several else [found]
        grads = torch.autograd.grad(outs, [own, *given, *bias], upstream[rank])
        for out, exact in zip(outs, whole, strict=True):
            assert torch.equal(out, exact)
        assert torch.equal(grads[0], dx[..., mine])
        for i, dout in enumerate(upstream[rank]):
            dw = dout.flatten(0, 1).t() @ x.flatten(0, 1)
            assert torch.equal(grads[1 + i], dw.t() if transposed else dw)
            assert torch.equal(grads[1 + len(outs) + i], dout.sum((0, 1)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_forward_dgrad_and_wgrad_are_those_of_the_whole_product(world_size: int) -> None:
    run_ranks(world_size, compare, False, False)
    run_ranks(world_size, compare, True, True)


def other_ways() -> None:
    comm = Communicator(dist.group.WORLD)
    x, weight, dout = integers(4, 6, seed=comm.rank), integers(3, 12), integers(4, 3, seed=7)

    def step(x: Tensor, weight: Tensor, overlap: bool) -> Tensor:
        return ops.all_gather_linear(x * 2.0, weight, group=comm, dim=1, overlap=overlap)

    results = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # Dynamo's own
        for run, overlap in (
            (step, True),
            (step, False),
            (torch.compile(step, fullgraph=True, backend="aot_eager"), True),
        ):
            leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
            with record() as log:
                out = run(*leaves, overlap)
                grads = torch.autograd.grad(out, leaves, dout)
            results.append((out.detach(), *grads))
            assert sorted(r.op for r in log) == ["all_gather", "all_gather", "reduce_scatter"]
    leaf, parameter = x.clone().requires_grad_(), torch.nn.Parameter(weight.clone())
    store = ops.WeightGradStore()
    out = ops.all_gather_linear(leaf * 2.0, parameter, group=comm, dim=-1, wgrad_store=store)
    out.backward(dout)
    assert parameter.grad is None
    store.run()
    assert leaf.grad is not None
    assert parameter.grad is not None
    results.append((out.detach(), leaf.grad, parameter.grad))
    for result in results[1:]:
        for found, wanted in zip(result, results[0], strict=True):
            assert torch.equal(found, wanted)


def test_overlap_compile_and_deferred_gradients_give_the_same_bits() -> None:
    run_ranks(2, other_ways)


def test_parts_that_do_not_make_up_the_weight_are_refused() -> None:
    for function in (ops.all_gather_linear, reference.all_gather_linear):
        with pytest.raises(ValueError, match=r"must agree in K, got x \(4, 6\).*\(3, 12\)"):
            function(torch.zeros(4, 6), torch.zeros(3, 12), group=None, dim=-1)
        with pytest.raises(ValueError, match="sizes must be 1 numbers"):
            function(torch.zeros(4, 6), torch.zeros(3, 6), group=None, dim=-1, sizes=[5])
