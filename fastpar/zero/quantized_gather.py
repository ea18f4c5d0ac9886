"""Gathers of parameters as 8-bit codes (`param_wire`): exact at rest, and everywhere else the values of the codes.

    formats = GatherFormats({"layers.0.weight": BlockWire("int8")})
    encoder = formats.encoder(wire, names, groups, device)        # of tensors whose rows lie in one flat tensor
    shards = CodedShards(comm, tensors, encoder)          # stage 3: this rank's rows, exact
    pending = shards.gather_rows_async(rows)              # quantises them, gathers codes, writes values
    whole = CodedParameters(comm, tensors, encoder)       # stages 1 and 2: parameters that are always whole
    whole.gather()
    formats.roll()                                        # collective: after a step

Rows are quantised tensor by tensor, so no block and no scale is of two tensors. What the optimizer updates are the
exact rows, and gradients are those of the values: the quantisation is passed straight through. Every gather quantises
anew, 1/N of the elements. Codes kept from step to step would save that, and hide what somebody writes to the shards in
between.

Note: equal bits. A message has the scales with the codes, and every rank decodes every message, its own too. So what
ranks compute with depends on nothing but the messages. A scale stays as it is from one step to the next, so that what
a group gathers again in backward has the bits of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fastpar.comm import Communicator
from fastpar.comm.pending import Pending
from fastpar.comm.scaled_codes import DelayedScalingWire
from fastpar.comm.wire_formats import BlockWire
from fastpar.zero.flat import FlatLayout, filled
from fastpar.zero.groups import Groups, own_storage

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
    """The history of tensors in one format: the largest values of the last steps, and the scales that follow.

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
        """The encoder for the rows of these tensors, which `groups.shard` gathers. All ranks ask for the same, in one
        order."""
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
        """Histories for a checkpoint: [amax_history_len] of every tensor with delayed scales, equal on all ranks."""
        found = self._histories.values()
        return {name: x for each in found for name, x in zip(each.names, each.history.clone(), strict=True)}

    def load(self, histories: Mapping[str, Tensor]) -> None:
        for history in self._histories.values():
            history.load(histories)

    def saturated(self) -> dict[str, int]:
        """Elements of this rank that were beyond the largest code when they were gathered, by name, where any was."""
        pairs = [pair for x in self._histories.values() for pair in zip(x.names, x.saturated.tolist(), strict=True)]
        return {name: count for name, count in pairs if count}


class CodedShards:
    """The rows of `tensors` that belong to this rank: what `FlatShards` are, with gathers of codes. Collective."""

    is_shared = False  # to gather takes time that can be hidden

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor], encoder: Encoder) -> None:
        self.comm = comm
        self.layout = FlatLayout([x.shape for x in tensors], comm.size)
        self.flat = torch.zeros(self.layout.counts[comm.rank], dtype=tensors[0].dtype, device=tensors[0].device)
        self.shards = self.layout.views(self.flat, comm.rank)
        for index, (shard, x) in enumerate(zip(self.shards, tensors, strict=True)):
            shard.copy_(self.layout.rows_of(x.detach(), index, comm.rank))
        self.codes, self._encoder = encoder.codes, encoder
        count = len(tensors)
        numels = [self.layout.numels[rank * count : (rank + 1) * count] for rank in range(comm.size)]
        self._numels = numels[comm.rank]
        self._words = [sum(map(self.codes.words, of_rank)) for of_rank in numels]

    def rows_in(self, outs: Sequence[Tensor]) -> list[list[Tensor]]:
        """The rows of each rank in whole tensors, without those that are empty: where a gather writes to."""
        everyone = range(self.comm.size)
        return [filled(self.layout.rows_of(x.detach(), i, rank) for i, x in enumerate(outs)) for rank in everyone]

    def encode(self) -> Tensor:
        """The message with this rank's rows."""
        return self._encoder.encode(self.flat, self._numels)

    def gather_rows_async(self, rows: Sequence[list[Tensor]]) -> Pending[None]:
        return self.send(self.encode(), rows)

    def send(self, message: Tensor, rows: Sequence[list[Tensor]]) -> Pending[None]:
        """Begin to gather messages; `wait` writes the values of all of them. Collective: one all-gather of bytes."""
        pending = self.comm.all_gather_async(message, sizes=self._words)
        targets = [x for of_rank in rows for x in of_rank]
        return Pending(
            None,
            lambda: self.codes.dequantize_into(pending.wait(), targets),
            describe=lambda: "gathering codes of shards",
            timeout=self.comm.timeout,
        )

    def gather_exact(self, rows: Sequence[list[Tensor]]) -> None:
        """The shards as they are, for good. Collective."""
        self.layout.put_rows(self.comm.all_gather(self.flat, sizes=self.layout.counts), rows)

    def abandon(self, pending: Pending[None]) -> None:
        """End a gather that has been begun, and whose result nobody wants."""
        pending.wait()  # it writes to memory that is about to go


class CodedParameters:
    """Whole tensors of one dtype and device on every rank, with the exact rows of this one beside them (`rows`): what
    `WholeParameters` are, with gathers of codes. Collective.

    values  the tensors; `gather` writes to all of their elements
    seen    this rank's rows of them
    """

    is_shared = False

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor], encoder: Encoder) -> None:
        self.values = list(tensors)
        self.shards = CodedShards(comm, tensors, encoder)
        self.layout = self.shards.layout
        self.rows = [own_storage(x) for x in self.shards.shards]
        self.seen = [self.layout.rows_of(x, index, comm.rank) for index, x in enumerate(tensors)]
        self._targets = self.shards.rows_in(tensors)
        self._message = torch.empty(0, dtype=torch.int64)
        self.gather()

    @property
    def nbytes(self) -> int:
        """Bytes of the exact rows and of their codes."""
        return self.shards.flat.nbytes + self._message.nbytes

    def gather(self) -> None:
        """Give all ranks the values of what the rows are now. Collective: one all-gather of bytes."""
        self._message = self.shards.encode()
        self.shards.send(self._message, self._targets).wait()
        for x in self.values:
            torch.autograd.graph.increment_version(x)  # graphs that have saved the old values are to say so

    def shown(self, index: int) -> Tensor:
        """Values that `seen` of a tensor has had since the last gather, unless somebody has written to it."""
        found = torch.empty_like(self.seen[index], memory_format=torch.contiguous_format)
        words = [self.shards.codes.words(x.numel()) for x in self.seen]
        self.shards.codes.dequantize_into(self._message.split(words)[index], [found])
        return found
