"""A plan without rows, and rows that follow it: the bits of `moe_dispatch`, over every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastpar import ops
from fastpar.comm import Communicator
from fastpar.ops import Padding
from tests.dist import run_ranks
from tests.moe.moe_calls import moe_dispatch, moe_plan
from tests.moe.moe_ranks import TRANSPORTS, multiply, tokens_of

SIZES = {1: (9,), 2: (7, 4), 3: (5, 0, 8)}
OPTIONS: list[dict[str, Any]] = [*TRANSPORTS.values(), {"padding": Padding(align=4)}]


def step(parts: Any, in_two: bool, group: Any, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """rows, row weights, out, dx and dweights of experts that multiply by their number + 1."""
    x, indices, weights, dout = parts
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    if in_two:
        plan = moe_plan(indices, weights, num_experts=6, group=group, **options)
        rows, row_weights = ops.moe_send(x, plan, weights)
    else:
        rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=6, group=group, **options)
    out = ops.moe_combine(multiply(rows, plan), plan, row_weights, add=x)
    out.backward(dout)
    assert x.grad is not None
    assert weights.grad is not None
    numbers = (plan.counts, torch.tensor(plan.splits), plan.loads, plan.source)
    return (rows.detach().clone(), row_weights.detach(), out.detach(), x.grad, weights.grad, *numbers)


def compare() -> None:
    comm = Communicator(dist.group.WORLD)
    parts = tokens_of(comm.rank, SIZES[comm.size], 16, 2, 6, torch.float32)
    for options in OPTIONS:
        if comm.size == 1 and "transport" in options:
            continue
        for _ in range(2):  # memory is used again
            results = [step(parts, in_two, comm, options) for in_two in (False, True)]
            for i, (wanted, found) in enumerate(zip(*results, strict=True)):
                assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)), (options, i)
    # Two tensors of other widths and dtypes over one plan.
    plan = ops.moe_plan(parts[1], None, num_experts=6, group=comm)
    for x in (parts[0], parts[0][:, :3].bfloat16()):
        rows, row_weights = ops.moe_send(x, plan)
        wanted, _, _ = ops.moe_dispatch(x, parts[1], num_experts=6, group=comm)
        assert torch.equal(rows, wanted)
        assert torch.equal(row_weights, torch.ones(plan.num_rows))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_that_follow_a_plan_have_the_bits_of_a_dispatch(world_size: int) -> None:
    run_ranks(world_size, compare)


def test_numbers_of_the_worked_example() -> None:
    plan = ops.moe_plan(torch.tensor([[1], [0], [1]]), num_experts=2)
    assert plan.counts.tolist() == [1, 2]
    assert plan.splits == (0, 1, 3)
    assert plan.source.tolist() == [1, 0, 2]
    rows, _ = ops.moe_send(torch.tensor([[1.0], [2.0], [3.0]]), plan)
    assert rows.tolist() == [[2.0], [1.0], [3.0]]


def bad_calls() -> list[str]:
    comm = Communicator(dist.group.WORLD)
    is_first, messages = comm.rank == 0, []
    indices, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)

    def attempt(call: Any) -> None:
        with pytest.raises(ValueError, match=r"indices|moe_|weights|x must") as raised:
            call()
        messages.append(str(raised.value))

    attempt(lambda: ops.moe_plan(indices + 9 * is_first, num_experts=2, group=comm))
    plan = ops.moe_plan(indices, weights, num_experts=2, group=comm)
    attempt(lambda: ops.moe_send(torch.zeros(3 if is_first else 2, 4), plan))
    attempt(lambda: ops.moe_send(torch.zeros(2, 4), plan, weights + is_first))
    attempt(lambda: ops.moe_send(torch.zeros(2, 4, requires_grad=is_first), plan))
    attempt(lambda: ops.moe_send(torch.zeros(2, 5 if is_first else 4), plan))
    rows, _ = ops.moe_send(torch.ones(2, 4), plan)  # the plan can be used further
    assert torch.equal(rows, torch.ones(plan.num_rows, 4))
    return messages


def test_what_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(2, bad_calls)
    assert "indices must be in 0..1" in first[0]
    assert "x must be [2, H]" in first[1]
    assert "weights must be those that the plan was made with" in first[2]
    assert all("wrong arguments on rank 0" in message for message in second[:3])
    assert "moe_send: what requires gradients" in first[3]
    assert "moe_send: the width of rows" in second[4]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"indices must be a tensor, got list \[\[0\]\]"):
        ops.moe_plan([[0]], num_experts=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_experts \(0\)"):
        ops.moe_plan(torch.zeros(2, 1, dtype=torch.int64), num_experts=0)
    plan = ops.moe_plan(torch.zeros(2, 1, dtype=torch.int64), num_experts=2)
    with pytest.raises(ValueError, match="x must be one of"):
        ops.moe_send(torch.zeros(2, 4, dtype=torch.int64), plan)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        ops.moe_send([[0.0]], plan)  # type: ignore[arg-type]
