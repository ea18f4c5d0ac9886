"""Copies that ranks hold of the same values, and whether somebody's writes have made them different.

Note: writes to copies. `reset_parameters()`, `load_state_dict` and `p.mul_()` after `shard` write to each rank's own
copy of a parameter. Ranks that draw other numbers, or of which one alone writes, would train different models from
there on. torch counts writes in place: a rank whose counts are not those that the last update has left says so in the
exchange that a step begins with, in a flag that is there anyway. Only then do ranks compare what any of them has
written to: one pass over these values, and 16 bytes of each in a reduction. What torch does not count (`p.data`) goes
unnoticed.

Note: options. Each rank has an optimizer of its own, and what is set in its param_groups (a scheduler that follows this
rank's loss, or has gone a step less) changes this rank's updates alone. A rank whose options have changed says so in
the same flag, and 16 bytes of a checksum of them are compared. Schedules that change them in every step are compared in
the first two steps, every 64th, and when they have ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.agree import set_on_any
from fastpar.optim._masters import LOOK_EVERY, version_of
from fastpar.zero.groups import local

_PLAIN = frozenset((int, float, bool, type(None)))
_CHUNK = 1 << 18  # elements, whose products with the weights are 2 MB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15
_SHOWN_NAMES = 4


class Replica(NamedTuple):
    """`value` is the same on all ranks that `comms` reach one after the other."""

    name: str
    value: Tensor
    comms: tuple[Communicator, ...]


class ReplicaWrites:
    """Watches `replicas`, of which all ranks have as many in the same order, and the options of `optimizers`."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = [each for each in replicas if each.comms]
        self.optimizers: Sequence[torch.optim.Optimizer] = ()
        self._agreed: list[Any] = []  # what ranks have compared
        self._last = self._options()  # at the last `note`
        self._is_changing, self._notes = False, 0
        self._replaced = self._is_held = False
        self.note()

    def hold(self) -> None:
        """What has been written so far is to be compared in spite of `note`: one of several optimizers updates."""
        self._is_held = self._is_written

    def note(self) -> None:
        """All ranks have the same values."""
        self._versions = [version_of(each.value) for each in self._replicas]
        self._replaced = False
        options = self._options()
        self._is_changing, self._last = options != self._last, options
        self._notes += 1

    def replaced(self) -> None:
        """Some parameter has got the values of another tensor."""
        self._replaced = bool(self._replicas)

    @property
    def is_any(self) -> bool:
        """Whether this rank has written to something since `note`, or has options to be compared."""
        if self._is_written:
            return True
        return self._options() != self._agreed and (not self._is_changing or self._notes % LOOK_EVERY == 0)

    @property
    def _is_written(self) -> bool:
        return self._replaced or self._is_held or [version_of(each.value) for each in self._replicas] != self._versions

    def _options(self) -> list[Any]:
        """The numbers that users set in param_groups, of all optimizers: those that these have defaults for, as others
        may be a rank's own. Three times in a step, so that plain ones are taken as they are."""
        return [
            value if type(value) in _PLAIN else _number(value)
            for each in self.optimizers
            for group in each.param_groups
            for value in map(group.get, each.defaults)
        ]

    def compare(self, comms: Sequence[Communicator]) -> None:
        """Raises RuntimeError on all ranks where options differ, or replicas of what any of `comms` has written to,
        naming them. Collective."""
        self._compare_options(comms)
        now = [version_of(each.value) for each in self._replicas]
        is_all = self._replaced or self._is_held
        changed = [is_all or new != old for new, old in zip(now, self._versions, strict=True)]
        written = set_on_any(changed, comms)
        if not any(written):  # options alone
            return self.note()
        kinds: dict[tuple[Communicator, ...], list[int]] = {}
        for index, (each, is_written) in enumerate(zip(self._replicas, written, strict=True)):
            if is_written:
                kinds.setdefault(each.comms, []).append(index)
        differs = [False] * len(self._replicas)
        for its_comms, indices in kinds.items():
            sums = [_checksum(local(self._replicas[index].value)) for index in indices]
            found = torch.tensor([sums, [-x for x in sums]], dtype=torch.int64, device="cpu")  # the most, and the least
            for comm in its_comms:
                comm.all_reduce(found, "max", out=found)
            for index, difference in zip(indices, found.sum(0).tolist(), strict=True):
                differs[index] = difference != 0
        # Rows that differ do so among the ranks that have them, and all are to raise
        pairs = zip(self._replicas, set_on_any(differs, comms), strict=True)
        differing = [each.name for each, is_different in pairs if is_different]
        if differing:
            more = ", ..." if len(differing) > _SHOWN_NAMES else ""
            raise RuntimeError(
                f"ranks have different values of {', '.join(differing[:_SHOWN_NAMES])}{more}, which must be the same: "
                "somebody has written to them after fastpar.zero.shard(...), on one rank alone or with other random "
                "numbers on each. Write the same on all ranks: seed them alike before reset_parameters(), load the "
                "same state, or broadcast it"
            )
        self._is_held = False
        self.note()

    def _compare_options(self, comms: Sequence[Communicator]) -> None:
        options = self._options()
        word = zlib.crc32(repr(options).encode())
        found = torch.tensor([word, -word], dtype=torch.int64, device="cpu")
        for comm in comms:
            comm.all_reduce(found, "max", out=found)
        if found.sum() != 0:
            rates = [group.get("lr") for each in self.optimizers for group in each.param_groups]
            more = ", ..." if len(rates) > _SHOWN_NAMES else ""
            raise RuntimeError(
                "ranks have different options in their optimizers' param_groups, and would update differently; here "
                f"lr is {', '.join(map(str, rates[:_SHOWN_NAMES]))}{more}. Let all ranks decide alike: a scheduler "
                "that follows a loss (ReduceLROnPlateau) takes its mean over the ranks (torch.distributed.all_reduce), "
                "and one that counts batches is called equally often on each, also where a rank leaves one out"
            )
        self._agreed = options


def _number(value: Any) -> Any:
    """A value as it is compared: None for what is no number, or lies on a device."""
    if isinstance(value, (tuple, list)):
        return tuple(value) if _PLAIN.issuperset(map(type, value)) else tuple(map(_number, value))
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    return value if isinstance(value, (int, float)) else None


@torch.no_grad()
def _checksum(x: Tensor) -> int:
    """Of the bits and their order, below 2^62: a sum of products with fixed weights, modulo 2^64, of every chunk, and a
    polynomial of these."""
    flat = x.reshape(-1).view(_BITS.get(x.element_size(), torch.int64))  # 16 bytes are two of 8
    weights = torch.arange(1, min(_CHUNK, flat.numel()) + 1, device=x.device) * _ODD
    weights = (weights ^ (weights >> 29)) * _ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for chunk in flat.split(_CHUNK):
        total = total * _ODD + (chunk * weights[: chunk.numel()]).sum()
    return int(total ^ (total >> 31)) & ((1 << 62) - 1)
