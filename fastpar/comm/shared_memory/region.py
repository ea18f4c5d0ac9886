"""Memory of the same size on every rank of a group, which all of them map: what needs no copy to be exchanged."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm.communicator import Communicator
from fastpar.comm.errors import CommError
from fastpar.comm.multi_host.host_ranks import HostRanks
from fastpar.comm.shared_memory.library import int64_array, library
from fastpar.comm.shared_memory.world import LocalWorld


class _RegionMapping:
    """Owns the mapping; every tensor over it keeps it alive, and a collective under way keeps its tensors."""

    def __init__(self, handle: int, world: LocalWorld) -> None:
        self._finalizer = weakref.finalize(self, _release, handle, world)


def _release(handle: int, world: LocalWorld) -> None:
    """Makes the library forget the address: later memory there must not be taken for a part of the region."""
    library().region_forget(handle, world.handle)
    library().region_destroy(handle)


class SharedRegion:
    """`nbytes` of zeroed memory on every rank of `comm`, mapped by all of them (CPU, one host: a group's, or its part
    there, `Communicator.host_ranks()`).

        region = SharedRegion(comm, nbytes)          # collective: every rank of the group, with the same nbytes
        x = region.tensor((1024, 1024), torch.float32)
        comm.all_reduce(x, out=x)                    # needs no copy: ranks reduce each other's memory in place
        region.tensor((1024, 1024), torch.float32, rank=1)      # what lies there on rank 1

    Collectives of `comm`'s group notice tensors that lie in a region: all_reduce with out=x, reduce_scatter and
    all_gather then read the other ranks' memory where it is. Nothing else orders accesses to another rank's memory:
    use a barrier.

    Raises CommError where the ranks cannot share memory. `close()` ends its part in collectives; the memory itself
    lives as long as tensors over it.
    """

    @checked(computed=False)
    def __init__(self, comm: Communicator | HostRanks, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, got {nbytes}")
        world = comm.local_world()
        if world is None or world.size != comm.size:
            raise CommError(f"the ranks of the group cannot share memory: {comm!r}")
        self.rank, self.size, self.nbytes = comm.rank, comm.size, nbytes
        self._world = world
        self._handle = library().region_create(nbytes) or 0
        problem = "" if self._handle else library().error_text()
        descriptor = library().region_descriptor(self._handle) if self._handle else -1
        everyone = comm.all_gather(torch.tensor([os.getpid(), descriptor, nbytes]))
        pids, descriptors, sizes = everyone.view(-1, 3).unbind(1)
        if not problem and len(set(sizes.tolist())) > 1:
            problem = f"nbytes must be equal on all ranks, got {sizes.tolist()}"
        if not problem and int(descriptors.min()) < 0:
            problem = "another rank could not create its memory"
        if not problem:
            status = library().region_connect(
                self._handle, world.handle, int64_array(pids.tolist()), int64_array(descriptors.tolist())
            )
            problem = library().error_text() if status else ""
        # Nobody closes its descriptor before all have opened it, and all succeed or none.
        is_fine = int(comm.all_reduce(torch.tensor([not problem], dtype=torch.int64), "min")) == 1
        self._is_open = is_fine
        if not is_fine:
            if self._handle:
                library().region_destroy(self._handle)
            error = ValueError if "nbytes" in problem else CommError
            raise error(problem or "another rank could not open the memory of its peers")
        library().region_seal(self._handle)
        self._memory = _RegionMapping(self._handle, world)

    @checked(computed=False)
    def address(self, rank: int) -> int:
        """The address of rank's memory in this process."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be in 0..{self.size - 1}, got {rank}")
        return int(library().region_address(self._handle, rank))

    @checked(computed=False)
    def tensor(self, shape: Sequence[int], dtype: torch.dtype, *, offset: int = 0, rank: int | None = None) -> Tensor:
        """A contiguous tensor over the memory of `rank` (None: this one), from byte `offset` on."""
        count = math.prod(shape)
        if offset < 0 or offset % dtype.itemsize or offset + count * dtype.itemsize > self.nbytes:
            raise ValueError(
                f"{tuple(shape)} {dtype} at offset {offset} does not fit into {self.nbytes} bytes "
                f"(offset must be a multiple of {dtype.itemsize})"
            )
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        start = self.address(self.rank if rank is None else rank) + offset
        memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(start)
        memory.owner = self._memory  # the tensor keeps `memory` alive, and that the mapping
        return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    def close(self) -> None:
        """Forget the memory; it is unmapped when no tensor of it is left. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            library().region_forget(self._handle, self._world.handle)
