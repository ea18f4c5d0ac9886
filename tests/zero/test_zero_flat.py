"""Tensors split by rows over ranks, gathered and reduced: through shared memory and through torch.distributed."""

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import Communicator, record
from fastpar.zero.buckets import FlatGradients, Staging
from fastpar.zero.flat import FlatLayout, FlatShards
from tests.dist import run_ranks

SHAPES = [(5, 3), (2,), (), (7, 2, 2), (0, 4), (3, 0)]
TRANSPORTS = pytest.mark.parametrize("transport", ["shared_memory", "torch"])


def test_the_layout_of_the_docstring():
    layout = FlatLayout([(5, 3), (2,)], 2)
    assert layout.counts == (10, 7)
    assert [view.tolist() for view in layout.views(torch.arange(7), 1)] == [[[0, 1, 2], [3, 4, 5]], [6]]


def test_every_element_has_one_owner():
    for size in (1, 2, 3, 4, 8):
        layout = FlatLayout(SHAPES, size)
        for index, shape in enumerate(SHAPES):
            x = torch.arange(torch.Size(shape).numel()).view(shape)
            rows = [layout.rows_of(x, index, rank) for rank in range(size)]
            assert torch.equal(torch.cat(rows).view(shape), x)


def check_gather(transport):
    comm = Communicator(dist.group.WORLD, transport=transport)
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in SHAPES]
    shards = FlatShards(comm, tensors)
    assert shards.is_shared == (transport == "shared_memory")
    for step in range(6):
        for shard in shards.shards:
            shard.mul_(2.0)
        shards.published()
        outs = [torch.full_like(x, torch.nan) for x in tensors]
        with record() as sent:
            shards.gather(outs)
        assert [(entry.op, entry.numel) for entry in sent] == [("all_gather", shards.layout.total)]
        shards.released()
        for out, x in zip(outs, tensors, strict=True):
            assert torch.equal(out, x * 2.0 ** (step + 1))
    halved = [torch.empty(x.shape, dtype=torch.bfloat16) for x in tensors]
    shards.gather(halved)
    assert all(torch.equal(out, (x * 64).bfloat16()) for out, x in zip(halved, tensors, strict=True))


@TRANSPORTS
def test_gathered_shards_are_the_whole_tensors(transport):
    run_ranks(3, check_gather, transport)


def check_reduce(transport, mode):
    comm = Communicator(dist.group.WORLD, transport=transport)
    generator = torch.Generator().manual_seed(comm.rank)
    layout = FlatLayout(SHAPES, comm.size)
    staging = Staging(comm, layout.total + 5, torch.float32, torch.device("cpu"))
    for _ in range(6):
        grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
        memory = staging.take()
        gradients = FlatGradients(comm, layout, memory.mine, mode=mode)
        for indices in ([3, 0], [2]):  # the others count as zero
            gradients.put(indices, [grads[index] for index in indices])
        rows = gradients.reduce().wait()
        staging.give_back(memory)
        for index, grad in enumerate(grads):
            everyone = comm.all_gather(grad.reshape(1, -1)).view(comm.size, *grad.shape)
            mean = everyone.sum(0) / comm.size if index in (3, 0, 2) else torch.zeros_like(grad)
            torch.testing.assert_close(rows[index], layout.rows_of(mean, index, comm.rank))


@TRANSPORTS
@pytest.mark.parametrize("mode", ["background", "split_phase", "blocking"])
def test_reduced_gradients_are_the_rows_of_the_mean(transport, mode):
    run_ranks(3, check_reduce, transport, mode)


def test_staging_buffers_are_counted():
    staging = Staging(Communicator(None), 10, torch.float32, torch.device("cpu"), count=1)
    memory = staging.take()
    with pytest.raises(RuntimeError, match="in use"):
        staging.take()
    staging.give_back(memory)
    assert staging.take() is memory
