"""Shards that are gathered as 8-bit codes (`param_wire`): exact at rest, and everywhere else the values of the codes.

    shards = CodedShards(comm, tensors, encoder)          # stage 3: this rank's rows, exact
    pending = shards.gather_rows_async(rows)              # quantises them, gathers codes, writes values
    whole = CodedParameters(comm, tensors, encoder)       # stages 1 and 2: parameters that are always whole
    whole.gather()

Rows are quantised tensor by tensor, so no block and no scale is of two tensors. Every rank writes the values of all
codes, its own too: ranks compute with equal bits. What the optimizer updates are the exact rows, and gradients are
those of the values: the quantisation is passed straight through.

Every gather quantises anew, 1/N of the elements. Codes kept from step to step would save that, and hide what somebody
writes to the shards in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.pending import Pending
from fastpar.zero.flat import FlatLayout, filled
from fastpar.zero.gather_codes import Encoder
from fastpar.zero.groups import own_storage


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
        """Of a gather that has been begun, and whose result nobody wants."""
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
        """Of the exact rows and of their codes."""
        return self.shards.flat.nbytes + self._message.nbytes

    def gather(self) -> None:
        """Give all ranks the values of what the rows are now. Collective: one all-gather of bytes."""
        self._message = self.shards.encode()
        self.shards.send(self._message, self._targets).wait()
        for x in self.values:
            torch.autograd.graph.increment_version(x)  # graphs that have saved the old values are to say so

    def shown(self, index: int) -> Tensor:
        """What `seen` of a tensor has had since the last gather, unless somebody has written to it."""
        found = torch.empty_like(self.seen[index], memory_format=torch.contiguous_format)
        words = [self.shards.codes.words(x.numel()) for x in self.seen]
        self.shards.codes.dequantize_into(self._message.split(words)[index], [found])
        return found
