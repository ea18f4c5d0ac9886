"""Weight gradients put off: what a pipeline schedule with separate backward-input and backward-weight actions runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class WeightGradStore:
    """A queue of weight gradients that are still to be computed.

    An op that was given a store returns no weight gradient from its backward. It puts a function here instead, which
    computes the gradient and hands it to autograd at the weight, so that it ends in `.grad` with all its hooks, as if
    backward had returned it. One entry per call of the op whose backward has run, in that order:

        store = WeightGradStore()
        loss = linear_cross_entropy(hidden, weight, target, wgrad_store=store)
        loss.backward()         # B: hidden.grad
        store.run()             # W: weight.grad

    A store belongs to one stage; a schedule that runs the weight gradients of a microbatch calls `run(1)`, oldest
    first, or keeps a store per microbatch.
    """

    def __init__(self) -> None:
        self._entries: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        """Entries that have not run."""
        return len(self._entries)

    def put(self, compute: Callable[[], None]) -> None:
        """Add an entry; it runs once."""
        self._entries.append(compute)

    def run(self, count: int | None = None) -> int:
        """Run the `count` oldest entries (None: all) and return how many ran. An entry that raises is gone."""
        if count is not None and count < 0:
            raise ValueError(f"count must be None or >= 0, got {count}")
        ran = 0
        while self._entries and (count is None or ran < count):
            self._entries.popleft()()
            ran += 1
        return ran

    def clear(self) -> None:
        """Forget what has not run, with the memory that it holds."""
        self._entries.clear()
