"""The emulation of the device: what it computes, and that it reports what would fault, hang or be undefined there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.device_array import DeviceArray, bfloat16_to_float, float_to_bfloat16
from tests.emulated import emulated


def launch(name: str, *arguments: Any, blocks: int = 1, threads: int = 32, **config: int) -> None:
    import fastpar_emulation as emulation

    kernel = getattr(emulation.self_test, name)
    kernel(
        emulation.LaunchConfig(blocks=blocks, threads=threads, **config),
        *(a.buffer if isinstance(a, DeviceArray) else a for a in arguments),
    )


def failure_of(name: str, *arguments: Any, **config: int) -> str:
    import fastpar_emulation as emulation

    with pytest.raises(emulation.Error) as caught:
        launch(name, *arguments, **config)
    return str(caught.value)


def schedules(seeds: int) -> Iterator[str]:
    """Sets one schedule after the other, and gives its name."""
    import fastpar_emulation as emulation

    for name in ("ascending", "descending", *(f"random {seed}" for seed in range(seeds))):
        emulation.set_schedule(*name.split()[:1], seed=int(name.split()[1]) if " " in name else 0)
        yield name
    emulation.set_schedule("ascending")


def ints(count: int) -> DeviceArray:
    return DeviceArray((count,), np.int32)


# ---- what it computes ------------------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("threads", [32, 96, 1024])
@pytest.mark.parametrize("schedule", ["ascending", "descending"])
def test_a_block_sums_through_shuffles_and_shared_memory(threads: int, schedule: str) -> None:
    import fastpar_emulation as emulation

    values = np.arange(threads, dtype=np.float32)
    out = DeviceArray((3 * threads,), np.float32)
    emulation.set_schedule(schedule)
    launch("block_sum", DeviceArray.of(values), out, blocks=3, threads=threads)
    emulation.set_schedule("ascending")
    assert (out.array == values.sum()).all()  # integers below 2^24: exact


@emulated
def test_copies_behind_a_threads_back_land_when_they_are_waited_for() -> None:
    values = np.arange(256, dtype=np.uint32)
    for name, landed in (("copies_all", 256), ("copies_but_one", 128)):
        out = DeviceArray.of(np.zeros(256, np.uint32))
        launch(name, DeviceArray.of(values), out, threads=32)
        np.testing.assert_array_equal(out.array[:landed], values[:landed])
        assert (out.array[landed:] == 0xFFFFFFFF).all(), "memory that nothing has landed in yet is poison"


@emulated
def test_bulk_copies_land_when_their_barrier_is_waited_for_and_no_earlier() -> None:
    values = np.arange(512, dtype=np.uint32)
    for schedule in schedules(2):
        for waits in (True, False):
            out = DeviceArray.of(np.zeros(512, np.uint32))
            arguments = (DeviceArray.of(values), out, 1024, 1024, 0)
            if waits:
                launch("bulk_copy", *arguments, True, threads=64)
                np.testing.assert_array_equal(out.array, values, err_msg=schedule)
            else:
                text = failure_of("bulk_copy", *arguments, False, threads=64)
                assert "told twice in one phase" in text, schedule
                assert (out.array[:256] == 0xFFFFFFFF).all(), "what has not been waited for is poison"


@emulated
@pytest.mark.parametrize(
    ("bytes_", "expected", "offset", "text"),
    [
        (512, 512, 8, "misaligned bulk copy"),
        (504, 504, 0, "a bulk copy of 504 bytes: allowed are multiples of 16"),
        (0, 0, 0, "a bulk copy of 0 bytes"),
        (1 << 20, 1 << 20, 0, "below 2^20"),
        (512, 496, 0, "bulk copies of 512 bytes arrive at a barrier that expects 496"),
        (512, 528, 0, "livelock"),  # 16 bytes that never come
    ],
)
def test_wrong_bulk_copies_are_reported(bytes_: int, expected: int, offset: int, text: str) -> None:
    source, out = DeviceArray.of(np.zeros(512, np.uint32)), ints(512)
    assert text in failure_of("bulk_copy", source, out, bytes_, expected, offset, True)


@emulated
def test_a_block_must_not_end_before_its_bulk_copies_have_landed() -> None:
    text = failure_of("bulk_copy_without_end", DeviceArray.of(np.zeros(4, np.uint32)))
    assert "ends before a bulk copy has landed" in text


@emulated
def test_a_missing_barrier_shows_in_either_order() -> None:
    import fastpar_emulation as emulation

    values = np.arange(64, dtype=np.int32)
    for schedule in ("ascending", "descending"):
        out = ints(64)
        emulation.set_schedule(schedule)
        launch("missing_barrier", DeviceArray.of(values), out, threads=64)
        emulation.set_schedule("ascending")
        expected = values[::-1]
        assert (out.array == expected).sum() == 32
        assert (out.array == -1).sum() == 32  # the poison of shared memory that nobody has written yet


@emulated
def test_shuffles_and_votes_give_what_the_programming_guide_says() -> None:
    lane = np.arange(32)
    out = DeviceArray((32, 9), np.int32)
    launch("shuffles", DeviceArray.of(lane.astype(np.int32)), out)
    expected = np.stack(
        [
            np.full(32, 5),
            np.where(lane >= 3, lane - 3, lane),
            np.where(lane + 3 < 32, lane + 3, lane),
            lane ^ 6,
            lane - lane % 8 + 1,  # lane 9 of segments of 8 is lane 1
            np.where(lane % 8 + 3 < 8, lane + 3, lane),
            np.full(32, sum(1 << i for i in range(32) if i % 3 == 0)).astype(np.int32),
            np.ones(32),
            lane < 4,
        ],
        axis=1,
    )
    np.testing.assert_array_equal(out.array, expected)


@emulated
def test_atomics_return_and_leave_the_right_values() -> None:
    values = np.arange(1, 129, dtype=np.int32)
    np.random.default_rng(0).shuffle(values)
    total, highest, winner = (DeviceArray.of(np.array([x], np.int32)) for x in (0, 0, -1))
    lowest = DeviceArray.of(np.array([2**32 - 1], np.uint32))
    float_total = DeviceArray.of(np.zeros(1, np.float32))
    launch("atomics", DeviceArray.of(values), total, highest, lowest, float_total, winner, blocks=2, threads=64)
    assert [total.array[0], highest.array[0], lowest.array[0], float_total.array[0]] == [8256, 128, 1, 8256.0]
    assert winner.array[0] == values[0]


@emulated
@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("schedule", ["ascending", "descending"])
def test_blocks_of_a_cluster_read_and_write_each_others_shared_memory(cluster: int, schedule: str) -> None:
    import fastpar_emulation as emulation

    values = np.arange(1, 2 * cluster + 1, dtype=np.int32)
    out = ints(2 * cluster)
    emulation.set_schedule(schedule)
    config = {"blocks": 2 * cluster, "threads": 32, "cluster": cluster, "shared_bytes": 4 * cluster}
    launch("cluster_sum", DeviceArray.of(values), out, **config)
    emulation.set_schedule("ascending")
    expected = 2 * values.reshape(2, cluster).sum(axis=1)  # once as pushed, once as pulled
    np.testing.assert_array_equal(out.array, expected.repeat(cluster))


@emulated
def test_shared_memory_is_poison_until_it_is_written() -> None:
    for name, config in (("read_dynamic", {"shared_bytes": 32}), ("read_static", {})):
        out = DeviceArray.of(np.zeros(1, np.float32))
        launch(name, out, 7, **config)
        assert np.isnan(out.array[0])


@emulated
def test_a_barrier_waits_for_the_threads_that_have_not_ended() -> None:
    out = ints(64)
    launch("early_exit_then_barrier", out, threads=64)
    np.testing.assert_array_equal(out.array, np.where(np.arange(64) < 40, 1, -1))


@emulated
def test_sixteen_bit_floats_round_to_nearest_even() -> None:
    import fastpar_emulation as emulation

    # every half, the midpoints between neighbours, and the floats next to those; then what overflows, and NaN
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = ((halves[:-1].astype(np.float64) + halves[1:]) / 2).astype(np.float32)  # exact
    around = np.concatenate(
        [halves, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e6))]
    )
    special = np.array([65519.0, 65520.0, 1e10, np.inf, 2.0**-25, 2.0**-26], np.float32)
    values = np.concatenate([around, -around, special, -special])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(emulation.self_test.to_half(values), values.astype(np.float16).view(np.uint16))
    every = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(emulation.self_test.from_half(every), every.view(np.float16).astype(np.float32))

    rng = np.random.default_rng(0)
    bits = np.concatenate([rng.integers(0, 2**32, 100_000, np.uint32), every.astype(np.uint32) << 16 | 0x8000])
    values = bits.view(np.float32)
    np.testing.assert_array_equal(emulation.self_test.to_bfloat16(values), float_to_bfloat16(values))
    np.testing.assert_array_equal(emulation.self_test.from_bfloat16(every), bfloat16_to_float(every))


@emulated
def test_a_launch_of_4_rows_and_512_threads_is_quick() -> None:
    # 5 kernels of 4 blocks with 6 switches a thread. 0.04 s on one core of Zen 5; the limit leaves room to be busy.
    values = DeviceArray.of(np.ones(512, np.float32))
    started = time.process_time()
    for _ in range(5):
        launch("block_sum", values, DeviceArray((4 * 512,), np.float32), blocks=4, threads=512)
    assert time.process_time() - started < 1.0


# ---- blocks and grids that wait for each other -----------------------------------------------------------------------


def zeros(count: int) -> DeviceArray:
    return DeviceArray.of(np.zeros(count, np.uint64))


@emulated
def test_blocks_of_a_cooperative_launch_can_wait_for_each_other() -> None:
    for name in schedules(5):
        flags = zeros(2)
        launch("meet", flags, 0, blocks=2, cooperative=True)
        assert flags.array.tolist() == [1, 1], name


@emulated
def test_blocks_of_any_other_launch_cannot() -> None:
    text = failure_of("meet", zeros(2), 0, blocks=2)
    assert "livelock: threads only sleep, thread 0 of block (0, 0, 0)" in text
    assert "block (1, 0, 0)" not in text  # it has not begun


@emulated
def test_grids_of_different_streams_run_side_by_side_and_those_of_one_in_order() -> None:
    import fastpar_emulation as emulation

    config = emulation.LaunchConfig(blocks=1, threads=32)
    for name in schedules(5):
        first, second = zeros(2), zeros(2)
        streams = [emulation.Stream(), emulation.Stream()]
        for flags in (first, second):
            for rank, stream in enumerate(streams):
                emulation.self_test.meet(config, flags.buffer, rank, stream=stream)
        assert first.array.tolist() == [0, 0], "a launch on a stream ran before synchronize"
        emulation.synchronize(streams)
        assert first.array.tolist() == second.array.tolist() == [1, 1], name


@emulated
def test_grids_of_one_stream_do_not_run_side_by_side() -> None:
    import fastpar_emulation as emulation

    stream, flags = emulation.Stream(), zeros(2)
    config = emulation.LaunchConfig(blocks=1, threads=32)
    for rank in range(2):
        emulation.self_test.meet(config, flags.buffer, rank, stream=stream)
    with pytest.raises(emulation.Error, match="livelock"):
        emulation.synchronize([stream])
    emulation.synchronize([stream])  # nothing is left in it
    assert flags.array.tolist() == [1, 0]


def packets_that_arrive(has_barrier: bool, has_release: bool) -> dict[str, bool]:
    """Schedule -> whether all of what block 0 handed over was there when block 1 had seen its flag."""
    given = np.arange(64 * 16, dtype=np.uint8)
    found = {}
    for name in schedules(20):
        memory, out = DeviceArray((64 * 16,), np.uint8), DeviceArray((64 * 16,), np.uint8)
        arguments = (DeviceArray.of(given), memory, zeros(1), out, has_barrier, has_release)
        launch("hand_over", *arguments, blocks=2, threads=64, cooperative=True)
        found[name] = bool((out.array == given).all())
        np.testing.assert_array_equal(memory.array, given)  # all stores have landed when the grid has ended
    return found


@emulated
def test_what_a_block_stored_before_a_barrier_and_a_release_is_seen_after_an_acquire() -> None:
    assert all(packets_that_arrive(has_barrier=True, has_release=True).values())


@emulated
@pytest.mark.parametrize(("has_barrier", "has_release"), [(False, True), (True, False), (False, False)])
def test_a_missing_barrier_or_release_shows_as_stale_memory(has_barrier: bool, has_release: bool) -> None:
    found = packets_that_arrive(has_barrier, has_release)
    assert not found["descending"]
    assert sum(not arrived for arrived in found.values()) >= 10, found


@emulated
def test_the_words_of_a_relaxed_packet_arrive_one_by_one() -> None:
    torn = []
    for _ in schedules(20):
        memory, out = DeviceArray((4,), np.uint32), ints(2)
        launch("hand_over_words", memory, out, blocks=2, threads=1, cooperative=True)
        assert memory.array.tolist() == [1, 2, 3, 4]
        torn.append(out.array[0] != -1)
    assert any(torn)


# ---- what it reports -------------------------------------------------------------------------------------------------


@emulated
def test_a_deadlock_names_the_block_and_who_waits_where() -> None:
    text = failure_of("barrier_and_shuffle", ints(32))
    assert "deadlock" in text
    assert "block (0, 0, 0)" in text
    assert "threads 0-15 wait in __syncthreads at self_test.cuh:" in text
    assert "threads 16-31 wait in __shfl_sync with mask 0xffffffff at self_test.cuh:" in text


@emulated
def test_a_barrier_that_threads_reach_at_different_lines_is_reported() -> None:
    text = failure_of("divergent_barriers", threads=64)
    assert "divergent __syncthreads" in text
    assert "threads 0-31 wait in __syncthreads at" in text


@emulated
def test_a_shuffle_that_names_an_ended_lane_is_reported() -> None:
    import fastpar_emulation as emulation

    for schedule in ("ascending", "descending"):  # the lane ends before the others ask, and after
        emulation.set_schedule(schedule)
        assert "names lane 7, which has ended" in failure_of("shuffle_with_ended_lane", ints(32))
    emulation.set_schedule("ascending")


@emulated
def test_a_shuffle_that_names_a_lane_beyond_the_block_is_reported() -> None:
    assert "lane 24, which does not exist" in failure_of("shuffles", ints(24), ints(9 * 24), threads=24)


@emulated
def test_a_shuffle_from_a_lane_outside_the_mask_is_reported() -> None:
    assert "reads lane 9, which the mask leaves out" in failure_of("shuffle_from_outside_the_mask", ints(32))


@emulated
def test_a_lane_outside_its_own_mask_is_reported() -> None:
    assert "thread 16 of block (0, 0, 0) is not in its own mask 0xffff" in failure_of("shuffle_without_itself")


@emulated
def test_lanes_in_different_operations_are_reported() -> None:
    text = failure_of("different_operations", ints(32))
    assert "__any_sync" in text
    assert "__all_sync" in text


@emulated
def test_a_misaligned_packet_is_reported_on_load_and_on_store() -> None:
    aligned, misaligned = DeviceArray((32,), np.uint8), DeviceArray((32,), np.uint8, offset=4)
    launch("copy_packets", aligned, DeviceArray((32,), np.uint8), threads=2)
    assert "misaligned load: thread 0 of block (0, 0, 0)" in failure_of("copy_packets", misaligned, aligned, threads=2)
    assert "misaligned store" in failure_of("copy_packets", aligned, misaligned, threads=2)


@emulated
@pytest.mark.parametrize(("waits", "peer"), [(False, 1), (True, 0)], ids=["it has not started", "it has, by chance"])
def test_memory_of_a_peer_cannot_be_used_before_the_cluster_has_met(waits: bool, peer: int) -> None:
    text = failure_of("map_before_meeting", ints(1), waits, blocks=2, cluster=2)
    assert f"maps an address to block ({peer}, 0, 0), which may not have started" in text


@emulated
def test_a_cluster_barrier_that_never_completes_is_a_deadlock() -> None:
    text = failure_of("one_block_never_comes", blocks=4, threads=2, cluster=4)
    assert "deadlock" in text
    assert "block (1, 0, 0):" in text
    assert "threads 0 wait in __syncwarp with mask 0x3" in text
    assert "threads 0-1 wait for the cluster at" in text


@emulated
def test_waiting_for_what_never_happens_ends() -> None:
    text = failure_of("sleep_until_set", DeviceArray.of(np.zeros(1, np.int32)), threads=1)
    assert "livelock" in text


@emulated
@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"threads": 1025}, "1 to 1024 threads, not 1025"),
        ({"shared_bytes": 232449}, "at most 232448 bytes of shared memory"),
        ({"blocks": 3, "cluster": 2}, "divides the grid"),
        ({"blocks": 32, "cluster": 32}, "1 to 16 blocks"),
    ],
)
def test_a_launch_that_the_device_refuses_is_refused(config: dict[str, int], text: str) -> None:
    assert text in failure_of("divergent_barriers", **config)


# ---- what a device has room for --------------------------------------------------------------------------------------


@contextlib.contextmanager
def device(**properties: Any) -> Iterator[None]:
    import fastpar_emulation as emulation

    emulation.set_device(**properties)
    try:
        yield
    finally:
        emulation.set_device()


@emulated
@pytest.mark.parametrize("shared_bytes", [48, 42 << 10, (42 << 10) + 16, 48 << 10, (48 << 10) + 16, 221 << 10])
def test_any_dynamic_shared_memory_can_be_had_beside_static(shared_bytes: int) -> None:
    out = DeviceArray.of(np.zeros(1, np.float32))
    launch("both_kinds", out, shared_bytes // 4 - 1, shared_bytes=shared_bytes)
    assert out.array[0] == 3.0


@emulated
@pytest.mark.parametrize(
    ("shared", "static", "allowed", "text"),
    [
        (48 << 10, 0, 0, None),
        (47 << 10, 1024, 0, None),
        ((47 << 10) + 1, 1024, 0, "have to be allowed first"),
        (48 << 10, 16, 0, "have to be allowed first"),
        (100 << 10, 1024, 100 << 10, None),
        (100 << 10, 1024, 99 << 10, "allowed are 101376"),
        (100 << 10, 1024, 227 << 10, "cannot be allowed"),
    ],
)
def test_the_limit_without_asking_counts_static_and_dynamic_memory(
    shared: int, static: int, allowed: int, text: str | None
) -> None:
    import fastpar_emulation as emulation

    if text is None:
        return emulation.self_test.launch_as(shared, static, allowed)
    with pytest.raises(emulation.Error, match=text):
        emulation.self_test.launch_as(shared, static, allowed)


@emulated
def test_more_static_memory_than_launches_expect_is_reported() -> None:
    text = failure_of("much_static", DeviceArray((32,), np.float32))
    assert "8192 bytes of static shared memory was launched as one with up to 6144" in text


@emulated
@pytest.mark.parametrize(
    ("properties", "threads", "shared_bytes", "most"),
    [
        ({}, 512, 0, 132),  # 128 registers a thread, which is what one block leaves room for
        ({"registers": 111}, 512, 0, 132),
        ({"registers": 64}, 512, 0, 264),
        ({"registers": 32}, 512, 0, 528),  # 2048 threads
        ({"registers": 32}, 32, 0, 132 * 32),  # 32 blocks
        ({"registers": 32}, 512, 64 << 10, 132 * 3),
        ({"registers": 32, "multiprocessors": 108}, 512, 106 << 10, 108 * 2),
    ],
)
def test_a_cooperative_launch_beyond_what_the_device_holds_is_refused(
    properties: dict[str, int], threads: int, shared_bytes: int, most: int
) -> None:
    config: dict[str, Any] = {"threads": threads, "shared_bytes": shared_bytes, "cooperative": True}
    with device(**properties):
        text = failure_of("meet", zeros(2), 0, blocks=most + 1, **config)
    assert f"too many blocks in a cooperative launch: {most + 1}" in text
    assert f"room for {most}" in text


def meeting_of_two_streams(num_first: int, devices: tuple[int, int]) -> list[int]:
    """A grid of blocks that wait for another stream's, which is launched second; the flags of both."""
    import fastpar_emulation as emulation

    streams = [emulation.Stream(device) for device in devices]
    flags = zeros(2)
    for rank, blocks in enumerate((num_first, 1)):
        config = emulation.LaunchConfig(blocks=blocks, threads=32)
        emulation.self_test.meet_rank(config, flags.buffer, rank, stream=streams[rank])
    emulation.synchronize(streams)
    found: list[int] = flags.array.tolist()
    return found


@emulated
def test_a_grid_that_takes_every_multiprocessor_leaves_none_to_the_stream_that_it_waits_for() -> None:
    import fastpar_emulation as emulation

    per_device = 2 * 8  # of 32 threads with 255 registers
    with device(multiprocessors=2, residency="what fits"):
        assert meeting_of_two_streams(per_device - 1, (0, 0)) == [1, 1]
        assert meeting_of_two_streams(per_device, (0, 1)) == [1, 1]  # each has a device of its own
        with pytest.raises(emulation.Error, match="livelock") as caught:
            meeting_of_two_streams(per_device, (0, 0))
    assert "stream 1:\n  1 blocks are not resident" in str(caught.value)
    with device(multiprocessors=2):  # one block of a grid at a time
        assert meeting_of_two_streams(per_device, (0, 0)) == [1, 1]


@emulated
def test_a_launch_works_after_one_that_failed() -> None:
    failure_of("barrier_and_shuffle", ints(32))
    test = test_a_block_sums_through_shuffles_and_shared_memory
    test(96, "ascending")


# ---- what the sanitizers end the process for -------------------------------------------------------------------------

CRASHES = {
    "dynamic": "launch('read_dynamic', DeviceArray((1,), np.float32), 8, shared_bytes=32)",
    "static": "launch('read_static', DeviceArray((1,), np.float32), 8)",
    "global": "launch('copy_packets', DeviceArray((31,), np.uint8), DeviceArray((32,), np.uint8), threads=2)",
    "ended peer": "launch('read_ended_peer', ints(1), blocks=2, threads=1, cluster=2)",
}


@emulated
@pytest.mark.parametrize("where", CRASHES)
def test_an_access_outside_of_memory_ends_the_process_with_a_report(where: str) -> None:
    script = f"from tests.gpu.test_emulation import *\n{CRASHES[where]}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert result.returncode != 0
    expected = "heap-use-after-free" if where == "ended peer" else "heap-buffer-overflow"
    assert f"AddressSanitizer: {expected}" in result.stderr, result.stderr
    assert "self_test::" in result.stderr  # the kernel is in the backtrace
