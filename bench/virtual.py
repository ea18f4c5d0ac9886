"""One rank of a group whose other ranks are not there: the vocabulary-parallel work of one GPU, on one GPU.

The other ranks' contributions to the all-gather are captured once, from the op itself running as each of them, and
replayed: `VirtualRanks.all_gather` is a copy of this rank's part beside theirs. So the timed region holds the whole
work of one rank and of a group of `size`, without the time that bytes spend on a wire (12 to 20 bytes a token).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fastpar.comm import Communicator
from fastpar.comm.launcher import Launcher
from fastpar.comm.transport import InFlight, Transport
from fastpar.comm.transport_selector import MODES, Mode, TransportSelector


class _Captured(Exception):
    """Ends a forward pass that runs only for what it sends."""


class _Replay:
    """The part of `fastpar.comm.transport.Transport` that a loss over given logits needs.

    others  what each other rank brings, in rank order; None: capture instead
    """

    def __init__(self, rank: int, others: Sequence[torch.Tensor] | None) -> None:
        self._rank, self._others = rank, others
        self.sent: torch.Tensor | None = None

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> InFlight:
        if self._others is None:
            self.sent = x.clone()
            raise _Captured
        parts = [*self._others[: self._rank], x, *self._others[self._rank :]]
        return InFlight(None, lambda: torch.cat(parts))


class _ReplaySelector(TransportSelector):
    """Leads to a replay, whatever is launched."""

    def __init__(self, rank: int, size: int, replay: _Replay) -> None:
        super().__init__(None, timeout=60.0, transport="torch")
        self.rank, self.size, self._replay = rank, size, replay
        self.fast_path = None  # of one rank

    def launch(
        self,
        op: str,
        is_cpu: bool,
        dtype: torch.dtype,
        start: Callable[[Transport], InFlight],
        *,
        mode: Mode,
    ) -> InFlight:
        return start(self._replay)  # type: ignore[arg-type]


class VirtualRanks(Communicator):
    """Rank `rank` of `size`; see the module docstring for `others`."""

    def __init__(self, rank: int, size: int, others: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size
        self._replay = _Replay(rank, others)  # a loss calls nothing else
        self._selector = _ReplaySelector(rank, size, self._replay)
        self._launchers = dict.fromkeys(MODES, Launcher(self._selector, "blocking"))

    def captured(self, forward: Callable[[], object]) -> torch.Tensor:
        """What `forward`, a function that uses this communicator, hands to its first all-gather."""
        replay = self._replay
        try:
            forward()
        except _Captured:
            assert replay.sent is not None
            return replay.sent
        raise RuntimeError("the forward pass made no all-gather")
