"""Copies of a model's hot experts, placed anew by the loads that its routers have counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fastpar.arguments import checked
from fastpar.comm import Communicator, GroupLike
from fastpar.expert.layer import MoELayer
from fastpar.expert.placement import Placement, plan_placement
from fastpar.expert.router import Router
from fastpar.mesh import named_groups


@checked(computed=False)
def rebalance(
    model: nn.Module, *, groups: Sequence[GroupLike] | None = None, min_gain: float = 0.01, reset: bool = False
) -> dict[str, Placement]:
    """Place the copies of all layers with `replicas` by the loads that their routers have counted.

    groups    what tokens are split over; None: all dims but pp of the layers' mesh
    min_gain  see `plan_placement`
    reset     zero `router.load` of these layers, so that the next call sees what comes from now on

    Call it on all ranks, between steps, every so often: loads change slowly, and a new placement costs nothing but this
    call. `update_biases` zeroes loads: call this before it. A layer that saw nothing keeps its placement. Returns the
    new placements by the layers' names: `placement.rank_loads(loads)` says what they promise.

    One all-reduce of all counts, int64, for each group, and for each layer the all-gathers of `Experts.place`.
    """
    layers = dict(_layers(model))
    if not layers:
        return {}
    meshes = {id(layer.experts.groups.mesh): layer.experts.groups.mesh for layer in layers.values()}
    if groups is None and len(meshes) > 1:
        raise ValueError("the model's layers are on different meshes: say with groups= what tokens are split over")
    if groups is None:
        (mesh,) = meshes.values()
        groups = [] if mesh is None else [group for name, group in named_groups(mesh) if name != "pp"]
    routers: list[Any] = [layer.router for layer in layers.values()]
    loads = torch.cat([router.load for router in routers])
    for group in groups:
        comm = Communicator.of(group)
        loads = comm.all_reduce(loads) if comm.size > 1 else loads
    found = {}
    counts = loads.split([router.num_experts for router in routers])
    for (name, layer), router, mine in zip(layers.items(), routers, counts, strict=True):
        if int(mine.sum()) == 0:
            continue
        experts = layer.experts
        found[name] = plan_placement(mine, experts.groups.ep.size, experts.replicas, min_gain=min_gain)
        experts.place(found[name])
        if reset:
            router.load.zero_()
    return found


def _layers(model: nn.Module) -> Iterator[tuple[str, MoELayer]]:
    """The layers that have slots for copies."""
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and module.experts.replicas:
            if not isinstance(module.router, Router):
                raise TypeError(
                    f"{name or 'the layer'} has a {type(module.router).__name__} for a router, which counts no loads: "
                    "use plan_placement(loads, ep, replicas) and experts.place(placement)"
                )
            yield name, module
