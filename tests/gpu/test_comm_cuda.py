"""CUDA collectives over symmetric memory (csrc/comm/*.cuh), in the emulation: ranks as streams or as one grid.

Every call is made several times without waiting in between, so that fast ranks are a call ahead of slow ones and every
buffer is used again; under seeds, blocks are up to 64 times slower than others and stores land late and out of order.
Sums have the bits of numpy's in rank order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.comm.symmetric_ranks import (
    STORED,
    Ranks,
    random_tensors,
    same_bits,
    schedules,
    sum_in_rank_order,
    widen,
)
from tests.emulated import emulated

CALLS = 6
LAUNCHES = ["streams", "one grid"]
WITH_FLAGS = ["one_shot", "two_shot", "multimem"]
ALGORITHMS = [*WITH_FLAGS, "mailbox"]


def check_all_reduce(
    algorithm: str,
    dtype: str,
    counts: list[int],
    size: int,
    launch: str = "streams",
    seeds: int = 3,
    average: bool = False,
    in_place: bool = False,
    offset: int = 0,
    **options: Any,
) -> None:
    for schedule in schedules(seeds):
        ranks = Ranks(size, launch, **options)
        calls = []
        for seed, count in enumerate(counts):
            values = random_tensors(size, count, dtype, seed)
            x = ranks.tensors_of(list(values), offset)
            out = x if in_place else ranks.tensors((count,), values.dtype, offset)
            ranks.enqueue(
                ranks.emulation.symmetric.all_reduce,
                lambda r, x=x, out=out, count=count: (algorithm, dtype, x[r], out[r], count, average),
            )
            calls.append((sum_in_rank_order(values, dtype, average), x, out))
        ranks.synchronize()
        for number, (wanted, _, out) in enumerate(calls):
            for rank, found in enumerate(out.arrays):
                assert same_bits(found, wanted), f"{schedule}: call {number}, rank {rank}: {found} is not {wanted}"


# ---- all-reduce ------------------------------------------------------------------------------------------------------


# Averages and RMSNorm have both launches in all dtypes.
DTYPES_OF_LAUNCHES = [
    pytest.param(dtype, launch, marks=[pytest.mark.slow] if launch == "one grid" and dtype != "bfloat16" else [])
    for launch in LAUNCHES
    for dtype in STORED
]


@emulated
@pytest.mark.parametrize(("dtype", "launch"), DTYPES_OF_LAUNCHES)
@pytest.mark.parametrize(
    ("size", "count"), [(2, 1), (2, 257), (2, 1023), (3, 1), (3, 257), (3, 1023), (5, 300), (8, 257)]
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_has_the_bits_of_a_sum_in_rank_order(
    algorithm: str, dtype: str, size: int, count: int, launch: str
) -> None:
    check_all_reduce(algorithm, dtype, [count] * CALLS, size, launch, seeds=2)


@emulated
@pytest.mark.parametrize("seeds", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_survives_many_schedules(algorithm: str, launch: str, seeds: int) -> None:
    check_all_reduce(algorithm, "float32", [70, 300, 1, 300, 5, 70, 300, 300, 9], 3, launch, seeds=seeds)


@emulated
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "mailbox"])
@pytest.mark.parametrize("dtype", STORED)
def test_all_reduce_averages_in_float32(dtype: str, algorithm: str, launch: str) -> None:
    check_all_reduce(algorithm, dtype, [257] * 2, 3, launch, average=True)


@emulated
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_works_in_place(algorithm: str, launch: str) -> None:
    check_all_reduce(algorithm, "bfloat16", [1023] * CALLS, 3, launch, in_place=True)


@emulated
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_takes_tensors_at_any_address(algorithm: str) -> None:
    for offset in (1, 3, 7):
        check_all_reduce(algorithm, "bfloat16", [263] * 2, 2, offset=offset)


@emulated
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_goes_in_pieces_where_the_inboxes_are_small(algorithm: str, launch: str) -> None:
    check_all_reduce(algorithm, "float16", [1023, 50], 3, launch, region_bytes=112, mailbox_bytes=112)


@emulated
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_number_of_blocks_may_change_from_call_to_call(algorithm: str) -> None:
    # 300 floats are 75 packets: 3 blocks of 32 threads; 8 floats are one
    check_all_reduce(algorithm, "float32", [300, 8, 300, 8, 8, 300, 300], 4, blocks=3, threads=32, seeds=20)


@emulated
@pytest.mark.parametrize("algorithm", WITH_FLAGS)
def test_more_than_2_to_the_32_collectives_are_counted(algorithm: str) -> None:
    for schedule in schedules(3):
        ranks = Ranks(2)
        ranks.group.set_epoch(2**32 - 3)
        values = random_tensors(2, 100, "float32", 0)
        outs = []
        for _ in range(CALLS):
            x, out = ranks.tensors_of(list(values)), ranks.tensors((100,), np.float32)
            ranks.enqueue(
                ranks.emulation.symmetric.all_reduce,
                lambda r, x=x, out=out: (algorithm, "float32", x[r], out[r], 100, False),
            )
            outs.append((x, out))
        ranks.synchronize()
        wanted = sum_in_rank_order(values, "float32")
        assert all(same_bits(found, wanted) for _, out in outs for found in out.arrays), schedule
        assert ranks.group.epoch(1) == 2**32 - 3 + CALLS


@emulated
def test_nan_that_looks_like_an_empty_mailbox_is_sent_as_another_nan() -> None:
    poison = np.full(64, 0xFFFFFFFF, np.uint32).view(np.float32)
    for schedule in schedules(3):
        ranks = Ranks(3)
        values = [poison, np.ones(64, np.float32), np.ones(64, np.float32)]
        x, out = ranks.tensors_of(values), ranks.tensors((64,), np.float32)
        for _ in range(4):
            ranks.enqueue(
                ranks.emulation.symmetric.all_reduce,
                lambda r, x=x, out=out: ("mailbox", "float32", x[r], out[r], 64, False),
            )
        ranks.synchronize()
        bits = [array.view(np.uint32) for array in out.arrays]
        assert all(np.isnan(array).all() for array in out.arrays), schedule
        assert all((b == bits[0]).all() and (b != 0xFFFFFFFF).all() for b in bits), schedule


# ---- reduce-scatter and all-gather -----------------------------------------------------------------------------------


def check_reduce_scatter(dtype: str, counts: list[int], launch: str, seeds: int = 3, **options: Any) -> None:
    size, total = len(counts), sum(counts)
    begins = np.cumsum([0, *counts])
    for schedule in schedules(seeds):
        ranks = Ranks(size, launch, **options)
        calls = []
        for seed in range(CALLS):
            values = random_tensors(size, total, dtype, seed)
            x, out = ranks.tensors_of(list(values)), ranks.tensors((max(counts),), values.dtype)
            ranks.enqueue(
                ranks.emulation.symmetric.reduce_scatter,
                lambda r, x=x, out=out: (dtype, x[r], x.stride, out[r], out.stride, counts, False),
            )
            calls.append((sum_in_rank_order(values, dtype), x, out))
        ranks.synchronize()
        for wanted, _, out in calls:
            for rank, found in enumerate(out.arrays):
                part = wanted[begins[rank] : begins[rank + 1]]
                assert same_bits(found[: counts[rank]], part), f"{schedule}, rank {rank}"
                assert (found[counts[rank] :].view(np.uint8) == 0xFF).all(), "written beyond the part"


def check_all_gather(dtype: Any, counts: list[int], launch: str, seeds: int = 3, **options: Any) -> None:
    size, total, dtype = len(counts), sum(counts), np.dtype(dtype)
    for schedule in schedules(seeds):
        ranks = Ranks(size, launch, **options)
        calls = []
        for seed in range(CALLS):
            rng = np.random.default_rng(seed)
            values = [rng.integers(0, 256, n * dtype.itemsize, np.uint8).view(dtype) for n in counts]
            x, out = ranks.tensors_of(values), ranks.tensors((total,), dtype)
            ranks.enqueue(
                ranks.emulation.symmetric.all_gather,
                lambda r, x=x, out=out: (dtype.itemsize, x[r], x.stride, out[r], out.stride, counts),
            )
            calls.append((np.concatenate(values), x, out))
        ranks.synchronize()
        for wanted, _, out in calls:
            for rank, found in enumerate(out.arrays):
                assert (found == wanted).all(), f"{schedule}, rank {rank}"


PARTS = [[5, 5], [257, 257, 257], [0, 7, 300, 1], [1023, 0], [8] * 8]


@emulated
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("counts", PARTS, ids=str)
@pytest.mark.parametrize("dtype", STORED)
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(dtype: str, counts: list[int], launch: str) -> None:
    check_reduce_scatter(dtype, counts, launch)


@emulated
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("counts", PARTS, ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_all_gather_gives_every_rank_all_parts(dtype: str, counts: list[int], launch: str) -> None:
    check_all_gather(dtype, counts, launch)


@emulated
@pytest.mark.parametrize("launch", LAUNCHES)
def test_reduce_scatter_and_all_gather_go_in_pieces_where_the_inboxes_are_small(launch: str) -> None:
    check_reduce_scatter("bfloat16", [0, 70, 300], launch, region_bytes=128)
    check_all_gather("uint16", [0, 70, 300], launch, region_bytes=128)


@emulated
def test_reduce_scatter_and_all_gather_survive_many_schedules() -> None:
    check_reduce_scatter("float32", [70, 0, 90], "streams", seeds=40)
    check_all_gather("uint32", [70, 0, 90], "streams", seeds=40)


# ---- with RMSNorm ----------------------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (5, 257), (3, 512), (2, 1023)])
@pytest.mark.parametrize("dtype", STORED)
def test_all_reduce_rms_norm_is_the_three_steps_in_one(dtype: str, rows: int, hidden: int, launch: str) -> None:
    size, count = 3, rows * hidden
    for schedule in schedules(3):
        for has_residual, has_weight, offset in [(True, True, 0.0), (False, True, 1.0), (True, False, 0.0)]:
            ranks = Ranks(size, launch, region_bytes=8192)
            calls = []
            for seed in range(3):  # both inboxes, and one of them again
                values = random_tensors(size, count, dtype, seed)
                shared, weight = random_tensors(2, count, dtype, 100 + seed)
                x, residual = ranks.tensors_of(list(values)), ranks.tensors_of([shared] * size)
                weights = ranks.tensors_of([weight[:hidden]] * size)
                out, h = (ranks.tensors((rows, hidden), STORED[dtype]) for _ in range(2))
                rstd = ranks.tensors((rows,), np.float32)
                ranks.enqueue(
                    ranks.emulation.symmetric.all_reduce_rms_norm,
                    lambda r, t=(x, residual, weights, out, h, rstd), has=(has_residual, has_weight), offset=offset: (
                        dtype,
                        t[0][r],
                        t[1][r] if has[0] else None,
                        t[2][r] if has[1] else None,
                        *(tensor[r] for tensor in t[3:]),
                        rows,
                        hidden,
                        1e-6,
                        offset,
                    ),
                )
                calls.append((values, shared, weight[:hidden], (x, residual, weights, out, h, rstd)))
            ranks.synchronize()
            for values, shared, weight, (*_, out, h, rstd) in calls:
                wanted = sum_in_rank_order(values, dtype)
                if has_residual:
                    wanted = sum_in_rank_order(np.stack([wanted, shared]), dtype)
                exact = widen(wanted, dtype).reshape(rows, hidden).astype(np.float64)
                exact_rstd = 1 / np.sqrt((exact**2).mean(axis=1) + 1e-6)
                scale = offset + widen(weight, dtype).astype(np.float64) if has_weight else 1.0
                exact_out = exact * exact_rstd[:, None] * scale
                for rank in range(size):
                    assert same_bits(h.arrays[rank].reshape(-1), wanted), f"{schedule}, rank {rank}"
                    # sums of up to 1023 squares in float32, in some order: 1e-5; then one rounding to the dtype
                    np.testing.assert_allclose(rstd.arrays[rank], exact_rstd, rtol=1e-5)
                    half_ulp = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
                    np.testing.assert_allclose(
                        widen(out.arrays[rank], dtype), exact_out, rtol=half_ulp + 2e-5, atol=1e-6
                    )
                    assert same_bits(out.arrays[rank], out.arrays[0]), "ranks differ"


@emulated
def test_all_reduce_rms_norm_gives_the_numbers_of_its_example() -> None:
    ranks = Ranks(2)
    x = ranks.tensors_of([np.array([1, 1], np.float32), np.array([1, 2], np.float32)])
    residual = ranks.tensors_of([np.array([1, 1], np.float32)] * 2)
    weight = ranks.tensors_of([np.array([1, 2], np.float32)] * 2)
    out, h, rstd = (ranks.tensors(shape, np.float32) for shape in ((2,), (2,), (1,)))
    ranks.enqueue(
        ranks.emulation.symmetric.all_reduce_rms_norm,
        lambda r: ("float32", x[r], residual[r], weight[r], out[r], h[r], rstd[r], 1, 2, 0.0, 0.0),
    )
    ranks.synchronize()
    for rank in range(2):
        assert h.arrays[rank].tolist() == [3, 4]
        np.testing.assert_allclose(rstd.arrays[rank], [0.282843], rtol=1e-5)
        np.testing.assert_allclose(out.arrays[rank], [0.848528, 2.262742], rtol=1e-6)


# ---- together --------------------------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("launch", LAUNCHES)
def test_collectives_of_all_kinds_follow_each_other(launch: str) -> None:
    size = 3
    for schedule in schedules(30):
        rng = np.random.default_rng(abs(hash(schedule)) % 1000)
        ranks = Ranks(size, launch, region_bytes=512, mailbox_bytes=256)
        symmetric, checks = ranks.emulation.symmetric, []
        for seed in range(12):
            kind = rng.choice([*ALGORITHMS, "reduce_scatter", "all_gather"])
            counts = rng.integers(0, 150, size).tolist()
            total = sum(counts) + 1
            counts[0] += 1
            values = random_tensors(size, total, "float32", seed)
            x, wanted = ranks.tensors_of(list(values)), sum_in_rank_order(values, "float32")
            out = ranks.tensors((total,), np.float32)
            if kind == "reduce_scatter":
                ranks.enqueue(
                    symmetric.reduce_scatter,
                    lambda r, x=x, out=out, counts=counts: (
                        "float32", x[r], x.stride, out[r], out.stride, counts, False
                    ),
                )  # fmt: skip
                wanted_of = dict(enumerate(np.split(wanted, np.cumsum(counts)[:-1])))
            elif kind == "all_gather":
                ranks.enqueue(
                    symmetric.all_gather,
                    lambda r, x=x, out=out, counts=counts: (4, x[r], x.stride, out[r], out.stride, counts),
                )
                wanted_of = dict.fromkeys(
                    range(size), np.concatenate([v[:n] for v, n in zip(values, counts, strict=True)])
                )
            else:
                ranks.enqueue(
                    symmetric.all_reduce,
                    lambda r, x=x, out=out, kind=kind, total=total: (kind, "float32", x[r], out[r], total, False),
                )
                wanted_of = dict.fromkeys(range(size), wanted)
            checks.append((kind, x, out, wanted_of))
        ranks.synchronize()
        for number, (kind, _, out, wanted_of) in enumerate(checks):
            for rank, wanted in wanted_of.items():
                assert same_bits(out.arrays[rank][: len(wanted)], wanted), f"{schedule}: {kind} #{number}, rank {rank}"


# ---- a rank that does not come ---------------------------------------------------------------------------------------

COLLECTIVES = {"one_shot": 1, "two_shot": 2, "mailbox": 5, "multimem": 6}  # 1 + Collective, in peer_group.h


@emulated
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_wait_times_out_says_who_was_waited_for_and_gives_poison(algorithm: str) -> None:
    for schedule in schedules(3):
        ranks = Ranks(3, timeout_nanoseconds=1_000_000)
        values = random_tensors(3, 300, "float32", 0)
        first, second, third = (ranks.tensors((300,), np.float32) for _ in range(3))
        x = ranks.tensors_of(list(values))

        def call(out: Any, only: tuple[int, ...], ranks: Ranks = ranks, x: Any = x) -> None:
            for rank in only:
                ranks.emulation.symmetric.all_reduce(
                    ranks.group, rank, algorithm, "float32", x[rank], out[rank], 300, False, ranks.streams[rank]
                )
            ranks.synchronize()

        call(first, (0, 1, 2))
        assert all(same_bits(a, sum_in_rank_order(values, "float32")) for a in first.arrays), schedule
        call(second, (0, 2))  # rank 1 does not come
        for rank in (0, 2):
            assert np.isnan(second.arrays[rank]).any(), schedule
            report = ranks.group.report(rank)
            assert (report["collective"], report["rank"], report["epoch"]) == (COLLECTIVES[algorithm], rank, 2)
            assert report["peer"] == 1, f"{schedule}: {report}"
            if algorithm != "mailbox":
                assert report["seen"] == 1
        assert ranks.group.report(1)["collective"] == 0
        began = ranks.emulation.clock_nanoseconds()
        call(third, (0, 2))
        assert ranks.emulation.clock_nanoseconds() - began < 1_000_000, "a broken group was waited for again"
        assert np.isnan(third.arrays[0]).all()
        assert np.isnan(third.arrays[2]).all()


@emulated
def test_a_rank_does_not_get_two_calls_ahead() -> None:
    import fastpar_emulation as emulation

    ranks = Ranks(2, blocks=1, threads=32)
    x, out = (ranks.tensors((8,), np.float32) for _ in range(2))
    for _ in range(2):
        emulation.symmetric.all_reduce(ranks.group, 0, "one_shot", "float32", x[0], out[0], 8, False, ranks.streams[0])
    with pytest.raises(emulation.Error, match="livelock"):
        ranks.synchronize()
    assert ranks.group.epoch(0) == 0


# ---- launches --------------------------------------------------------------------------------------------------------


@emulated
def test_few_bytes_get_few_blocks() -> None:
    import fastpar_emulation as emulation

    plan = emulation.symmetric.plan
    assert plan(8, 1, 1, True) == (1, 512)
    assert plan(8, 1, 4096, True) == (8, 512)  # 64 KiB
    assert plan(8, 1, 1 << 20, True) == (8, 512)
    assert plan(8, 1, 1 << 20, False) == (32, 512)


@emulated
@pytest.mark.parametrize("multiprocessors", [132, 114, 108, 16])  # H100 SXM, H100 PCIe, A100, a slice of one
def test_the_blocks_of_all_ranks_of_a_device_are_resident_at_once(multiprocessors: int) -> None:
    import fastpar_emulation as emulation

    try:
        emulation.set_device(multiprocessors=multiprocessors)
        for ranks in (2, 3, 4, 8, 16):
            blocks, _ = emulation.symmetric.plan(ranks, ranks, 1 << 20, False)
            assert blocks % ranks == 0
            assert min(multiprocessors // ranks, 32) * ranks == blocks
            assert emulation.symmetric.plan(ranks, 1, 1 << 20, False) == (32, 512)  # ranks on devices of their own
    finally:
        emulation.set_device()


@emulated
def test_a_device_with_few_registers_in_use_holds_more_blocks() -> None:
    import fastpar_emulation as emulation

    budget = json.loads((Path(__file__).parent / "ptxas_budget.json").read_text())
    try:
        for name in ("all_reduce_two_shot", "all_gather"):
            emulation.set_device(multiprocessors=16, registers=budget[name]["registers"])
            blocks, threads = emulation.symmetric.plan(8, 8, 1 << 20, False)
            assert threads == budget[name]["threads"]
            assert blocks == 16 * budget[name]["blocks"]
    finally:
        emulation.set_device()


@emulated
def test_eight_ranks_share_a_device_of_few_multiprocessors() -> None:
    import fastpar_emulation as emulation

    try:
        emulation.set_device(multiprocessors=2)  # with room for 4 blocks of 64 threads each: one block for each rank
        options: dict[str, Any] = {"threads": 64, "blocks": 32, "region_bytes": 32768}
        check_all_reduce("two_shot", "float32", [40_000], 8, "one grid", seeds=0, **options)
        emulation.set_device(multiprocessors=1)
        with pytest.raises(RuntimeError, match=r"8 ranks that share a device need 8 blocks.*room for 4"):
            check_all_reduce("two_shot", "float32", [33], 8, "one grid", seeds=0, **options)
    finally:
        emulation.set_device()


@emulated
def test_a_block_with_fewer_threads_than_ranks_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a thread for each rank"):
        check_all_reduce("one_shot", "float32", [8], 33, threads=32)
    with pytest.raises(RuntimeError, match="holds no packet"):
        check_all_reduce("one_shot", "float32", [8], 2, region_bytes=8)
