"""Training runs on several ranks that the tests of data parallelism compare with one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fastpar as fp
from fastpar.comm import Communicator

ROWS = 12  # samples of a step, for 1, 2, 3 or 4 ranks and 1 or ... microbatches


class Net(nn.Module):
    """Awkward: rows that do not divide, fewer than ranks, a scalar, one that is frozen, one used twice, one never."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.twice = nn.Linear(13, 13, bias=False)
        self.last = nn.Linear(13, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.full((13,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x))) * self.frozen
        x = torch.tanh(self.twice(x))
        x = torch.tanh(self.twice(x))
        return self.last(x) * self.scale


def batch(step: int, microbatch: int, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randn(rows, 7, generator=generator), torch.randn(rows, 2, generator=generator)


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    kinds = {
        "ours": lambda: fp.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
        "fused": lambda: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, nesterov=True),
    }
    return kinds[name]()


def train_sharded(
    stage: int, kind: str = "adamw", steps: int = 10, accumulate: int = 1, options: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """This rank's parameters after some steps, whole."""
    options = dict(options or {})
    transport = options.pop("transport", "auto")
    model = Net()
    optimizer = make_optimizer(kind, model.parameters())
    comm = Communicator(dist.group.WORLD, transport=transport)
    fp.zero.shard(model, optimizer, group=comm, stage=stage, accumulate=accumulate, **options)
    for step in range(steps):
        for microbatch in range(accumulate):
            x, y = batch(step, microbatch, comm.rank, 4)
            (nn.functional.mse_loss(model(x).float(), y) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    if stage == 3:
        model.unshard()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_plain(size: int, kind: str = "adamw", steps: int = 10, accumulate: int = 1) -> dict[str, torch.Tensor]:
    """The same in one process: gradients of all ranks in turn, then their mean."""
    model = Net()
    optimizer = make_optimizer(kind, model.parameters())
    for step in range(steps):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(size):
            optimizer.zero_grad()
            for microbatch in range(accumulate):
                x, y = batch(step, microbatch, rank, 4)
                (nn.functional.mse_loss(model(x), y) / accumulate).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.clone()
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / size if name in sums else None
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
