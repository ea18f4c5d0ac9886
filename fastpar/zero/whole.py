"""Parameters that every rank has whole, and whose rows are updated by one rank each (stages 0 to 2)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.observers import note
from fastpar.zero.flat import FlatLayout, PeerMemory, copy_rows, filled


class WholeParameters:
    """Tensors of one dtype and device, replicated over `comm`, of which this rank changes its rows (`rows`) only.

    Where the ranks share memory, the tensors are moved to where the others can read them (`values`), and `gather`
    copies changed rows from there: one pass. Else rows are packed, gathered and unpacked.
    """

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor]) -> None:
        self.comm, self.dtype = comm, tensors[0].dtype
        self.layout = FlatLayout([x.shape for x in tensors], comm.size)
        numels = [x.numel() for x in tensors]
        self.values = list(tensors)
        self._mirrored: list[Tensor] = []  # rows of other ranks, here,
        self._peers: list[Tensor] = []  # and where those ranks write them
        self.is_shared = False
        if comm.size > 1:
            memory = PeerMemory(comm, [sum(numels)] * comm.size, self.dtype, tensors[0].device)
            if memory.is_shared:
                self.values = self._cut(memory.mine, numels)
                for value, x in zip(self.values, tensors, strict=True):
                    value.copy_(x)
                self.is_shared = True
                for rank in range(comm.size):
                    if rank != comm.rank:
                        self._mirrored += self._rows(self.values, rank)
                        self._peers += self._rows(self._cut(memory.of(rank), numels), rank)
        self.rows = [self.layout.rows_of(value, index, comm.rank) for index, value in enumerate(self.values)]

    def gather(self) -> None:
        """Bring the other ranks' rows in. Collective: when it returns, no rank reads this one's rows any more, which
        users may write to (averages of weights, load_state_dict)."""
        if self.comm.size == 1:
            return
        if not self.is_shared:
            mine = torch.cat([rows.reshape(-1) for rows in self.rows])
            flat = self.comm.all_gather(mine, sizes=self.layout.counts)
            for rank, part in enumerate(self.layout.parts(flat)):
                if rank != self.comm.rank:
                    sources = filled(self.layout.views(part, rank))
                    copy_rows(self._rows(self.values, rank), sources)
            return
        note("all_gather", self.comm.size, self.layout.total, self.dtype)
        self.comm.barrier()
        copy_rows(self._mirrored, self._peers)
        self.comm.barrier()

    def _cut(self, flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
        ends = list(itertools.accumulate(numels))
        return [
            flat[end - numel : end].view(shape)
            for end, numel, shape in zip(ends, numels, self.layout.shapes, strict=True)
        ]

    def _rows(self, values: Sequence[Tensor], rank: int) -> list[Tensor]:
        """The rows of a rank, of those tensors of which it has some."""
        rows = [self.layout.rows_of(value, index, rank) for index, value in enumerate(values)]
        return filled(rows)
