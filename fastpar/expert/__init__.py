"""Mixture of experts: routers, what keeps their loads even, and presets that pin the conventions of known models.

    layer = fp.expert.MoELayer.from_preset("qwen3_moe", 2048, 768, 128, mesh=mesh)      # over mesh's ep, etp and tp
    out = layer(x)

    router = fp.expert.preset("qwen3_moe").router(hidden=2048, num_experts=128)         # or piece by piece
    routing = router(x)                                         # .indices, .weights, .counts
    out = fp.ops.moe_mlp(x, routing.indices, routing.weights, experts, ...)

Names are looked up on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastpar.expert.balance import expert_loads, load_balance, update_biases, update_biases_with
    from fastpar.expert.layer import Capacity, Experts, MoELayer, SharedExpert
    from fastpar.expert.losses import (
        LossRule,
        TokenCounts,
        attach_loss,
        aux_loss,
        global_batch_aux_loss,
        sequence_aux_loss,
        z_loss,
    )
    from fastpar.expert.placement import Placement, plan_placement
    from fastpar.expert.presets import PRESETS, RouterPreset, preset
    from fastpar.expert.rebalance import rebalance
    from fastpar.expert.replay import balance_routes, record_routes, replay_routes
    from fastpar.expert.router import BiasRule, Router, collected_losses, set_loss_scale

_HOME = {
    "PRESETS": "fastpar.expert.presets",
    "BiasRule": "fastpar.expert.router",
    "Capacity": "fastpar.expert.layer",
    "Experts": "fastpar.expert.layer",
    "LossRule": "fastpar.expert.losses",
    "MoELayer": "fastpar.expert.layer",
    "Placement": "fastpar.expert.placement",
    "Router": "fastpar.expert.router",
    "RouterPreset": "fastpar.expert.presets",
    "SharedExpert": "fastpar.expert.layer",
    "TokenCounts": "fastpar.expert.losses",
    "attach_loss": "fastpar.expert.losses",
    "aux_loss": "fastpar.expert.losses",
    "balance_routes": "fastpar.expert.replay",
    "collected_losses": "fastpar.expert.router",
    "expert_loads": "fastpar.expert.balance",
    "global_batch_aux_loss": "fastpar.expert.losses",
    "load_balance": "fastpar.expert.balance",
    "plan_placement": "fastpar.expert.placement",
    "preset": "fastpar.expert.presets",
    "rebalance": "fastpar.expert.rebalance",
    "record_routes": "fastpar.expert.replay",
    "replay_routes": "fastpar.expert.replay",
    "routers_of": "fastpar.expert.router",
    "sequence_aux_loss": "fastpar.expert.losses",
    "set_loss_scale": "fastpar.expert.router",
    "update_biases": "fastpar.expert.balance",
    "update_biases_with": "fastpar.expert.balance",
    "z_loss": "fastpar.expert.losses",
}
__all__ = [
    "PRESETS",
    "BiasRule",
    "Capacity",
    "Experts",
    "LossRule",
    "MoELayer",
    "Placement",
    "Router",
    "RouterPreset",
    "SharedExpert",
    "TokenCounts",
    "attach_loss",
    "aux_loss",
    "balance_routes",
    "collected_losses",
    "expert_loads",
    "global_batch_aux_loss",
    "load_balance",
    "plan_placement",
    "preset",
    "rebalance",
    "record_routes",
    "replay_routes",
    "routers_of",
    "sequence_aux_loss",
    "set_loss_scale",
    "update_biases",
    "update_biases_with",
    "z_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fastpar.expert' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
