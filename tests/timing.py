"""Bounds on how long something takes, for machines that may be busy."""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.markers import needs

_MOST = 3.0  # times that a bound grows: what waits for a deadline takes longer still


@needs("clock")
def assert_within(seconds: float, measure: Callable[[], float], tries: int = 4) -> None:
    """One of a few tries of what `measure` times takes less than that.

    Where other processes keep the processors busy, any single try may be late, and all of them where each process gets
    a small share: the bound grows with the number of those that want a processor. What waits for something that it
    need not wait for is late in all of them.
    """
    taken: list[str] = []
    while len(taken) < tries:
        found = measure()
        bound = seconds * min(max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))), _MOST)
        if found < bound:
            return
        taken.append(f"{found:.3f} of {bound:.3f}")
    raise AssertionError(
        f"took {', '.join(taken)} s, never less than {seconds:g} s on processors with nothing else to do"
    )
