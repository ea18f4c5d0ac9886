"""Copies of experts at work: who sends which weights, which copy a token goes to, where gradients are added up.

    forward   a home's weights, as they are now, go to the ranks that have copies: one all-to-all
              every choice of an expert becomes one of a copy; the experts of a rank are its own and its copies
    backward  the gradients of the copies go home and are added to those of the home: one all-to-all

So parameters, their gradients and the states of optimizers stay where they are without copies, and a new placement is
nothing but other tables.

Bytes, for each copy: its weights once in forward and once more, as gradients, in backward; with gate and up, inner size
I and hidden size H that is 2 * 3 I H / etp elements for each microbatch, all of them sent or received by the expert's
home. With torch.autocast they travel in its dtype. The copies of a layer are in memory from its forward to its
backward.

Note: which copy. A rank counts its choices of an expert and gives each copy a run of them. A copy on the rank itself
comes first: what it computes need not travel. It takes as many of the rank's own choices as it can without exceeding
its share of all, if every rank has as many choices of that expert; the copies' other room is shared out among the ranks
that have choices left. So the shares hold exactly where batches are alike, and nobody asks anybody. Ends of runs are
rounded with an offset that grows with the rank: their errors cancel over the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.agree import Agreement
from fastpar.comm.recompute_cache import kept
from fastpar.expert.placement import Placement
from fastpar.ops._autograd import first_derivative_only
from fastpar.ops._buffers import new_buffer
from fastpar.ops.moe.permute import pair_positions

_ALIGNMENT = 32  # elements: matrices in a packed row begin at multiples of this
_DIGEST_WORDS = 2
_EQUAL_ON_ALL = ("the placement (the first half of its digest)", "the placement (the rest of its digest)")

Weights = Sequence[Tensor | None]


class ExpertReplicas:
    """What one rank needs to run a placement that has copies.

    placement
    comm       the expert group
    """

    def __init__(self, placement: Placement, comm: Communicator) -> None:
        self.placement, self.comm = placement, comm
        copies, mine = placement.copies, comm.rank
        first = mine * placement.experts_per_rank
        by_target = [[e - first for e in experts if placement.home(e) == mine] for experts in copies]
        # Homes ascend with experts: what comes from rank 0 first is what the first slots are for.
        self._sent = [expert for experts in by_target for expert in experts]
        self._to = [len(experts) for experts in by_target]
        self._back = [sum(placement.home(e) == rank for e in copies[mine]) for rank in range(comm.size)]
        self._targets, self._ends = _choices(placement, mine)

    # ---- tokens

    @property
    def num_physical(self) -> int:
        """Experts and slots of all ranks."""
        return self.placement.num_experts + self.comm.size * self.placement.slots

    def physical(self, indices: Tensor) -> Tensor:
        """indices [T, K] of experts as numbers of `Placement.physical_to_logical`; -1: nowhere.

        What is wrong with them is left to the dispatch, which tells all ranks.
        """
        num_experts = self.placement.num_experts
        if indices.dim() != 2 or indices.dtype not in (torch.int64, torch.int32):
            return indices
        if self._targets.device != indices.device:
            self._targets, self._ends = self._targets.to(indices.device), self._ends.to(indices.device)
        indices = indices.long().contiguous()
        position, counts = pair_positions(indices, num_experts)  # among those of its expert
        offset = (self.comm.rank + 0.5) / self.comm.size
        ends = (self._ends * counts[:, None] + offset).floor().long()
        experts = indices.clamp(0, num_experts - 1)
        copy = (position[..., None] >= ends[experts]).sum(-1)
        nowhere = torch.where(indices == num_experts, -1, indices + (self.num_physical - num_experts) * (indices > 0))
        return torch.where(position < 0, nowhere, self._targets[experts, copy])

    # ---- weights

    def fetch(self, weights: Weights, dtype: torch.dtype | None = None) -> tuple[list[Any], list[Any]]:
        """(weights, copies): those of this rank's experts [E_r, ..] as they are, and of its slots [slots, ..], which
        travel in `dtype` (None: as they are). Gradients of the copies come into those of the weights at home.
        """
        if torch.compiler.is_compiling():  # a graph cannot hold an exchange
            found = torch.compiler.disable(self.fetch)(weights, dtype)
            return found[0], found[1]
        found = FetchReplicas.apply(self, dtype, *weights)
        own = [old if new is None else new for old, new in zip(weights, found, strict=False)]
        return own, [*found[len(weights) :]]

    def _send(self, weights: Weights, dtype: torch.dtype | None) -> list[Tensor | None]:
        """The copies of this rank's slots; zeros in those that are not used."""
        present = [weight for weight in weights if weight is not None]
        columns, width = _columns(present)
        packed = new_buffer(present[0], (len(self._sent), width), dtype)
        for weight, column in zip(present, columns, strict=True):
            for row, expert in zip(packed, self._sent, strict=True):
                row[column].view(weight.shape[1:]).copy_(weight[expert])
        received = self.comm.all_to_all(packed, input_sizes=self._to, output_sizes=self._back)
        slots = self.placement.slots
        if len(received) < slots:
            filled = received.new_zeros((slots, width))
            filled[: len(received)] = received
            received = filled
        parts = iter(columns)
        return [None if w is None else received[:, next(parts)].view(slots, *w.shape[1:]) for w in weights]

    def _bring_home(self, grads: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """Add to the gradients of this rank's experts [E_r, ..] those of the copies [slots, ..] that the ranks have, in
        the order of ranks, in float32 with one rounding.
        """
        columns, width = _columns(copies)
        packed = new_buffer(copies[0], (sum(self._back), width))
        for grad, column in zip(copies, columns, strict=True):
            for row, one in zip(packed, grad, strict=False):
                row[column].view(one.shape).copy_(one)
        received = self.comm.all_to_all(packed, input_sizes=self._back, output_sizes=self._to)
        for grad, column in zip(grads, columns, strict=True):
            for expert in sorted(set(self._sent)):
                total = grad[expert].to(torch.promote_types(grad.dtype, torch.float32))
                for row, sent in zip(received, self._sent, strict=True):
                    if sent == expert:
                        total += row[column].view(total.shape)
                if total.dtype != grad.dtype:
                    grad[expert].copy_(total)


class FetchReplicas(torch.autograd.Function):
    """(weights, their copies), None for a weight that is frozen; see `ExpertReplicas.fetch`."""

    @staticmethod
    def forward(
        ctx: Any, replicas: ExpertReplicas, dtype: torch.dtype | None, *weights: Tensor | None
    ) -> tuple[Any, ...]:
        copies = kept(lambda: replicas._send(weights, dtype))
        ctx.replicas, ctx.wants = replicas, ctx.needs_input_grad[2:]
        own = [w.view_as(w) if w is not None and wanted else None for w, wanted in zip(weights, ctx.wants, strict=True)]
        frozen = [copy for copy, wanted in zip(copies, ctx.wants, strict=True) if copy is not None and not wanted]
        ctx.mark_non_differentiable(*frozen)
        return *own, *copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count = len(ctx.wants)
        own = [grad for grad, wanted in zip(grads[:count], ctx.wants, strict=True) if wanted]
        copies = [grad for grad, wanted in zip(grads[count:], ctx.wants, strict=True) if wanted]
        with torch.no_grad():
            # In place: nobody else has these. They come from the one use of the weights in `moe_mlp`, which makes them.
            ctx.replicas._bring_home(own, copies)
        found = iter(own)
        once = "Experts with replicas", "Experts without a placement"
        result = (first_derivative_only(next(found), *once, *grads) if wanted else None for wanted in ctx.wants)
        return None, None, *result


def _columns(weights: Sequence[Tensor]) -> tuple[list[slice], int]:
    """Where an expert's part of each of weights [E, ..] lies in a packed row, and the length of that."""
    found, width = [], 0
    for weight in weights:
        found.append(slice(width, width + weight[0].numel()))
        width = -(-found[-1].stop // _ALIGNMENT) * _ALIGNMENT
    return found, width


# ---- choices ---------------------------------------------------------------------------------------------------------


class ReplicaRun(NamedTuple):
    """A part of a rank's choices of an expert, and the rank that computes it."""

    rank: int
    part: float


def _runs(shares: Sequence[tuple[int, float]], rank: int, size: int) -> list[ReplicaRun]:
    """How the choices of a rank are split over an expert's copies; see the module's note.

    Worked example: shares 1/2 on rank 0, 3/8 on 1, 1/8 on 2, of 4 ranks with a quarter of the choices each: 0 and 1
    keep their own; 2 keeps half of its own, and that half and all of 3's are left for 0 and 1, which take 1/4 and 1/8
    more: two thirds of it and one third.
    """
    own = {at: min(1.0, share * size) for at, share in shares}
    room = {at: share * size - own[at] for at, share in shares}
    kept_here = own.get(rank, 0.0)
    left, total = 1.0 - kept_here, sum(room.values())
    found = [ReplicaRun(rank, kept_here)] if kept_here > 0 else []
    if left > 0 and total > 0:
        found += [ReplicaRun(at, left * part / total) for at, part in room.items() if part > 0]
    return found


def _choices(placement: Placement, rank: int) -> tuple[Tensor, Tensor]:
    """The choices of one rank: targets int64 [E, C], the physical experts that take its choices of each, and ends
    float64 [E, C - 1]: up to which part of those choices each of them but the last does."""
    runs = [_runs(shares, rank, placement.ep) for shares in placement.shares]
    width = max(len(mine) for mine in runs)
    per_rank, copies = placement.experts_per_rank, placement.copies
    stride = per_rank + placement.slots
    targets = torch.zeros((len(runs), width), dtype=torch.int64)
    ends = torch.ones((len(runs), width - 1), dtype=torch.float64)
    for expert, mine in enumerate(runs):
        end = 0.0
        for column, (at, part) in enumerate(mine):
            is_home = placement.home(expert) == at
            slot = expert % per_rank if is_home else per_rank + copies[at].index(expert)
            targets[expert, column] = at * stride + slot
            end += part
            if column < len(mine) - 1:
                ends[expert, column] = end
    return targets, ends


# ---- agreement -------------------------------------------------------------------------------------------------------


def check_equal(placement: Placement | None, problem: str, comms: Sequence[Communicator], device: torch.device) -> None:
    """Raise ValueError on all ranks of the groups for a problem on one, or for placements that differ."""
    digest = hashlib.sha256(repr(placement).encode()).digest()
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True) for i in range(_DIGEST_WORDS)]
    found: Exception | str = problem
    for comm in comms:
        try:  # a problem goes on to the other groups, whose ranks have to hear of it too
            Agreement("Experts.place", _EQUAL_ON_ALL, words, found).gather(comm, device=device)
        except ValueError as error:
            found = error
    if isinstance(found, Exception):
        raise found
