"""What the actions of a schedule cost: the numbers that `fastpar.pipeline.simulation.simulate` computes with."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Literal

from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule

Number = int | float | Fraction
PerPart = Number | Sequence[Number]


@dataclass(frozen=True)
class Costs:
    """Time of every action, and what else a simulation counts.

    Where `PerPart` is written, one number holds for every part of the model, and a sequence has one number per part
    (the replicas of a part cost the same). The unit of time is yours. With ints and Fractions every result is exact,
    and never a float; with a float among them, results are floats.

    forward          F of one microbatch through one part
    backward_input   I
    backward_weight  W; a whole backward B costs I + W
    hop              time that a message between two ranks is on its way; both may compute meanwhile
    overlap          an OVERLAP_F_B costs the "sum" of its parts, their "max"imum, or this number times their sum
    message_bytes    size of what a part hands to the next, and of the gradient that comes back
    bandwidth        bytes per unit of time between two ranks, in each direction; None: a message takes `hop` alone
    serial           the messages of a link go one after another (each takes bytes / bandwidth, then `hop`), not at once
    step, stash, unshard, reduce_grad
                     STEP, STASH, UNSHARD, REDUCE_GRAD of one part, which occupy the rank; RESHARD and DROP cost nothing
    activation       what a part keeps for the backward of a microbatch: 1 counts (stage, microbatch) pairs, bytes give
                     bytes
    head_forward, head_weight
                     S and T of a sharded head on one rank
    head_activation  what a rank keeps of a microbatch from its S to its T

    >>> Costs(10, 20, 6).of(ActionType.BACKWARD, part=0)
    26
    """

    forward: PerPart = 1
    backward_input: PerPart = 1
    backward_weight: PerPart = 1
    hop: Number = 0
    overlap: Literal["sum", "max"] | Number = "sum"
    message_bytes: PerPart = 0
    bandwidth: Number | None = None
    serial: bool = True
    step: PerPart = 0
    stash: PerPart = 0
    unshard: PerPart = 0
    reduce_grad: PerPart = 0
    activation: PerPart = 1
    head_forward: Number = 1
    head_weight: Number = 1
    head_activation: Number = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "serial" or hasattr(value, "__array__"):
                _check_plain(field.name, value)
                continue
            if (field.name, value) in (*_WORDS, ("bandwidth", None)):
                continue
            if isinstance(value, str):
                words = ', "sum" or "max"' if field.name == "overlap" else ""
                raise ValueError(f"{field.name} must be a number{words}, got {value!r}")
            if isinstance(value, Sequence):
                if field.name in ("hop", "overlap", "bandwidth") or field.name.startswith("head_"):
                    raise TypeError(f"{field.name} is one number for all parts, got {value!r}")
                object.__setattr__(self, field.name, tuple(_number(field.name, each) for each in value))
            else:
                object.__setattr__(self, field.name, _number(field.name, value))
        if self.bandwidth == 0:
            raise ValueError("bandwidth must be positive, or None where size does not matter")

    def check(self, schedule: Schedule) -> None:
        """Raise ValueError unless every sequence has one number per part of the schedule."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) != schedule.num_parts:
                raise ValueError(
                    f"{field.name} has {len(value)} numbers, but {schedule.name} cuts the model into "
                    f"{schedule.num_parts} parts"
                )

    def of(self, kind: ActionType, part: int) -> Number:
        """The time that an action of this kind on this part occupies its rank; 0 for transfers."""
        if not isinstance(kind, ActionType):
            raise TypeError(f"kind must be an ActionType, got {kind!r:.60}")
        if kind is ActionType.BACKWARD:
            return _at(self.backward_input, part) + _at(self.backward_weight, part)
        name = FIELDS.get(kind)
        return 0 if name is None else _at(getattr(self, name), part)

    def of_action(self, action: Action, schedule: Schedule) -> Number:
        """The time that an action occupies its rank."""
        times = [self.of(part.type, schedule.part_of(part.stage)) for part in action.flat()]
        if len(times) == 1 or self.overlap == "sum":
            return sum(times)
        if self.overlap == "max":
            return max(times)
        assert not isinstance(self.overlap, str)
        return sum(times) * self.overlap

    def bytes_of(self, part: int) -> Number:
        """Size of what a part hands to the next."""
        return _at(self.message_bytes, part)

    def transfer_time(self, part: int) -> Number:
        """The time that the output of a part, or its gradient, occupies a link: without `hop`."""
        size = self.bytes_of(part)
        if self.bandwidth is None:
            return 0
        if isinstance(size, float) or isinstance(self.bandwidth, float):
            return size / self.bandwidth
        return simplest(Fraction(size) / Fraction(self.bandwidth))

    def activation_of(self, part: int) -> Number:
        """What a part keeps for the backward of one microbatch."""
        return _at(self.activation, part)


# The field of an action's cost; B has two.
FIELDS = {
    ActionType.FORWARD: "forward",
    ActionType.BACKWARD_INPUT: "backward_input",
    ActionType.BACKWARD_WEIGHT: "backward_weight",
    ActionType.STEP: "step",
    ActionType.STASH: "stash",
    ActionType.UNSHARD: "unshard",
    ActionType.REDUCE_GRAD: "reduce_grad",
    ActionType.HEAD_FORWARD: "head_forward",
    ActionType.HEAD_WEIGHT: "head_weight",
}
_WORDS = (("overlap", "sum"), ("overlap", "max"))


def simplest(value: Number) -> Number:
    """A whole Fraction as an int; everything else as it is."""
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value


def quotient(numerator: Number, denominator: Number) -> Number:
    """numerator / denominator, exact unless one is a float."""
    if isinstance(numerator, float) or isinstance(denominator, float):
        return numerator / denominator
    return simplest(Fraction(numerator) / Fraction(denominator))


def common_denominator(values: Collection[Number]) -> int | None:
    """The least number that makes all of `values` whole; None if there is a float among them.

    Whole numbers add and compare some thirty times faster than Fractions do.

    >>> common_denominator([1, Fraction(1, 2), Fraction(2, 3)])
    6
    """
    if any(isinstance(value, float) for value in values):
        return None
    return math.lcm(*(value.denominator for value in values if not isinstance(value, float)))


def _at(value: PerPart, part: int) -> Number:
    return value[part] if isinstance(value, Sequence) else value


_LARGEST = 10**300  # whose float is finite


def _check_plain(name: str, value: object) -> None:
    """TypeError for an array or a tensor, and for a `serial` that is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be {'True or False' if name == 'serial' else 'a number or one per part'}")


def _number(name: str, value: object) -> Number:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number or one per part, got {value!r}")
    if not 0 <= value <= _LARGEST:  # type: ignore[operator]  # as a float it might not fit
        raise ValueError(f"{name} must be finite and not negative, got {value!r:.60}")
    if isinstance(value, numbers.Integral):
        return int(value)
    return Fraction(value) if isinstance(value, numbers.Rational) else float(value)
