"""Which ranks share a microbatch's tokens with a router of `fastpar.expert`, so that its losses are those of all.

A router's balance loss and z-loss are of all tokens of a microbatch. Context parallelism splits these over cp, and
within a layer of a stream that is split along the sequence over tp as well, outside of blocks and of modules that get
all tokens. A router that was told of one rank alone is told of these; one that was told of others is refused, since
what it computes would be a loss of some of the tokens. So is one that was told of tensor-parallel ranks where each has
all tokens, and counts them once for every rank: its gradient would be a part of the loss's. `MoELayer` cuts tokens.
"""

from __future__ import annotations

from fastpar.comm import Communicator
from fastpar.expert.layer import MoELayer
from fastpar.expert.router import Router
from fastpar.parallel.context_parallel import ranks_of
from fastpar.parallel.styles import SwapContext
from fastpar.tensor import GridRegion


def connect_routers(context: SwapContext) -> None:
    """Let routers balance over all tokens, as changes that are undone with the others.

    Raises ValueError for a router with losses whose group has not all ranks that share its tokens, or has some that
    hold the same ones, and for one without a group where a grid cuts its tokens.
    """
    routers = [path for path, module in context.modules.items() if isinstance(module, Router)]
    for path in context.once(routers):
        router, comm = context.modules[path], _sharing_tokens(path, context)
        assert isinstance(router, Router)
        has_losses = bool(router.losses.coeff or router.losses.z_coeff)
        if has_losses and not isinstance(context.parent_of(path), MoELayer):
            _refuse_copies(path, router, comm, context)
        if comm is None:
            continue
        if isinstance(comm, GridRegion):
            if has_losses and router.comm.size == 1:
                raise ValueError(
                    f"{path} balances over this rank's tokens, of which a grid of tensor-parallel ranks leaves it a "
                    "part: give it the group of the ranks with the others (Router(group=))"
                )
            continue
        ranks, told = ranks_of(comm), ranks_of(router.comm)
        if router.comm.size == 1:
            context.changes.set(router, "comm", comm)
        elif has_losses and not set(ranks) <= set(told):
            raise ValueError(
                f"{path} balances over the tokens of the ranks {told} (its group), but sequences are split over "
                f"{ranks} as well: give it a group of both, or none"
            )


def _refuse_copies(path: str, router: Router, sharing: Communicator | GridRegion | None, context: SwapContext) -> None:
    if isinstance(sharing, GridRegion) or context.comm.size == 1:
        return
    tp, told = set(ranks_of(context.comm)), set(ranks_of(router.comm))
    is_split = sharing is not None and tp <= set(ranks_of(sharing))
    alike = sorted(tp & told)
    if not is_split and len(alike) > 1:
        raise ValueError(
            f"{path} balances over the tokens of the ranks {sorted(told)} (its group), of which {alike} "
            "hold the same tokens, as no sequence is split over them: leave its group out, or pass "
            "sequence_parallel=True"
        )


def _sharing_tokens(path: str, context: SwapContext) -> Communicator | GridRegion | None:
    """The ranks that the tokens of the module at `path` are split over; of a grid, the region. None: nowhere."""
    cp = None if context.context is None or context.context.comm.size == 1 else context.context.comm
    region = None if context.block_of(path) is not None else context.region_of(path)
    if isinstance(region, GridRegion):
        return region
    if region is None or context.comm.size == 1:
        return cp
    return context.comm if cp is None else context.cp_tp
