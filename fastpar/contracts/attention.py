"""Attention's masks and layouts as data: which query sees which key, as a table of band tiles.

A rank holds some of a sequence's tokens, in a local order: its `TokenRange`s. A mask says which query sees which key by
their global positions: an `AttentionMask`. Of both, `AttentionMask.tiles` makes rectangles of local rows and columns
with a band in each; that table is all that kernels read, so that causal, windowed, chunked and packed attention over
contiguous, zigzag, striped and dealt tokens are one kernel. No mask of queries times keys exists anywhere.

Note: band tiles
    A run of queries at a, a + s, a + 2s, ... and a run of keys at c, c + s, ... of one document. Query i sees key j iff

        a + s i - left <= c + s j <= a + s i + right
        ceil((a - left - c) / s) <= j - i <= floor((a + right - c) / s)

    A tile is (q0, q1, k0, k1, lo, hi): rows q0 <= q0 + i < q1, keys k0 <= k0 + j < k1, visible iff lo <= j - i <= hi.
    It is trimmed: each of its rows sees one of its keys, and each key is seen. It is full iff lo <= -(q1 - q0 - 1) and
    hi >= k1 - k0 - 1.

    Example: tokens 0..3 and 4..7 on two ranks, causal. Rank 1's tiles for its own keys: (0, 4, 0, 4, -3, 0); for rank
    0's: (0, 4, 0, 4, -3, 3), full; rank 0's for rank 1's: none.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastpar.arguments import check_counts, checked, checked_fields
from fastpar.contracts import FLOAT_DTYPES
from fastpar.contracts.linear import autocast_dtype

MAX_TOKENS = 2**31 - 1  # tables are int32
_CACHED_TABLES = 512  # of tiles: a model of a few kinds of layers, on a few ranks, for several microbatches


@checked_fields
@dataclass(frozen=True)
class TokenRange:
    """The global tokens start, start + step, ... below stop, in a rank's local order."""

    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= MAX_TOKENS:
            raise ValueError(f"TokenRange needs 0 <= start <= stop <= {MAX_TOKENS}, got {self.start} and {self.stop}")
        if self.step < 1:
            raise ValueError(f"step must be at least 1, got {self.step}")

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.step)


Ranges = tuple[TokenRange, ...]  # one rank's tokens, in local order


def num_tokens(ranges: Ranges) -> int:
    """How many tokens a rank has."""
    return sum(map(len, ranges))


def positions(ranges: Ranges) -> Tensor:
    """The global positions of a rank's tokens, in local order: int64 [s] on the host."""
    parts = [torch.arange(r.start, r.stop, r.step) for r in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class AttentionTiles:
    """Which of a rank's queries see which keys, as rectangles with a band in each (Note: band tiles).

    table       int32 [T, 6] on the host, (q0, q1, k0, k1, lo, hi): local row q0 + i sees local key k0 + j iff
                lo <= j - i <= hi; rows of one batch row sorted by (q0, k0)
    batch       b + 1 offsets: the tiles of batch row n are table[batch[n]:batch[n + 1]]; None: every row has them all
    num_queries, num_keys    of the rank's tensors: the table's rows and columns are below these

    A pair of a query and a key is in at most one tile. Queries in no tile see nothing: their output is 0.
    """

    table: Tensor
    batch: tuple[int, ...] | None
    num_queries: int
    num_keys: int
    offsets: Tensor | None = field(init=False)  # `batch` as an op takes it: int64 [b + 1] on the host

    def __post_init__(self) -> None:
        table = self.table
        if table.dtype != torch.int32 or table.dim() != 2 or table.shape[1] != 6 or table.device.type != "cpu":
            raise ValueError(
                f"table must be int32 [T, 6] on the host, got {table.dtype} {list(table.shape)} on {table.device}"
            )
        if len(table):
            self._check_bounds()
        offsets = None if self.batch is None else torch.tensor(self.batch, dtype=torch.int64, device="cpu")
        object.__setattr__(self, "offsets", offsets)
        if self.batch is None:
            return
        ascends = all(a <= b for a, b in itertools.pairwise(self.batch))
        if len(self.batch) < 2 or self.batch[0] != 0 or self.batch[-1] != len(table) or not ascends:
            raise ValueError(f"batch must ascend from 0 to the table's {len(table)} tiles, got {self.batch}")

    def _check_bounds(self) -> None:
        q0, q1, k0, k1, lo, hi = self.table.unbind(1)
        inside = (q0 >= 0) & (q0 < q1) & (q1 <= self.num_queries) & (k0 >= 0) & (k0 < k1) & (k1 <= self.num_keys)
        good = inside & (lo <= hi)
        if not bool(good.all()):
            index = int((~good).nonzero()[0])
            raise ValueError(
                f"tile {index}, {self.table[index].tolist()}, must have 0 <= q0 < q1 <= {self.num_queries}, "
                f"0 <= k0 < k1 <= {self.num_keys} and lo <= hi"
            )

    @functools.cached_property
    def pairs(self) -> int:
        """How many (query, key) pairs are visible, of all rows that the table tells apart: the work of one head."""
        q0, q1, k0, k1, lo, hi = self.table.long().unbind(1)
        rows, columns = q1 - q0, k1 - k0
        return int((_pairs_up_to(hi, rows, columns) - _pairs_up_to(lo - 1, rows, columns)).sum())

    @functools.cached_property
    def keys_read(self) -> tuple[tuple[int, int], ...]:
        """The ranges of local keys that some tile of some batch row reads, ascending and apart from one another."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted({(k0, k1) for _, _, k0, k1, _, _ in self.table.tolist()}):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((start, stop))
        return tuple(merged)


def _pairs_up_to(band: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pairs of a rectangle with j - i <= band: the sum over rows of clamp(i + band + 1, 0, columns)."""

    def total(x: Tensor) -> Tensor:  # the sum of clamp(y, 0, columns) over y <= x
        inner = torch.minimum(x.clamp(min=0), columns)
        return inner * (inner + 1) // 2 + (x - columns).clamp(min=0) * columns

    return total(rows + band) - total(band)


@checked_fields
@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Dropout of attention's probabilities with a mask that depends on the seed and on global indices alone.

    p                         of a probability to become 0; the others are divided by 1 - p, after the softmax
    seed                      of this call, the same on every rank; the hash: `attention_keep_mask` of the reference
    q_positions, k_positions  global positions of the local tokens, int64 [s_q] and [s_k]; None: 0, 1, ...
    first_batch, first_head   global indices of the first batch row and the first query head of these tensors
    """

    p: float
    seed: int
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    first_batch: int = 0
    first_head: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"p must be between 0 and 1, got {self.p}")
        check_counts(MAX_TOKENS, least=0, first_batch=self.first_batch, first_head=self.first_head)
        for name, value in (("q_positions", self.q_positions), ("k_positions", self.k_positions)):
            if value is not None and (value.dtype != torch.int64 or value.dim() != 1):
                raise ValueError(f"{name} must be int64 [tokens], got {value.dtype} {list(value.shape)}")


@checked_fields
@dataclass(frozen=True)
class AttentionMask:
    """Which query sees which key, by global positions: the query at p sees the key at c iff all of these hold.

    causal      c <= p
    window      p - left <= c <= p + right, of (left, right): keys seen beside the query's own, at most
    documents   both are in one document: lengths per batch row, or one tuple of lengths for all rows
    chunk       both are in one chunk of this many tokens, counted from the start of their document (Llama 4)

    A document sees what it would see alone, whatever it is packed with. Hugging Face's `sliding_window` w is the
    window (w - 1, 0). Raises ValueError for negative lengths and windows, and chunks below one.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    chunk: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.window is not None:  # lists are not hashable, and tables are kept by their masks
            object.__setattr__(self, "window", tuple(self.window))
        if self.documents is not None:
            object.__setattr__(self, "documents", tuple(tuple(lengths) for lengths in self.documents))
        if self.window is not None and not all(0 <= side <= MAX_TOKENS for side in self.window):
            raise ValueError(f"window must be (left, right), both in 0..{MAX_TOKENS}, got {self.window}")
        if self.chunk is not None:
            check_counts(MAX_TOKENS, chunk=self.chunk)
        if self.documents is None:
            return
        if not self.documents:
            raise ValueError("documents must be lengths for at least one batch row, got none")
        for row, lengths in enumerate(self.documents):
            if any(length < 0 for length in lengths) or sum(lengths) > MAX_TOKENS:
                raise ValueError(
                    f"documents must not be negative, and at most {MAX_TOKENS} together, got {lengths} in row {row}"
                )
        sums = sorted({sum(lengths) for lengths in self.documents})
        if len(sums) > 1:
            raise ValueError(f"documents must add up to one length in every batch row, got {sums}")

    @property
    def reach(self) -> tuple[int, int]:
        """(left, right): how far before and behind itself a query sees, documents and chunks aside."""
        left, right = self.window or (MAX_TOKENS, MAX_TOKENS)
        return left, 0 if self.causal else right

    @property
    def num_tokens(self) -> int | None:
        """What the documents add up to; None without any."""
        return None if self.documents is None else sum(self.documents[0])

    @checked(computed=False)
    def tiles(self, queries: Ranges, keys: Ranges) -> AttentionTiles:
        """The tiles of queries on one rank and keys of another, or of the same; kept for the next call with the same.

        Runs of both sides that see each other in part need one step: striped queries see striped keys. Raises
        ValueError otherwise, and for tokens behind the last document.
        """
        return _cached_tiles(self, queries, keys)

    @checked(computed=False)
    def visible_keys(self, num_tokens: int) -> Tensor:
        """How many keys of the whole sequence each query sees, summed over the rows of `documents`: int64 [S]."""
        check_counts(MAX_TOKENS, least=0, num_tokens=num_tokens)
        if self.documents is not None and self.num_tokens != num_tokens:
            raise ValueError(f"documents add up to {self.num_tokens} tokens, not to {num_tokens}")
        left, right = self.reach
        counts = torch.zeros(num_tokens, dtype=torch.int64)
        position = torch.arange(num_tokens)
        for lengths in self.documents or ((num_tokens,),):
            starts = _segment_starts(lengths, self.chunk, num_tokens)
            ends = torch.cat([starts[1:], torch.tensor([num_tokens])])
            segment = torch.searchsorted(starts, position, right=True) - 1
            before, behind = position - starts[segment], ends[segment] - 1 - position
            counts += before.clamp(max=left) + behind.clamp(max=right) + 1
        return counts


@functools.lru_cache(maxsize=_CACHED_TABLES)
def _cached_tiles(mask: AttentionMask, queries: Ranges, keys: Ranges) -> AttentionTiles:
    # What is kept is real, whoever asks first, and can be saved for backward.
    with _disable_current_modes(), torch.inference_mode(False), torch.device("cpu"):
        return _tiles(mask, queries, keys)


def _tiles(mask: AttentionMask, queries: Ranges, keys: Ranges) -> AttentionTiles:
    last = max((r.start + (len(r) - 1) * r.step + 1 for r in (*queries, *keys) if len(r)), default=0)
    total = mask.num_tokens
    if total is not None and last > total:
        raise ValueError(f"documents add up to {total} tokens, but there are tokens up to {last}")
    rows = mask.documents or ((last,),)
    if len(set(rows)) == 1:
        rows = rows[:1]
    tables = [_table(mask, lengths, last, queries, keys) for lengths in rows]
    batch = tuple(itertools.accumulate(map(len, tables), initial=0)) if len(rows) > 1 else None
    return AttentionTiles(torch.cat(tables), batch, num_tokens(queries), num_tokens(keys))


class _Runs(NamedTuple):
    """Ranges cut where a document or a chunk starts; int64 [n] each, sorted by segment."""

    segment: Tensor
    start: Tensor  # the first token, in global positions
    step: Tensor
    local: Tensor  # the first token's local index
    length: Tensor

    def take(self, index: Tensor) -> _Runs:
        return _Runs(*(column[index] for column in self))


def _segment_starts(lengths: Sequence[int], chunk: int | None, total: int) -> Tensor:
    """Where documents and their chunks start, ascending, without empty ones: int64 [n], n >= 1."""
    sizes = torch.tensor([n for n in lengths if n] or [total], dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    if chunk is not None:
        chunks = -(-sizes // chunk)
        first = (chunks.cumsum(0) - chunks).repeat_interleave(chunks)
        starts = starts.repeat_interleave(chunks) + (torch.arange(int(chunks.sum())) - first) * chunk
    return starts


def _cut(ranges: Ranges, starts: Tensor) -> _Runs:
    """The runs of one side. A range of step s has ceil((b - start) / s) tokens below a boundary b."""
    columns = torch.tensor([(r.start, r.step, len(r)) for r in ranges], dtype=torch.int64).reshape(-1, 3)
    start, step, count = columns.unbind(1)
    local = count.cumsum(0) - count
    filled = count > 0
    start, step, count, local = start[filled], step[filled], count[filled], local[filled]
    first = torch.searchsorted(starts, start, right=True) - 1
    last = torch.searchsorted(starts, start + (count - 1) * step, right=True) - 1
    pieces = last - first + 1
    owner = torch.arange(len(start)).repeat_interleave(pieces)
    segment = first[owner] + torch.arange(len(owner)) - (pieces.cumsum(0) - pieces)[owner]
    ends = torch.cat([starts[1:], torch.tensor([2 * MAX_TOKENS])])
    start, step, count, local = start[owner], step[owner], count[owner], local[owner]
    below = (-((start - starts[segment]) // step)).clamp(min=0).minimum(count)  # tokens before the segment
    up_to = (-((start - ends[segment]) // step)).clamp(min=0).minimum(count)
    runs = _Runs(segment, start + below * step, step, local + below, up_to - below)
    runs = runs.take((runs.length > 0).nonzero().flatten())
    return runs.take(torch.argsort(runs.segment, stable=True))


def _pairs_of_runs(queries: _Runs, keys: _Runs) -> tuple[_Runs, _Runs]:
    """Every query run beside every key run of its segment."""
    low = torch.searchsorted(keys.segment, queries.segment)
    many = torch.searchsorted(keys.segment, queries.segment, right=True) - low
    query = torch.arange(len(low)).repeat_interleave(many)
    key = low[query] + torch.arange(len(query)) - (many.cumsum(0) - many)[query]
    return queries.take(query), keys.take(key)


def _table(mask: AttentionMask, lengths: Sequence[int], total: int, queries: Ranges, keys: Ranges) -> Tensor:
    """The tiles of one batch row, int32 [T, 6]."""
    starts = _segment_starts(lengths, mask.chunk, total)
    q, k = _pairs_of_runs(_cut(queries, starts), _cut(keys, starts))
    left, right = mask.reach
    step, ahead = torch.where(q.length == 1, k.step, q.step), q.start - k.start
    hi = torch.div(ahead + right, step, rounding_mode="floor")
    lo = -torch.div(left - ahead, step, rounding_mode="floor")
    hi, lo = _of_two_steps(q, k, mask.reach, hi, lo)
    # trimmed: row i sees a key iff i + hi >= 0 and i + lo < columns, and the same for keys
    row0, row1 = (-hi).clamp(min=0), torch.minimum(q.length, k.length - lo)
    key0, key1 = lo.clamp(min=0), torch.minimum(k.length, q.length + hi)
    lo, hi = lo + row0 - key0, hi + row0 - key0
    seen = (row0 < row1) & (key0 < key1) & (lo <= hi)
    lo, hi = torch.maximum(lo, row0 - row1 + 1), torch.minimum(hi, key1 - key0 - 1)
    table = torch.stack([q.local + row0, q.local + row1, k.local + key0, k.local + key1, lo, hi], 1)[seen]
    table = table[torch.argsort(table[:, 2], stable=True)]
    return table[torch.argsort(table[:, 0], stable=True)].to(torch.int32)


def _of_two_steps(q: _Runs, k: _Runs, reach: tuple[int, int], hi: Tensor, lo: Tensor) -> tuple[Tensor, Tensor]:
    """The bands, right for pairs of runs of two steps as well: these must be seen wholly or not at all."""
    two = (q.step != k.step) & (q.length > 1) & (k.length > 1)
    if not bool(two.any()):
        return hi, lo
    left, right = reach
    q_last, k_last = q.start + (q.length - 1) * q.step, k.start + (k.length - 1) * k.step
    unseen = (k.start > q_last + right) | (k_last < q.start - left)
    whole = (k_last <= q.start + right) & (k.start >= q_last - left)
    if bool((two & ~unseen & ~whole).any()):
        steps = sorted({*q.step[two].tolist(), *k.step[two].tolist()})
        raise ValueError(f"queries and keys that see each other in part must have one step, got the steps {steps}")
    hi = torch.where(two, torch.where(whole, k.length - 1, -q.length), hi)
    return hi, torch.where(two, 1 - q.length, lo)


# ---- arguments of `attention` ----------------------------------------------------------------------------------------


class ScoreOptions(NamedTuple):
    """What fastpar::attention_forward and attention_backward take after the tiles."""

    scale: float
    softcap: float = 0.0  # 0: none
    dropout_p: float = 0.0
    dropout_seed: int = 0
    first_batch: int = 0
    first_head: int = 0
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Neither a softcap nor dropout."""
        return self.softcap == 0.0 and self.dropout_p == 0.0

    @property
    def dropout(self) -> AttentionDropout | None:
        """None where nothing is dropped."""
        return AttentionDropout(*self[2:4], *self[6:], *self[4:6]) if self.dropout_p else None

    @classmethod
    def of(
        cls, head_dim: int, scale: float | None, softcap: float | None, dropout: AttentionDropout | None
    ) -> ScoreOptions:
        scale = head_dim**-0.5 if scale is None else scale
        if dropout is None or dropout.p == 0.0:
            return cls(scale, softcap or 0.0)
        where = (dropout.first_batch, dropout.first_head, dropout.q_positions, dropout.k_positions)
        return cls(scale, softcap or 0.0, dropout.p, dropout.seed, *where)


def autocast_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the dtype that torch's scaled_dot_product_attention would compute in."""
    dtype = autocast_dtype(q)
    return (q, k, v) if dtype is None else (q.to(dtype), k.to(dtype), v.to(dtype))


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises TypeError or ValueError if these are no queries, keys and values of one attention."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} must be one of {', '.join(map(str, FLOAT_DTYPES))}, got {x.dtype}")
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head dim], got {list(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q and {name} must have one dtype and device, got {q.dtype} on {q.device} and {x.dtype} on {x.device}"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, heads and tokens, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head dim, got {list(q.shape)} and {list(k.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads ({q.shape[1]}) must be a multiple of key/value heads ({k.shape[1]})")


def check_score_options(q: Tensor, scale: float | None, softcap: float | None, sink: Tensor | None) -> None:
    """Raises TypeError or ValueError with the values of options that do not fit."""
    if scale is not None and not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, got {scale}")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, or None, got {softcap}")
    if sink is not None:
        if sink.dtype not in FLOAT_DTYPES:
            raise TypeError(f"sink must be one of {', '.join(map(str, FLOAT_DTYPES))}, got {sink.dtype}")
        if sink.shape != q.shape[1:2] or sink.device != q.device:
            raise ValueError(
                f"sink must be [{q.shape[1]}], a number for each query head, on {q.device}, "
                f"got {list(sink.shape)} on {sink.device}"
            )


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: AttentionTiles | None, causal: bool, dropout: AttentionDropout | None
) -> None:
    """Raises TypeError or ValueError with the values if the tensors do not fit one another or the tiles."""
    check_heads(q, k, v)
    rows, columns = q.shape[2], k.shape[2]
    if tiles is None and causal and rows != columns:
        raise ValueError(
            f"causal needs as many queries as keys, got {rows} and {columns}: say which query sees which key by tiles="
        )
    if tiles is not None:
        if causal:
            raise ValueError("give either tiles or causal: AttentionMask(causal=True).tiles(...) has the causal ones")
        if (tiles.num_queries, tiles.num_keys) != (rows, columns):
            raise ValueError(
                f"tiles are of {tiles.num_queries} queries and {tiles.num_keys} keys, but q has {rows} and k {columns}"
            )
        if tiles.batch is not None and len(tiles.batch) - 1 != q.shape[0]:
            raise ValueError(f"tiles are of {len(tiles.batch) - 1} batch rows, but q has {q.shape[0]}")
    if dropout is None:
        return
    for name, where, count in (
        ("q_positions", dropout.q_positions, rows),
        ("k_positions", dropout.k_positions, columns),
    ):
        if where is not None and len(where) != count:
            raise ValueError(f"{name} of dropout must be [{count}], one for each token, got {list(where.shape)}")
