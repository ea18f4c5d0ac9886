"""What the shared-memory transport promises beyond what every transport does (test_comm.py): order and bits of
reductions on every instruction set, sizes around its buffers, regions, calls in the background, errors of all ranks.

Faults and determinism under delays are in tests/comm/test_comm_faults.py.
"""

from __future__ import annotations

import mmap
import os
import time

import pytest
import torch
import torch.distributed as dist

from fastpar import _ext
from fastpar.comm import CommError, CommMismatchError, Communicator, record
from fastpar.comm.reduction import reduce_in_order
from fastpar.comm.shared_memory.library import library
from fastpar.comm.shared_memory.region import SharedRegion
from fastpar.comm.shared_memory.world import SLOT_BYTES
from tests import instruction_sets
from tests.dist import run_ranks
from tests.timing import assert_within

CAPABILITIES = instruction_sets.available("avx512", "avx2", "portable")
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]


def noise(size, numel, dtype, seed=0):
    """The x of every rank: sums whose result depends on the order, with NaN, infinities and subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return [torch.randint(limits.min, limits.max, (numel,), generator=generator, dtype=dtype) for _ in range(size)]
    xs = [torch.randn(numel, generator=generator, dtype=torch.float64) * 10 ** (2 * rank) for rank in range(size)]
    for rank, x in enumerate(xs):
        x[rank::97] = float("nan")
        x[rank + 5 :: 89] = float("inf")
        x[7::31] = 1e-41
    return [x.to(dtype) for x in xs]


def same_bits(actual, wanted):
    """Equal bit for bit, but for the payload of NaN."""
    assert actual.dtype == wanted.dtype
    if actual.dtype.is_floating_point:
        nan = torch.isnan(wanted)
        assert torch.equal(torch.isnan(actual), nan)
        actual, wanted = actual.masked_fill(nan, 0), wanted.masked_fill(nan, 0)
        assert torch.equal(torch.signbit(actual), torch.signbit(wanted))
    assert torch.equal(actual, wanted)


def shared(timeout=20.0):
    return Communicator(dist.group.WORLD, timeout=timeout, transport="shared_memory")


# ---- reductions


def check_order(capability):
    comm = shared()
    with instruction_sets.using(capability):
        for dtype in DTYPES:
            for op in ("sum", "max", "min", "avg")[: 4 if dtype.is_floating_point else 3]:
                for numel in (1, 63, 1031, 40_003):  # the last beyond one-shot, for 16-bit and wider, and with a tail
                    xs = noise(comm.size, numel, dtype)
                    wanted = reduce_in_order(xs, op)
                    same_bits(comm.all_reduce(xs[comm.rank], op), wanted)
                    sizes = [numel // 3] + [0] * (comm.size - 2) + [numel - numel // 3]
                    same_bits(comm.reduce_scatter(xs[comm.rank], op, sizes=sizes), wanted.split(sizes)[comm.rank])
                    reduced = comm.reduce(xs[comm.rank], comm.size - 1, op)
                    if reduced is not None:
                        same_bits(reduced, wanted)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_reductions_add_in_rank_order_and_round_once_on_every_instruction_set(world_size, capability):
    run_ranks(world_size, check_order, capability)


def check_algorithms():
    """The same call with every input as large as one-shot allows, as two-shot with small and large chunks, and in a
    region."""
    comm = shared()
    numel = 50_021
    xs = noise(comm.size, numel, torch.bfloat16)
    wanted = reduce_in_order(xs, "sum")
    region = SharedRegion(comm, 2 * numel)
    results = []
    for one_shot, chunk in ((1 << 20, 1 << 20), (0, 64), (0, 4096), (0, 1 << 20)):
        library().comm_tune(one_shot, chunk)
        comm.barrier()
        results.append(comm.all_reduce(xs[comm.rank]))
        results.append(comm.all_reduce_async(xs[comm.rank]).wait())
        x = region.tensor((numel,), torch.bfloat16).copy_(xs[comm.rank])
        results.append(comm.all_reduce(x, out=x).clone())
        comm.barrier()
    library().comm_tune(64 << 10, 1 << 20)
    for result in results:
        same_bits(result, wanted)


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_algorithm_shows_in_the_bits(world_size):
    run_ranks(world_size, check_algorithms)


# ---- sizes


def check_sizes():
    comm = shared()
    size, rank = comm.size, comm.rank
    slot = SLOT_BYTES // 4
    for numel in (slot - 1, slot, slot + 1, 3 * slot + 17):
        xs = [torch.arange(numel, dtype=torch.float32) % 1000 + other for other in range(size)]
        total = sum(xs[1:], xs[0])
        assert torch.equal(comm.all_reduce(xs[rank]), total)
        assert torch.equal(comm.reduce_scatter(xs[rank]), total.split(-(-numel // size))[rank])
        assert torch.equal(comm.all_gather(xs[rank]), torch.cat(xs))
        assert torch.equal(comm.broadcast(xs[rank], size - 1), xs[size - 1])
        sizes = [0] * size
        sizes[-1] = numel  # all to the last rank, nothing to others
        received = [numel if rank == size - 1 else 0] * size
        got = comm.all_to_all(xs[rank], input_sizes=sizes, output_sizes=received)
        assert torch.equal(got, torch.cat(xs) if rank == size - 1 else torch.empty(0))
    # neither aligned to a cache line nor of a length that is
    for offset in (1, 3):
        base = torch.zeros(70_007)
        x = base[offset:].copy_(torch.arange(70_007 - offset) % 100)
        comm.all_reduce(x, out=x)
        assert torch.equal(x, torch.arange(70_007 - offset) % 100 * float(size))
        assert base[:offset].count_nonzero() == 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_around_and_beyond_the_exchange_buffers_arrive_whole(world_size):
    run_ranks(world_size, check_sizes)


def check_large_results():
    _ext.load()
    comm, buffers = shared(), torch.ops.fastpar.large_buffer_stats
    x = torch.ones(3 << 19)  # 6 MB: a gathered pair is large, one is not
    for _ in range(2):  # the long way, and then the short one
        in_use = buffers()[0]
        gathered = comm.all_gather(x)
        assert buffers()[0] >= in_use + gathered.nbytes
        assert torch.equal(gathered, torch.ones(3 << 20))
        in_use = buffers()[0]
        assert torch.equal(comm.broadcast(gathered), gathered)
        copy = comm.all_to_all(gathered)
        assert buffers()[0] >= in_use + copy.nbytes
        del gathered, copy


def test_large_results_come_from_the_pool_of_buffers():
    run_ranks(2, check_large_results)


# ---- groups, order, background


def check_groups():
    world = shared()
    rank = world.rank
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 3])]
    mine = [
        Communicator(group, transport="shared_memory")
        for group in groups
        if group is not dist.GroupMember.NON_GROUP_MEMBER
    ]
    pending = []
    for step in range(20):  # different groups in flight at once, awaited in another order
        for comm in (*mine, world):
            pending.append((comm, step, comm.all_reduce_async(torch.full((5 + step,), float(rank + step)))))
    for comm, step, work in reversed(pending):
        ranks = dist.get_process_group_ranks(comm.group)
        assert torch.equal(work.wait(), torch.full((5 + step,), float(sum(ranks) + step * len(ranks))))


def test_overlapping_groups_make_progress_together():
    run_ranks(4, check_groups)


def check_interleaved():
    """Rank 0 waits for what rank 1 sends only after its own wait has returned: it needs progress behind its back."""
    comm, other = shared(), Communicator(dist.new_group([0, 1]), transport="shared_memory")
    pending = comm.all_reduce_async(torch.ones(300_000))
    if comm.rank == 0:
        other.barrier()
        total = pending.wait()
    else:
        total = pending.wait()
        other.barrier()
    assert torch.equal(total, torch.full((300_000,), 2.0))


def test_a_collective_in_the_background_needs_nobody_to_wait_for_it():
    run_ranks(2, check_interleaved)


def check_dropped():
    """Results nobody waits for, and inputs nobody keeps."""
    comm = shared()
    for _ in range(50):
        comm.all_reduce_async(torch.ones(100_000))
    assert torch.equal(comm.all_reduce(torch.ones(7)), torch.full((7,), float(comm.size)))


def test_a_pending_that_is_dropped_keeps_its_buffers_until_it_is_done():
    run_ranks(2, check_dropped)


def check_first_call_does_not_block():
    comm = Communicator(dist.group.WORLD, timeout=20.0)
    if comm.rank == 1:
        time.sleep(0.5)
    started = time.monotonic()
    pending = comm.all_reduce_async(torch.ones(3))
    took = time.monotonic() - started
    assert torch.equal(pending.wait(), torch.full((3,), float(comm.size)))
    return took


def test_launching_the_first_collective_does_not_wait_for_the_other_ranks():
    assert_within(0.25, lambda: max(run_ranks(2, check_first_call_does_not_block)))


# ---- in two phases


def check_split_phases():
    comm = shared()
    phases = comm.collectives("split_phase")
    size, rank = comm.size, comm.rank
    for numel in (6, 5000 * size, 700_000):  # one phase, one phase, several
        xs = [torch.arange(numel, dtype=torch.float32) % 100 + other for other in range(size)]
        total, x = sum(xs[1:], xs[0]), xs[rank]
        part = total.split(-(-numel // size))[rank]
        for _ in range(3):
            assert torch.equal(phases.all_reduce(x).wait(), total)
            first, second = phases.all_gather(x), phases.reduce_scatter(x)  # the second ends the first
            assert first.done()
            assert not second.done()
            third = comm.all_reduce_async(x)
            assert second.done()
            assert torch.equal(third.wait(), total)
            assert torch.equal(first.wait(), torch.cat(xs))
            assert torch.equal(second.wait(), part)
            phases.broadcast(x)  # nobody waits for it: the next one ends it
            assert torch.equal(comm.all_reduce(x), total)
            in_place = x.clone()
            assert phases.all_reduce(in_place, out=in_place).wait() is in_place
            assert torch.equal(in_place, total)
    behind = comm.all_reduce_async(torch.ones(200_000))  # where something is queued, phases queue behind it
    assert torch.equal(phases.all_reduce(torch.ones(3)).wait(), torch.full((3,), float(size)))
    assert torch.equal(behind.wait(), torch.full((200_000,), float(size)))
    pending = phases.all_reduce(torch.ones(2 + rank))
    with pytest.raises(CommMismatchError, match=r"rank 1: all_reduce .* 3 elements"):
        pending.wait()
    pending = phases.all_reduce(torch.ones(2 + rank))
    assert comm.all_reduce(torch.ones(1)).item() == size  # ends it, and is not to blame
    with pytest.raises(CommMismatchError, match=r"rank 1: all_reduce .* 3 elements"):
        pending.wait()


@pytest.mark.parametrize("world_size", [2, 3])
def test_split_phase_collectives_give_the_same_and_end_each_other(world_size):
    run_ranks(world_size, check_split_phases)


def check_split_phases_hide_a_late_rank():
    comm = shared()
    x = torch.ones(100)
    comm.all_reduce(x)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.3)
    pending = comm.collectives("split_phase").all_reduce(x)
    if comm.rank == 0:
        time.sleep(0.6)  # longer than rank 1 is late
    started = time.monotonic()
    pending.wait()
    return time.monotonic() - started if comm.rank == 0 else 0.0


def test_a_split_phase_collective_does_not_wait_for_a_rank_that_came_meanwhile():
    assert_within(0.1, lambda: max(run_ranks(2, check_split_phases_hide_a_late_rank)))


# ---- regions


def check_region():
    comm = shared()
    size, rank = comm.size, comm.rank
    region = SharedRegion(comm, 1 << 20)
    assert region.tensor((1 << 20,), torch.uint8).count_nonzero() == 0
    x = region.tensor((300, 257), torch.float32, offset=64)
    for step in range(6):
        x.fill_(rank + step)
        with record() as log:
            assert comm.all_reduce(x, out=x) is x
        assert [entry.op for entry in log] == ["all_reduce"]
        assert torch.equal(x, torch.full_like(x, size * (size - 1) / 2 + size * step))
    comm.barrier()
    # Each rank's part at a place of its own, and parts of different sizes.
    sizes = [10 * (other + 1) for other in range(size)]
    part = region.tensor((sizes[rank], 8), torch.float64, offset=8 * rank).fill_(float(rank))
    wanted = torch.cat([torch.full((n, 8), float(other), dtype=torch.float64) for other, n in enumerate(sizes)])
    assert torch.equal(comm.all_gather(part, sizes=sizes), wanted)
    whole = region.tensor((sum(sizes),), torch.bfloat16, offset=2 * 4096 * (rank % 2)).fill_(1.0)
    assert torch.equal(comm.reduce_scatter(whole, sizes=sizes), torch.full((sizes[rank],), float(size)).bfloat16())
    # One rank's tensor lies in the region, the others' do not.
    y = x.fill_(1.0) if rank == 0 else torch.ones(300, 257)
    comm.all_reduce(y, out=y)
    assert torch.equal(y, torch.full((300, 257), float(size)))
    assert torch.equal(
        comm.all_gather(region.tensor((4,), torch.float32).fill_(2.0) if rank else torch.full((4,), 2.0)),
        torch.full((4 * size,), 2.0),
    )
    # Peers' memory is there to read and write.
    comm.barrier()
    region.tensor((1,), torch.int64, rank=(rank + 1) % size).fill_(rank)
    comm.barrier()
    assert region.tensor((1,), torch.int64).item() == (rank - 1) % size
    comm.barrier()
    region.close()
    x.fill_(1.0)
    del region
    assert torch.equal(comm.all_reduce(x, out=x), torch.full_like(x, float(size)))


def check_forgotten():
    """New memory at the address of a region that nobody has closed is ordinary memory."""
    comm = shared()
    addresses = set()
    for step in range(5):
        region = SharedRegion(comm, 1 << 16)
        x = region.tensor((1 << 14,), torch.float32).fill_(1.0)
        comm.all_reduce(x, out=x)
        addresses.add(x.data_ptr())
        pending = comm.all_reduce_async(x, out=x)
        del region, x, pending
        comm.barrier()  # in order after it
        memory = mmap.mmap(-1, 1 << 16)  # lands where the region was, as a rule
        y = torch.frombuffer(memory, dtype=torch.float32).fill_(1.0 + step)
        comm.all_reduce(y, out=y)
        assert torch.equal(y, torch.full_like(y, comm.size * (1.0 + step)))


def test_memory_where_a_region_was_is_ordinary_memory():
    run_ranks(2, check_forgotten)


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_in_a_region_are_reduced_and_gathered_where_they_lie(world_size):
    run_ranks(world_size, check_region)


def check_region_arguments():
    comm = shared()
    with pytest.raises(ValueError, match=r"nbytes must be equal on all ranks, got \[64, 128\]"):
        SharedRegion(comm, 64 * (comm.rank + 1))
    with pytest.raises(ValueError, match="nbytes must be at least 1, got 0"):
        SharedRegion(comm, 0)
    region = SharedRegion(comm, 64)
    for shape, offset in (((17,), 0), ((1,), 2), ((4,), 56), ((1,), -4)):
        with pytest.raises(ValueError, match="does not fit"):
            region.tensor(shape, torch.float32, offset=offset)
    with pytest.raises(ValueError, match=r"rank must be in 0..1, got 2"):
        region.tensor((1,), torch.float32, rank=2)
    assert region.tensor((0, 3), torch.float32).shape == (0, 3)


def test_region_arguments_are_checked_on_every_rank():
    run_ranks(2, check_region_arguments)


# ---- errors


def check_mismatches():
    comm, x = shared(), torch.ones(8)
    rank = comm.rank
    calls = [
        (lambda: comm.all_reduce(x if rank else x[:4]), r"rank 0: all_reduce \(sum\) of 4 elements, float32; rank 1"),
        (lambda: comm.all_reduce(x.double() if rank else x), "float32.*float64"),
        (lambda: comm.all_reduce(x, "max" if rank else "min"), r"\(min\).*\(max\)"),
        (lambda: comm.broadcast(x, rank), "root 0.*root 1"),
        (lambda: comm.all_gather(x) if rank else comm.all_reduce(x), "all_reduce.*all_gather"),
        (lambda: comm.barrier() if rank else comm.all_reduce(x), "all_reduce.*barrier"),
        (lambda: comm.reduce_scatter(x, sizes=[8 * rank, 8 - 8 * rank]), "sizes #"),
        (
            lambda: comm.all_to_all(x, input_sizes=[4, 4], output_sizes=[4, 4] if rank else [4, 3]),
            "rank 0 sends 4 4 and expects 4 3",
        ),
        (lambda: comm.all_reduce_async(x if rank else x[:4]).wait(), "rank 0: all_reduce"),
    ]
    for call, words in calls:
        with pytest.raises(CommMismatchError, match=words):
            call()
        assert torch.equal(comm.all_reduce(x), x * comm.size)  # and the group goes on


def test_a_mismatch_is_an_error_on_every_rank_and_the_group_goes_on():
    run_ranks(2, check_mismatches)


def check_mismatch_of_one_of_three():
    comm = shared()
    with pytest.raises(CommMismatchError, match=r"rank 2: all_reduce \(sum\) of 3 elements"):
        comm.all_reduce(torch.ones(3 if comm.rank == 2 else 2))
    assert comm.all_reduce(torch.ones(1)).item() == 3


def test_a_mismatch_of_two_ranks_is_seen_by_the_third():
    run_ranks(3, check_mismatch_of_one_of_three)


def check_in_place_is_noticed_by_autograd():
    comm = shared()
    comm.barrier()
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    loss = (y * y).sum()
    comm.all_reduce(y.detach(), out=y.detach())
    z = y.detach()
    comm.all_reduce(z, out=z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_writing_to_out_is_noticed_by_autograd():
    run_ranks(2, check_in_place_is_noticed_by_autograd)


def check_fork():
    comm = shared()
    comm.barrier()
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(torch.ones(2))
        except CommError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert comm.all_reduce(torch.ones(1)).item() == comm.size


def test_a_forked_child_is_told_that_it_is_no_rank():
    run_ranks(2, check_fork)


# ---- compiled


def compiled():
    comm = shared()
    rank, size = comm.rank, comm.size
    x = torch.arange(8.0) + rank

    def step(x):
        parts = comm.reduce_scatter(comm.all_reduce(x * 2), dim=0)
        everything = comm.all_gather(parts + 1)
        swapped = comm.all_to_all(everything)
        comm.reduce(swapped, 0)  # nobody looks at the result: it must run all the same
        comm.barrier()
        return comm.broadcast(swapped, size - 1)

    return torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x)


def test_a_compiled_graph_holds_the_collectives_and_gives_the_eager_bits():
    for result, eager in run_ranks(2, compiled):
        assert torch.equal(result, eager)


# ---- transports


def check_transport_argument():
    with pytest.raises(ValueError, match="transport must be one of auto, torch, shared_memory, got 'nccl'"):
        Communicator(dist.group.WORLD, transport="nccl")
    auto, plain = Communicator(dist.group.WORLD), Communicator(dist.group.WORLD, transport="torch")
    assert plain.local_world() is None
    assert auto.local_world() is not None
    assert shared().local_world() is auto.local_world()  # one world for the group, whoever asks
    assert torch.equal(plain.all_reduce(torch.ones(3)), auto.all_reduce(torch.ones(3)))
    return os.listdir("/dev/shm")


def test_communicators_of_a_group_share_its_memory_and_leave_no_name_behind():
    before = os.listdir("/dev/shm")
    for names in run_ranks(2, check_transport_argument):
        assert names == before
