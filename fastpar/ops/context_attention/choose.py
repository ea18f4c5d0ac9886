"""The method for `method="auto"`, by what a call sends and how long a step of it takes.

    1. Where tiles need less than a quarter of the others' keys (windows, packed documents), a ring: it sends no more.
    2. Else Ulysses over as many neighbours of a host as the heads allow, and a ring over the rest, where it sends less
       over forward and backward, of g query heads a key/value head: iff P > 2 (g + 1) / 3.
    3. Else gathered keys where a step of a ring is too short to hide a transfer, and a ring where it is not.

Everything that it looks at is the same on all ranks, and when a forward is run again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.multi_host.host_ranks import find_hosts_of
from fastpar.contracts.attention import AttentionMask
from fastpar.ops.context_attention.methods import GatherKeys, Method, Spread, Usp
from fastpar.ops.context_attention.plan import Layout, make_plan

_SPARSE = 0.25
# Tokens of a rank, times query heads a key/value head, from which on a step hides a transfer: e F / B of 2-byte
# elements, an H100's matrix products and the links. Shared memory is read in place.
_HIDDEN_ON_HOST = 3000
_HIDDEN_BETWEEN_HOSTS = 24000


def resolve_method(method: Method, size: int) -> Spread | None:
    """What a caller asks for, of a group of so many ranks; None: "auto". Raises ValueError for what cannot be."""
    if isinstance(method, Usp):
        if size % method.ulysses:
            works = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(f"Usp({method.ulysses}): ulysses must divide the {size} ranks of the group: {works}")
        return Spread(method.ulysses, uneven=method.uneven)
    if isinstance(method, GatherKeys):
        return Spread(gather=method.head_groups)
    named = {"auto": None, "ring": Spread(), "gather": Spread(gather=1), "ulysses": Spread(size)}
    if method not in named:
        raise ValueError(f"method must be one of {', '.join(named)}, Usp or GatherKeys, got {method!r}")
    return named[method]


def choose_spread(comm: Communicator, layout: Layout, mask: AttentionMask, q: Tensor, kv_heads: int) -> Spread:
    """See the module docstring."""
    size, heads = comm.size, q.shape[1]
    plan = make_plan(layout, mask, comm.rank, 1)
    if size == 1 or plan.read_fraction < _SPARSE:
        return Spread()
    group = heads // kv_heads
    on_host = ranks_on_host(comm, q.device)
    if 3 * size > 2 * (group + 1):
        ulysses = max(n for n in range(1, on_host + 1) if on_host % n == 0 and size % n == 0 and heads % n == 0)
        if ulysses > 1:
            return Spread(ulysses)
    if q.device.type == "cpu" and on_host == size:
        return Spread()
    tokens = sum(plan.sizes) // size * group
    return Spread(gather=int(tokens < flops_an_element(comm, q.device)))


def flops_an_element(comm: Communicator, device: torch.device) -> int:
    """How many floating-point operations an H100 does while it sends one 2-byte element to another rank."""
    return _HIDDEN_ON_HOST if ranks_on_host(comm, device) == comm.size else _HIDDEN_BETWEEN_HOSTS


def ranks_on_host(comm: Communicator, device: torch.device) -> int:
    """How many neighbouring ranks of a group are on one host, everywhere: 1 where they are not in order, or few."""
    if comm.group is None:
        return 1
    if device.type == "cpu":
        world = comm.local_world()
        if world is not None:
            return comm.size
        here = comm.host_ranks()
        hosts = () if here is None else here.hosts
    else:
        hosts = find_hosts_of(comm.group, comm.timeout)
    sizes = {len(ranks) for ranks in hosts}
    in_order = [rank for ranks in hosts for rank in ranks] == list(range(comm.size))
    return sizes.pop() if len(sizes) == 1 and in_order else 1
