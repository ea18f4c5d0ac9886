"""Which columns of a vocabulary a rank holds, and the exchange of per-row statistics between the ranks that share it.

Every vocab-parallel op begins alike: each rank computes a few numbers a row from its own columns, all ranks' numbers
travel in one all-gather, and every rank combines them in rank order. What can be wrong with the arguments of one rank
only (its range, a target) travels with them, so that every rank raises the same error and none waits for another.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastpar.contracts.agreement import AgreedCall, first_outside, outside_error, raise_disagreement

if TYPE_CHECKING:
    from fastpar.comm import Communicator

HEADER_ROWS = 3  # enough for four int64 in rows of three float32


class Shard(NamedTuple):
    """One rank's columns [start, start + size) of a vocabulary of `total` ids."""

    start: int
    size: int
    total: int


def resolve_shard(size: int, vocab_range: tuple[int, int, int] | None, comm: Communicator | None) -> Shard:
    """The columns that this rank, which has `size` of them, holds: `vocab_range`, or equal shards in rank order."""
    if vocab_range is None:
        rank, ranks = (comm.rank, comm.size) if comm is not None else (0, 1)
        return Shard(rank * size, size, ranks * size)
    start, end, total = vocab_range
    if not 0 <= start <= end <= total:
        raise ValueError(f"vocab_range is (start, end, total) with 0 <= start <= end <= total, got {vocab_range}")
    if end - start != size:
        raise ValueError(f"vocab_range {vocab_range} names {end - start} columns, but there are {size}")
    if comm is None and size != total:
        raise ValueError(f"vocab_range {vocab_range} is a part of the vocabulary, which needs a group of several ranks")
    return Shard(start, size, total)


def check_target_range(target: Tensor, total: int, ignore_index: int, name: str = "target") -> None:
    """Raise IndexError that names the first target outside [0, total) other than `ignore_index`."""
    bad = first_outside(target, total, ignore_index)
    if bad is not None:
        raise outside_error(bad, "", total, ignore_index, name)


def check_shards(shards: list[list[int]]) -> None:
    """Raise ValueError unless the ranks' (size, start, total, ...) tile one vocabulary."""
    end, total = 0, shards[0][2]
    for rank, (size, start, rank_total, *_) in enumerate(shards):
        if rank_total != total or start != end:
            sizes = [shard[0] for shard in shards]
            raise ValueError(
                f"the ranks' vocabulary shards do not tile one vocabulary: rank {rank} holds {size} columns from "
                f"{start} of {rank_total}, expected to start at {end} of {total}. Shards of unequal sizes ({sizes}) "
                "need vocab_range=(start, end, total) on every rank."
            )
        end = start + size
    if end != total:
        raise ValueError(f"the ranks' vocabulary shards end at {end}, but the vocabulary has {total} ids")


# ---- the header ------------------------------------------------------------------------------------------------------

# Note: the header. The last HEADER_ROWS rows of a rank's statistics are no statistics: their first 36 bytes are four
# int64, (size, start, total, 1 + first bad row or 0), and a checksum of the ids and of the call's options (an int32; 0:
# there is none), and the rest is zero. They are bits, not numbers, so that ids beyond 2^24 survive in a float32 tensor;
# nothing ever computes with them.


def with_header(rows: Tensor, shard: Shard, bad_row: int = -1, checksum: int = 0) -> Tensor:
    """`rows` [N, C] (C >= 3, float32 or float64) and the header below them: [N + 3, C]."""
    numbers = [shard.size, shard.start, shard.total, bad_row + 1, checksum]
    integers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    words = integers.view(torch.int32)[:9].view(torch.float32) if rows.dtype == torch.float32 else None
    header = torch.zeros(HEADER_ROWS * rows.shape[1], dtype=rows.dtype)
    if words is None:
        words = integers.view(torch.float64)
    header[: words.numel()] = words
    return torch.cat([rows, header.view(HEADER_ROWS, -1).to(rows.device)])


def read_headers(gathered: Tensor) -> list[list[int]]:
    """[size, start, total, 1 + bad row, checksum] of every rank, from [ranks, N + 3, C]; waits for the device."""
    headers = gathered[:, -HEADER_ROWS:].view(torch.int32).tolist()  # the rest in Python: less than an op's time
    words = ([word for row in header for word in row] for header in headers)
    return [list(struct.unpack("=4qi", struct.pack("=9i", *header[:9]))) for header in words]


def exchange(local: Tensor, comm: Communicator | None) -> Tensor:
    """Every rank's [N + 3, C], [ranks, N + 3, C], by one all-gather; none without a communicator."""
    if comm is None:
        return local.unsqueeze(0)
    if torch.compiler.is_compiling() and not local.is_cpu:
        # A transport of devices cannot be traced; this is the same collective as an op that can, without a deadline.
        from torch.distributed._functional_collectives import all_gather_tensor

        assert comm.group is not None  # a communicator of several ranks has one
        return all_gather_tensor(local, 0, comm.group).view(comm.size, *local.shape)
    return comm.all_gather(local, dim=0).view(comm.size, *local.shape)


def check_headers(
    gathered: Tensor, ids: Tensor | None, ignore_index: int, name: str = "target", call: AgreedCall | None = None
) -> None:
    """Raise what the ranks' headers say is wrong, the same on every rank: ValueError, IndexError, CommMismatchError.

    On CPU only: elsewhere it would be a synchronisation, and in a graph a branch on data. There a target outside the
    vocabulary makes its row's loss NaN, on every rank.
    """
    if torch.compiler.is_compiling() or gathered.device.type != "cpu":
        return
    headers = read_headers(gathered)
    check_shards(headers)
    total = headers[0][2]
    if call is None:
        if ids is not None and any(header[3] for header in headers):
            check_target_range(ids, total, ignore_index, name)
    elif any(header[3] or header[4] != headers[0][4] for header in headers):
        raise_disagreement(call, ids, total, ignore_index, name)
