"""Overlapped GEMMs on one GPU: virtual ranks in one process, a stream each.

Inputs are -1, 0 and 1 where results have to be exact, in every dtype and in every order of addition. `make gpu` runs
the tests with "small" in their names once more under compute-sanitizer, which may run kernels one after the other: that
works too, since no phase of a call waits for a later one (`Note: several ranks in one process` of overlap_gemm.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.overlap_gemm_cases import DeviceBuffer, device_memories, integers, product, rounded_sum

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]
pytest.importorskip("triton")

from fastpar.kernels import overlap_gemm as og  # noqa: E402  (triton is optional)
from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer  # noqa: E402
from fastpar.kernels.overlap_gemm_calls import AllGatherGemm, GemmReduce, configuration  # noqa: E402

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Ranks:
    """W virtual ranks: their buffers, their streams, and a share of the multiprocessors for each."""

    def __init__(self, size: int, nbytes: int = 1 << 26, timeout: float = 20.0) -> None:
        memories = device_memories(size, nbytes, DEVICE)
        self.size, self.memories = size, memories
        self.buffers = [
            OverlapBuffer(DeviceBuffer(memories, r), flag_capacity=4096, timeout=timeout) for r in range(size)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        self.programs = (processors - 8) // size - 2  # 2 reduce, and 8 are left to copies that are kernels
        assert self.programs >= 1

    def run(self, calls: list[Any], delays: list[int] | None = None) -> list[Any]:
        """One call per rank, from the current stream and back to it; a delay is in cycles, before its rank begins."""
        current = torch.cuda.current_stream()
        for rank, stream in enumerate(self.streams):
            stream.wait_stream(current)
            if delays is not None:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(delays[rank])
        results = og.run_together(calls, self.streams)
        for stream in self.streams:
            current.wait_stream(stream)
        return results

    def gather(self, shards: list[Tensor], weights: list[Any], bias: Any = None, **options: Any) -> list[Any]:
        return [
            AllGatherGemm(x, w, bias, buffer=b, num_programs=self.programs, **options)
            for x, w, b in zip(shards, weights, self.buffers, strict=True)
        ]

    def reduce(self, xs: list[Tensor], weights: list[Tensor], bias: Tensor | None = None, **options: Any) -> list[Any]:
        options = {"num_programs": self.programs, "reduce_programs": 2, **options}
        return [GemmReduce(x, w, bias, buffer=b, **options) for x, w, b in zip(xs, weights, self.buffers, strict=True)]

    def check(self) -> None:
        torch.cuda.synchronize()
        for buffer in self.buffers:
            buffer.check()


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (257, 65, 77), (128, 256, 64), (130, 300, 513)])
def test_small_gemm_is_exact_on_integers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, cols, terms = shape
    x, weight, bias = (integers(*s, seed=i, dtype=dtype) for i, s in enumerate([(rows, terms), (cols, terms), (cols,)]))
    assert torch.equal(og.gemm(*on_device(x, weight, bias)).cpu(), product(x, weight, bias))
    transposed = weight.T.contiguous().to(DEVICE).T
    assert torch.equal(og.gemm(x.to(DEVICE), transposed).cpu(), product(x, weight))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("transport", "chunks"), [("copy", 1), ("copy", 3), ("kernel", 3)])
def test_small_all_gather_gemm_is_exact_on_integers(size: int, transport: str, chunks: int) -> None:
    ranks = Ranks(size)
    sizes = [300, 1, 0, 129][:size]
    for call, dtype in enumerate([*DTYPES, *DTYPES]):
        x, weight, bias = (
            integers(*s, seed=call, dtype=dtype) for s in [(sum(sizes), 72 + call), (200, 72 + call), (200,)]
        )
        shards = on_device(*x.split(sizes))
        options = {"sizes": sizes, "transport": transport, "chunks": chunks}
        outs = ranks.run(ranks.gather(shards, on_device(weight) * size, bias.to(DEVICE), **options))
        for out in outs:
            assert torch.equal(out.cpu(), product(x, weight, bias)), (call, dtype)
    ranks.check()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("replicate", [False, True])
def test_small_gemm_reductions_have_the_bits_of_a_gemm_and_a_sum_in_rank_order(size: int, replicate: bool) -> None:
    ranks = Ranks(size)
    sizes = [300, 1, 0, 129][:size]
    for call, dtype in enumerate([*DTYPES, *DTYPES]):
        torch.manual_seed(call)
        xs = [torch.randn(sum(sizes), 72 + call, device=DEVICE).to(dtype) for _ in range(size)]
        weights = [torch.randn(200, 72 + call, device=DEVICE).to(dtype) for _ in range(size)]
        bias = torch.randn(200, device=DEVICE).to(dtype)
        config = configuration(max(sizes), 200, dtype, xs[0].device)
        wanted = rounded_sum([og.gemm(x, w, config=config) for x, w in zip(xs, weights, strict=True)], bias)
        options = {} if replicate else {"sizes": sizes}
        outs = ranks.run(ranks.reduce(xs, weights, bias, replicate=replicate, config=config, **options))
        if replicate:
            assert all(torch.equal(out, wanted) for out in outs), (call, dtype)
        else:
            assert torch.equal(torch.cat(outs), wanted), (call, dtype)
    ranks.check()


def test_sizes_of_real_layers_match_torch() -> None:
    ranks = Ranks(2, nbytes=1 << 28)
    x = torch.randn(4096, 4096, device=DEVICE).bfloat16()
    weight = (torch.randn(2048, 4096, device=DEVICE) / 64).bfloat16()
    exact = x.float() @ weight.float().T
    for out in ranks.run(ranks.gather(list(x.chunk(2)), [weight, weight])):
        torch.testing.assert_close(out.float(), exact, rtol=2.0**-7, atol=2e-2)
    parts = [t.contiguous() for t in x.chunk(2, dim=1)]
    halves = [t.contiguous() for t in weight.chunk(2, dim=1)]
    for out in ranks.run(ranks.reduce(parts, halves, replicate=True)):
        torch.testing.assert_close(out.float(), exact, rtol=2.0**-6, atol=4e-2)  # two roundings before the sum
    ranks.check()


# ---- the schedule does not show --------------------------------------------------------------------------------------


def test_bits_are_the_same_in_100_calls_with_random_delays() -> None:
    ranks = Ranks(4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 512, device=DEVICE).bfloat16()
    weights = [torch.randn(512, 512, device=DEVICE).bfloat16() for _ in range(4)]
    wanted: list[Tensor] = []
    for call in range(100):
        delays = torch.randint(0, 200_000, (4,), generator=generator).tolist()
        if call % 10 == 0:
            delays[call // 10 % 4] = 4_000_000  # milliseconds late
        found = ranks.run(ranks.gather(list(x.chunk(4)), weights, chunks=1 + call % 2), delays)
        found += ranks.run(ranks.reduce([x] * 4, weights, replicate=False), delays)
        found += ranks.run(ranks.reduce([x] * 4, weights, replicate=True, slices=1 + call % 4), delays)
        wanted = wanted or found
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True)), call
    ranks.check()


@pytest.mark.parametrize("calls", [1, 2])
def test_graphs_replay_with_new_inputs(calls: int) -> None:
    """One gather and a reduction use a channel each. Two and a reduction begin each replay with the channel that the
    replay before ended with."""
    ranks = Ranks(2)
    x, weight = torch.empty(256, 128, device=DEVICE), integers(200, 128, seed=1).to(DEVICE)

    def body() -> list[Tensor]:
        outs: list[Tensor] = []
        for _ in range(calls):
            outs = ranks.run(ranks.gather(list(x.chunk(2)), [weight, weight]))
        return outs + ranks.run(ranks.reduce([x, x], [weight, weight], replicate=True))

    for _ in range(2):
        x.copy_(integers(256, 128, seed=0))
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = body()
    for replay in range(6):
        new = integers(256, 128, seed=10 + replay)
        x.copy_(new)
        graph.replay()
        wanted = product(new, weight.cpu())
        assert torch.equal(outs[0].cpu(), wanted)
        assert torch.equal(outs[1].cpu(), wanted)
        assert torch.equal(outs[2].cpu(), 2 * wanted)
        assert torch.equal(outs[3].cpu(), 2 * wanted)
    ranks.check()


# ---- failures --------------------------------------------------------------------------------------------------------


def test_rows_that_never_come_end_in_nan_and_an_error_that_names_the_rank() -> None:
    ranks = Ranks(2, timeout=0.2)
    x, weight = torch.ones(64, 64, device=DEVICE), torch.ones(64, 64, device=DEVICE)
    out = og.all_gather_gemm(x, weight, buffer=ranks.buffers[0])
    torch.cuda.synchronize()
    assert torch.equal(out[:64], torch.full_like(x, 64.0))
    assert torch.isnan(out[64:]).all()
    with pytest.raises(TimeoutError, match=r"rank 0 waited .* for rank 1 to send rows"):
        ranks.buffers[0].check()
    og.all_gather_gemm(x, weight, buffer=ranks.buffers[1])
    torch.cuda.synchronize()
    with pytest.raises(TimeoutError, match="a wait of rank 0 has failed"):
        ranks.buffers[1].check()
