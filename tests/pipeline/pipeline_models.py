"""Small models in parts, and the sequential runs that pipelines are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CLASSES = 24, 11


class Block(nn.Module):
    """Linear layers with and without bias, a norm, a residual, and a scale that no W/B split recognises."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


def build_parts(num_parts: int, seed: int = 0) -> list[nn.Module]:
    """One module per part, the same on every rank."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = [Block() for _ in range(num_parts)]
    parts[-1] = nn.Sequential(parts[-1], nn.Linear(WIDTH, CLASSES))
    return parts


def build_batch(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (rows, 3), generator=generator)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def run_parts(parts: Sequence[nn.Module], x: Any) -> Any:
    for part in parts:
        x = part(x)
    return x


def sequential_step(parts: Sequence[nn.Module], x: Tensor, target: Tensor, num_microbatches: int) -> Tensor:
    """Gradients of all microbatches, one after the other, added to `.grad`; returns the loss."""
    total: Tensor | None = None
    for inputs, labels in zip(x.tensor_split(num_microbatches), target.tensor_split(num_microbatches), strict=True):
        loss = loss_fn(run_parts(parts, inputs), labels) / num_microbatches
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def stale_sgd(
    parts: Sequence[nn.Module],
    x: Tensor,
    target: Tensor,
    num_microbatches: int,
    version: Callable[[int, int], int],
    per_update: int,
    lr: float,
) -> Tensor:
    """SGD in one process whose gradients are taken at old weights: the update rule of PipeDream and 2BW.

    version(part, t)  number of updates in the weights that microbatch t sees in that part
    per_update        microbatches between two updates; their gradients are averaged
    """
    names = [[name for name, _ in part.named_parameters()] for part in parts]
    history = [[{name: p.detach().clone() for name, p in part.named_parameters()} for part in parts]]
    grads: list[dict[str, Tensor]] = [{} for _ in parts]
    losses = []
    inputs, labels = x.tensor_split(num_microbatches), target.tensor_split(num_microbatches)
    for t in range(num_microbatches):
        leaves = [
            {name: history[version(k, t)][k][name].clone().requires_grad_() for name in names[k]}
            for k in range(len(parts))
        ]
        hidden: Any = inputs[t]
        for part, own in zip(parts, leaves, strict=True):
            hidden = torch.func.functional_call(part, own, (hidden,))
        loss = loss_fn(hidden, labels[t]) / per_update
        loss.backward()
        losses.append(loss.detach())
        for total, own in zip(grads, leaves, strict=True):
            for name, leaf in own.items():
                total[name] = leaf.grad if name not in total else total[name] + leaf.grad
        if (t + 1) % per_update == 0:
            newest = history[-1]
            pairs = zip(newest, grads, strict=True)  # torch.add(alpha=): rounded once, as torch's SGD does
            history.append([{name: w.add(g[name], alpha=-lr) for name, w in own.items()} for own, g in pairs])
            grads = [{} for _ in parts]
    with torch.no_grad():
        for part, own in zip(parts, history[-1], strict=True):
            for name, p in part.named_parameters():
                p.copy_(own[name])
    return torch.stack(losses).sum() / (num_microbatches // per_update)
