"""What the logger "fastpar.comm" tells operators: the transport of each group, and why it is not the best one."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import Communicator, PointToPoint
from fastpar.comm.shared_memory import rendezvous
from tests.dist import run_ranks


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def listen(transport: str = "auto", host: str = "") -> list[tuple[str, str]]:
    """What this rank logs when two communicators of one group and a channel are used. `host`: "own" gives each rank one
    of its own, "none" leaves rank 1 without shared memory."""
    logger, heard, is_first = logging.getLogger("fastpar.comm"), Heard(), dist.get_rank() == 0

    def faked() -> str:
        if host == "none" and not is_first:
            raise OSError("no boot id")
        return f"host {dist.get_rank() if host == 'own' else 0}"

    with pytest.MonkeyPatch.context() as patch:
        if host:
            patch.setattr(rendezvous, "_host", faked)
        level = logger.level
        logger.addHandler(heard)
        logger.setLevel(logging.INFO)
        try:
            for _ in range(2):
                comm = Communicator(dist.group.WORLD, transport=transport)
                for _ in range(2):
                    assert comm.all_reduce(torch.ones(2)).tolist() == [2, 2]
            channel = PointToPoint(dist.group.WORLD, transport=transport)
            comm.barrier()
            channel.close()
        finally:
            logger.removeHandler(heard)
            logger.setLevel(level)
    return heard.lines


@pytest.mark.parametrize(
    ("transport", "host", "level", "through"),
    [
        ("auto", "", "INFO", "shared memory"),
        ("torch", "", "INFO", "gloo"),
        ("auto", "own", "INFO", "gloo: the ranks are on several hosts, or in several containers"),
        ("auto", "none", "WARNING", "gloo: rank 1 has no shared memory: no boot id"),
    ],
)
def test_rank_0_says_once_for_each_group_which_way_it_takes_and_why(transport, host, level, through):
    first, second = run_ranks(2, listen, transport, host)
    assert [line_level for line_level, _ in first] == [level, level]
    assert first[0][1].startswith(f"CPU tensors of ranks [0, 1] go through {through}")
    assert first[1][1].startswith(f"messages between ranks [0, 1] go through {through}")
    assert second == []
