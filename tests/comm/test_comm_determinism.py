"""Reductions over shared memory have the same bits, whatever happens to the ranks meanwhile and whichever way they go.

200 runs, in which ranks are late at random, are stopped by signals in the middle of collectives, call in the foreground
or the background, from ordinary memory or a region, and (all alike) use one algorithm or another. Values are random, so
that another order of additions would show.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm import Communicator, shard_sizes
from fastpar.comm.reduction import reduce_in_order
from fastpar.comm.shared_memory.library import library
from fastpar.comm.shared_memory.region import SharedRegion
from tests.dist import run_ranks, worker_pids

RUNS = 200
NUMELS = (5, 3000, 70_001, 300_000)
DTYPES = (torch.float32, torch.bfloat16)
DEFAULT_TUNING = (64 << 10, 1 << 20)  # bytes up to which every rank reduces everything; bytes of a chunk
TUNINGS = (DEFAULT_TUNING, (0, 4096), (0, 1 << 20), (1 << 20, 1 << 20))


def inputs(size: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Large values that cancel in the order of ranks, and leave rounding errors in any other."""
    generator = torch.Generator().manual_seed(numel)
    xs = [torch.randn(numel, generator=generator).to(dtype) for _ in range(size)]
    xs[0] *= 1 << 20
    if size > 2:
        xs[1] = -xs[0]
    return xs


def many_runs(runs: int) -> int:
    comm = Communicator(dist.group.WORLD, timeout=30.0, transport="shared_memory")
    rank, size = comm.rank, comm.size
    region = SharedRegion(comm, 4 * NUMELS[-1])
    alike, own = random.Random(0), random.Random(rank)
    problems = {(numel, dtype): inputs(size, numel, dtype) for numel in NUMELS for dtype in DTYPES}
    wanted = {key: reduce_in_order(xs, "sum") for key, xs in problems.items()}

    def check(found: Tensor, expected: Tensor, what: str) -> None:
        bits = torch.int32 if found.dtype == torch.float32 else torch.int16
        assert torch.equal(found.view(bits), expected.view(bits)), what

    for run in range(runs):
        comm.barrier()  # the algorithm is the process's, so nobody changes it while another is in a collective
        library().comm_tune(*alike.choice(TUNINGS))
        comm.barrier()
        key = numel, dtype = alike.choice(NUMELS), alike.choice(DTYPES)
        x = problems[key][rank]
        if own.random() < 0.5:
            x = region.tensor((numel,), dtype).copy_(x)
        if own.random() < 0.3:
            time.sleep(own.random() * 0.003)
        in_background = own.random() < 0.5
        part = comm.reduce_scatter_async(x) if in_background else comm.reduce_scatter(x)
        if own.random() < 0.3:
            time.sleep(own.random() * 0.001)
        total = comm.all_reduce_async(x, out=x.clone()).wait() if own.random() < 0.5 else comm.all_reduce(x)
        if in_background:
            part = part.wait()
        check(total, wanted[key], f"run {run}: all_reduce of {key}")
        check(part, wanted[key].split(shard_sizes(numel, size))[rank], f"run {run}: reduce_scatter of {key}")
        in_place = comm.all_reduce(x, out=x) if x.data_ptr() != problems[key][rank].data_ptr() else comm.all_reduce(x)
        check(in_place, wanted[key], f"run {run}: all_reduce in place of {key}")
    comm.barrier()
    library().comm_tune(*DEFAULT_TUNING)
    return runs


@contextmanager
def stops(seed: int) -> Iterator[None]:
    """Stop a random worker of the pool again and again, for up to 3 ms."""
    done = threading.Event()

    def run() -> None:
        draw = random.Random(seed)
        while not done.wait(draw.random() * 0.01):
            pids = worker_pids()
            if not pids:
                continue
            pid = draw.choice(pids)
            try:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(draw.random() * 0.003)
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_200_runs_with_delays_give_the_bits_of_the_sum_in_rank_order(size):
    with stops(seed=size):
        assert run_ranks(size, many_runs, RUNS) == [RUNS] * size


def test_another_order_of_additions_would_show():
    for dtype in DTYPES:
        xs = inputs(3, NUMELS[-1], dtype)
        assert not torch.equal(reduce_in_order(xs, "sum"), reduce_in_order([xs[2], xs[1], xs[0]], "sum"))
