"""How much the experts have to do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fastpar.arguments import checked

if TYPE_CHECKING:
    from fastpar.expert.router import Router


def routers_of(model: nn.Module) -> dict[str, Router]:
    """The model's routers by name, in the order of its modules."""
    from fastpar.expert.router import Router

    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


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
