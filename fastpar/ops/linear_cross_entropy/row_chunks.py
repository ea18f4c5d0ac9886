"""How linear_cross_entropy cuts a batch of tokens into chunks whose logits fit a memory budget.

A row is a token. Rows whose target is ignored contribute nothing, so on CPU they are left out before the GEMMs; on
CUDA counting them would be a synchronisation, and they stay.

Under sequence parallelism every chunk takes a share of every rank's tokens, so that one gather brings a chunk's hidden
states together and one reduce-scatter takes their gradients home, and no rank ever holds all tokens' hidden states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm.shards import shard_sizes

Rows = slice | Tensor

# Logits of one chunk: large enough that reading the weight again and accumulating its gradient once per chunk costs
# little against the GEMMs, small enough not to matter beside the weight.
BUDGET_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
MIN_ROWS = {"cpu": 128, "cuda": 1024}  # below, GEMMs lose speed
ROW_MULTIPLE = {"cpu": 8, "cuda": 128}  # of the GEMMs' tiles


class RowChunk(NamedTuple):
    """One chunk.

    rows   its rows among the flattened targets, in the order in which they are processed
    local  its rows among this rank's flattened hidden states: the same, but under sequence parallelism
    parts  under sequence parallelism, how many of its rows each rank has; `rows` are in rank order
    """

    rows: Rows
    local: Rows
    parts: list[int] | None
    size: int


def rows_per_chunk(
    num_rows: int, row_bytes: int, chunk_bytes: int | None, device_type: str, spared_bytes: int = 0
) -> int:
    """Rows of the largest chunk: what the budget allows but no fewer than the device's minimum, all chunks about equal.

    spared_bytes  what one chunk of all rows does without; its logits may take that much more than the default budget

    1000 rows of 128 KiB on CPU: 512 fit 64 MiB, so there are two chunks, of 504 and 496 rows.
    """
    kind = device_type if device_type in BUDGET_BYTES else "cuda"
    if chunk_bytes is None and spared_bytes and num_rows * row_bytes <= BUDGET_BYTES[kind] + spared_bytes:
        return num_rows
    multiple = ROW_MULTIPLE[kind]
    limit = (BUDGET_BYTES[kind] if chunk_bytes is None else chunk_bytes) // max(row_bytes, 1)
    limit = max(limit // multiple * multiple, MIN_ROWS[kind])
    chunks = max(1, -(-num_rows // limit))
    return min(num_rows, -(-num_rows // (chunks * multiple)) * multiple)


def split_rows(
    target: Tensor, keep: Tensor | None, row_bytes: int, chunk_bytes: int | None, spared_bytes: int = 0
) -> list[RowChunk]:
    """Chunks of the rows of `target` [...] that `keep` (bool, same shape; None: all) selects."""
    num_rows, device = target.numel(), target.device
    kept = None if keep is None else keep.reshape(-1).nonzero().squeeze(1)
    count = num_rows if kept is None else kept.numel()
    step = rows_per_chunk(count, row_bytes, chunk_bytes, device.type, spared_bytes)
    chunks = []
    for start in range(0, count, step or 1):
        end = min(start + step, count)
        rows = slice(start, end) if kept is None else kept[start:end]
        chunks.append(RowChunk(rows, rows, None, end - start))
    return chunks


def split_sequence(
    target: Tensor, keep: Tensor | None, row_bytes: int, chunk_bytes: int | None, *, dim: int, ranks: int, rank: int
) -> list[RowChunk]:
    """The same where rank r holds the hidden states of the r-th part (`shard_sizes`) of dim `dim` of `target`."""
    positions = torch.arange(target.numel(), device=target.device).view(target.shape)
    kept = []  # every rank's rows among all
    mine: Tensor | None = None  # this rank's among its own
    for r, part in enumerate(positions.split(shard_sizes(target.shape[dim], ranks), dim)):
        part = part.reshape(-1)
        chosen = None if keep is None else keep.reshape(-1)[part].nonzero().squeeze(1)
        kept.append(part if chosen is None else part[chosen])
        if r == rank:
            mine = chosen
    count = sum(part.numel() for part in kept)
    step = rows_per_chunk(count, row_bytes, chunk_bytes, target.device.type)
    num_chunks = -(-count // step) if count else 0
    chunks = []
    for c in range(num_chunks):
        bounds = [(part.numel() * c // num_chunks, part.numel() * (c + 1) // num_chunks) for part in kept]
        rows = torch.cat([part[a:b] for part, (a, b) in zip(kept, bounds, strict=True)])
        local = slice(*bounds[rank])
        chunks.append(RowChunk(rows, local if mine is None else mine[local], [b - a for a, b in bounds], rows.numel()))
    return chunks


def take_rows(x: Tensor, rows: Rows) -> Tensor:
    """Rows of x along dim 0: a view where they are a range, or where all rows of x are one (an expanded scalar)."""
    if isinstance(rows, slice):
        return x[rows]
    if x.dim() == 1 and x.stride(0) == 0:
        return x[:1].expand(rows.numel())
    return x.index_select(0, rows)


def put_rows(out: Tensor, rows: Rows, values: Tensor) -> None:
    """out[rows] = values, along dim 0."""
    if isinstance(rows, slice):
        out[rows].copy_(values)
    else:
        out.index_copy_(0, rows, values)
