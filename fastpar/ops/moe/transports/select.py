"""The dispatcher of a group, by the name of a transport and by where its ranks are."""

from __future__ import annotations

import weakref

import torch
from torch.distributed import ProcessGroup

from fastpar.comm import Communicator, GroupLike
from fastpar.comm.multi_host.host_ranks import find_hosts_of
from fastpar.ops.moe.dispatcher import LocalDispatcher, TokenDispatcher
from fastpar.ops.moe.plan import DEFAULT_DISPATCH, Dispatch
from fastpar.ops.moe.transports.all_to_all import AllToAllDispatcher
from fastpar.ops.moe.transports.hierarchical import HierarchicalDispatcher
from fastpar.ops.moe.transports.shared_memory import DoubleBuffer, SharedMemoryDispatcher
from fastpar.ops.moe.transports.within_host import AllToAllForwarder, SharedForwarder

# What is kept for a group is its memory, not its dispatcher, which refers to the group: nothing would ever end.
_MEMORY: weakref.WeakKeyDictionary[ProcessGroup, DoubleBuffer] = weakref.WeakKeyDictionary()


def find_dispatcher(
    group: GroupLike, options: Dispatch = DEFAULT_DISPATCH, device: torch.device | None = None
) -> TokenDispatcher:
    """The dispatcher of a group for tensors on `device` (None: CPU).

    The first call for a group waits until all its ranks have come.
    """
    transport, exact = options.transport, options.exact
    comm = Communicator.of(group)
    if comm.group is None or comm.size == 1:
        return LocalDispatcher(comm)
    if transport == "symmetric":
        raise ValueError(
            "transport='symmetric' is for moe_mlp: how many rows there are is known on the device alone, and the "
            "handle of a dispatch says it on the host; fastpar.kernels.moe_push has the dispatch by itself"
        )
    is_cpu = device is None or device.type == "cpu"
    world = comm.local_world() if is_cpu and transport != "all_to_all" else None
    shares = world is not None and world.size == comm.size
    if transport == "shared_memory" and not shares:
        where = "" if is_cpu else f" on {device}"
        raise ValueError(f"transport='shared_memory': the ranks of {comm!r} cannot share memory{where}")
    # Shared memory needs no `exact`: its sums have the bits of one rank.
    if shares and transport != "hierarchical":
        return SharedMemoryDispatcher(comm, _MEMORY.setdefault(comm.group, DoubleBuffer()))
    if transport == "all_to_all":
        return AllToAllDispatcher(comm, exact=exact)
    found = _over_hosts(comm, comm.group, is_cpu=is_cpu, exact=exact, if_fewer=transport == "auto")
    if transport == "hierarchical" and found is None:
        raise ValueError(
            f"transport='hierarchical': the ranks of {comm!r} must be on several hosts, with several on one of them "
            "that can share memory"
        )
    return found or AllToAllDispatcher(comm, exact=exact)


def _over_hosts(
    comm: Communicator, group: ProcessGroup, *, is_cpu: bool, exact: bool, if_fewer: bool
) -> HierarchicalDispatcher | None:
    """The transport over several hosts where some rank is not alone: else no token would be spared a way."""
    if is_cpu:
        here = comm.host_ranks()
        if here is None:
            return None
        shared = SharedForwarder(here, _MEMORY.setdefault(group, DoubleBuffer()))
        return HierarchicalDispatcher(comm, here.hosts, shared, exact=exact, if_fewer=if_fewer)
    hosts = find_hosts_of(group, comm.timeout)
    if not 1 < len(hosts) < comm.size:
        return None
    flat = AllToAllForwarder(AllToAllDispatcher(comm))
    return HierarchicalDispatcher(comm, hosts, flat, exact=exact, if_fewer=if_fewer)
