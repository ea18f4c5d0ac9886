"""A sharded head on one rank of a running pipeline: its microbatches, and their messages to and from the last stage."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.comm import PointToPoint
from fastpar.pipeline.runtime.sharded_head import Kept, Results, ShardedHead, combine, combine_losses
from fastpar.pipeline.schedules.schedule import Schedule


class Purpose(enum.Enum):
    """What a run is for."""

    TRAIN = "train"
    LOSS = "loss"
    LOGITS = "logits"


class HeadRun:
    """Runs S and T of this rank and, beside the last stage, what goes out before S and comes together after it.

    tags     the first of 3 * num_microbatches tags: for hidden states, results, normalisers
    """

    def __init__(self, head: ShardedHead, schedule: Schedule, rank: int, p2p: PointToPoint, tags: int) -> None:
        self.module, self._rank, self._p2p, self._tags = head, rank, p2p, tags
        self._home = schedule.stage_ranks[schedule.last_stage]
        self._ranks = range(schedule.num_ranks)
        self._num_microbatches = schedule.num_microbatches
        self._hidden: dict[int, tuple[Tensor, Tensor]] = {}  # microbatch -> hidden states, targets
        self._shapes: dict[int, torch.Size] = {}  # of the hidden states, where the last stage is
        self._targets: dict[int, Tensor] = {}
        self._own: dict[int, list[Tensor]] = {}  # results of this rank, where the last stage is
        self._kept: dict[int, Kept] = {}
        self._normalisers: dict[int, Tensor] = {}

    def begin(self, purpose: Purpose, divisors: Sequence[float]) -> None:
        """divisors: what the losses are divided by; those beside the last stage count."""
        self.purpose, self._divisors = purpose, divisors

    def clear(self) -> None:
        """Forget what is in flight."""
        for state in (self._hidden, self._shapes, self._targets, self._own, self._kept, self._normalisers):
            state.clear()

    def offer(self, microbatch: int, hidden: Any, target: Any) -> None:
        """The last stage has made the hidden states [..., H] of a microbatch with targets [...]: to all ranks."""
        if self.purpose is Purpose.LOGITS and isinstance(hidden, Tensor):
            target = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
        width = self.module.weight.shape[1]
        if not isinstance(hidden, Tensor) or hidden.dim() < 2 or hidden.shape[-1] != width:
            what = f"shape {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ValueError(f"before a sharded head the last stage returns hidden states [..., {width}], got {what}")
        if not isinstance(target, Tensor) or target.shape != hidden.shape[:-1]:
            what = f"shape {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(
                f"a sharded head computes the loss, and needs target= with one number for each of the hidden states "
                f"{tuple(hidden.shape[:-1])}, got {what}"
            )
        flat = hidden.detach().flatten(0, -2), target.flatten()
        self._shapes[microbatch], self._targets[microbatch] = hidden.shape, flat[1]
        self._hidden[microbatch] = flat
        self._send_to_others(0, microbatch, list(flat))

    def forward(self, microbatch: int) -> None:
        """S."""
        if self._rank == self._home:
            hidden, target = self._hidden.pop(microbatch)
        else:
            (hidden, target), _ = self._p2p.recv(self._home, self._tag(0, microbatch))
        if self.purpose is Purpose.LOGITS:
            found = [self.module.logits(hidden)]
        else:
            results, kept = self.module(hidden, target)
            found = list(results)
            if self.purpose is Purpose.TRAIN:
                self._kept[microbatch] = kept
            else:
                found[3:] = [t[:0] for t in found[3:]]  # what only the gradient needs
        if self._rank == self._home:
            self._own[microbatch] = found
        else:
            self._p2p.send(self._home, self._tag(1, microbatch), found)

    def combine(self, microbatch: int) -> tuple[Tensor, Tensor]:
        """Beside the last stage: (the loss, divided; the gradient of the hidden states). Sends the normalisers."""
        results = [Results(*found) for found in self._collect(microbatch)]
        divisor = self._divisors[microbatch]
        found = combine(self.module, self._targets.pop(microbatch), results, divisor)
        self._normalisers[microbatch] = found.normalisers
        self._send_to_others(2, microbatch, [found.normalisers, torch.tensor(divisor, dtype=torch.float64)])
        return _divided(found.loss, divisor), found.hidden_grad.view(self._shapes.pop(microbatch))

    def loss(self, microbatch: int) -> Tensor:
        """Beside the last stage, where there are no gradients: the loss, divided."""
        results = [Results(*found) for found in self._collect(microbatch)]
        self._shapes.pop(microbatch)
        loss = combine_losses(self.module, self._targets.pop(microbatch), results)[0]
        return _divided(loss, self._divisors[microbatch])

    def logits(self, microbatch: int) -> Tensor:
        """Beside the last stage: the logits [..., V]."""
        shards = [found[0] for found in self._collect(microbatch)]
        self._targets.pop(microbatch)
        return torch.cat(shards, -1).unflatten(0, self._shapes.pop(microbatch)[:-1])

    def backward_weight(self, microbatch: int) -> None:
        """T."""
        if self._rank == self._home:
            normalisers, divisor = self._normalisers.pop(microbatch), self._divisors[microbatch]
        else:
            (normalisers, given), _ = self._p2p.recv(self._home, self._tag(2, microbatch))
            divisor = given.item()
        self.module.backward_weight(self._kept.pop(microbatch), normalisers, divisor)

    @property
    def in_flight(self) -> list[int]:
        """Microbatches between their S and their T."""
        return list(self._kept)

    def _collect(self, microbatch: int) -> list[list[Tensor]]:
        """What S of each rank found, by rank."""
        own = self._own.pop(microbatch)
        tag = self._tag(1, microbatch)
        return [own if rank == self._rank else self._p2p.recv(rank, tag)[0] for rank in self._ranks]

    def _send_to_others(self, message: int, microbatch: int, tensors: list[Tensor]) -> None:
        for rank in self._ranks:
            if rank != self._rank:
                self._p2p.send(rank, self._tag(message, microbatch), tensors)

    def _tag(self, message: int, microbatch: int) -> int:
        return self._tags + message * self._num_microbatches + microbatch


def _divided(loss: Tensor, divisor: float) -> Tensor:
    """The loss divided; 0 by inf, where no token counts and the loss is not a number."""
    return torch.zeros_like(loss) if math.isinf(divisor) else loss / divisor
