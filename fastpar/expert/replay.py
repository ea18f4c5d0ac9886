"""Choices that come from elsewhere: of another run, or evenly spread.

    with record_routes(model) as routes:         # {"layers.0.router": indices [T, K], ...}
        model(batch)
    with replay_routes(model, routes):           # the same experts, weighed by the logits of now
        model(batch).loss.backward()

Backward belongs inside the block where layers are recomputed: their second forward has to be given the same choices.
One block, one microbatch: a router that runs twice in it would need two sets of choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from fastpar.arguments import checked
from fastpar.comm import Communicator, GroupLike
from fastpar.expert.router import Router, routers_of
from fastpar.ops.moe.route import balanced_indices


def _routers(model: nn.Module) -> dict[str, Router]:
    found = routers_of(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no fastpar.expert.Router")
    return found


@contextmanager
@checked(computed=False)
def record_routes(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within the block, what the model's routers choose goes into the dictionary: int64 [T, K] by the router's name.

    Raises ValueError if a router runs twice; recomputation does not count.
    """
    routes: dict[str, Tensor] = {}

    def keep(name: str, indices: Tensor) -> None:
        if name in routes:
            raise ValueError(f"router {name!r} ran twice: record one forward of the model in one block")
        routes[name] = indices.detach().clone()

    routers = _routers(model)
    for name, router in routers.items():
        router._seen = partial(keep, name)
    try:
        yield routes
    finally:
        for router in routers.values():
            router._seen = None


@contextmanager
@checked(computed=False)
def replay_routes(model: nn.Module, routes: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block, the model's routers choose what `routes` says, and weigh it by their own logits.

    Raises ValueError if routers and routes differ in their names, and in forward for another number of tokens.
    """
    routers = _routers(model)
    if set(routers) != set(routes):
        differing = sorted(set(routers) ^ set(routes))
        raise ValueError(f"routes must be those of the model's routers; only on one side: {', '.join(differing)}")

    def give(name: str, num_tokens: int) -> Tensor:
        indices = routes[name]
        if len(indices) != num_tokens:
            raise ValueError(f"router {name!r} has {num_tokens} tokens, but {len(indices)} were recorded")
        return indices.to(routers[name].weight.device)

    with _giving({name: partial(give, name) for name in routers}, routers):
        yield


@contextmanager
@checked(computed=False)
def balance_routes(model: nn.Module, group: GroupLike = None) -> Iterator[None]:
    """Within the block, experts are chosen in turn, whatever the logits: for measuring what even loads cost.

    Rank r of the `group` of n starts at expert r * E / n, and so sends to its own experts first.
    """
    routers, comm = _routers(model), Communicator.of(group)

    def give(router: Router, num_tokens: int) -> Tensor:
        start = comm.rank * router.num_experts // comm.size
        return balanced_indices(
            num_tokens, router.num_experts, router.rule.top_k, start=start, device=router.weight.device
        )

    with _giving({name: partial(give, router) for name, router in routers.items()}, routers):
        yield


@contextmanager
def _giving(givers: Mapping[str, partial[torch.Tensor]], routers: Mapping[str, Router]) -> Iterator[None]:
    for name, router in routers.items():
        router._given = givers[name]
    try:
        yield
    finally:
        for router in routers.values():
            router._given = None
