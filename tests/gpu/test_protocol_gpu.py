"""The flag protocols of the GPU collectives and of the overlapped GEMMs, explored: every interleaving of small worlds.

Pushed data and flags lie in the receiver's memory; epochs count calls from 1, are never reset, and are compared with
>=. A process here is a thread block, a copy engine or a whole kernel; the end of a kernel is a `Fence` and a local flag
for which the next kernel of the stream waits. As in `tests.comm.test_protocol`, each protocol is shown right, and then
broken in every way that somebody has shipped, or might: the explorer must find each.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.explorer import Add, Await, Fence, Location, Op, Program, Publish, Read, Result, Write, explore

CALLS = 4  # every buffer is used twice, whether there are two or three


def peers_of(rank: int, size: int) -> list[int]:
    """The others, the next one first, as kernels take them."""
    return [(rank + step) % size for step in range(1, size)]


def check(result: Result, right: bool) -> None:
    assert bool(result.wrong) != right, str(result)
    assert result.finished or not right


# ---- one-shot push with flags


def push(rank: int, size: int, *, slots: int = 2, flag: str = "after", waits: bool = True, bits: int = 0) -> list[Op]:
    """All-reduce, all-gather or reduce-scatter: x goes to every peer's slot of this call's parity, then a flag."""
    ops: list[Op] = []
    peers = peers_of(rank, size)
    for epoch in range(1, CALLS + 1):
        value, test = (epoch & 1, "equal") if bits else (epoch, "at_least")
        stores = [Write(("inbox", peer, epoch % slots, rank), (epoch, rank)) for peer in peers]
        flags = [(Write if flag == "relaxed" else Publish)(("signal", peer, rank), value) for peer in peers]
        ops += [*flags, *stores] if flag == "before" else [*stores, *flags]
        ops += [Await(("signal", rank, peer), value, test) for peer in peers] * waits
        ops += [Read(("inbox", rank, epoch % slots, peer), (epoch, peer)) for peer in peers]
    return ops


def explore_push(size: int, **changes: object) -> Result:
    return explore({f"rank {r}": push(r, size, **changes) for r in range(size)})


@pytest.mark.parametrize("size", [2, 3])
def test_one_shot_push_needs_two_slots_and_no_barrier(size):
    check(explore_push(size), right=True)


@pytest.mark.parametrize(
    "changes", [{"slots": 1}, {"flag": "before"}, {"flag": "relaxed"}, {"waits": False}, {"bits": 1}], ids=str
)
def test_a_broken_one_shot_push_is_found(changes):
    check(explore_push(2, **changes), right=False)


# ---- blocks: flags by block, grids that change from call to call


def blocks(
    rank: int, size: int, block: int, grids: Sequence[int], *, boundary: bool = True, epochs: str = "host"
) -> list[Op]:
    """One thread block of a one-shot push of two words, of which a grid of one block takes both.

    boundary  a kernel starts when the one before it has ended; without it, block b follows block b only, as a
              dependent launch that forgets to wait for its predecessor does
    epochs    "host": an argument of the kernel; "per block": each block counts the calls that it took part in;
              "block 0": kept on the device, read by all at the start and advanced by block 0 at its end
    """
    ops: list[Op] = []
    peers = peers_of(rank, size)
    own = 0
    for call, grid in enumerate(grids, 1):
        if boundary and call > 1:
            ops += [Await(("done", rank, b), call - 1) for b in range(max(grids))]
        if block < grid:
            own += 1
            epoch = own if epochs == "per block" else call
            if epochs == "block 0":
                ops.append(Read(("epoch", rank), call - 1))
            words = range(2) if grid == 1 else [block]
            slot = epoch % 2
            ops += [Write(("inbox", peer, slot, rank, w), (call, rank, w)) for peer in peers for w in words]
            ops += [Publish(("signal", peer, rank, block), epoch) for peer in peers]
            for peer in peers:
                ops.append(Await(("signal", rank, peer, block), epoch))
                ops += [Read(("inbox", rank, slot, peer, w), (call, peer, w)) for w in words]
            if epochs == "block 0" and block == 0:
                ops.append(Write(("epoch", rank), call))
        ops += [Fence(), Publish(("done", rank, block), call)] if boundary else []
    return ops


def explore_blocks(grids: Sequence[int], **changes: object) -> Result:
    return explore(
        {f"rank {r} block {b}": blocks(r, 2, b, grids, **changes) for r in range(2) for b in range(max(grids))}
    )


GRIDS = (2, 1, 2, 1)


def test_grids_may_change_from_call_to_call():
    check(explore_blocks(GRIDS), right=True)


@pytest.mark.parametrize("changes", [{"boundary": False}, {"epochs": "per block"}, {"epochs": "block 0"}], ids=str)
def test_a_kernel_that_overtakes_or_miscounts_is_found(changes):
    check(explore_blocks(GRIDS, **changes), right=False)


def test_blocks_that_count_their_own_calls_are_right_only_while_the_grid_stays_the_same():
    check(explore_blocks((2, 2, 2), epochs="per block"), right=True)


# ---- one-shot push with Lamport payload: the data is its own flag, poison (0) marks what has not arrived


def lamport(
    rank: int, size: int, words: Sequence[int], *, slots: int = 3, clear: str = "previous", boundary: bool = True
) -> list[Op]:
    """words[c] of call c. Every call wipes what the one before it has read, as much of it as that call had."""
    ops: list[Op] = []
    peers = peers_of(rank, size)
    for call, count in enumerate(words):
        before = words[call - 1] if call else 0
        wiped = {"previous": (call - 1, before), "too little": (call - 1, min(count, before)), "own": (call, count)}
        which, amount = wiped.get(clear, (0, 0))
        wipe = [Write(("inbox", rank, which % slots, peer, w), 0) for peer in peers for w in range(amount)]
        ops += [Write(("inbox", peer, call % slots, rank, w), (call, rank)) for peer in peers for w in range(count)]
        ops += wipe if clear != "own" else []
        for peer in peers:
            for w in range(count):
                word = ("inbox", rank, call % slots, peer, w)
                ops += [Await(word, 0, "unlike"), Read(word, (call, peer))]
        ops += wipe if clear == "own" else []
        ops += [Fence()] * boundary
    return ops


def explore_lamport(size: int = 2, words: Sequence[int] = (2, 1, 1, 2, 1), **changes: object) -> Result:
    return explore({f"rank {r}": lamport(r, size, words, **changes) for r in range(size)})


@pytest.mark.parametrize(
    ("size", "words"),
    [(2, (2, 1, 1, 2, 1, 2)), pytest.param(3, (1,) * CALLS, marks=pytest.mark.slow)],
)
def test_lamport_payload_needs_three_slots_and_no_flag(size, words):
    check(explore_lamport(size, words), right=True)


def test_wiping_what_was_just_read_needs_two_slots_only():
    check(explore_lamport(slots=2, clear="own"), right=True)


@pytest.mark.parametrize(
    "changes",
    [{"slots": 2}, {"clear": "too little"}, {"clear": "never"}, {"boundary": False}, {"slots": 1, "clear": "own"}],
    ids=str,
)
def test_a_broken_lamport_push_is_found(changes):
    check(explore_lamport(**changes), right=False)


# ---- two-shot push


def two_shot(rank: int, size: int, *, slots: int = 1, second_wait: bool = True) -> list[Op]:
    """Parts to their owners, who reduce them and push the sums to everybody."""
    ops: list[Op] = []
    peers = peers_of(rank, size)
    for epoch in range(1, CALLS + 1):
        slot = epoch % slots
        for name, value in (("parts", (epoch, rank)), ("sums", (epoch, "sum", rank))):
            ops += [Write((name, peer, slot, rank), value) for peer in peers]
            ops += [Publish((name, "signal", peer, rank), epoch) for peer in peers]
            if name == "parts" or second_wait:
                ops += [Await((name, "signal", rank, peer), epoch) for peer in peers]
            ops += [Read((name, rank, slot, peer), (epoch, *value[1:-1], peer)) for peer in peers]
    return ops


def explore_two_shot(size: int, **changes: object) -> Result:
    return explore({f"rank {r}": two_shot(r, size, **changes) for r in range(size)})


@pytest.mark.parametrize("size", [2, 3])
def test_two_shot_push_needs_one_slot_only(size):
    """Its two waits are a barrier each: whoever pushes a part of the next call has seen that the owner is done."""
    check(explore_two_shot(size), right=True)


def test_a_broken_two_shot_push_is_found():
    check(explore_two_shot(2, second_wait=False), right=False)


# ---- all-gather + GEMM: tiles by copy engine, gated tile by tile


def gather_copies(
    rank: int, size: int, *, calls: int = 3, empty: int = 2, flags: str = "per tile", bits: int = 0, **_: object
) -> list[Op]:
    """The copy engine of a rank: its tiles to every peer, each followed by a flag; call e into the buffer of parity
    e & 1, when the peer's GEMM of call e - `empty` is done (0: never asks)."""
    ops: list[Op] = []
    for epoch in range(1, calls + 1):
        value = epoch & 1 if bits else epoch
        for peer in peers_of(rank, size):
            if empty and epoch > empty:
                ops.append(Await(("empty", rank, peer), epoch - empty))
            for tile in range(2):
                copy = Write(("gathered", peer, epoch % 2, rank, tile), (epoch, rank, tile))
                signal = Publish(("tile", peer, rank, tile), value)
                early = flags == "per shard" and tile == 0  # one flag, at the first tile, for the shard
                both = [Publish(("tile", peer, rank, t), value) for t in range(2)] if early else [signal]
                ops += [copy, *both]
    return ops


def gather_gemm(rank: int, size: int, *, calls: int = 3, bits: int = 0, reset: bool = False, **_: object) -> list[Op]:
    """The GEMM of a rank: waits for a tile before its first load of it, and says at its end that the buffer is free."""
    ops: list[Op] = []
    for epoch in range(1, calls + 1):
        value, test = (epoch & 1, "equal") if bits else (1 if reset else epoch, "at_least")
        for peer in peers_of(rank, size):
            for tile in range(2):
                ops += [Await(("tile", rank, peer, tile), value, test)]
                ops += [Read(("gathered", rank, epoch % 2, peer, tile), (epoch, peer, tile))]
                ops += [Write(("tile", rank, peer, tile), 0)] * reset
        ops += [Publish(("empty", peer, rank), epoch) for peer in peers_of(rank, size)]
    return ops


def explore_gather_gemm(**changes: object) -> Result:
    engines: dict[str, Program] = {f"copies {r}": gather_copies(r, 2, **changes) for r in range(2)}
    return explore(engines | {f"GEMM {r}": gather_gemm(r, 2, **changes) for r in range(2)})


def test_tiles_of_the_next_call_may_arrive_while_the_gemm_of_this_one_runs():
    check(explore_gather_gemm(), right=True)


@pytest.mark.parametrize(
    "changes", [{"empty": 0}, {"empty": 3}, {"flags": "per shard"}, {"bits": 1}, {"reset": True, "calls": 2}], ids=str
)
def test_a_broken_tile_gate_is_found(changes):
    check(explore_gather_gemm(**changes), right=False)


# ---- GEMM + reduce-scatter: partial tiles to their owner, who counts arrivals


def counter(owner: int, epoch: int, counters: str) -> Location:
    return ("arrived", owner, epoch % 2 if counters == "per slot" else 0)


def scatter_gemm(
    rank: int, size: int, *, empty: int = 2, relaxed: bool = False, counters: str = "per slot", **_: object
) -> list[Op]:
    """The GEMM of a rank: its part of tile t goes to owner t, who is told by an atomic addition."""
    ops: list[Op] = []
    for epoch in range(1, 4):
        for owner in [*peers_of(rank, size), rank]:  # peers' tiles first, the own one last
            if empty and epoch > empty:
                ops.append(Await(("empty", rank, owner), epoch - empty))
            ops.append(Write(("partial", owner, epoch % 2, rank), (epoch, rank)))
            ops.append(Add(counter(owner, epoch, counters), 1, relaxed))
    return ops


def scatter_reduce(rank: int, size: int, *, missing: int = 0, counters: str = "per slot", **_: object) -> list[Op]:
    """The reduction of the tile that a rank owns, in rank order, when all parts have arrived."""
    ops: list[Op] = []
    for epoch in range(1, 4):
        uses = (epoch + 1) // 2 if counters == "per slot" else epoch
        ops.append(Await(counter(rank, epoch, counters), size * uses - missing))
        ops += [Read(("partial", rank, epoch % 2, r), (epoch, r)) for r in range(size)]
        ops += [Publish(("empty", r, rank), epoch) for r in range(size)]
    return ops


def explore_scatter(**changes: object) -> Result:
    gemms: dict[str, Program] = {f"GEMM {r}": scatter_gemm(r, 2, **changes) for r in range(2)}
    return explore(gemms | {f"reduction {r}": scatter_reduce(r, 2, **changes) for r in range(2)})


def test_arrivals_are_counted_per_slot():
    check(explore_scatter(), right=True)


def test_one_counter_for_both_slots_is_right_only_without_overlap():
    """Else a fast rank's arrivals of the next call make up for a straggler's of this one."""
    check(explore_scatter(counters="one"), right=False)
    check(explore_scatter(counters="one", empty=1), right=True)


@pytest.mark.parametrize("changes", [{"empty": 0}, {"relaxed": True}, {"missing": 1}], ids=str)
def test_a_broken_count_of_arrivals_is_found(changes):
    check(explore_scatter(**changes), right=False)
