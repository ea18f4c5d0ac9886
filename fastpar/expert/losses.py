"""Losses that keep the experts' loads even, and two ways to bring them into the backward pass.

All are means over tokens. A rank that has part of a microbatch's tokens, as in sequence and context parallelism, passes
the `group` that they are split over and gets its *share*: shares add up over the group to the loss of the whole, and
their gradients to its gradient. Counts of tokens are all-reduced, without a gradient; probabilities are not sent.

Note: scale. The gradient of a loss in a layer does not come from the main loss, so that nothing scales it unasked:

    tokens split over tp or cp     shares; the gradients of the router's weight are summed over that group, as they are
                                   where the sequence is split. Where they are averaged: scale = size of the group
    data-parallel ranks            nothing; each rank's loss is its microbatches', and gradients are averaged. Where
                                   they are summed: scale = 1 / ranks
    expert parallelism             nothing; the router is not part of it
    accumulation of A microbatches scale = 1 / A, as the main loss has
    a gradient scaler              scale = scaler.get_scale(), likewise

`set_loss_scale(model, scale)` says so to every router of a model; it is 1 until then. With the explicit way,
`loss + sum(collected_losses(model).values())`, the losses are scaled by whatever scales the sum.

Note: recomputation. A layer's second forward happens within a backward pass. `attach_loss` acts in backward, which
comes once per forward that counts; a loss is set aside for `collected_losses` by first forwards only. So both see it
once, under fastpar's recomputation and under both of torch's checkpoints (the explicit way: but the reentrant one,
whose first forward has no gradients).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import check_counts, checked, checked_fields
from fastpar.comm import Communicator, GroupLike
from fastpar.comm.recompute_cache import kept
from fastpar.ops._autograd import in_backward
from fastpar.reference.moe_route import count

BALANCE = ("none", "switch", "huggingface", "sequence", "global_batch")
COUNTED = ("routed", "top_scores")


@checked_fields
@dataclass(frozen=True)
class LossRule:
    """What a router adds to the loss.

    balance     "none"; over the tokens of a microbatch: "switch", 1 at balance, or "huggingface", top_k of it;
                "sequence", the mean of the "switch" losses of its sequences; "global_batch", with the counts of all
                data-parallel ranks
    coeff       of the balance loss
    z_coeff     of the z-loss
    counted     whose counts: of the experts that tokens were "routed" to, or of the "top_scores", without the
                selection bias and groups
    """

    balance: str = "none"
    coeff: float = 0.0
    z_coeff: float = 0.0
    counted: str = "routed"

    def __post_init__(self) -> None:
        if self.balance not in BALANCE:
            raise ValueError(f"balance must be one of {', '.join(BALANCE)}, got {self.balance!r}")
        if self.counted not in COUNTED:
            raise ValueError(f"counted must be one of {', '.join(COUNTED)}, got {self.counted!r}")
        if self.balance == "none" and self.coeff:
            raise ValueError(f"coeff ({self.coeff}) needs a balance loss: balance is 'none'")


# ---- counts ----------------------------------------------------------------------------------------------------------


@checked_fields
@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a microbatch, of all ranks of the group that they are split over.

    experts  int64 [.., E]  choices of each expert
    tokens   int64 [..]     tokens that are not padding
    """

    experts: Tensor
    tokens: Tensor

    @classmethod
    @checked(meta=True)
    def of(
        cls, indices: Tensor, num_experts: int, *, mask: Tensor | None = None, group: GroupLike = None
    ) -> TokenCounts:
        """Counts of indices [T, K] and a mask [T], False for padding. One all-reduce of E + 1 integers."""
        check_counts(1 << 20, least=0, num_experts=num_experts)
        if indices.dim() != 2 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"indices must be integers [T, K], got {indices.dtype} of {tuple(indices.shape)}")
        _check_mask(mask, indices)
        if mask is not None:
            indices = indices.masked_fill(~mask[:, None], -1)
        num_tokens = indices.new_tensor(len(indices)) if mask is None else mask.sum()
        own = torch.cat([count(indices, num_experts), num_tokens.long()[None]])
        total = _summed(own, group)
        return cls(total[:-1], total[-1])

    @checked(meta=True)
    def over(self, groups: Sequence[GroupLike]) -> TokenCounts:
        """The same of the batch that is split over these groups too. One all-reduce each."""
        total = torch.cat([self.experts, self.tokens[None]])
        for group in groups:
            total = _summed(total, group)
        return TokenCounts(total[:-1], total[-1])


def _summed(counts: Tensor, group: GroupLike) -> Tensor:
    comm = Communicator.of(group)
    return counts if comm.size == 1 else kept(lambda: comm.all_reduce(counts))


def _without_padding(values: Tensor, mask: Tensor | None) -> Tensor:
    """values [T, ..] with zeros for padding, whatever stood there, and no gradient to it."""
    return values if mask is None else values.masked_fill(~mask.view(-1, *[1] * (values.dim() - 1)), 0.0)


def _check(scores: Tensor, indices: Tensor, mask: Tensor | None) -> None:
    if scores.dim() != 2 or indices.dim() != 2 or len(scores) != len(indices):
        raise ValueError(
            f"scores must be [T, E] and indices [T, K], got {tuple(scores.shape)} and {tuple(indices.shape)}"
        )
    _check_mask(mask, scores)


def _check_mask(mask: Tensor | None, rows: Tensor) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != rows.shape[:1]):
        raise ValueError(f"mask must be bool of shape {tuple(rows.shape[:1])}, got {mask.dtype} of {tuple(mask.shape)}")


# ---- losses ----------------------------------------------------------------------------------------------------------


@checked(meta=True)
def aux_loss(
    scores: Tensor,
    indices: Tensor,
    *,
    convention: str = "switch",
    mask: Tensor | None = None,
    group: GroupLike = None,
    counts: TokenCounts | None = None,
) -> Tensor:
    """The load balance loss of a microbatch (Fedus et al. 2021), this rank's share.

        scores   [T, E]   probabilities, rows of sum 1: `Routing.scores`
        indices  [T, K]   the experts chosen; -1: nowhere
        mask     [T]      bool; False: padding
        counts            `TokenCounts.of` the same, if they are there already
        loss              scalar, E * sum over e of f_e * P_e
                          f_e   choices of e, over all choices ("switch": 1 at balance) or over tokens ("huggingface",
                                top_k at balance)
                          P_e   mean of scores[:, e]

        backward  dscores[t, e] = E * f_e / tokens, the same for every token; none through the counts

    One all-reduce of E + 1 integers, unless `counts` are given; see the module for `group`. Without tokens 0.
    transformers' loss over all layers at once is this of their scores and indices one below the other.

    Worked example: scores [[0.8, 0.2], [0.6, 0.4]], indices [[0], [0]]: 2 * (1 * 0.7 + 0 * 0.3) = 1.4.
    """
    if convention not in ("switch", "huggingface"):
        raise ValueError(f"convention must be 'switch' or 'huggingface', got {convention!r}")
    _check(scores, indices, mask)
    if counts is None:
        counts = TokenCounts.of(indices, scores.shape[1], mask=mask, group=group)
    top_k = indices.shape[1] if convention == "switch" else 1
    return _balance(_without_padding(scores, mask).sum(0), counts.experts, counts.tokens, top_k)


def _balance(sums: Tensor, experts: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """E * <experts / (tokens * top_k), sums / tokens> along the last dim."""
    tokens = tokens.clamp_min(1).to(sums.dtype)
    share = (experts.to(sums.dtype) * sums).sum(-1) / (tokens * max(top_k, 1))
    return share / tokens * experts.shape[-1]


@checked(meta=True)
def sequence_aux_loss(
    scores: Tensor,
    indices: Tensor,
    sequences: Tensor,
    num_sequences: int,
    *,
    mask: Tensor | None = None,
    group: GroupLike = None,
) -> Tensor:
    """The mean over sequences of the "switch" loss of each (DeepSeek-V3, equations 17 to 20), this rank's share.

    sequences  int64 [T]  the sequence that a token is of, 0 .. num_sequences - 1, alike on all ranks of `group`

    Sequences without a token that counts are left out. One all-reduce of num_sequences * (E + 1) integers.
    """
    _check(scores, indices, mask)
    if sequences.shape != scores.shape[:1]:
        raise ValueError(f"sequences must have shape {tuple(scores.shape[:1])}, got {tuple(sequences.shape)}")
    check_counts(1 << 40, num_sequences=num_sequences)
    num_experts = scores.shape[1]
    chosen = indices if mask is None else indices.masked_fill(~mask[:, None], -1)
    is_out = (chosen < 0) | (chosen >= num_experts)
    cells = (sequences[:, None] * num_experts + chosen).masked_fill(is_out, -1)
    rows = sequences if mask is None else sequences.masked_fill(~mask, -1)
    own = torch.cat([count(cells, num_sequences * num_experts), count(rows, num_sequences)])
    total = _summed(own, group)
    tokens = total[num_sequences * num_experts :]
    # A product rather than index_add, which on CUDA sums in whatever order.
    members = sequences == torch.arange(num_sequences, device=sequences.device)[:, None]
    sums = members.to(scores.dtype) @ _without_padding(scores, mask)
    losses = _balance(sums, total[: num_sequences * num_experts].view(num_sequences, -1), tokens, indices.shape[1])
    return losses.sum() / (tokens > 0).sum().clamp_min(1)


@checked(meta=True)
def global_batch_aux_loss(
    scores: Tensor,
    indices: Tensor,
    *,
    mask: Tensor | None = None,
    group: GroupLike = None,
    batch_groups: Sequence[GroupLike] = (),
    counts: TokenCounts | None = None,
) -> Tensor:
    """The "switch" loss over the microbatches of all data-parallel ranks at once (Qiu et al. 2025), this rank's share.

    batch_groups  the groups that different microbatches lie on, one or several whose product is all ranks
    counts        `TokenCounts.of` this microbatch over `group`, if they are there already

    Experts may specialise on what one rank reads, as long as the batch is even. Shares add up over `group` and are
    averaged over `batch_groups`, as gradients are: the result is the loss of the joined batch for any split of it.
    Microbatches that come one after the other count apart. One all-reduce of E + 1 integers for each group.
    """
    _check(scores, indices, mask)
    if counts is None:
        counts = TokenCounts.of(indices, scores.shape[1], mask=mask, group=group)
    batch = counts.over(batch_groups)
    ranks = math.prod(Communicator.of(one).size for one in batch_groups)
    return ranks * _balance(_without_padding(scores, mask).sum(0), batch.experts, batch.tokens, indices.shape[1])


@checked(meta=True)
def z_loss(
    logits: Tensor, *, mask: Tensor | None = None, group: GroupLike = None, tokens: Tensor | None = None
) -> Tensor:
    """The mean of logsumexp(logits)^2 (Zoph et al. 2022), which keeps logits small; this rank's share.

    logits [T, E]; mask [T]; tokens: how many count in all of `group`, if that is known already. One all-reduce of an
    integer otherwise. Worked example: logits [[0, 0]]: ln(2)^2 = 0.48.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must be [T, E], got {tuple(logits.shape)}")
    _check_mask(mask, logits)
    if tokens is None:
        tokens = TokenCounts.of(logits.new_empty((len(logits), 0), dtype=torch.int64), 0, mask=mask, group=group).tokens
    if tokens.is_complex() or tokens.device != logits.device:
        raise TypeError(f"tokens must be a number of them on {logits.device}, got {tokens.dtype} on {tokens.device}")
    squares = _without_padding(logits, mask).logsumexp(-1).square()
    return _without_padding(squares, mask).sum() / tokens.clamp_min(1).to(logits.dtype)


# ---- into the backward pass ------------------------------------------------------------------------------------------


class AttachLoss(torch.autograd.Function):
    """The identity on x; in backward the loss gets the gradient that it would get as a summand of the main loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, coeff: float, scale: float | Tensor) -> Tensor:
        ctx.coeff, ctx.scale, ctx.like = coeff, scale, loss.new_empty(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        factor = ctx.coeff * ctx.scale
        return grads[0], torch.ones_like(ctx.like) * factor, None, None


class NoticeBackward(torch.autograd.Function):
    """The identity on x that calls `notice` when backward comes by for the first time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notice: Callable[[], None]) -> Tensor:
        ctx.notice = notice
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        notice, ctx.notice = ctx.notice, None
        if notice is not None:
            notice()
        return grads[0], None


@checked(meta=True)
def attach_loss(x: Tensor, loss: Tensor, *, coeff: float = 1.0, scale: float | Tensor = 1.0) -> Tensor:
    """x, whose backward is also that of coeff * scale * loss.

        forward   x
        backward  dx unchanged; dloss = coeff * scale, whatever the gradient of x is

    For losses of layers, which need not be returned through the model that way: the main loss has to depend on x.
    `scale` is what the main loss is scaled by (see the module); a tensor is read in backward.

    Raises ValueError if loss is not a scalar.
    """
    if loss.dim():
        raise ValueError(f"loss must be a scalar, got shape {tuple(loss.shape)}")
    attached: Tensor = AttachLoss.apply(x, loss, coeff, scale)
    return attached


def when_it_counts(x: Tensor, notice: Callable[[], None]) -> Tensor:
    """x; `notice` is called once for a forward that is trained on, however often it is computed.

    That is in backward; or now, if there will be none because nothing in front of x is trained.
    """
    if x.requires_grad:
        noticed: Tensor = NoticeBackward.apply(x, notice)
        return noticed
    if torch.is_grad_enabled() and not in_backward():
        notice()
    return x
