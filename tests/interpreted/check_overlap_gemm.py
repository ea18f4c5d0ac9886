"""Overlapped GEMMs in Triton's interpreter; run by tests/ops/test_overlap_gemm.py.

What is computed is tested with virtual ranks in one process, which take turns; what is waited for, with real processes
that share memory. Inputs are -1, 0 and 1 where results have to be exact, and random where bits are compared.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from fastpar.kernels import overlap_gemm as og
from fastpar.kernels import overlap_gemm_schedule as schedule
from fastpar.kernels.overlap_gemm_buffer import Channel, OverlapBuffer, Symmetric
from fastpar.kernels.overlap_gemm_calls import AllGatherGemm, GemmConfiguration, GemmReduce, configuration
from tests.dist import run_ranks
from tests.ops.overlap_gemm_cases import MappedBuffer, create_files, integers, product, rounded_sum

NBYTES = 1 << 20
CAPACITY = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = GemmConfiguration(16, 16, 16, 4, 1)


def open_buffers(folder: Path, size: int, nbytes: int = NBYTES, timeout: float = 20.0) -> list[OverlapBuffer]:
    """All ranks of a group, in this process."""
    paths = create_files(folder, size, nbytes)
    return [
        OverlapBuffer(MappedBuffer(paths, rank, nbytes), flag_capacity=CAPACITY, timeout=timeout)
        for rank in range(size)
    ]


def split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(x.split(sizes))


# ---- the GEMM --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (257, 33, 70), (40, 64, 257), (0, 5, 3), (3, 0, 5), (5, 4, 0)])
def test_gemm_is_exact_on_integers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, cols, terms = shape
    x, weight, bias = (integers(*s, seed=i, dtype=dtype) for i, s in enumerate([(rows, terms), (cols, terms), (cols,)]))
    assert torch.equal(og.gemm(x, weight, bias), product(x, weight, bias))
    assert torch.equal(og.gemm(x, weight), product(x, weight))


def test_gemm_takes_any_strides() -> None:
    x, weight = integers(30, 80, seed=0), integers(20, 90, seed=1)
    assert torch.equal(og.gemm(x[:, 3:43:2], weight[:, 5:25]), product(x[:, 3:43:2], weight[:, 5:25]))
    assert torch.equal(og.gemm(x.T, weight[:, :30]), product(x.T, weight[:, :30]))
    assert torch.equal(og.gemm(x, integers(80, 20, seed=2).T), product(x, integers(80, 20, seed=2).T))


def test_gemm_bits_depend_neither_on_the_number_of_programs_nor_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(70, 50), torch.randn(45, 50), torch.randn(45)
    wanted = og.gemm(x, weight, bias, num_programs=1)
    torch.testing.assert_close(wanted, x @ weight.T + bias, rtol=1e-5, atol=1e-4)
    for num_programs in (2, 7, 100):
        assert torch.equal(og.gemm(x, weight, bias, num_programs=num_programs), wanted)
    ordered = schedule.gather_tiles
    monkeypatch.setattr(schedule, "gather_tiles", lambda *args: ordered(*args)[::-1])
    assert torch.equal(og.gemm(x, weight, bias), wanted)


# ---- what is computed: virtual ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "chunks", "dtype"),
    [
        pytest.param("copy", 1, torch.bfloat16, marks=pytest.mark.slow),
        ("copy", 3, torch.float32),
        pytest.param("kernel", 1, torch.float16, marks=pytest.mark.slow),
        ("kernel", 3, torch.bfloat16),
    ],
)
def test_all_gather_gemm_multiplies_the_rows_of_all_ranks(
    tmp_path: Path, transport: str, chunks: int, dtype: torch.dtype
) -> None:
    size, sizes, terms = 3, [40, 1, 71], 257
    buffers = open_buffers(tmp_path, size)
    for call in range(3):
        x = integers(sum(sizes), terms, seed=call, dtype=dtype)
        weights = [integers(30 + rank, terms, seed=10 + rank, dtype=dtype) for rank in range(size)]
        bias = [integers(30 + rank, seed=20 + rank, dtype=dtype) for rank in range(size)]
        shards = split(x, sizes)
        outs = og.run_together(
            [
                AllGatherGemm(
                    shards[r], weights[r], bias[r], buffer=buffers[r], sizes=sizes, transport=transport, chunks=chunks
                )
                for r in range(size)
            ]
        )
        for rank in range(size):
            assert torch.equal(outs[rank], product(x, weights[rank], bias[rank])), (call, rank)


@pytest.mark.parametrize("sizes", [[0, 5, 9], [0, 0, 0], pytest.param([16, 32, 33], marks=pytest.mark.slow)])
def test_shards_may_be_uneven_and_empty(tmp_path: Path, sizes: list[int]) -> None:
    buffers = open_buffers(tmp_path, 3)
    x, weight = integers(sum(sizes), 20, seed=0), integers(33, 20, seed=1)
    shards = split(x, sizes)
    for _ in range(2):
        outs = og.run_together([AllGatherGemm(shards[r], weight, buffer=buffers[r], sizes=sizes) for r in range(3)])
        for out in outs:
            assert torch.equal(out, product(x, weight))
        calls = [GemmReduce(x, weight, buffer=buffers[r], replicate=False, sizes=sizes) for r in range(3)]
        assert torch.equal(torch.cat(og.run_together(calls)), 3 * product(x, weight))


def test_one_gather_feeds_several_gemms(tmp_path: Path) -> None:
    buffers = open_buffers(tmp_path, 2)
    x = integers(50, 40, seed=0)
    weights, biases = [integers(n, 40, seed=n) for n in (64, 5, 33)], [None, integers(5, seed=3), None]
    calls = [AllGatherGemm(x[r * 25 : r * 25 + 25], weights, biases, buffer=buffers[r]) for r in range(2)]
    for outs in og.run_together(calls):
        assert isinstance(outs, tuple)
        for out, weight, bias in zip(outs, weights, biases, strict=True):
            assert torch.equal(out, product(x, weight, bias))


@pytest.mark.parametrize(
    ("shape", "slices", "dtype"),
    [
        ((1, 1), 1, torch.bfloat16),
        ((66, 33), 4, torch.bfloat16),
        pytest.param((66, 33), 1, torch.float16, marks=pytest.mark.slow),
        ((257, 30), 4, torch.float32),
    ],
)
def test_gemm_reduce_scatter_and_all_reduce_add_in_rank_order_and_round_once(
    tmp_path: Path, shape: tuple[int, int], slices: int, dtype: torch.dtype
) -> None:
    """Bit for bit what `gemm` on every rank and a sum in rank order give; K differs by rank.

    Products of integers are exact: the interpreter's are numpy's, whose bits may depend on where a row lies in a tile.
    The ranks' are so far apart that their sum is rounded, and depends on their order.
    """
    size, (rows, cols) = 3, shape
    scales = [1.0, 2.0**20, 2.0**2] if dtype != torch.float16 else [1.0, 2.0**7, 2.0**-7]
    sizes = [rows // 3, rows - rows // 3, 0]
    buffers = open_buffers(tmp_path, size)
    for call in range(3):
        torch.manual_seed(call)
        xs = [torch.randint(-3, 4, (rows, 20 + rank)).to(dtype) * scales[rank] for rank in range(size)]
        weights = [torch.randint(-3, 4, (cols, 20 + rank)).to(dtype) for rank in range(size)]
        bias = torch.randn(cols).to(dtype) if call else None
        config = configuration(max(sizes), cols, dtype, torch.device("cpu"))
        parts = [og.gemm(x, w, config=config) for x, w in zip(xs, weights, strict=True)]
        wanted = rounded_sum(parts, bias)
        for replicate in (False, True):
            options = {} if replicate else {"sizes": sizes}
            calls = [
                GemmReduce(
                    xs[r], weights[r], bias, buffer=buffers[r], replicate=replicate, slices=slices, config=config,
                    **options,
                )
                for r in range(size)
            ]  # fmt: skip
            outs = og.run_together(calls)
            if replicate:
                assert all(torch.equal(out, wanted) for out in outs)
            else:
                assert torch.equal(torch.cat(outs), wanted)


def test_bits_do_not_depend_on_the_order_of_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(70, 30), torch.randn(40, 30)

    def results(folder: str) -> list[Tensor]:
        (tmp_path / folder).mkdir()
        buffers = open_buffers(tmp_path / folder, 2)
        found = og.run_together([AllGatherGemm(x[:35], weight, buffer=buffers[r], config=SMALL) for r in range(2)])
        for replicate in (False, True):
            calls = [GemmReduce(x, weight, buffer=buffers[r], replicate=replicate, config=SMALL) for r in range(2)]
            found += og.run_together(calls)
        return found

    wanted = results("ordered")
    for name in ("gather_tiles", "scatter_tiles", "owner_tiles", "collected_tiles"):
        ordered = getattr(schedule, name)

        def shuffled(*args: object, ordered: object = ordered) -> list[schedule.Tile]:
            tiles = ordered(*args)  # type: ignore[operator]
            return [tiles[i] for i in torch.randperm(len(tiles)).tolist()]

        monkeypatch.setattr(schedule, name, shuffled)
    for found, expected in zip(results("shuffled"), wanted, strict=True):
        assert torch.equal(found, expected)


def test_one_rank_needs_no_other(tmp_path: Path) -> None:
    (buffer,) = open_buffers(tmp_path, 1)
    x, weight, bias = integers(20, 30, seed=0), integers(7, 30, seed=1), integers(7, seed=2)
    for _ in range(3):
        assert torch.equal(og.all_gather_gemm(x, weight, bias, buffer=buffer), product(x, weight, bias))
        assert torch.equal(og.gemm_reduce_scatter(x, weight, bias, buffer=buffer), product(x, weight, bias))
        assert torch.equal(og.gemm_all_reduce(x, weight, bias, buffer=buffer), product(x, weight, bias))


# ---- what is waited for: processes -----------------------------------------------------------------------------------


def late(call: int, rank: int, size: int, delay: str) -> bool:
    return {"nobody": False, "turns": call % size == rank, "last": rank == size - 1}[delay]


def in_phases(call: AllGatherGemm | GemmReduce, sleep: bool) -> Tensor:
    """A rank that is slow has sent its data long before it uses that of the others."""
    call.start()
    if sleep:
        time.sleep(0.2)
    call.compute()
    if sleep:
        time.sleep(0.1)
    call.reduce()
    out = call.finish()
    assert isinstance(out, Tensor)
    return out


def repeat_calls(symmetric: Symmetric, ops: list[str], calls: int, delay: str, sizes: list[int]) -> list[str]:
    """The ops in turn, with other data and other shapes every time; returns what was wrong.

    Nothing but the ops keeps the ranks in step, not even when they open their buffers.
    """
    rank, size = symmetric.rank, symmetric.size
    if late(0, rank, size, delay):
        time.sleep(0.3)
    buffer = OverlapBuffer(symmetric, flag_capacity=CAPACITY, timeout=40.0)
    wrong = []
    for call in range(calls):
        op, sleep = ops[call % len(ops)], late(call, rank, size, delay)
        terms, cols, rows = 20 + 3 * (call % 4), 17 + 16 * (call % 3), sum(sizes)
        whole = integers(rows, terms, seed=call)
        weight, bias = integers(cols, terms, seed=100 + call), integers(cols, seed=200 + call)
        first = sum(sizes[:rank])
        mine = slice(first, first + sizes[rank])
        made: AllGatherGemm | GemmReduce
        if op.startswith("gather"):
            transport = op.removeprefix("gather ")
            made = AllGatherGemm(
                whole[mine], weight, bias, buffer=buffer, sizes=sizes, transport=transport, chunks=2, config=SMALL
            )
            wanted = product(whole, weight, bias)
        else:
            scale = torch.arange(1.0, size + 1)  # rank r multiplies r + 1 times as much
            total = whole.double() @ weight.double().T * float(scale.sum()) + bias.double()
            replicate = op == "reduce"
            options = {} if replicate else {"sizes": sizes}
            made = GemmReduce(
                whole * scale[rank], weight, bias, buffer=buffer, replicate=replicate, config=SMALL, **options
            )
            wanted = (total if replicate else total[mine]).float()
        found = in_phases(made, sleep)
        if not torch.equal(found, wanted):
            wrong.append(f"call {call} ({op}) on rank {rank}: {int((found != wanted).sum())} of {found.numel()}")
    buffer.check()
    return wrong


def on_rank(paths: list[Path], *args: object) -> list[str]:
    symmetric = MappedBuffer(paths, torch.distributed.get_rank(), NBYTES)
    return repeat_calls(symmetric, *args)  # type: ignore[arg-type]


def on_symmetric_memory(*args: object) -> list[str]:
    from fastpar.comm.symmetric.buffer import SymmetricBuffer

    symmetric = SymmetricBuffer.create(torch.distributed.group.WORLD, NBYTES)
    wrong = repeat_calls(symmetric, *args)  # type: ignore[arg-type]
    torch.distributed.barrier()
    symmetric.close()
    return wrong


ALL_OPS = ["gather copy", "scatter", "reduce", "gather kernel"]


@pytest.mark.parametrize(
    ("size", "ops", "delay", "sizes"),
    [
        pytest.param(2, ALL_OPS, "nobody", [33, 33], marks=pytest.mark.slow),
        pytest.param(2, ["gather copy", "gather kernel"], "turns", [40, 1], marks=pytest.mark.slow),
        pytest.param(2, ["scatter"], "turns", [1, 40], marks=pytest.mark.slow),
        (2, ["reduce"], "turns", [20, 21]),
        (3, ALL_OPS, "last", [17, 0, 33]),
        pytest.param(4, ALL_OPS, "turns", [16, 1, 20, 5], marks=pytest.mark.slow),
    ],
)
def test_processes_agree_call_after_call(
    tmp_path: Path, size: int, ops: list[str], delay: str, sizes: list[int]
) -> None:
    """Eight calls over two channels: every channel is used four times."""
    paths = create_files(tmp_path, size, NBYTES)
    assert run_ranks(size, on_rank, paths, ops, 8, delay, sizes, timeout=120.0) == [[]] * size


def test_processes_agree_over_symmetric_memory() -> None:
    pytest.importorskip("fastpar.comm.symmetric.buffer")
    assert run_ranks(2, on_symmetric_memory, ALL_OPS, 8, "turns", [33, 20], timeout=120.0) == [[], []]


@pytest.mark.parametrize("op", ["gather copy", pytest.param("gather kernel", marks=pytest.mark.slow), "scatter"])
def test_a_rank_that_waits_for_nobody_is_kept_from_running_two_calls_ahead(tmp_path: Path, op: str) -> None:
    """Rank 0 alone has data to send in all-gather, and rank 1 alone owns rows in reduce-scatter: rank 0 never waits for
    a flag, and nothing but EMPTY keeps it from writing over what rank 1, which is slow, has not read."""
    sizes = [40, 0] if op.startswith("gather") else [0, 40]
    paths = create_files(tmp_path, 2, NBYTES)
    assert run_ranks(2, on_rank, paths, [op], 8, "last", sizes, timeout=120.0) == [[], []]


def one_channel_only(paths: list[Path], ops: list[str]) -> list[str]:
    """What a CUDA graph of one call does when it is replayed: the same channel every time."""

    class OneChannel(OverlapBuffer):
        def next_channel(self) -> Channel:
            return self.channels[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.interpreted.check_overlap_gemm.OverlapBuffer", OneChannel)
        return on_rank(paths, ops, 6, "turns", [20, 21])


@pytest.mark.parametrize("ops", [pytest.param(["gather copy"], marks=pytest.mark.slow), ["scatter", "reduce"]])
def test_one_channel_used_again_and_again_is_right_too(tmp_path: Path, ops: list[str]) -> None:
    paths = create_files(tmp_path, 2, NBYTES)
    assert run_ranks(2, one_channel_only, paths, ops, timeout=120.0) == [[], []]


# ---- failures --------------------------------------------------------------------------------------------------------


def test_rows_that_never_come_are_nan_and_the_next_call_names_the_rank(tmp_path: Path) -> None:
    buffers = open_buffers(tmp_path, 3, timeout=0.05)
    x, weight = integers(5, 20, seed=0), integers(4, 20, seed=1)
    calls = [AllGatherGemm(x, weight, buffer=buffers[rank]) for rank in range(3)]
    calls[0].start()
    calls[2].start()
    calls[0].compute()
    out = calls[0].finish()
    assert isinstance(out, Tensor)
    assert torch.equal(out[:5], product(x, weight))
    assert torch.isnan(out[5:10]).all()
    with pytest.raises(
        TimeoutError, match=r"rank 0 waited .* for rank 1 to send rows \(chunk 0 .*epoch 2 did not come"
    ):
        og.all_gather_gemm(x, weight, buffer=buffers[0])


def test_a_rank_hears_that_a_wait_of_its_peer_has_failed(tmp_path: Path) -> None:
    buffers = open_buffers(tmp_path, 2, timeout=0.05)
    x, weight = integers(5, 20, seed=0), integers(4, 20, seed=1)
    og.all_gather_gemm(x, weight, buffer=buffers[0])
    og.all_gather_gemm(x, weight, buffer=buffers[1])
    with pytest.raises(TimeoutError, match="rank 1: a wait of rank 0 has failed"):
        buffers[1].check()


def test_partials_that_never_come_are_named(tmp_path: Path) -> None:
    buffers = open_buffers(tmp_path, 2, timeout=0.05)
    x, weight = integers(8, 20, seed=0), integers(4, 20, seed=1)
    (out,) = og.run_together([GemmReduce(x, weight, buffer=buffers[0], replicate=False)])
    assert torch.isnan(out).all()
    with pytest.raises(
        TimeoutError, match=r"rank 0 waited .* for rank 1 to send its partial tile 0 for gemm_reduce_scatter"
    ):
        buffers[0].check()


def test_finished_tiles_that_never_come_are_named(tmp_path: Path) -> None:
    buffers = open_buffers(tmp_path, 2, timeout=0.05)
    x, weight = integers(8, 20, seed=0), integers(40, 20, seed=1)
    calls = [GemmReduce(x, weight, buffer=b, replicate=True) for b in buffers]
    for phase in ("start", "compute"):
        for call in calls:
            getattr(call, phase)()
    calls[0].reduce()
    out = calls[0].finish()
    missing = torch.isnan(out)
    assert missing.any()
    assert torch.equal(out[~missing], 2 * product(x, weight)[~missing])
    with pytest.raises(TimeoutError, match="for rank 1 to send its finished tile 0 for gemm_all_reduce"):
        buffers[0].check()


def test_a_peer_that_is_two_calls_late_is_named_before_its_memory_is_trusted(tmp_path: Path) -> None:
    """Rank 0 does not wait for rows; its third call waits for rank 1 to finish the first. It gives up, and rank 1,
    whose memory is then written over, learns of it in the call that may have read it."""
    buffers = open_buffers(tmp_path, 2, timeout=0.05)
    x, weight = integers(5, 20, seed=0), integers(4, 20, seed=1)
    for _ in range(2):
        og.all_gather_gemm(x, weight, buffer=buffers[0], sizes=[5, 0])
    buffers[0].check()
    third = AllGatherGemm(x, weight, buffer=buffers[0], sizes=[5, 0])
    third.start()
    og.all_gather_gemm(x[:0], weight, buffer=buffers[1], sizes=[5, 0])
    with pytest.raises(TimeoutError, match="a wait of rank 0 has failed"):
        buffers[1].check()
    third.compute()
    third.finish()
    with pytest.raises(TimeoutError, match=r"rank 0 waited .* for rank 1 to finish the call before the last one"):
        buffers[0].check()


def test_a_failed_rank_does_not_wait_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen tiles miss their rows; one of them is waited for."""
    buffers = open_buffers(tmp_path, 2)
    buffers[0].max_polls = 100
    reads: list[None] = []
    exchange = InterpreterBuilder.create_atomic_rmw

    def counted(*args: object) -> object:
        reads.append(None)
        return exchange(*args)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", counted)
    x, weight = integers(48, 20, seed=0), integers(80, 20, seed=1)
    out = og.all_gather_gemm(x, weight, buffer=buffers[0], config=SMALL)
    assert torch.isnan(out[48:]).all()
    assert 100 < len(reads) < 200


def test_impossible_arguments_are_explained(tmp_path: Path) -> None:
    buffer = open_buffers(tmp_path, 2)[0]
    x, weight = torch.ones(5, 20), torch.ones(4, 20)
    with pytest.raises(ValueError, match=r"x must be \[M, K\] and weight \[N, K\], not \(5, 20\) and \(4, 19\)"):
        og.all_gather_gemm(x, weight[:, 1:], buffer=buffer)
    with pytest.raises(TypeError, match=r"bfloat16, float16 or float32, not torch\.float64"):
        og.gemm(x.double(), weight.double())
    with pytest.raises(TypeError, match=r"not torch\.float32 and torch\.bfloat16"):
        og.gemm(x, weight.bfloat16())
    with pytest.raises(ValueError, match=r"bias must be \[4\]"):
        og.gemm(x, weight, torch.ones(5))
    with pytest.raises(ValueError, match="5 rows do not divide by 2 ranks; say with sizes="):
        og.gemm_reduce_scatter(x, weight, buffer=buffer)
    with pytest.raises(ValueError, match=r"sizes \(\[4, 1\]\) say that rank 0 has 4 rows, but its shard has 5"):
        og.all_gather_gemm(x, weight, buffer=buffer, sizes=[4, 1])
    with pytest.raises(ValueError, match=r"sizes \(\[5\]\)"):
        og.all_gather_gemm(x, weight, buffer=buffer, sizes=[5])
    with pytest.raises(ValueError, match="5 together"):
        og.gemm_reduce_scatter(x, weight, buffer=buffer, sizes=[5, 1])
    with pytest.raises(TypeError, match="gemm_all_reduce has no sizes"):
        og.gemm_all_reduce(x, weight, buffer=buffer, sizes=[5, 0])
    with pytest.raises(ValueError, match="transport must be 'copy', 'kernel' or a function, not 'pigeon'"):
        og.all_gather_gemm(x, weight, buffer=buffer, transport="pigeon")
    with pytest.raises(ValueError, match="2 weights came with 1 biases"):
        og.all_gather_gemm(x, [weight, weight], [None], buffer=buffer)
    with pytest.raises(ValueError, match="chunks"):
        og.all_gather_gemm(x, weight, buffer=buffer, chunks=0)
    with pytest.raises(ValueError, match="slices"):
        og.gemm_all_reduce(x, weight, buffer=buffer, slices=0)
    with pytest.raises(ValueError, match=r"a rank would own 128 tiles, but flag_capacity is 64"):
        og.gemm_all_reduce(torch.ones(256, 4), torch.ones(256, 4), buffer=buffer, config=SMALL)


def test_a_buffer_that_is_too_small_says_how_much_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 1000 bytes, but the flags of 2 ranks alone take 2048"):
        open_buffers(tmp_path, 2, nbytes=1000)
    buffer = open_buffers(tmp_path, 2, nbytes=2048 + 2 * 256)[0]
    with pytest.raises(
        ValueError, match=r"needs 800 bytes in each of the 2 channels, but the buffer has 256; .* 1088 "
    ):
        og.all_gather_gemm(torch.ones(5, 20), torch.ones(4, 20), buffer=buffer)


# ---- the bench -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["gather", *(pytest.param(op, marks=pytest.mark.slow) for op in ("scatter", "reduce"))])
def test_bench_providers_pass_their_check_and_bounds_run(op: str) -> None:
    pytest.importorskip("fastpar.comm.symmetric.buffer")
    from bench.bench_overlap_gpu import OverlapCase
    from bench.harness import Rank

    providers = OverlapCase(op, "fp32", (64, 40, 48), 2).build(Rank(device="cpu"))
    checked = {p.name: p.check() for p in providers if p.kind in ("fastpar", "torch")}
    assert {"fastpar", "one after the other"} <= set(checked)
    for name, errors in checked.items():
        assert errors["out"].ok, (name, errors)
    for provider in providers:
        provider.call()
