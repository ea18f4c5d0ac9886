"""How much the experts of a model have to do, and biases that keep it even.

Balance without a loss (Wang et al. 2024): a bias per expert, added in the choice only, which a rule moves against the
load after every step.

    b_e += rate * sign(mean load - load of e)

Loads are counted in backward, once for every forward that is trained on (see `fastpar.expert.losses`), and summed over
the ranks once per step, for all routers in one all-reduce for each group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fastpar.arguments import checked
from fastpar.comm import Communicator, GroupLike
from fastpar.expert.router import routers_of


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


@checked(meta=True)
def expert_loads(model: nn.Module, *, reset: bool = False) -> dict[str, Tensor]:
    """int64 [E] by router: choices of each expert on this rank since the last reset, by forwards that were trained on.

    `update_biases` resets those of the routers that it updates. No synchronisation with the device.
    """
    routers = routers_of(model)
    loads = {name: router.load.clone() for name, router in routers.items()}
    if reset:
        for router in routers.values():
            router.load.zero_()
    return loads


@checked(meta=True)
def load_balance(counts: Tensor) -> dict[str, Tensor]:
    """How even loads [.., E] are: scalars [..] on their device, float32.

    max_over_mean  1 at balance, E if one expert has all: how much longer the busiest takes
    entropy        of the loads, over ln E: 1 at balance, 0 if one expert has all
    idle           share of the experts that have nothing

    Worked example: counts [6, 2, 0, 0] have max_over_mean 3, entropy 0.41, idle 0.5. Without any load all are 0.
    """
    if counts.dim() < 1 or counts.shape[-1] < 1 or counts.is_complex():
        raise ValueError(
            f"counts must be real [.., E] with at least one expert, got {counts.dtype} {tuple(counts.shape)}"
        )
    loads = counts.float()
    total = loads.sum(-1, keepdim=True).clamp_min(1.0)
    share = loads / total
    num_experts = counts.shape[-1]
    entropy = -(share * share.clamp_min(1e-30).log()).sum(-1) / max(math.log(num_experts), 1e-30)
    is_used = counts.sum(-1) > 0
    return {
        "max_over_mean": share.amax(-1) * num_experts,
        "entropy": entropy,
        "idle": (counts == 0).float().mean(-1) * is_used,
    }
