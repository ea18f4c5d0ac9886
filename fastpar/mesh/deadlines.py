"""What torch does not know of a process group: the deadline of its collectives, and whether one has failed."""

from __future__ import annotations

import weakref

from torch.distributed import ProcessGroup

DEFAULT_TIMEOUT_S = 600.0  # NCCL's own
_TIMEOUTS: weakref.WeakKeyDictionary[ProcessGroup, float] = weakref.WeakKeyDictionary()
_FAILED: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


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
