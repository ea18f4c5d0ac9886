"""Virtual ranks: threads of one process that meet where a split module has its collectives."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.comm import shard_range
from fastpar.tensor.parameter import RowMap

_TIMEOUT_S = 60.0


class TrialError(Exception):
    """Why a split does not compute what the whole module does."""


class CodeError(TrialError):
    """The module's own code fails on parts."""


class DifferenceError(TrialError):
    """A trial has run, and computes something else."""


class ThreadMeeting:
    """A place where the threads of a trial exchange tensors; an error of one is an error of all.

    turn   held by the thread that runs, as compilers and tracers that a module's code calls fail in two at once
    """

    def __init__(self, size: int):
        self.size = size
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        self.slots[rank] = value
        self._wait()
        everyone = list(self.slots)
        self._wait()
        return everyone

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


@dataclass
class VirtualRank:
    """A virtual rank, as its modules know it."""

    meeting: ThreadMeeting
    rank: int
    sequence: bool  # whether hidden states are split along dim 1
    total: int  # tokens
    dim: int = 1

    def part(self, rank: int) -> slice:
        return slice(*shard_range(self.total, self.meeting.size, rank))

    def span(self) -> tuple[int, int]:
        """The begin of this rank's part, and its length."""
        here = self.part(self.rank)
        return here.start, here.stop - here.start

    def _check_part(self, x: Tensor) -> None:
        here = self.part(self.rank)
        if x.dim() < 2 or x.size(1) != here.stop - here.start:
            raise TrialError(f"a tensor of shape {list(x.shape)} is not a part of the sequence")

    def enter(self, x: Tensor) -> Tensor:
        """The input of a block: copied, or gathered where the sequence is split."""
        if self.sequence:
            self._check_part(x)
        everyone = self.meeting.exchange(self.rank, x)
        if self.sequence:
            return torch.cat(everyone, 1)
        others = [y for index, y in enumerate(everyone) if index != self.rank]
        # No value, but this rank's share of the others' gradients.
        return x + torch.stack([y - y.detach() for y in others]).sum(0)

    def whole(self, x: Tensor) -> Tensor:
        """The input of a module that is left whole: gathered, where every rank then computes the same."""
        self._check_part(x)
        everyone = self.meeting.exchange(self.rank, x)
        return torch.cat([y if index == self.rank else y.detach() for index, y in enumerate(everyone)], 1)

    def cut(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.size(1) != self.total:
            raise TrialError(f"a module that is left whole returned the shape {list(x.shape)}")
        everyone = [y[:, self.part(self.rank)] for y in self.meeting.exchange(self.rank, x)]
        others = [y - y.detach() for index, y in enumerate(everyone) if index != self.rank]
        return everyone[self.rank] + torch.stack(others).sum(0)

    def sum(self, x: Tensor) -> Tensor:
        everyone = self.meeting.exchange(self.rank, x)
        if not self.sequence:
            return x + torch.stack([y.detach() for index, y in enumerate(everyone) if index != self.rank]).sum(0)
        if x.dim() < 2 or x.size(1) != self.total:
            raise TrialError(f"a row-parallel layer got the shape {list(x.shape)} and not all tokens")
        return torch.stack(everyone).sum(0)[:, self.part(self.rank)]


class VirtualColumn(nn.Module):
    def __init__(self, rank: VirtualRank, weight: Tensor, bias: Tensor | None, rows: RowMap, enters: bool):
        super().__init__()
        self.rank, self.enters = rank, enters
        self.local_weight = rows.take(weight, 0, rank.rank)
        self.local_bias = None if bias is None else rows.take(bias, 0, rank.rank)
        self.weight = torch.empty_like(weight, device="meta")  # for code that asks for its dtype; it has no values

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.rank.enter(x) if self.enters else x, self.local_weight, self.local_bias)


class VirtualRow(nn.Module):
    def __init__(self, rank: VirtualRank, weight: Tensor, bias: Tensor | None, columns: RowMap):
        super().__init__()
        self.rank = rank
        self.local_weight, self.whole_bias = columns.take(weight, 1, rank.rank), bias
        self.weight = torch.empty_like(weight, device="meta")  # as above

    def forward(self, x: Tensor) -> Tensor:
        if x.size(-1) != self.local_weight.size(1):
            raise TrialError(f"a row-parallel layer got {x.size(-1)} features, not its {self.local_weight.size(1)}")
        out = self.rank.sum(F.linear(x, self.local_weight))
        return out if self.whole_bias is None else out + self.whole_bias
