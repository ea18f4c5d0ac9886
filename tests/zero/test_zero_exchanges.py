"""What the ranks exchange in a step that has nothing to agree on, and what they do where there is something."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from tests.dist import run_ranks
from tests.zero.zero_ranks import whole_of

ROWS = {"even": 4, "uneven": 3}  # of 2 ranks


class Branches(nn.Module):
    """Linears of which a rank runs those that it is told to."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(5, rows) for _ in range(3))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        return sum((self.parts[i](x) for i in used), x.new_zeros(())).square().mean()


def batch(rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(7 + rank))


def expected(rows: int, used: Sequence[Sequence[int]]) -> dict[str, Tensor | None]:
    """The mean over ranks of each gradient, in float64; None where no rank has one."""
    sums: dict[str, Tensor | None] = {}
    for rank, branches in enumerate(used):
        model = Branches(rows).double()
        if branches:
            model(batch(rank).double(), branches).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] = parameter.grad / len(used) + sums.get(name, 0)
    return {name: sums.get(name) for name, _ in model.named_parameters()}


def exchanges(stage: int) -> None:
    """On a rank: the collectives of a step, the second and the third of a run."""
    model = Branches(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage)
    for step in range(3):
        with fp.comm.record() as log:
            model(batch(dist.get_rank()), (0, 1, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = [entry.op for entry in log]
        if step > 0:  # in the first ranks agree on the order of gradients
            wanted = {
                # Plain parameters of a group that is not known as a mesh: no rank sums others' squares
                0: ["all_reduce", "all_reduce"],
                1: ["reduce_scatter", "all_reduce", "all_gather", "barrier", "barrier"],
            }[stage]
            assert found == wanted, (step, found)
    zero.detach()


@pytest.mark.parametrize("stage", [0, 1])
def test_step_without_anything_to_agree_on_has_one_exchange_for_each_purpose(stage: int) -> None:
    run_ranks(2, exchanges, stage)


def unused(stage: int, rows: int, dtype: torch.dtype, used: Sequence[Sequence[Sequence[int]]]) -> None:
    """On a rank: gradients after each backward, where ranks run branches of their own."""
    model = Branches(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    precision = None if dtype == torch.float32 else fp.Precision(reduce=dtype)
    zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage, precision=precision)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for step, of_ranks in enumerate(used):
        mine = of_ranks[dist.get_rank()]
        if mine:
            model(batch(dist.get_rank()), mine).backward()
        for_step = zero.reduce_gradients if not all(of_ranks) else lambda: None  # a rank without a backward pass
        for_step()
        for name, wanted in expected(rows, of_ranks).items():
            found = next(param for param in zero.params if param.name == name).optim_param.grad
            assert (found is None) == (wanted is None), (step, name)
            if wanted is not None and found is not None:
                torch.testing.assert_close(whole_of(found).double(), wanted, rtol=tolerance, atol=tolerance)
        optimizer.step()
        optimizer.zero_grad()
    zero.detach()


ALL = (0, 1, 2)
USED = (
    (ALL, ALL),
    ((0, 1), ALL),  # one rank lacks what the other has
    ((0, 1), (0, 1)),  # nobody has the last
    ((0,), (2,)),
    (ALL, ALL),
)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_unused_parameters_are_agreed_on_with_and_without_the_flag(stage: int, dtype: torch.dtype, rows: int) -> None:
    run_ranks(2, unused, stage, rows, dtype, USED)


def late(stage: int, max_norm: float | None) -> None:
    """On a rank: a step before which one rank alone has gradients that nobody has averaged."""
    model = Branches(4)
    before = {name: x.detach().double().clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage, max_norm=max_norm)
    rank = dist.get_rank()
    if rank == 1:
        with zero.no_sync():
            model(batch(rank), ALL).backward()
    optimizer.step()
    gradients = expected(4, ((), ALL))
    norm = torch.cat([x.flatten() for x in gradients.values() if x is not None]).norm()
    assert zero.norm is not None
    torch.testing.assert_close(zero.norm.double(), norm, rtol=1e-6, atol=0.0)
    factor = 1.0 if max_norm is None else min(1.0, max_norm / float(norm))
    for name, x in model.named_parameters():
        grad = gradients[name]
        assert grad is not None
        torch.testing.assert_close(x.detach().double(), before[name] - 0.5 * factor * grad, rtol=1e-5, atol=1e-6)
    zero.detach()


@pytest.mark.parametrize("max_norm", [None, 1e-3])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_one_rank_that_were_not_averaged_are_before_the_step(stage: int, max_norm: float | None) -> None:
    run_ranks(2, late, stage, max_norm)
