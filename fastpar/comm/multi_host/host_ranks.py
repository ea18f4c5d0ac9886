"""The ranks of a group that are on this host, where it has several: who they are, and what they do among themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastpar.comm.errors import CommError
from fastpar.comm.groups import name_meeting, store_of
from fastpar.comm.multi_host.protocol import Hierarchy, HostLocal
from fastpar.comm.observers import note, open_spans
from fastpar.comm.shared_memory.rendezvous import Hosts, Rendezvous, find_hosts
from fastpar.comm.shared_memory.world import LocalWorld

T = TypeVar("T")


class HostRanks:
    """The ranks of a group of several hosts that are on this one, joined by shared memory.

    hosts  the group's ranks by host, in the order of each host's lowest rank
    ranks  those here; `rank` and `size` count them

    What is called here takes its turn with the collectives of the whole group, in the order of launches: all ranks of
    the host call the same between the same collectives of the group. A `SharedRegion` can be made of it. A failure is
    final for the group. CPU tensors, contiguous.
    """

    def __init__(self, hierarchy: Hierarchy, timeout: float) -> None:
        self._hierarchy, self.timeout = hierarchy, timeout
        self.hosts: Hosts = tuple(map(tuple, hierarchy.hosts))
        self.ranks = self.hosts[hierarchy.host]
        self.rank, self.size = hierarchy.index, len(self.ranks)

    def __repr__(self) -> str:
        return f"HostRanks(rank={self.rank}, ranks={list(self.ranks)}, timeout={self.timeout:g})"

    def local_world(self) -> LocalWorld | None:
        """None where this rank is alone on its host."""
        return self._hierarchy.world

    def all_gather(self, x: Tensor) -> Tensor:
        """x of all ranks here, flat, one after the other; of as many elements on each."""
        return self._run("all_gather", x.numel() * self.size, x.dtype, lambda local: local.all_gather(x.view(-1)))

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """ "min" or "max" of little data."""
        everyone = self.all_gather(x).view(self.size, *x.shape)
        return everyone.amin(0) if op == "min" else everyone.amax(0)

    def barrier(self) -> None:
        """Return when every rank of this host has entered."""
        self._run("barrier", 0, torch.uint8, lambda local: local.barrier())

    def _run(self, op: str, numel: int, dtype: torch.dtype, action: Callable[[HostLocal], T]) -> T:
        spans = open_spans()
        try:
            result = self._hierarchy.run_here(action, self.timeout)
        except CommError as error:
            raise type(error)(f"{op} of the ranks {list(self.ranks)} of one host: {error}") from error
        note(op, self.size, numel, dtype)
        if spans is not None:
            spans.launched(op, self.size, numel, dtype)
        return result


_HOSTS: weakref.WeakKeyDictionary[ProcessGroup, Hosts] = weakref.WeakKeyDictionary()


def find_hosts_of(group: ProcessGroup, timeout: float) -> Hosts:
    """The ranks of a group by host, in the order of each host's lowest rank; no hosts where that cannot be told.

    For groups of any backend: ranks meet in the group's store. The first call waits for all of them, in the same order
    as other meetings of the group.
    """
    found = _HOSTS.get(group)
    if found is None:
        store = store_of(group)
        hosts: Hosts | str = ()
        if store is not None:
            hosts = find_hosts(Rendezvous(store, name_meeting(group), group.rank(), group.size(), timeout))
        found = _HOSTS[group] = () if isinstance(hosts, str) else hosts
    return found
