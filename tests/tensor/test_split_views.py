"""Writes to a part of a split parameter, or of its gradient, reach it or are errors; data that are set are taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from tests.dist import run_ranks

PLAN = {"up": "colwise", "down": "rowwise"}
WRITES: dict[str, Callable[[Any], object]] = {
    "a row": lambda w: w.data[0].zero_(),
    "a row by setitem": lambda w: w.__setitem__(0, 0.0),
    "an element of a flat view": lambda w: w.view(-1).__setitem__(0, 5.0),
    "rows": lambda w: w.narrow(0, 1, 3).fill_(7.0),
    "columns": lambda w: w.narrow(1, 1, 3).mul_(7.0),
    "a column of the transposed": lambda w: w.T[0].add_(1.0),
    "half": lambda w: w.chunk(2, 0)[0].zero_(),
    "columns apart": lambda w: w.split(2, 1)[1].zero_(),
    "the diagonal": lambda w: w.diagonal().fill_(3.0),
    "a part of a part": lambda w: w.detach()[:4][1].zero_(),
    "a part with an operator": lambda w: w[1].__imul__(2.0),
    "reshaped": lambda w: w.reshape(2, -1)[0].mul_(3.0),
    "by init": lambda w: nn.init.zeros_(w[0]),
    "several at once": lambda w: torch._foreach_mul_([w[0], w[1]], 2.0),
    "into": lambda w: torch.add(torch.ones(6, dtype=w.dtype), 1.0, out=w[0]) if w.shape == (10, 6) else None,
    "all": lambda w: w.clamp_(-0.05, 0.05),
    "what a mask says": lambda w: w.masked_fill_(w > 0, 0.0),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def result(write: str, where: str, stage: int | None) -> Tensor | str:
    """An output after a write and a step, or what the write has raised. stage: of ZeRO over the ranks; None: one
    process; -1: tensor-parallel."""
    net = build()
    if stage == -1:
        fp.parallelize(net, dist.group.WORLD, PLAN)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if stage is not None and stage >= 0:
        fp.zero.shard(net, optimizer, stage=stage)
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6)
    net(x).square().mean().backward()
    weight: Any = getattr(net, where.split(".")[0]).weight
    try:
        with torch.no_grad():
            WRITES[write](weight.grad if where.endswith("grad") else weight)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    optimizer.step()
    return net(x).detach()


def lost(stages: tuple[int, ...], places: tuple[str, ...]) -> list[str]:
    """Writes that did not raise, and did not do what they do in one process."""
    found, refused = [], 0
    for write in WRITES:
        for where in places:
            wanted = result(write, where, None)
            assert isinstance(wanted, Tensor), wanted
            for stage in stages:
                got = result(write, where, stage)
                if isinstance(got, str):
                    refused += "would write to a copy" in got
                elif not torch.allclose(got, wanted, rtol=0, atol=1e-12):
                    found.append(f"{write} of {where} in {stage}")
    return [*found, *(["nothing was refused"] if refused < len(WRITES) else [])]


@pytest.mark.parametrize("stages", [(-1,), (1, 3)], ids=str)
def test_no_write_to_a_part_is_lost(stages: tuple[int, ...]) -> None:
    places = ("up", "down", "up.grad", "down.grad") if stages == (-1,) else ("up", "up.grad")
    assert run_ranks(2, lost, stages, places) == [[], []]


def written_in_a_hook() -> None:
    net = fp.parallelize(build(), dist.group.WORLD, PLAN)
    net.up.weight.register_hook(lambda grad: grad[3:].zero_())
    with pytest.raises(RuntimeError, match="zero_ would write to a copy"):
        net(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    average = net.up.weight.detach().clone()
    with pytest.raises(RuntimeError, match="__setitem__ would write to a copy"):
        average[1] = 0.0


def test_neither_is_one_to_what_is_split_like_a_parameter() -> None:
    run_ranks(2, written_in_a_hook)


def read() -> list[bool]:
    """Parts may be read, copied and computed with, and what is computed is a DTensor as any."""
    net, whole = fp.parallelize(build(), dist.group.WORLD, PLAN), build()
    part: Any = net.up.weight[1:3]
    copied = part.clone().zero_()
    summed = (part * 2 + part[0]).sum()
    summed.backward()
    expected = whole.up.weight[1:3]
    (expected * 2 + expected[0]).sum().backward()
    grad = net.up.weight.grad.full_tensor()
    return [
        not bool(copied.detach().full_tensor().any()),
        torch.equal(part.full_tensor(), expected),
        torch.allclose(grad, whole.up.weight.grad),
        type(part * 2).__name__ == "DTensor",
        torch.equal(copy.deepcopy(net.up.weight.detach().view(-1)).full_tensor(), whole.up.weight.detach().view(-1)),
    ]


def test_parts_are_read_as_ever() -> None:
    assert run_ranks(2, read) == [[True] * 5] * 2


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def with_data_set(net: Any) -> list[Tensor]:
    """Outputs of steps between which averages are put in and taken out, and steps are taken back, through `.data`."""
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    averages = {name: p.data.clone() for name, p in net.named_parameters()}
    outputs = []
    for _ in range(4):
        net(x).square().mean().backward()
        before = {name: p.data.clone() for name, p in net.named_parameters()}
        for name, p in net.named_parameters():
            p.grad.data = p.grad.data * 0.5
            p.data = p.data + p.grad.data
            p.data = before[name]
        optimizer.step()
        optimizer.zero_grad()
        backup = {}
        for name, p in net.named_parameters():
            averages[name] = averages[name] * 0.5 + p.data * 0.5
            backup[name] = p.data  # its memory, which p has again afterwards
            p.data = averages[name]
        outputs.append(net(x).detach())
        for name, p in net.named_parameters():
            p.data = backup[name]
        net.norm.weight.data = net.norm.weight.data * 1.5
        net.norm.weight = net.norm.weight
        outputs.append(net(x).detach())
    for layer in (net.up, net.down):  # whole tensors: this rank takes its part
        layer.weight.data = torch.arange(60, dtype=torch.float64).view(layer.weight.shape) / 60
    return [*outputs, net(x).detach()]


def data_set() -> None:
    torch.manual_seed(0)
    plain = Normed().double()
    net: Any = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, PLAN)
    for got, wanted in zip(with_data_set(net), with_data_set(plain), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    with pytest.raises(TypeError, match=r"data of shape \(3, 6\).*a DTensor of shape \(10, 6\)"):
        net.up.weight.data = torch.zeros(3, 6, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"data of dtype torch.float32.*convert the model as a whole"):
        net.up.weight.data = net.up.weight.data.float()
    net(torch.ones(2, 6, dtype=torch.float64)).square().sum().backward()
    with pytest.raises(TypeError, match=r"a DTensor that is not tensor-parallel must be one"):
        net.up.weight.grad.data = torch.zeros(10, 6, dtype=torch.float64)


def test_data_set_to_split_and_whole_parameters_and_their_gradients_is_taken() -> None:
    run_ranks(2, data_set)
