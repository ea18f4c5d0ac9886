"""The router of a mixture-of-experts layer: its weight, its rule, what it adds to the loss, and what it counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastpar.arguments import check_counts, checked, checked_fields, shown
from fastpar.comm import Communicator, GroupLike
from fastpar.expert.losses import (
    LossRule,
    TokenCounts,
    attach_loss,
    aux_loss,
    global_batch_aux_loss,
    sequence_aux_loss,
    when_it_counts,
    z_loss,
)
from fastpar.ops._autograd import in_backward
from fastpar.ops.moe.route import RouteRule, Routing, expert_choice_route, moe_route, router_logits, top_experts

MAX_EXPERTS = 1 << 20


def check_dtype(dtype: torch.dtype | None) -> None:
    """ValueError for a dtype that no weight has."""
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point one or None, got {dtype}")


@checked_fields
@dataclass(frozen=True)
class BiasRule:
    """How the selection bias moves: by `rate` a step; `centered` takes the mean of a step's moves off each."""

    rate: float = 1e-3
    centered: bool = False


class Router(nn.Module):
    """Chooses the experts of every token.

        x        [.., H]  any floating dtype; [T, H] below
        Routing           see `fastpar.ops.moe_route`; T rows

        logits = x @ weight.T + bias                       float32, of 16-bit operands too; see `router_logits`
        Routing = moe_route(logits, rule, bias=e_score_correction_bias)

    Parameters and buffers, under the names that transformers gives them: `weight` [E, H]; `bias` [E] on request;
    `noise_weight` [E, H] for a rule with learned noise; `e_score_correction_bias` [E] for a `bias_rule`, which stays
    float32 when the module is cast, since steps of 1e-3 are lost in 16 bits.

    In training, with gradients: the losses of `losses` are attached to the weights (or set aside, see `collect`), and
    `load` counts the tokens of each expert. Both happen once for a forward that is recomputed.

    Args:
        rule: how experts are chosen and weighed.
        losses: which losses, in which convention.
        bias_rule: keep a selection bias; `update_biases` moves it by this rule.
        expert_choice: experts choose tokens; each takes as many as it would get if loads were even. See
            `expert_choice_route`; of the rule, top_k and score are what there is to say. Each rank's tokens apart.
        jitter: in training, x is multiplied by uniform numbers from 1 - jitter to 1 + jitter.
        group: the ranks that a microbatch's tokens are split over (tp with a split sequence, cp). `fastpar.parallelize`
            tells it to a router without one, and refuses a group without all of them, or of ranks with the same tokens.
        batch_groups: those that different microbatches lie on, for "global_batch".
        collect: keep the losses for `collected_losses` rather than attach them.

    Random numbers come from torch's generator: ranks that have the same tokens need the same state.
    """

    e_score_correction_bias: Tensor | None

    @checked(computed=False)
    def __init__(
        self,
        hidden: int,
        num_experts: int,
        rule: RouteRule,
        *,
        losses: LossRule | None = None,
        bias_rule: BiasRule | None = None,
        bias: bool = False,
        expert_choice: bool = False,
        jitter: float = 0.0,
        group: GroupLike = None,
        batch_groups: Sequence[GroupLike] = (),
        collect: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(hidden=hidden)
        check_counts(MAX_EXPERTS, num_experts=num_experts)
        check_dtype(dtype)
        rule.check_experts(num_experts)
        if not 0.0 <= jitter < 1.0:
            raise ValueError(f"jitter must be at least 0 and less than 1, got {jitter}")
        if expert_choice and (rule != RouteRule(rule.top_k, rule.score) or bias_rule is not None):
            raise ValueError(
                f"expert_choice goes with top_k and score alone and without a bias, got {rule}, {bias_rule}"
            )
        if expert_choice and losses is not None and losses.coeff:
            raise ValueError(f"expert_choice has even loads and no balance loss, got {losses}")
        self.hidden, self.num_experts, self.rule, self.expert_choice = hidden, num_experts, rule, expert_choice
        self.losses, self.bias_rule, self.jitter, self.collect = losses or LossRule(), bias_rule, jitter, collect
        self.comm = Communicator.of(group)
        self.batch_comms = [Communicator.of(one) for one in batch_groups]
        self.loss_scale: float | Tensor = 1.0
        self.weight = nn.Parameter(torch.empty((num_experts, hidden), device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        has_noise = rule.noise == "learned"
        self.noise_weight = (
            nn.Parameter(torch.empty((num_experts, hidden), device=device, dtype=dtype)) if has_noise else None
        )
        correction = None if bias_rule is None else torch.zeros(num_experts, device=device)
        self.register_buffer("e_score_correction_bias", correction)
        # Not a buffer, which DDP would overwrite in every forward. On the host until it counts, as no folder has it.
        self._load = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        self._waiting_losses: dict[str, Tensor] = {}
        self._given: Callable[[int], Tensor] | None = None
        self._seen: Callable[[Tensor], None] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """weight: normal with a deviation of hidden ** -0.5, for logits near 1; bias, noise, correction and load 0."""
        nn.init.normal_(self.weight, std=self.hidden**-0.5)
        for tensor in (self.bias, self.noise_weight, self.e_score_correction_bias):
            if tensor is not None:
                nn.init.zeros_(tensor)
        self._load.zero_()

    @property
    def load(self) -> Tensor:
        """int64 [E]: choices of each expert since it was last zeroed, by forwards that were trained on."""
        if self._load.device != self.weight.device:
            self._load = self._load.to(self.weight.device)
        return self._load

    def extra_repr(self) -> str:
        """hidden, experts and the rule, for print(model)."""
        return f"{self.hidden}, {self.num_experts}, {self.rule}"

    def __getstate__(self) -> dict[str, Any]:
        """The state of copies, which take no part in what is going on: losses that wait, a record, a replay."""
        return {**self.__dict__, "_waiting_losses": {}, "_given": None, "_seen": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            # Its own values, not rounded ones, unless they have none yet.
            same = after.float() if before.is_meta else before.to(device=after.device)
            self.e_score_correction_bias = same
        return self

    # ---- forward

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        indices: Tensor | None = None,
        sequences: Tensor | None = None,
        num_sequences: int | None = None,
    ) -> Routing:
        """Route x [.., H].

        mask       [..]   bool; False: padding, which goes nowhere and into no loss and no count
        indices    [T, K] choices that are given (hash: `hash_table(...)[ids]`)
        sequences  [T]    for the "sequence" loss: which of num_sequences a token is of; by default the rows of
                          x [B, S, H]
        """
        if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x must be a tensor [.., {self.hidden}], got {shown(x)}")
        if not (mask is None or (isinstance(mask, Tensor) and mask.shape == x.shape[:-1])):
            raise ValueError(f"mask must be a bool tensor of shape {tuple(x.shape[:-1])} or None, got {shown(mask)}")
        tokens = x.reshape(-1, self.hidden)
        mask = None if mask is None else mask.reshape(-1)
        if self.training and self.jitter:
            tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        logits = router_logits(tokens, self.weight, self.bias)
        noise = self._noise(tokens, logits) if self.training else None
        if indices is None and self._given is not None:
            indices = self._given(len(tokens))
        if self.expert_choice and indices is None:
            capacity = math.ceil(len(tokens) * self.rule.top_k / self.num_experts)
            routing = expert_choice_route(logits, capacity, score=self.rule.score, mask=mask)
        else:
            routing = moe_route(
                logits, self.rule, bias=self.e_score_correction_bias, indices=indices, noise=noise, mask=mask
            )
        if self._seen is not None and not in_backward():
            self._seen(routing.indices)
        if not self.training or not torch.is_grad_enabled():
            return routing
        if sequences is None and x.dim() == 3:
            num_sequences = len(x)
            sequences = torch.arange(num_sequences, device=x.device).repeat_interleave(x.shape[1])
        weights = self._with_losses(routing, mask, sequences, num_sequences)
        counts = routing.counts
        return replace(routing, weights=when_it_counts(weights, lambda: self._add_load(counts)))

    def _add_load(self, counts: Tensor) -> None:
        self.load.add_(counts)

    def _noise(self, tokens: Tensor, logits: Tensor) -> Tensor | None:
        kind = self.rule.noise
        if kind == "none":
            return None
        if kind == "gumbel":
            return -torch.empty_like(logits).exponential_().log() * self.rule.noise_scale
        noise = torch.randn_like(logits)
        if self.noise_weight is None:
            return noise * self.rule.noise_scale
        return noise * functional.softplus(router_logits(tokens, self.noise_weight))

    # ---- losses

    def _with_losses(
        self, routing: Routing, mask: Tensor | None, sequences: Tensor | None, num_sequences: int | None
    ) -> Tensor:
        """The weights with the losses attached, unless those are collected."""
        weights = routing.weights
        for kind, coeff, loss in self._shares(routing, mask, sequences, num_sequences):
            if not self.collect:
                weights = attach_loss(weights, loss, coeff=coeff, scale=self.loss_scale)
            elif not in_backward():
                waiting = self._waiting_losses.get(kind)
                self._waiting_losses[kind] = coeff * loss if waiting is None else waiting + coeff * loss
        return weights

    def _shares(
        self, routing: Routing, mask: Tensor | None, sequences: Tensor | None, num_sequences: int | None
    ) -> list[tuple[str, float, Tensor]]:
        """Kind, coefficient and this rank's share of each loss. The two count tokens together."""
        rule, found = self.losses, []
        if not rule.coeff and not rule.z_coeff:
            return []
        indices, scores = routing.indices, routing.scores
        if rule.counted == "top_scores":
            indices = top_experts(scores.detach(), indices.shape[1])
        counts = TokenCounts.of(indices, self.num_experts, mask=mask, group=self.comm)
        if rule.coeff:
            loss = self._balance_loss(scores, indices, counts, mask, sequences, num_sequences)
            found.append(("aux", rule.coeff, loss))
        if rule.z_coeff:
            found.append(("z", rule.z_coeff, z_loss(routing.logits, mask=mask, tokens=counts.tokens)))
        return found

    def _balance_loss(
        self,
        scores: Tensor,
        indices: Tensor,
        counts: TokenCounts,
        mask: Tensor | None,
        sequences: Tensor | None,
        num_sequences: int | None,
    ) -> Tensor:
        kind = self.losses.balance
        if kind == "global_batch":
            return global_batch_aux_loss(scores, indices, mask=mask, batch_groups=self.batch_comms, counts=counts)
        if kind != "sequence":
            return aux_loss(scores, indices, convention=kind, mask=mask, counts=counts)
        if sequences is None or num_sequences is None:
            raise ValueError("the 'sequence' loss needs x of [batch, sequence, hidden], or sequences and num_sequences")
        return sequence_aux_loss(scores, indices, sequences, num_sequences, mask=mask, group=self.comm)


# ---- a model's routers -----------------------------------------------------------------------------------------------


@checked(meta=True)
def routers_of(model: nn.Module) -> dict[str, Router]:
    """The model's routers by name, in the order of its modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


@checked(meta=True)
def collected_losses(model: nn.Module) -> dict[str, Tensor]:
    """The losses that the routers with `collect=True` have set aside since the last call, by name, times their
    coefficients: to be added to the main loss.

    "layers.3.router.aux" is the balance loss of that router, "layers.3.router.z" its z-loss; shares, see the module.
    """
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        waiting = getattr(module, "_waiting_losses", None)
        if waiting:
            found.update({f"{name}.{kind}" if name else kind: loss for kind, loss in waiting.items()})
            waiting.clear()
    return found


@checked(meta=True)
def set_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """What the main loss is scaled by from now on, for the losses that the model's routers attach."""
    for router in routers_of(model).values():
        router.loss_scale = scale
