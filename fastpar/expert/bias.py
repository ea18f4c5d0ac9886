"""Balance without a loss (Wang et al. 2024): a bias per expert, added in the choice only, which a rule moves against
the load after every step.

    b_e += rate * sign(mean load - load of e)

Loads are counted in backward, once for every forward that is trained on (see `fastpar.expert.losses`), and summed over
the ranks once per step, for all routers in one all-reduce for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fastpar.arguments import checked, checked_fields
from fastpar.comm import Communicator, GroupLike
from fastpar.expert.loads import routers_of


@checked_fields
@dataclass(frozen=True)
class BiasRule:
    """How the selection bias moves: by `rate` a step; `centered` takes the mean of a step's moves off each."""

    rate: float = 1e-3
    centered: bool = False


@torch.no_grad()
@checked(computed=False)
def update_biases(model: nn.Module, *, groups: Sequence[GroupLike] = ()) -> None:
    """Move the selection biases of the model's routers by their loads since the last call, and reset those.

    groups  what tokens are split over: those of tp (with a split sequence), cp and data parallelism, whose product is
            all ranks that have the model's tokens

    Call it once per optimizer step, on all ranks. One all-reduce of all routers' counts, int64, for each group: every
    rank computes the same biases. A router that saw nothing keeps its own.
    """
    routers = [router for router in routers_of(model).values() if router.bias_rule is not None]
    if not routers:
        return
    loads = torch.cat([router.load for router in routers])
    for group in groups:
        comm = Communicator.of(group)
        if comm.size > 1:
            loads = comm.all_reduce(loads)
    for router, load in zip(routers, loads.split([router.num_experts for router in routers]), strict=True):
        bias, rule = router.e_score_correction_bias, router.bias_rule
        assert bias is not None
        assert rule is not None
        # In integers: a mean in float32 would not be exact, and equal loads would move.
        move = torch.sign(load.sum() - load * len(load)).to(bias.dtype)
        if rule.centered:
            move = move - move.mean()
        bias.add_(move, alpha=rule.rate)
        router.load.zero_()


@checked(computed=False)
def update_biases_with(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, groups: Sequence[GroupLike] = ()
) -> RemovableHandle:
    """Have every step of the optimizer end with `update_biases(model, groups=groups)`. `.remove()` ends it."""
    return optimizer.register_step_post_hook(lambda *_: update_biases(model, groups=groups))
