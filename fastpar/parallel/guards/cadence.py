"""When to look: the first calls of a model, and one in many from then on."""

from __future__ import annotations

from typing import Any

from torch.compiler import is_compiling

FIRST, EVERY = 2, 256


class Cadence:
    """Counts the calls of a model, the same on all ranks of a group since each call has collectives in it."""

    def __init__(self, first: int = FIRST, every: int = EVERY):
        self.first, self.every, self.calls = first, every, 0

    def __deepcopy__(self, memo: Any) -> Cadence:
        return Cadence(self.first, self.every)

    def stop(self) -> None:
        """No further call is one to look at."""
        self.first = self.every = 0

    def next(self) -> bool:
        """True if the call that begins is one to look at. None is while torch.compile traces it."""
        if is_compiling():
            return False
        number = self.calls
        self.calls += 1
        return number < self.first or (self.every > 0 and number % self.every == 0)
