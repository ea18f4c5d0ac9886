"""State of process groups that torch does not keep: the deadline of their collectives, whether one has failed, and who
still uses them; a group that nobody uses gives its threads and descriptors back.

Note: when a group goes. torch keeps every process group until somebody destroys it, so a mesh that is dropped without
`close()` would leave its threads and sockets running. Its groups may be in use all the same: by a DTensor, by a
Communicator, by whoever has asked for `mesh.group("tp")`. So a group goes when the last DeviceMesh over it has gone and
nothing but torch's own tables refers to it. What is still referred to then is looked at again whenever a mesh or a
communicator goes and when the next mesh is made.

Destroying a gloo group is no collective, and waits for nobody but the group's own threads. It happens on a thread of
its own: a finaliser may run in any thread, in the middle of anything. Groups with NCCL stay, since ending it
may wait for other ranks: such meshes have to be closed. Nothing is done while the interpreter ends, nor, in a forked
process, to groups of the one that it was forked from.

Note: DTensor's caches hold the meshes that it has worked with, and take a new mesh of the same shape for an old one,
with its groups. They are emptied when a mesh is closed and when the next one is made: places that all ranks come to.
A finaliser must not do it. Ranks would go on with different groups, as each collects at another time, and a collection
may run in the middle of an operation of DTensor, in C++ that holds a reference into its cache.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastpar.mesh.one_rank import OneRankGroup

DEFAULT_TIMEOUT_S = 600.0  # NCCL's own
_TIMEOUTS: weakref.WeakKeyDictionary[ProcessGroup, float] = weakref.WeakKeyDictionary()
_FAILED: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
_JOIN_S = 2.0  # how long a finaliser waits for the thread that destroys


def set_timeout(group: ProcessGroup, seconds: float) -> None:
    _TIMEOUTS[group] = seconds


def timeout_of(group: ProcessGroup | None) -> float:
    """Seconds that a collective of this group has: those of its mesh, else DEFAULT_TIMEOUT_S."""
    return DEFAULT_TIMEOUT_S if group is None else _TIMEOUTS.get(group, DEFAULT_TIMEOUT_S)


def mark_failed(group: ProcessGroup) -> None:
    """A collective has failed in a way that leaves the group unusable: the next mesh must not take it."""
    _FAILED.add(group)


def has_failed(group: ProcessGroup | None) -> bool:
    return group in _FAILED


class _Orphans:
    """Groups whose meshes are gone, and that somebody still refers to.

    A finaliser calls `add` and `release` in the middle of anything, so also while its own thread is in `_work`: neither
    may wait for the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what follows, but for `_coming`
        self._groups: list[ProcessGroup] = []
        self._coming: deque[ProcessGroup] = deque()  # its own operations are not interrupted
        self._worker = 0  # the thread that holds the lock
        self._inherited: list[ProcessGroup] = []  # of the process that this one was forked from

    def begin_in_child(self) -> None:
        """Begin in a forked process, whose own groups come later: those that there are have their threads elsewhere."""
        self._inherited += [*self._groups, *self._coming, *known_groups()]
        self._lock, self._groups, self._coming, self._worker = threading.Lock(), [], deque(), 0

    def add(self, groups: Iterable[ProcessGroup]) -> None:
        for group in groups:
            if all(group is not other for other in self._inherited):
                self._coming.append(group)

    def release(self) -> None:
        """Destroy those that nobody refers to any more."""
        if sys.is_finalizing() or not (self._groups or self._coming):
            return
        if self._worker == threading.get_ident():  # which looks again at what has come
            return
        finished = _thread.allocate_lock()
        finished.acquire()
        with contextlib.suppress(RuntimeError):  # no new thread: the interpreter ends
            _thread.start_new_thread(self._work, (finished,))
            finished.acquire(timeout=_JOIN_S)

    def _work(self, finished: Any) -> None:
        try:
            with self._lock:
                self._worker = threading.get_ident()
                try:
                    self._destroy_unused()
                    while self._coming:
                        self._destroy_unused()
                finally:
                    self._worker = 0
        finally:
            finished.release()

    def _destroy_unused(self) -> None:
        while self._coming:
            if all(self._coming[0] is not other for other in self._groups):
                self._groups.append(self._coming[0])
            self._coming.popleft()
        known = known_groups()
        self._groups = [group for group in self._groups if any(group is other for other in known)]
        del known
        for index in reversed(range(len(self._groups))):
            # Referred to by the list, by getrefcount's argument, and by torch.
            if sys.getrefcount(self._groups[index]) <= 2 + _tables_with(self._groups[index]):
                with contextlib.suppress(Exception):  # it may have gone by another way just now
                    dist.destroy_process_group(self._groups.pop(index))


_ORPHANS = _Orphans()
os.register_at_fork(after_in_child=_ORPHANS.begin_in_child)


def release_unused() -> None:
    """Give back the groups of dropped meshes that nobody refers to any more."""
    _ORPHANS.release()


class GroupUse:
    """Held by what uses a group, as the last of its attributes: when it goes, somebody looks whether the group can."""

    def __init__(self) -> None:
        if torch.compiler.is_compiling():
            return  # what a compiled function makes goes with its call, and Dynamo would guard the table of finalisers
        weakref.finalize(self, release_unused).atexit = False


def release_with(mesh: DeviceMesh, groups: list[ProcessGroup]) -> weakref.finalize[Any, Any]:
    """Give the groups back when the DeviceMesh has gone, and all that was cut out of it; the list is then empty."""
    finalizer = weakref.finalize(mesh, _drop, getattr(mesh, "_pg_registry", {}), groups)
    finalizer.atexit = False
    return finalizer


def _drop(registry: dict[str, ProcessGroup], groups: list[ProcessGroup]) -> None:
    registry.clear()  # of the mesh, which is gone: references that no longer count
    leave(group for group in groups if _is_released_alone(group))
    groups.clear()
    release_unused()


def leave(groups: Iterable[ProcessGroup]) -> None:
    """Let these go as soon as nobody refers to them: at the next `release_unused`."""
    _ORPHANS.add(groups)


def forget_meshes() -> None:
    """Empty DTensor's caches of what operations do to layouts: their keys hold meshes, and these their groups.

    Not for finalisers: see the note above.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    debug._clear_sharding_prop_cache()
    for owner, name in (
        (_redistribute, "_gen_transform_infos"),
        (_collective_utils.MeshTopoInfo, "build_from_mesh"),
    ):
        if hasattr(owner, name):  # torch's own matter: other versions may have others
            getattr(owner, name).cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()


def known_groups() -> list[ProcessGroup]:
    """Every process group that this rank is in."""
    return list(dist.distributed_c10d._world.pg_map)


def _is_released_alone(group: ProcessGroup) -> bool:
    """True where destroying it asks no other rank: its backends are all gloo, or none."""
    if isinstance(group, OneRankGroup):
        return True
    config = dist.distributed_c10d._world.pg_backend_config.get(group, "")
    return {part.rpartition(":")[2] for part in config.split(",")} == {"gloo"}


def _tables_with(group: ProcessGroup) -> int:
    """The number of references to the group from torch's own tables."""
    count = 0
    for table in vars(dist.distributed_c10d).values():
        if type(table) is dict:  # isinstance would ask a deprecated object of torch's, which warns
            count += sum(key is group for key in table)
            count += sum(item is group for value in table.values() if isinstance(value, list) for item in value)
    return count
