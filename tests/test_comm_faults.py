"""What ranks get when they do not do the same, are late, or die: over shared memory, a clean error on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import Communicator
from fastpar.comm.shared_region import SharedRegion
from tests.dist import run_ranks

# ---- data in a region on some ranks only


def partly_in_a_region(op: str, with_region: list[int]) -> None:
    comm = Communicator(dist.group.WORLD, timeout=10.0)
    rank, size, numel = comm.rank, comm.size, 3 << 18  # several chunks
    region = SharedRegion(comm, 4 * numel)
    x = region.tensor((numel,), torch.float32) if rank in with_region else torch.empty(numel)
    base = torch.arange(numel) % 7
    for repeat in range(3):
        every_x = [(base + r + repeat).float() for r in range(size)]
        x.copy_(every_x[rank])
        if op == "all_reduce":
            assert torch.equal(comm.all_reduce(x, out=x), sum(every_x))
        elif op == "reduce_scatter":
            assert torch.equal(comm.reduce_scatter(x), sum(every_x).chunk(size)[rank])
        else:
            assert torch.equal(comm.all_gather(x), torch.cat(every_x))
        comm.barrier()
    region.close()


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("with_region", [[0], [1, 2], [0, 1, 2]])
def test_data_may_lie_in_a_region_on_some_ranks_only(op, with_region):
    run_ranks(3, partly_in_a_region, op, with_region)
