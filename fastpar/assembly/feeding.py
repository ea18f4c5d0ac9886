"""What ranks have to agree on before a step: that each has a batch, how many tokens count, and who was fed the same."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fastpar.assembly.objective import FedBatch
from fastpar.comm import Communicator
from fastpar.mesh import Mesh

SHARING = ("tp", "cp", "pp")  # ranks that differ in these alone are fed the same batch
DEALT = ("dp_shard", "dp_replicate")


@dataclass(frozen=True)
class GlobalBatch:
    """Rows and valid tokens of the batch, over all ranks."""

    rows: int
    tokens: int


class FeedAgreement:
    """Agreement of a mesh's ranks on what they were fed. Made once; collective."""

    def __init__(self, mesh: Mesh) -> None:
        self._device = torch.device(mesh.device_type)
        self._comms = {dim: Communicator(mesh.group(dim)) for dim in (*SHARING, *DEALT) if mesh.size(dim) > 1}
        self._sizes = {dim: mesh.size(dim) for dim in SHARING}
        self._sharing = mesh.size("tp") * mesh.size("cp") * mesh.size("pp")
        self._rank = torch.distributed.get_rank() if mesh.world_size > 1 else 0

    def gather(self, fed: FedBatch | None, tokens: int, problem: Exception | None, *, compare: bool) -> GlobalBatch:
        """Raises on all ranks what is wrong on one. One all-reduce of 4 integers along each dim of the mesh; with
        `compare` one all-gather of an integer along tp, cp and pp."""
        if compare:
            found = self._compare(-1 if fed is None or problem is not None else fingerprint(fed))
            problem = problem or found
        own = [int(problem is not None), self._rank if problem is not None else 0, 0 if fed is None else fed.rows]
        words = torch.tensor([*own, tokens], dtype=torch.int64, device=self._device)
        for comm in self._comms.values():
            words = comm.all_reduce(words)
        wrong, ranks, rows, total = words.tolist()
        if problem is not None:
            raise problem
        if wrong:
            who = f"rank {ranks}" if wrong == 1 else f"{wrong} ranks"
            raise ValueError(f"the batch of {who} is wrong: see the error there")
        if rows % self._sharing or total % self._sharing:
            raise ValueError(
                f"ranks that share a batch ({', '.join(d for d in SHARING if self._sizes[d] > 1)}) were fed different "
                f"ones: {rows} rows and {total} valid tokens of all ranks are no multiples of {self._sharing}"
            )
        return GlobalBatch(rows // self._sharing, total // self._sharing)

    def _compare(self, own: int) -> ValueError | None:
        """What is wrong among ranks that ought to have been fed the same; -1: this one has another problem."""
        prints = torch.tensor([own], dtype=torch.int64, device=self._device)
        for dim in SHARING:
            if dim in self._comms:
                prints = self._comms[dim].all_gather(prints)
        if int(prints.min()) < 0:
            return None  # somebody has a problem, and says so
        grid = prints.view(self._sizes["pp"], self._sizes["cp"], self._sizes["tp"])
        for place, dim in enumerate(("pp", "cp", "tp")):
            first = grid.select(place, 0)
            for rank in range(1, self._sizes[dim]):
                if not torch.equal(grid.select(place, rank), first):
                    return ValueError(
                        f"{dim} ranks 0 and {rank} were fed different samples: ranks with the same data-parallel "
                        "coordinate read the same batch (samples(step, batch) says which)"
                    )
        return None


def fingerprint(fed: FedBatch) -> int:
    """A number that differs where tensors of batches do."""
    value = 0
    for name, x in sorted({**fed.inputs, "": fed.target}.items()):
        if isinstance(x, Tensor):
            raw = x.detach().cpu().contiguous().view(-1).view(torch.uint8) if x.numel() else torch.empty(0).byte()
            value = zlib.crc32(raw.numpy().data, zlib.crc32(f"{name}{tuple(x.shape)}".encode(), value))
    return value
