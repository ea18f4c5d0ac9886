"""Every collective against what one process computes from the same inputs.

Inputs are small integers, so that sums are exact in every dtype and compared for equality, but in tests of rounding.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fastpar.comm import (
    CommError,
    Communicator,
    all_reduce_coalesced,
    all_to_all,
    copy_to,
    gather_from,
    gather_sequence,
    record,
    reduce_from,
    reduce_scatter_sequence,
    scatter_to,
    shard_range,
    shard_sizes,
    trace,
)
from fastpar.comm.observers import algorithmic_bytes
from tests.counting import count_collectives
from tests.dist import run_ranks, say_done, stay_away_until_done

SHAPES = [(1,), (257,), (5, 7), (0, 3)]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]
WORLD_SIZES = [1, 2, 3, 4]
REPEATS = 6
_BIG = (131, 1024)  # above the size from which gloo's ring reduces


def inputs(size, shape, dtype, seed=0):
    """The x of every rank, known to every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 5, shape, generator=generator).to(dtype) for _ in range(size)]


def expected(xs, op):
    stacked = torch.stack(xs)
    if op in ("max", "min"):
        wide = stacked.to(torch.float64) if not stacked.dtype.is_floating_point else stacked
        return getattr(wide, f"a{op}")(0).to(xs[0].dtype)
    total = stacked.to(torch.float64).sum(0)
    return (total / len(xs) if op == "avg" else total).to(xs[0].dtype)


def same(actual, wanted):
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


def ops_for(dtype):
    return [op for op in ("sum", "avg", "max", "min") if not (op == "avg" and not dtype.is_floating_point)]


def uneven(total, size):
    """Ragged sizes with an empty shard where there are ranks enough."""
    sizes = [0] * size
    sizes[size - 1] = total - total // 3 if size > 1 else total
    sizes[0] += total - sum(sizes)
    return sizes


def group_and_data(seed=0):
    comm = Communicator(dist.group.WORLD, timeout=20.0)
    return comm, comm.rank, comm.size


def check_all_reduce():
    comm, rank, size = group_and_data()
    for shape in (*SHAPES, _BIG):
        for dtype in DTYPES if shape == (5, 7) else FLOATS:
            for op in ops_for(dtype) if shape != _BIG else ("sum", "max"):
                if dtype == torch.bool and op == "sum":
                    continue
                xs = inputs(size, shape, dtype)
                x = xs[rank].clone()
                same(comm.all_reduce(x, op), expected(xs, op))
                same(x, xs[rank])  # functional
                assert comm.all_reduce(x, op, out=x) is x
                same(x, expected(xs, op))
    xs = inputs(size, (6, 4), torch.float32)
    strided = xs[rank].t().contiguous().t()
    same(comm.all_reduce(strided), expected(xs, "sum"))
    out = torch.zeros(4, 6).t()
    comm.all_reduce(strided, out=out)
    torch.testing.assert_close(out, expected(xs, "sum"), rtol=0, atol=0)
    scalar = comm.all_reduce(torch.tensor(float(rank + 1)))
    assert scalar.shape == ()
    assert scalar.item() == size * (size + 1) / 2


def check_reduce_scatter():
    comm, rank, size = group_and_data()
    for shape in SHAPES:
        for dim in (0, 1, -1)[: 3 if len(shape) > 1 else 1]:
            for sizes in (None, uneven(shape[dim], size)):
                for dtype in (torch.float32, torch.bfloat16, torch.int16) if shape == (5, 7) else (torch.float32,):
                    for op in ops_for(dtype):
                        xs = inputs(size, shape, dtype)
                        parts = expected(xs, op).split(sizes or shard_sizes(shape[dim], size), dim)
                        same(comm.reduce_scatter(xs[rank], op, dim=dim, sizes=sizes), parts[rank].contiguous())


def check_gathers():
    comm, rank, size = group_and_data()
    for shape in SHAPES:
        for dim in (0, 1, -1)[: 3 if len(shape) > 1 else 1]:
            for dtype in (
                (torch.float32, torch.bool, torch.int16, torch.complex64) if shape == (5, 7) else (torch.float32,)
            ):
                xs = inputs(size, shape, dtype)
                same(comm.all_gather(xs[rank], dim=dim), torch.cat(xs, dim))
                whole = inputs(1, shape, dtype, seed=1)[0]
                for sizes in (shard_sizes(shape[dim], size), uneven(shape[dim], size)):
                    parts = whole.split(sizes, dim)
                    same(comm.all_gather(parts[rank], dim=dim, sizes=sizes), whole)
                    for root in {0, size - 1}:
                        gathered = comm.gather(parts[rank], root, dim=dim, sizes=sizes)
                        if rank == root:
                            same(gathered, whole)
                        else:
                            assert gathered is None
                        given = whole if rank == root else None
                        meta = torch.empty(shape, dtype=dtype, device="meta")
                        part = comm.scatter(given, root, dim=dim, sizes=sizes, like=meta)
                        same(part, parts[rank].contiguous())


def reduce_over_gloo():
    """Over gloo as fastpar sends, and over gloo's own, below and above the size from which its ring reduces."""
    for check, shape in itertools.product((None, False), ((5, 7), _BIG)):
        comm = Communicator(dist.group.WORLD, timeout=20.0, transport="torch", check=check)
        for dtype in FLOATS:
            for op in ops_for(dtype):
                xs = inputs(comm.size, shape, dtype)
                same(comm.all_reduce(xs[comm.rank], op), expected(xs, op))
        for dtype in (torch.bfloat16, torch.float16):
            xs = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(comm.size)]
            total = torch.stack(xs).double().sum(0)
            same(comm.all_reduce(xs[comm.rank]), total.float().to(dtype))


@pytest.mark.parametrize("world_size", [2, 4])
def test_gloo_averages_and_rounds_once_at_any_size(world_size):
    run_ranks(world_size, reduce_over_gloo)


def check_rooted():
    comm, rank, size = group_and_data()
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.int16) if shape == (5, 7) else (torch.float32,):
            xs = inputs(size, shape, dtype)
            for root in range(size):
                same(comm.broadcast(xs[rank], root), xs[root])
                for op in ops_for(dtype):
                    reduced = comm.reduce(xs[rank], root, op)
                    if rank == root:
                        same(reduced, expected(xs, op))
                    else:
                        assert reduced is None
    comm.barrier()
    assert comm.barrier_async().wait() is None


def check_all_to_all():
    comm, rank, size = group_and_data()
    table = [
        [(3 * source + target) % 4 for target in range(size)] for source in range(size)
    ]  # rows from source to target
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        for row in ((), (3,), (0,)):
            xs = [inputs(1, (sum(table[r]), *row), dtype, seed=r)[0] for r in range(size)]
            wanted = torch.cat([xs[source].split(table[source])[rank] for source in range(size)])
            received = [table[source][rank] for source in range(size)]
            same(comm.all_to_all(xs[rank], input_sizes=table[rank], output_sizes=received), wanted)
    equal = inputs(size, (2 * size, 3), torch.float32)
    same(comm.all_to_all(equal[rank]), torch.cat([x.chunk(size)[rank] for x in equal]))


def check_repeats(late_rank):
    """Async, waited for in the opposite order, again and again, with one rank late."""
    comm, rank, size = group_and_data()
    for repeat in range(REPEATS):
        xs = inputs(size, (5, 7), torch.float32, seed=repeat)
        if rank == late_rank:
            time.sleep(0.05)
        pendings = [
            comm.all_reduce_async(xs[rank]),
            comm.all_gather_async(xs[rank], dim=1),
            comm.reduce_scatter_async(xs[rank], dim=1),
        ]
        order = reversed(range(3)) if rank % 2 else range(3)
        results = {index: pendings[index].wait() for index in order}
        total = expected(xs, "sum")
        same(results[0], total)
        same(results[1], torch.cat(xs, 1))
        same(results[2], total.split(shard_sizes(7, size), 1)[rank].contiguous())
        assert all(pending.done() for pending in pendings)
        assert pendings[0].wait() is results[0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "check", [check_all_reduce, check_reduce_scatter, check_gathers, check_rooted, check_all_to_all]
)
def test_collective_matches_one_process(check, world_size):
    run_ranks(world_size, check)


@pytest.mark.parametrize("late_rank", [None, 1])
def test_async_results_do_not_depend_on_the_order_of_waits_or_a_late_rank(late_rank):
    run_ranks(3, check_repeats, late_rank)


# ---- precision and order of reductions


def reductions_of_random_values():
    comm, rank, size = group_and_data()
    found = {}
    for dtype in FLOATS:
        for shape in ((5, 7), _BIG):
            xs = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
            wide = torch.float32 if dtype.itemsize == 2 else dtype
            ordered = xs[0].to(wide)
            for x in xs[1:]:
                ordered = ordered + x.to(wide)
            reduced = comm.all_reduce(xs[rank])
            assert torch.equal(reduced, comm.all_reduce_async(xs[rank]).wait())
            small = shape == (5, 7)
            if small or dtype.itemsize == 2:
                same(reduced, ordered.to(dtype))
            same(comm.reduce_scatter(xs[rank]), ordered.to(dtype).split(shard_sizes(shape[0], size))[rank])
            found[dtype, small] = reduced
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reductions_round_once_in_rank_order_and_have_the_same_bits_on_every_rank(world_size):
    results = run_ranks(world_size, reductions_of_random_values)
    for other in results[1:]:
        for key, value in results[0].items():
            assert torch.equal(value, other[key]), key


# ---- groups, arguments


def subgroups():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"1-D DeviceMesh, got dims \('dp', 'tp'\)"):
        Communicator(mesh)
    x = torch.tensor([float(rank)])
    assert Communicator(mesh["tp"]).all_reduce(x).item() == {0: 1, 1: 1, 2: 5, 3: 5}[rank]
    assert Communicator(mesh.get_group("dp")).all_reduce(x).item() == {0: 2, 1: 4, 2: 2, 3: 4}[rank]
    comm = Communicator(mesh["dp"])
    assert Communicator.of(comm) is comm
    assert Communicator.of(mesh["tp"]).size == 2
    assert comm.broadcast(x, 1).item() == rank % 2 + 2
    alone = dist.new_group([3])
    if rank == 3:
        assert Communicator(alone).size == 1
    else:
        with pytest.raises(ValueError, match="not a member"):
            Communicator(alone)


def test_a_communicator_of_a_subgroup_or_mesh_dim_reaches_only_its_ranks():
    run_ranks(4, subgroups)


def bad_arguments():
    comm = Communicator(dist.group.WORLD)
    x = torch.ones(4, 3)
    bad = [
        (ValueError, "op must be one of sum, avg, max, min, got 'mean'", lambda: comm.all_reduce(x, "mean")),
        (TypeError, '"avg" needs a floating-point', lambda: comm.all_reduce(x.int(), "avg")),
        (TypeError, "use .max. for any", lambda: comm.all_reduce(x.bool())),
        (TypeError, "view_as_real", lambda: comm.all_reduce(x.to(torch.complex64))),
        (TypeError, "must be a tensor, got list", lambda: comm.all_gather([1.0])),
        (ValueError, "out must have the shape", lambda: comm.all_reduce(x, out=torch.ones(3))),
        (IndexError, r"dim must be in -2..1", lambda: comm.all_gather(x, dim=2)),
        (ValueError, "one entry per rank", lambda: comm.all_gather(x, sizes=[4])),
        (ValueError, r"sizes\[\d\] must be the 4 rows", lambda: comm.all_gather(x, sizes=[5, 5])),
        (ValueError, "add up to the 4 rows", lambda: comm.reduce_scatter(x, sizes=[1, 2])),
        (ValueError, "not be negative", lambda: comm.reduce_scatter(x, sizes=[5, -1])),
        (ValueError, "src must be a rank of the group, 0..1, got 2", lambda: comm.broadcast(x, 2)),
        (ValueError, "dst must be a rank", lambda: comm.reduce(x, -1)),
        (ValueError, "3 rows, not divisible by 2", lambda: comm.all_to_all(torch.ones(3))),
        (ValueError, "output_sizes must be given", lambda: comm.all_to_all(x, input_sizes=[1, 3])),
        (ValueError, "add up to the 4 rows of x", lambda: comm.all_to_all(x, input_sizes=[1, 1])),
        (ValueError, "on rank src", lambda: comm.scatter(None, dist.get_rank())),
        (ValueError, "timeout must be positive", lambda: Communicator(None, timeout=0)),
        (ValueError, "bucket_bytes", lambda: all_reduce_coalesced([x], comm, bucket_bytes=0)),
    ]
    with count_collectives() as counts:
        for error, words, call in bad:
            with pytest.raises(error, match=words):
                call()
    assert counts.total == 0


def test_bad_arguments_are_rejected_before_anything_is_sent():
    run_ranks(2, bad_arguments)


def test_one_rank_needs_no_process_group_and_still_gives_new_tensors():
    comm = Communicator()
    x = torch.randn(3, 4)
    with count_collectives() as counts, record() as log:
        results = [
            comm.all_reduce(x, "avg"),
            comm.reduce_scatter(x, dim=1),
            comm.all_gather(x, dim=1),
            comm.all_to_all(x),
            comm.broadcast(x),
            comm.reduce(x),
            comm.scatter(x),
            comm.gather(x),
        ]
        comm.barrier()
    for result in results:
        same(result, x)
        assert result.data_ptr() != x.data_ptr()
    assert (counts.total, log) == (0, [])
    with pytest.raises(TypeError, match="must be a ProcessGroup, a 1-D DeviceMesh, a Communicator or None, got str"):
        Communicator("tp")


# ---- failures


def nobody_else_calls(waiter):
    comm = Communicator(dist.group.WORLD, timeout=1.0)
    if comm.rank != waiter:
        stay_away_until_done([waiter])
        return None
    started = time.monotonic()
    pending = comm.all_reduce_async(torch.ones(3, dtype=torch.float64))
    with pytest.raises(CommError, match=r"0\.2 s after the call") as early:
        pending.wait(timeout=0.2)
    assert not pending.done()
    with pytest.raises(CommError) as late:
        pending.wait()
    took = time.monotonic() - started
    with pytest.raises(CommError):
        pending.wait()
    say_done()
    return took, str(early.value), str(late.value)


def test_a_rank_that_never_calls_becomes_an_error_naming_the_operation_at_the_deadline():
    took, _, message = run_ranks(2, nobody_else_calls, 0)[0]
    assert 0.9 < took < 2.0
    for word in (
        "all_reduce #0",
        "shape (3,)",
        "torch.float64",
        "on rank 0 of 2",
        "global ranks [0, 1]",
        "1 s after its launch",
    ):
        assert word in message


# ---- counting


def record_and_count():
    comm = Communicator(dist.group.WORLD)
    x = torch.ones(8, 6, requires_grad=True)
    with count_collectives() as counts, record() as log:
        y = reduce_from(copy_to(x, comm) * 2, comm)
        forward = counts.total
        y.sum().backward()
    assert (forward, counts.total) == (1, 2)
    assert [(r.op, r.size, r.numel, r.dtype, r.nbytes) for r in log] == [("all_reduce", 2, 48, torch.float32, 192)] * 2
    with record() as log:
        gather_sequence(x, comm, dim=0).sum().backward()
        comm.all_to_all(x)
        comm.barrier()
    assert [(r.op, r.nbytes) for r in log] == [
        ("all_gather", 192),
        ("reduce_scatter", 192),
        ("all_to_all", 96),
        ("barrier", 0),
    ]
    return counts.by_op


def traced() -> tuple[list, list, float, float]:
    comm = Communicator(dist.group.WORLD)
    x = torch.ones(1000)
    comm.barrier()
    with trace() as found:
        time.sleep(0.05 if dist.get_rank() else 0)
        with found.phase("launch"):
            pending = comm.all_reduce_async(x)
        with found.phase("wait"):
            pending.wait()
            pending.wait()
        comm.all_gather(x)
    comm.barrier()
    spans = [(s.op, s.size, s.nbytes, s.launched <= s.returned <= s.done, len(s.waits)) for s in found.spans]
    return (
        spans,
        [name for name, *_ in found.phases],
        found.waited("wait"),
        found.spans[0].done - found.spans[0].launched,
    )


def test_a_trace_has_every_collective_with_the_time_that_it_was_waited_for(tmp_path):
    for rank, (spans, phases, waited, lasted) in enumerate(run_ranks(2, traced)):
        assert spans == [("all_reduce", 2, 4000, True, 1), ("all_gather", 2, 4000, True, spans[1][4])]
        assert phases == ["launch", "wait"]
        assert 0 < waited <= lasted
        assert rank or waited >= 0.02  # rank 0 waits for the one that sleeps
    with trace() as found, found.phase("alone"):
        Communicator(None).all_reduce(torch.ones(3))
    assert found.spans == []  # one rank sends nothing
    found.to_chrome_trace(tmp_path / "trace.json")
    (event,) = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (event["name"], event["ph"], event["tid"]) == ("alone", "X", "phases")


def test_record_and_the_independent_counter_agree_and_see_the_backward_pass():
    run_ranks(2, record_and_count)


def test_an_all_reduce_is_the_bytes_of_a_reduce_scatter_and_an_all_gather():
    for size in (2, 3, 4):
        halves = [algorithmic_bytes(op, size, 1200) for op in ("reduce_scatter", "all_gather")]
        assert sum(halves) == algorithmic_bytes("all_reduce", size, 1200) == 2 * 1200 * (size - 1) // size


def coalesced():
    comm, rank, size = group_and_data()
    shapes = [(3, 5), (), (0,), (257,), (2, 2)]
    groups = [
        inputs(size, shape, dtype, seed)
        for seed, shape in enumerate(shapes)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for limit, launches in ((25 << 20, 2), (1, None)):
        mine = [xs[rank].clone() for xs in groups]
        mine[0] = mine[0].t().contiguous().t()
        with record() as log:
            all_reduce_coalesced(mine, comm, "avg", bucket_bytes=limit)
        assert launches is None or len(log) == launches
        for tensor, xs in zip(mine, groups, strict=True):
            torch.testing.assert_close(tensor, expected(xs, "avg"))
    with record() as log:
        all_reduce_coalesced([torch.ones(10) for _ in range(5)], comm, "sum", bucket_bytes=100)
    assert len(log) == 3  # two of 40 bytes have room, and a third has none


def test_coalesced_all_reduce_averages_in_place_in_one_collective_per_bucket():
    run_ranks(2, coalesced)


# ---- the autograd pairs: unsharded functions of the concatenated input as the reference


def check_pairs():
    comm, rank, size = group_and_data()
    generator = torch.Generator().manual_seed(3)
    for dim, sizes in ((0, None), (-1, None), (1, uneven(6, size)), (0, uneven(12, size))):
        whole = torch.randn(12, 6, dtype=torch.float64, generator=generator)
        rows = sizes or shard_sizes(whole.size(dim), size)
        if sizes is None and len(set(rows)) > 1:
            sizes = rows
        weights = [torch.randn(12, 6, dtype=torch.float64, generator=generator) for _ in range(size)]
        shard = whole.split(rows, dim)[rank].clone().requires_grad_()

        # Every rank computes the same from what was gathered.
        y = gather_from(shard, comm, dim=dim, sizes=sizes)
        torch.testing.assert_close(y, whole, rtol=0, atol=0)
        (y * weights[0]).sum().backward()
        torch.testing.assert_close(shard.grad, weights[0].split(rows, dim)[rank])

        # Every rank computes its own share: the whole loss is the sum over ranks.
        shard.grad = None
        (gather_sequence(shard, comm, dim=dim, sizes=sizes) * weights[rank]).sum().backward()
        torch.testing.assert_close(shard.grad, sum(weights).split(rows, dim)[rank])

        full = whole.clone().requires_grad_()
        y = scatter_to(full, comm, dim=dim, sizes=sizes)
        torch.testing.assert_close(y, whole.split(rows, dim)[rank].contiguous(), rtol=0, atol=0)
        (y * weights[0].split(rows, dim)[rank]).sum().backward()
        torch.testing.assert_close(full.grad, weights[0])

        full = (whole * (rank + 1)).requires_grad_()
        y = reduce_scatter_sequence(full, comm, dim=dim, sizes=sizes)
        torch.testing.assert_close(y, (whole * (size * (size + 1) / 2)).split(rows, dim)[rank].contiguous())
        (y * weights[0].split(rows, dim)[rank]).sum().backward()
        torch.testing.assert_close(full.grad, weights[0])


def check_results_may_be_written_to():
    comm, rank, size = group_and_data()
    pairs = [reduce_from, *(functools.partial(f, dim=0) for f in (gather_from, scatter_to)), all_to_all]
    for pair in (*pairs, *(functools.partial(f, dim=0) for f in (gather_sequence, reduce_scatter_sequence))):
        found = []
        for in_place in (True, False):
            x = torch.linspace(rank, rank + 2, 2 * size, dtype=torch.float64).view(size, 2).requires_grad_()
            y = pair(x, comm)
            y = y.mul_(3.0) if in_place else y * 3.0
            y.square().sum().backward()
            found.append((y.detach(), x.grad))
        torch.testing.assert_close(*found, rtol=0, atol=0)


def check_copy_and_reduce():
    """A column- then row-parallel MLP, with x used twice, checkpointed and not; sum() sends expanded gradients."""
    comm, rank, size = group_and_data()
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    up = torch.randn(12, 6, dtype=torch.float64, generator=generator)
    down = torch.randn(6, 12, dtype=torch.float64, generator=generator)

    def whole(x, up, down):
        return (torch.tanh(x @ up.t()) + torch.sin(x @ up.t())) @ down.t()

    reference = [t.clone().requires_grad_() for t in (x, up, down)]
    wanted = whole(*reference)
    wanted.sum().backward()
    start, stop = shard_range(12, size, rank)
    for checkpointed in (False, True):
        mine = [t.clone().requires_grad_() for t in (x, up[start:stop], down[:, start:stop])]

        def sharded(x, up, down):
            once, twice = copy_to(x, comm), copy_to(x, comm)
            return reduce_from((torch.tanh(once @ up.t()) + torch.sin(twice @ up.t())) @ down.t(), comm)

        y = checkpoint(sharded, *mine, use_reentrant=False) if checkpointed else sharded(*mine)
        y.sum().backward()
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(mine[0].grad, reference[0].grad)
        torch.testing.assert_close(mine[1].grad, reference[1].grad[start:stop])
        torch.testing.assert_close(mine[2].grad, reference[2].grad[:, start:stop])


def check_differentiates_twice():
    """Forward identity whose backward sums over ranks: d(sum_r w_r x^3)/dx, and its derivative."""
    comm, rank, size = group_and_data()
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    weight = rank + 1.0
    y = reduce_from(weight * copy_to(x, comm) ** 3, comm).sum()
    total = size * (size + 1) / 2
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    torch.testing.assert_close(first, total * 3 * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, total * 6 * x)


class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def check_undefined_gradient():
    comm, rank, _ = group_and_data()
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = copy_to(x, comm)
    (Undefined.apply(y) if rank == 0 else y).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, float(comm.size - 1)))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "check",
    [
        check_pairs,
        check_results_may_be_written_to,
        check_copy_and_reduce,
        check_differentiates_twice,
        check_undefined_gradient,
    ],
)
def test_autograd_pairs_match_the_unsharded_function(check, world_size):
    run_ranks(world_size, check)


def test_autograd_pairs_return_the_input_itself_on_one_rank():
    x = torch.ones(4, 4)
    assert copy_to(x, None) is x
    assert reduce_from(x, None) is x
    for function in (gather_from, scatter_to, gather_sequence, reduce_scatter_sequence):
        assert function(x, None, dim=0) is x


# ---- shards


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_shard_sizes_are_those_of_torch_chunk(parts):
    for total in (0, 1, 4, 10, 257):
        sizes = shard_sizes(total, parts)
        assert len(sizes) == parts
        chunks = [chunk.numel() for chunk in torch.arange(total).chunk(parts)] if total else []
        assert [size for size in sizes if size] == chunks
        ranges = [shard_range(total, parts, rank) for rank in range(parts)]
        assert [stop - start for start, stop in ranges] == sizes
        assert ranges[0][0] == 0
        assert ranges[-1][1] == total


def test_shard_arguments_are_checked():
    assert shard_sizes(10, 4) == [3, 3, 3, 1]
    assert shard_sizes(4, 3) == [2, 2, 0]
    with pytest.raises(ValueError, match="total must not be negative"):
        shard_sizes(-1, 2)
    with pytest.raises(ValueError, match="parts must be at least 1"):
        shard_sizes(1, 0)
    with pytest.raises(IndexError, match=r"rank must be in 0..1, got 2"):
        shard_range(4, 2, 2)


# ---- one way to write a collective

COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "scatter", "gather"]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_and_its_twin_have_one_docstring_and_one_signature_but_for_the_pending(name):
    waits, launches = getattr(Communicator, name), getattr(Communicator, f"{name}_async")
    assert waits.__doc__ == launches.__doc__ != ""
    mine, theirs = inspect.signature(waits), inspect.signature(launches)
    assert mine.parameters == theirs.parameters
    assert theirs.return_annotation == f"Pending[{mine.return_annotation}]"
    assert (waits.__qualname__, launches.__qualname__) == (f"Communicator.{name}", f"Communicator.{name}_async")


@pytest.mark.parametrize("mode", ["blocking", "background", "split_phase"])
def test_every_mode_gives_pendings_of_new_tensors(mode):
    x = torch.arange(6.0).view(3, 2)
    found = Communicator(None).collectives(mode).all_reduce(x).wait()
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr()


def test_an_unknown_mode_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="one of blocking, background, split_phase, got 'halves'"):
        Communicator(None).collectives("halves")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_rank_gets_a_new_tensor_without_history_from_every_collective(name):
    x = torch.arange(6.0).view(3, 2).t().contiguous().requires_grad_()
    for given in (x, x.t(), x.detach()):  # the fast path, and tensors that it does not take
        found = getattr(Communicator(None), name)(given)
        assert torch.equal(found, given)
        assert found.is_contiguous()
        assert not found.requires_grad
        assert found.data_ptr() != given.data_ptr()


def test_one_rank_refuses_what_several_refuse():
    comm = Communicator(None)
    with pytest.raises(ValueError, match="op must be one of"):
        comm.all_reduce(torch.ones(2), "mean")
    with pytest.raises(TypeError):
        comm.all_reduce(torch.ones(2, dtype=torch.int64), "avg")
    with pytest.raises(ValueError, match="src must be a rank"):
        comm.broadcast(torch.ones(2), 1)
    with pytest.raises(ValueError, match="scalar"):
        comm.all_gather(torch.ones(()))
    with pytest.raises(IndexError):
        comm.reduce_scatter(torch.ones(2), dim=1)


def later_communicator():
    first = Communicator(dist.group.WORLD)
    assert first._selector.fast_path is None
    before = first.all_reduce(torch.ones(3))
    later, apart = Communicator(dist.group.WORLD), Communicator(dist.group.WORLD, transport="torch")
    found = type(later._selector.fast_path).__name__, apart._selector.fast_path
    return *found, torch.equal(later.all_reduce(torch.ones(3)), before)


def test_a_later_communicator_of_a_group_takes_the_fast_path_from_its_first_call():
    assert run_ranks(2, later_communicator) == [("FastPath", None, True)] * 2
