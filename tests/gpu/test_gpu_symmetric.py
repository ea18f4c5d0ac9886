"""Collectives over symmetric memory on one CUDA device: virtual ranks in one grid and on streams, CUDA graphs,
time-outs, and processes that share the device.

Sums have the bits of `reduce_in_order` on the CPU. Tests with "small" in their names run once more under
compute-sanitizer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm import CommTimeoutError, Communicator
from fastpar.comm.reduction import reduce_in_order
from fastpar.comm.symmetric.buffer import SymmetricBuffer, virtual_ranks
from fastpar.comm.symmetric.collectives import DTYPES, SymmetricCollectives, signal_words, workspace_bytes
from tests.dist import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]
DEVICE = "cuda"
ALGORITHMS = ["one_shot", "two_shot", "mailbox"]
CALLS = 6


def tensors(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of very different sizes, so that another order of adding them gives other bits; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-6, 7, (ranks, *shape), generator=generator).float())
    return (torch.randn(ranks, *shape, generator=generator) * scale).to(dtype)


def total(x: Tensor, op: str = "sum") -> Tensor:
    return reduce_in_order(list(x), op)


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.cpu().contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


# ---- all ranks in one grid -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_small_all_reduce_has_the_bits_of_a_sum_in_rank_order(algorithm: str, dtype: torch.dtype, size: int) -> None:
    group = SymmetricCollectives.virtual(size, DEVICE, timeout=10.0)
    results = []
    for call, count in enumerate([1, 257, 1023, 8192, 257, 65536]):  # without waiting in between
        x = tensors(size, (count,), dtype, call)
        results.append((group.all_reduce(x.to(DEVICE), algorithm=algorithm), total(x)))
    for found, wanted in results:
        assert all(same_bits(row, wanted) for row in found)
    group.check()


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "auto"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_all_reduce_of_more_than_the_inboxes_hold(op: str, algorithm: str) -> None:
    group = SymmetricCollectives.virtual(4, DEVICE, timeout=10.0)
    x = tensors(4, (3_000_001,), torch.bfloat16)
    on_device = x.to(DEVICE)
    assert all(same_bits(row, total(x, op)) for row in group.all_reduce(on_device, op, algorithm=algorithm))
    assert group.all_reduce(on_device, op, out=on_device, algorithm=algorithm) is on_device
    assert same_bits(on_device[3], total(x, op))


@pytest.mark.parametrize("sizes", [[5, 0, 300], [64, 64, 64]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_reduce_scatter_and_all_gather_give_parts_and_wholes(dtype: torch.dtype, sizes: list[int]) -> None:
    group = SymmetricCollectives.virtual(3, DEVICE, timeout=10.0)
    for call in range(CALLS):
        x = tensors(3, (sum(sizes), 3), dtype, call)
        parts = group.reduce_scatter(x.to(DEVICE), sizes=sizes)
        for rank, wanted in enumerate(total(x).split(sizes)):
            assert same_bits(parts[rank, : sizes[rank]], wanted)
        whole = group.all_gather(parts, sizes=sizes)
        assert all(same_bits(row, total(x)) for row in whole)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex128])
def test_small_all_gather_moves_any_dtype(dtype: torch.dtype) -> None:
    group = SymmetricCollectives.virtual(3, DEVICE, timeout=10.0)
    x = tensors(3, (7, 5), torch.float32).mul(9).to(dtype)
    assert torch.equal(group.all_gather(x.to(DEVICE))[2].cpu(), x.view(21, 5))


@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (33, 257), (64, 8192)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_all_reduce_rms_norm_is_the_three_steps_in_one(dtype: torch.dtype, rows: int, hidden: int) -> None:
    group = SymmetricCollectives.virtual(4, DEVICE, timeout=10.0)
    for call in range(CALLS):
        x, residual = tensors(4, (rows, hidden), dtype, call), tensors(1, (rows, hidden), dtype, 50 + call)[0]
        weight = tensors(1, (hidden,), dtype, 100)[0]
        out, h, rstd = group.all_reduce_rms_norm(
            x.to(DEVICE), weight.to(DEVICE), residual=residual.expand(4, -1, -1).to(DEVICE), weight_offset=1.0
        )
        wanted_h = total(x) + residual
        exact = wanted_h.double()
        exact_rstd = exact.pow(2).mean(-1).add(1e-6).rsqrt()
        exact_out = exact * exact_rstd[:, None] * (1 + weight.double())
        for rank in range(4):
            assert same_bits(h[rank], wanted_h)
            assert same_bits(out[rank], out[0].cpu())
            # sums of up to 8192 squares in float32: 1e-5; then one rounding to the dtype
            torch.testing.assert_close(rstd[rank].cpu().double(), exact_rstd, rtol=1e-5, atol=0.0)
            half_ulp = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
            torch.testing.assert_close(out[rank].cpu().double(), exact_out, rtol=half_ulp + 2e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_graph_is_replayed_with_new_data_and_among_other_calls(algorithm: str) -> None:
    group = SymmetricCollectives.virtual(4, DEVICE, timeout=10.0)
    x = torch.zeros(4, 5000, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(x)
    group.all_reduce(x, out=out, algorithm=algorithm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            group.all_reduce(x, out=out, algorithm=algorithm)
    for call in range(10):
        values = tensors(4, (5000,), torch.bfloat16, call)
        x.copy_(values)
        graph.replay()
        assert all(same_bits(row, total(values)) for row in out), call
        if call % 3 == 0:
            assert same_bits(group.all_reduce(x, algorithm=algorithm)[1], total(values))
    group.check()


def test_200_calls_give_the_same_bits_by_any_algorithm() -> None:
    group = SymmetricCollectives.virtual(8, DEVICE, timeout=10.0)
    values = tensors(8, (30_000,), torch.float32)
    x, wanted = values.to(DEVICE), total(values).to(DEVICE)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for call in range(200):
        wrong += (group.all_reduce(x, algorithm=ALGORITHMS[call % 3]) != wanted).sum()
    assert int(wrong) == 0


def test_calls_on_two_streams_follow_each_other() -> None:
    group = SymmetricCollectives.virtual(4, DEVICE, timeout=10.0)
    values = tensors(4, (100_000,), torch.float32)
    x, streams = values.to(DEVICE), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for call in range(20):
        with torch.cuda.stream(streams[call % 2]):
            results.append(group.all_reduce(x, algorithm="one_shot"))
    torch.cuda.synchronize()
    assert all(same_bits(found[3], total(values)) for found in results)


# ---- every rank a stream ---------------------------------------------------------------------------------------------


def groups_on_streams(size: int, timeout: float = 10.0) -> list[SymmetricCollectives]:
    region, mailbox = 1 << 16, 1 << 16
    buffers = virtual_ranks(
        size, workspace_bytes(size, region, mailbox), DEVICE, signal_words=signal_words(size)
    )  # fmt: skip
    return [
        SymmetricCollectives([buffer], region_bytes=region, mailbox_bytes=mailbox, timeout=timeout)
        for buffer in buffers
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_small_ranks_on_streams_of_their_own_wait_for_a_straggler(algorithm: str) -> None:
    size, count = 3, 2000
    groups, streams = groups_on_streams(size), [torch.cuda.Stream() for _ in range(size)]
    values = [tensors(size, (count,), torch.float32, call) for call in range(CALLS)]
    inputs = [value.to(DEVICE) for value in values]
    outs = [torch.empty_like(x) for x in inputs]
    for rank, (group, stream) in enumerate(zip(groups, streams, strict=True)):  # what a launch loads, it loads now
        with torch.cuda.stream(stream):
            SymmetricCollectives.virtual(1, DEVICE).all_reduce(inputs[0][:1], algorithm=algorithm)
            assert group.rank == rank
    torch.cuda.synchronize()
    for call in range(CALLS):
        for rank, (group, stream) in enumerate(zip(groups, streams, strict=True)):
            with torch.cuda.stream(stream):
                if rank == call % size:
                    torch.cuda._sleep(2_000_000)  # cycles: about a millisecond
                group.all_reduce(inputs[call][rank], out=outs[call][rank], algorithm=algorithm)
    torch.cuda.synchronize()
    for value, out in zip(values, outs, strict=True):
        assert all(same_bits(row, total(value)) for row in out)
    for group in groups:
        group.check()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_small_a_rank_that_never_comes_is_named(algorithm: str) -> None:
    first, _ = groups_on_streams(2, timeout=0.2)
    x = torch.ones(1000, device=DEVICE)
    started = time.monotonic()
    found = first.all_reduce(x, algorithm=algorithm)
    torch.cuda.synchronize()
    assert 0.1 < time.monotonic() - started < 20.0
    assert found.isnan().any()
    with pytest.raises(CommTimeoutError, match=rf"all_reduce \({algorithm}\) #1 on rank 0 of 2: rank 1 did not come"):
        first.all_reduce(x)


# ---- processes that share the device ---------------------------------------------------------------------------------


def in_process(check: Callable[[SymmetricCollectives, Communicator], None]) -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    comm = Communicator(dist.group.WORLD)
    group = SymmetricCollectives.create(comm, DEVICE, region_bytes=1 << 16, mailbox_bytes=1 << 16, timeout=60.0)
    check(group, comm)
    group.check()
    comm.barrier()
    group.close()


def exchange_between_processes() -> None:
    def check(group: SymmetricCollectives, comm: Communicator) -> None:
        for call in range(CALLS):
            values = tensors(comm.size, (1023,), torch.bfloat16, call)
            for algorithm in ALGORITHMS:
                found = group.all_reduce(values[comm.rank].to(DEVICE), algorithm=algorithm)
                assert same_bits(found, total(values)), algorithm
            sizes = [1000, 23][: comm.size]
            part = group.reduce_scatter(values[comm.rank].to(DEVICE), sizes=sizes)
            assert same_bits(part, total(values).split(sizes)[comm.rank])
            assert same_bits(group.all_gather(part, sizes=sizes), total(values))

    in_process(check)


def buffers_between_processes() -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    comm = Communicator(dist.group.WORLD)
    buffer = SymmetricBuffer.create(comm, 4096, DEVICE)
    other = 1 - comm.rank
    buffer.tensor((8,), torch.float32, offset=64, rank=other).fill_(comm.rank + 1)
    buffer.signal_pad(other)[3] = comm.rank + 1
    torch.cuda.synchronize()
    comm.barrier()
    assert buffer.tensor((8,), torch.float32, offset=64).tolist() == [other + 1] * 8
    assert int(buffer.signal_pad()[3]) == other + 1
    comm.barrier()
    buffer.close()


def test_processes_on_one_device_read_and_write_each_others_memory() -> None:
    run_ranks(2, buffers_between_processes)


def test_processes_on_one_device_exchange_through_symmetric_memory() -> None:
    run_ranks(2, exchange_between_processes)
