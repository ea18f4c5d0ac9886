"""Formats of gathered parameters: which parameter travels how, and the scales that delayed scaling remembers.

    formats = GatherFormats({"layers.0.weight": BlockWire("int8")}, groups)
    encoder = formats.encoder(wire, names, groups, device)        # of tensors whose rows lie in one flat tensor
    message = encoder.encode(flat, numels)
    encoder.codes.dequantize_into(gathered, outs)
    formats.roll()                                                # collective: after a step

Note: equal bits. A message has the scales with the codes, and every rank decodes every message, its own too. So what
ranks compute with depends on nothing but the messages. A scale stays as it is from one step to the next, so that what a
unit gathers again in backward has the bits of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastpar.comm.scaled_codes import DelayedScalingWire
from fastpar.comm.wire_formats import FLOATS, BlockWire
from fastpar.precision import Precision
from fastpar.zero.groups import Groups

ParamWire = BlockWire | DelayedScalingWire
ParamWireLike = ParamWire | Callable[[str, nn.Parameter], ParamWire | None] | None
_UNKNOWN = -1.0  # the largest value of what has not been gathered


class Codes(Protocol):
    """`BlockCodes` or `ScaledCodes`."""

    def words(self, count: int) -> int: ...

    def dequantize_into(self, message: Tensor, outs: Sequence[Tensor]) -> None: ...


class Encoder(Protocol):
    """Writes the messages of some tensors."""

    @property
    def codes(self) -> Codes: ...

    def encode(self, flat: Tensor, numels: Sequence[int]) -> Tensor:
        """The message with this rank's rows of every tensor."""


class _BlockEncoder:
    def __init__(self, wire: BlockWire) -> None:
        self.codes = wire.codes

    def encode(self, flat: Tensor, numels: Sequence[int]) -> Tensor:
        return self.codes.quantize(flat, numels, seed=None, residual=None)


class _DelayedEncoder:
    def __init__(self, history: AmaxHistory, first: int, count: int) -> None:
        self.codes = history.wire.codes
        self._history, self._members = history, slice(first, first + count)

    def encode(self, flat: Tensor, numels: Sequence[int]) -> Tensor:
        history = self._history
        message, largest, saturated = self.codes.quantize(flat, numels, history.scales[self._members])
        history.met[self._members] = torch.maximum(history.met[self._members], largest.nan_to_num(nan=_UNKNOWN))
        history.saturated[self._members] += saturated
        return message


class AmaxHistory:
    """Of tensors in one format: the largest values of the last steps, and the scales that follow.

    names      of the tensors, in the order in which they came
    history    [tensors, amax_history_len], the newest first; 0 where there is none
    scales     [tensors], 0: not known yet. They change in `roll` only
    met        [tensors], the largest values since then
    saturated  [tensors], elements of this rank that the scales did not reach, since the beginning
    """

    def __init__(self, wire: DelayedScalingWire, groups: Groups, device: torch.device) -> None:
        self.wire = wire
        self.names: list[str] = []
        self._comms = groups.holders()
        self.history = torch.zeros(0, wire.amax_history_len, device=device)
        self.scales, self.met = torch.zeros(0, device=device), torch.zeros(0, device=device)
        self.saturated = torch.zeros(0, dtype=torch.int64, device=device)

    def extend(self, names: Sequence[str]) -> int:
        """Take in tensors; returns the number of the first."""
        first, count = len(self.names), len(names)
        self.names += names
        self.history = torch.cat([self.history, self.history.new_zeros(count, self.history.shape[1])])
        self.scales = torch.cat([self.scales, self.scales.new_zeros(count)])
        self.met = torch.cat([self.met, self.met.new_full((count,), _UNKNOWN)])
        self.saturated = torch.cat([self.saturated, self.saturated.new_zeros(count)])
        return first

    def roll(self) -> None:
        """Put what has been met into the history, as the largest of all ranks, and make scales of it. Collective."""
        for comm in self._comms:
            self.met = comm.all_reduce(self.met, "max")
        rolled = torch.cat([self.met[:, None], self.history[:, :-1]], 1)
        self.history = torch.where(self.met[:, None] >= 0, rolled, self.history)
        self.met = torch.full_like(self.met, _UNKNOWN)
        self.scales = self.wire.scales(self.history)

    def forget(self, names: Container[str] | None = None) -> None:
        """The history of tensors that have got other values (None: all): the next gather scales by what they are."""
        for index, name in enumerate(self.names):
            if names is None or name in names:
                self.history[index] = self.scales[index] = 0
                self.met[index] = _UNKNOWN

    def load(self, histories: Mapping[str, Tensor]) -> None:
        """Go on from the history of these names; what has been met since is forgotten."""
        for index, name in enumerate(self.names):
            if name in histories:
                self.history[index] = histories[name]
        self.met.fill_(_UNKNOWN)
        self.scales = self.wire.scales(self.history)


class GatherFormats:
    """The formats of the parameters of one model, by name; those without one travel as they are."""

    def __init__(self, wires: Mapping[str, ParamWire]) -> None:
        self._wires = wires
        self._histories: dict[tuple[DelayedScalingWire, Groups, torch.device], AmaxHistory] = {}

    def wire_of(self, name: str) -> ParamWire | None:
        return self._wires.get(name)

    def encoder(self, wire: ParamWire, names: Sequence[str], groups: Groups, device: torch.device) -> Encoder:
        """For the rows of these tensors, which `groups.shard` gathers. All ranks ask for the same, in one order."""
        if isinstance(wire, BlockWire):
            return _BlockEncoder(wire)
        key = wire, groups, device
        if key not in self._histories:
            self._histories[key] = AmaxHistory(wire, groups, device)
        history = self._histories[key]
        return _DelayedEncoder(history, history.extend(names), len(names))

    def roll(self) -> None:
        """After a step, before anything is gathered again. Collective where there are delayed scales."""
        for history in self._histories.values():
            history.roll()

    def forget(self, names: Container[str] | None = None) -> None:
        """Values of these tensors (None: of all) were loaded or written, which no step has led to."""
        for history in self._histories.values():
            history.forget(names)

    def histories(self) -> dict[str, Tensor]:
        """What a checkpoint holds: [amax_history_len] of every tensor with delayed scales, equal on all ranks."""
        found = self._histories.values()
        return {name: x for each in found for name, x in zip(each.names, each.history.clone(), strict=True)}

    def load(self, histories: Mapping[str, Tensor]) -> None:
        for history in self._histories.values():
            history.load(histories)

    def saturated(self) -> dict[str, int]:
        """Elements of this rank that were beyond the largest code when they were gathered, by name, where any was."""
        pairs = [pair for x in self._histories.values() for pair in zip(x.names, x.saturated.tolist(), strict=True)]
        return {name: count for name, count in pairs if count}


def param_wires_of(
    param_wire: Any, named: Mapping[str, nn.Parameter], precision: Precision, stage: int, offloads_parameters: bool
) -> dict[str, ParamWire]:
    """The format of every parameter that `param_wire` means. Raises TypeError and ValueError for what is not sound."""
    if param_wire is None:
        return {}
    is_choice = callable(param_wire) and not isinstance(param_wire, type)
    if not is_choice:
        _check_wire(param_wire, "param_wire")
    if stage == 0:
        raise ValueError(
            "param_wire is for stages 1 to 3, which gather parameters; in stage 0 none travel: leave it out"
        )
    if offloads_parameters:
        raise ValueError(
            "param_wire gathers from shards in the device's memory; offload of parameters puts them elsewhere: leave "
            "one of the two out (offload='cpu' and 'nvme:FOLDER' without parameters do)"
        )
    found: dict[str, ParamWire] = {}
    for name, parameter in named.items():
        is_float = parameter.dtype in FLOATS and precision.param_dtype(name, parameter.dtype) in FLOATS
        wire = param_wire(name, parameter) if is_choice else param_wire if parameter.ndim >= 2 and is_float else None
        if wire is None:
            continue
        _check_wire(wire, f"param_wire({name!r}, ...)" if is_choice else "param_wire")
        if not is_float:
            raise ValueError(
                f"param_wire({name!r}, ...) must be None for a parameter of {parameter.dtype}: float32, bfloat16 and "
                "float16 can be quantised"
            )
        found[name] = wire
    return found


def _check_wire(wire: Any, name: str) -> None:
    if not isinstance(wire, (BlockWire, DelayedScalingWire)):
        raise TypeError(
            f"{name} must be a fastpar.comm.BlockWire, a DelayedScalingWire, a function of a name and a parameter that "
            f"gives one or None, or None; got {wire!r:.80}. For 16 bits take precision='bf16'"
        )
    if isinstance(wire, BlockWire) and (wire.rounding != "nearest" or wire.error_feedback):
        raise ValueError(
            f"{name} must be a BlockWire with rounding='nearest' and error_feedback=False, got {wire!r}: forward and "
            "backward gather the same values, and the optimizer keeps the exact ones"
        )


def check_gradient_wire(wire: Any) -> None:
    """Raises TypeError for a `wire` that has no reductions."""
    if wire is not None and not (hasattr(wire, "reduce_scatter_async") and hasattr(wire, "all_reduce_async")):
        raise TypeError(
            f"wire must be a fastpar.comm.BlockWire, CastWire or PlainWire, which reduce gradients, got {wire!r:.80}"
            + ("; param_wire= takes it for parameters" if isinstance(wire, DelayedScalingWire) else "")
        )
