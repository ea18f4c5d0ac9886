"""What a rank is told where a peer has ended, or has written what it should not: the right name, and no crash."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import struct
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import CommError, PeerLostError, PointToPoint
from fastpar.comm.message_format import parse
from tests.dist import RankError, run_ranks, say_done, stay_away_until_done


def blamed_first() -> str:
    p2p = PointToPoint(dist.group.WORLD, timeout=30.0)
    if p2p.rank == 1:
        stay_away_until_done([2])
        os.kill(os.getpid(), signal.SIGKILL)
    if p2p.rank == 2:
        p2p.recv(0, 9)  # so that all have come
        say_done()
        with contextlib.suppress(PeerLostError):
            p2p.recv(1, 1)
        p2p.close()  # gives up first, and is no cause of anything
        dist.distributed_c10d._get_default_store().set("given up", "")
        time.sleep(1.0)
        return ""
    p2p.send(2, 9, [])
    dist.distributed_c10d._get_default_store().wait(["given up"])
    with pytest.raises(PeerLostError) as error:
        p2p.recv(2, 7)
    with pytest.raises(PeerLostError) as sending:
        p2p.send(2, 8, [])
    raise ValueError(f"{error.value} | {sending.value}")


def test_a_process_that_was_killed_is_blamed_and_not_the_rank_that_gave_up_first():
    with pytest.raises(RankError) as error:
        run_ranks(3, blamed_first)
    text = str(error.value)
    ended = r"on rank 0 of 3: the process of rank 1 \(pid \d+\) has ended"
    assert re.search(rf"recv #0 from rank 2 with tag 7 {ended}", text), text
    assert re.search(rf"send #1 to rank 2 with tag 8 {ended}", text), text


def scribble(seed: int) -> str:
    """Rank 1 writes over its own mailbox; rank 0 reads on, and may get an error, but no signal."""
    p2p = PointToPoint(dist.group.WORLD, timeout=0.3)
    draw = random.Random(seed)
    outcome = ""
    for step in range(40):
        if p2p.rank == 1:
            with contextlib.suppress(CommError):
                p2p.send(0, step, [torch.arange(10.0), torch.ones(2, 3, dtype=torch.int64)], b"note")
            for begin, nbytes in mapped_segments():
                memory = (ctypes.c_char * min(nbytes, 1 << 14)).from_address(begin)
                for _ in range(3):
                    at = 4096 + 8 * draw.randrange(64) if draw.random() < 0.7 else 8 * draw.randrange(1 << 9)
                    value = draw.choice([0, 1, -1, 1 << 62, 1 << 40, 4096, 64, draw.getrandbits(63)])
                    if at >= 128:  # not the first lines, which say whose it is
                        struct.pack_into("<q", memory, at, value)
        try:
            if p2p.rank == 0:
                p2p.recv(1, step)
                p2p.send(1, step, [torch.ones(3)])
        except CommError as error:
            outcome = str(error)
        _wait_for_each_other(step)
    return outcome


def _wait_for_each_other(step: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"step {step} {dist.get_rank()}", "")
    store.wait([f"step {step} 0", f"step {step} 1"])


def mapped_segments() -> list[tuple[int, int]]:
    """Shared memory of fastpar that this process has mapped, which is its own or its peer's; all of it."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:fastpar" in line and line.split()[1].startswith("rw-s"):
            begin, end = (int(x, 16) for x in line.split()[0].split("-"))
            if end - begin > 1 << 30:  # an arena
                found.append((begin, end - begin))
    return found


def test_a_mailbox_that_was_written_over_is_an_error_of_its_readers_and_no_crash():
    """Which numbers are hit, and whether they are read again, depends on where segments are mapped."""
    outcomes = [run_ranks(2, scribble, seed)[0] for seed in range(4)]
    assert all(not outcome or "damaged" in outcome or "waited" in outcome for outcome in outcomes), outcomes
    assert any(outcomes)


@pytest.mark.parametrize(
    "words",
    [[], [-1], [5], [1, 6], [1, 99, 0], [1, 6, 65], [1, 6, -1], [1, 6, 1], [1, 6, 1, -2], [1, 6, 2, 1 << 40, 1 << 40]],
)
def test_a_description_of_a_peer_that_no_rank_writes_is_an_error(words):
    with pytest.raises(CommError, match="not what a rank writes"):
        parse(struct.pack(f"<{len(words)}q", *words))
