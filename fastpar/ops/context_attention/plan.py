"""What a rank computes and exchanges for one layout and one mask: made on the host, once for all layers and steps.

Note: rows and keys of a block
    A block is what one call of the local op computes: this rank's queries, `rows` of them, against keys of one source.
    Rows that see none of these keys are left out at both ends. `read` are the source's keys that some of this rank's
    queries see; a transport that sends sends these alone, one after another, and `packed` is the same table for them.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastpar.contracts.attention import AttentionMask, AttentionTiles, Ranges, TokenRange, num_tokens, positions
from fastpar.ops.context_attention.methods import Span

_CACHED_PLANS = 64  # a few kinds of layers, for several microbatches in flight
Layout = tuple[Ranges, ...]


@dataclass(frozen=True, eq=False)
class Block:
    """Queries of this rank against keys of one source (Note: rows and keys of a block).

    rows       the first query with a tile, and one past the last
    table      int32 [T, 6], rows counted from rows[0]; keys as they lie, or as they were packed
    offsets    int64 [b + 1] of the batch rows' tiles, or None: see AttentionTiles
    query_ranges, key_ranges  of all queries and keys; packed: the keys that were packed, None: all
    """

    rows: Span
    table: Tensor
    offsets: Tensor | None
    query_ranges: Ranges
    key_ranges: Ranges
    packed: tuple[Span, ...] | None = None

    @functools.cached_property
    def queries(self) -> Tensor:
        """Global positions of the rows, int64, for dropout's hash."""
        return positions(self.query_ranges)[self.rows[0] : self.rows[1]]

    @functools.cached_property
    def keys(self) -> Tensor:
        """Global positions of the keys, int64."""
        found = positions(self.key_ranges)
        return found if self.packed is None else take_spans(found, self.packed)


@dataclass(frozen=True, eq=False)
class RingStep:
    """One step of a ring: the keys of `source` are here, and this rank's own are at `target`. Both are positions of the
    ring.

    sent   this rank's keys that the target reads
    """

    source: int
    target: int
    tiles: AttentionTiles
    queries: Ranges
    keys: Ranges
    sent: tuple[Span, ...]

    @property
    def read(self) -> tuple[Span, ...]:
        """The source's keys that this rank reads."""
        return self.tiles.keys_read

    @functools.cached_property
    def in_place(self) -> Block | None:
        """Against all keys of the source; None where nothing is visible."""
        return _block(self.tiles, self.tiles.table, self.queries, self.keys)

    @functools.cached_property
    def packed(self) -> Block | None:
        """Against the keys that are read, one after another."""
        table = self.tiles.table.clone()
        starts = torch.tensor([start for start, _ in self.read], dtype=torch.int64)
        before = torch.tensor([0, *(stop - start for start, stop in self.read)], dtype=torch.int64).cumsum(0)[:-1]
        if len(table):
            span = torch.searchsorted(starts, table[:, 2].long(), right=True) - 1
            # A tile lies in one of the spans, which are unions of tiles. lo and hi count within the tile.
            table[:, 2:4] -= (starts - before)[span][:, None].to(torch.int32)
        return _block(self.tiles, table, self.queries, self.keys, self.read)


def _block(
    tiles: AttentionTiles, table: Tensor, queries: Ranges, keys: Ranges, packed: tuple[Span, ...] | None = None
) -> Block | None:
    if not len(table):
        return None
    first, last = int(table[:, 0].min()), int(table[:, 1].max())
    table = table.clone()
    table[:, :2] -= first
    return Block((first, last), table, tiles.offsets, queries, keys, packed)


class ContextPlan:
    """The plan of one rank. `layout`: the tokens of each position of the ring."""

    def __init__(self, layout: Layout, mask: AttentionMask, position: int) -> None:
        self.layout, self.mask, self.position = layout, mask, position
        self.sizes = tuple(map(num_tokens, layout))
        self.size = len(layout)

    @functools.cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """Own keys first, then those of position - 1, position - 2, ..."""
        own, steps = self.layout[self.position], []
        for step in range(self.size):
            source, target = (self.position - step) % self.size, (self.position + step) % self.size
            sent = self.mask.tiles(self.layout[target], own).keys_read
            keys = self.layout[source]
            steps.append(RingStep(source, target, self.mask.tiles(own, keys), own, keys, sent))
        return tuple(steps)

    @functools.cached_property
    def busy(self) -> tuple[int, ...]:
        """The steps behind the first in which some rank of the ring sees a key: the same on every rank."""
        ring = range(self.size)
        return tuple(
            step
            for step in range(1, self.size)
            if any(len(self.mask.tiles(self.layout[p], self.layout[(p - step) % self.size]).table) for p in ring)
        )

    @functools.cached_property
    def shown(self) -> tuple[Span, ...]:
        """Own keys that any other rank of the ring reads."""
        return merge_spans(span for step in self.steps[1:] for span in step.sent)

    @functools.cached_property
    def read_fraction(self) -> float:
        """Keys that ranks read of others, of all that there are to be read: the words of a ring, of the most that it
        can send. The same on every rank."""
        read = sum(
            stop - start
            for p, q in itertools.permutations(range(self.size), 2)
            for start, stop in self.mask.tiles(self.layout[p], self.layout[q]).keys_read
        )
        return read / max(1, (self.size - 1) * sum(self.sizes))

    @functools.cached_property
    def order(self) -> TokenOrder:
        """The order of all ranks' tokens, for keys that are gathered."""
        return TokenOrder(self.layout, keep_steps=True)

    @functools.cached_property
    def gathered(self) -> Block | None:
        """Against the keys of all ranks, in `order`."""
        own = self.layout[self.position]
        tiles = self.mask.tiles(own, self.order.ranges)
        return _block(tiles, tiles.table, own, self.order.ranges)


@functools.lru_cache(maxsize=_CACHED_PLANS)
def make_plan(layout: Layout, mask: AttentionMask, rank: int, ulysses: int) -> ContextPlan:
    """The plan of a rank whose `ulysses` neighbours hold the tokens of one position of the ring together."""
    if ulysses == 1:
        return ContextPlan(layout, mask, rank)  # in the caller's order, whatever that is
    rings = (neighbours_order(layout, first, ulysses).ranges for first in range(0, len(layout), ulysses))
    return ContextPlan(tuple(rings), mask, rank // ulysses)


@functools.lru_cache(maxsize=_CACHED_PLANS)
def neighbours_order(layout: Layout, first: int, count: int) -> TokenOrder:
    """The tokens of so many ranks from `first` on."""
    return TokenOrder(layout[first : first + count])


@functools.lru_cache(maxsize=_CACHED_PLANS)
def check_layout(layout: Layout, size: int) -> tuple[int, ...]:
    """The numbers of tokens of each rank. Raises ValueError unless every token is on one rank."""
    if len(layout) != size:
        raise ValueError(f"layout must have the tokens of each of the {size} ranks of the group, got {len(layout)}")
    sizes = tuple(map(num_tokens, layout))
    held = torch.cat([positions(ranges) for ranges in layout]).sort().values
    wrong = (held != torch.arange(len(held))).nonzero()
    if len(wrong):
        token = int(wrong[0])
        how = "no rank" if int(held[token]) > token else "two ranks, or twice on one"
        raise ValueError(f"layout must have every token of 0..{len(held) - 1} on one rank: token {token} is on {how}")
    return sizes


@functools.lru_cache(maxsize=_CACHED_PLANS)
def checksum(value: Layout | AttentionMask) -> int:
    """The same number for equal layouts and masks on all ranks."""
    return zlib.crc32(repr(value).encode())


# ---- tokens of several ranks, side by side ---------------------------------------------------------------------------


class TokenOrder:
    """The tokens of several ranks in one order: ascending where that makes no more ranges, else rank by rank.

    keep_steps  the queries will be in the layout's ranges, not in these
    ranges      of all tokens in this order
    places  for each rank, (its local tokens from, to; where they go to, a slice or int64 indices)

    Attention over ascending tokens has the tiles, and so the bits, of one rank.
    """

    def __init__(self, layout: Sequence[Ranges], *, keep_steps: bool = False) -> None:
        held = torch.cat([positions(ranges) for ranges in layout])
        ascending = held.sort().values
        merged = _runs(ascending)
        in_turn = tuple(tokens for ranges in layout for tokens in ranges if len(tokens))
        steps = {tokens.step for tokens in in_turn if len(tokens) > 1}
        # Queries and keys of different steps are no band: striped keys of some ranks, or for some, stay striped.
        is_ascending = len(merged) <= len(in_turn) and (steps <= {1} or (len(merged) == 1 and not keep_steps))
        self.ranges: Ranges = merged if is_ascending else in_turn
        self.sizes = tuple(map(num_tokens, layout))
        first, self.places = 0, []
        for ranges in layout:
            begin, places = 0, []
            for tokens in ranges:
                if count := len(tokens):
                    where = torch.arange(first, first + count)
                    if is_ascending:
                        where = torch.searchsorted(ascending, positions((tokens,)))
                    places.append(((begin, begin + count), _as_slice(where)))
                    begin, first = begin + count, first + count
            self.places.append(places)

    def put(self, rank: int, part: Tensor, out: Tensor) -> None:
        """A rank's tokens [b, h, s, D] to their places in [b, h, S, D]."""
        for (start, stop), where in self.places[rank]:
            out[:, :, where] = part[:, :, start:stop]

    def take(self, rank: int, x: Tensor, part: Tensor) -> None:
        """A rank's tokens of [b, h, S, D], into [b, h, s, D]."""
        for (start, stop), where in self.places[rank]:
            part[:, :, start:stop] = x[:, :, where]


def _runs(ascending: Tensor) -> Ranges:
    """Ascending tokens as ranges of step 1; one of another step where that is all of them."""
    if not len(ascending):
        return ()
    gaps = ascending.diff()
    if len(gaps) and int(gaps.min()) == int(gaps.max()):
        return (TokenRange(int(ascending[0]), int(ascending[-1]) + 1, int(gaps[0])),)
    ends = [*(gaps != 1).nonzero().flatten().tolist(), len(ascending) - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return tuple(TokenRange(int(ascending[a]), int(ascending[b]) + 1) for a, b in zip(starts, ends, strict=True))


def _as_slice(index: Tensor) -> slice | Tensor:
    first, last, count = int(index[0]), int(index[-1]), len(index)
    step = 1 if count == 1 else int(index[1]) - first
    evenly = step > 0 and bool((index == torch.arange(count) * step + first).all())
    return slice(first, last + 1, step) if evenly else index


# ---- spans of keys ---------------------------------------------------------------------------------------------------


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same keys in ascending spans that are apart from one another."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def count_spans(spans: Sequence[Span]) -> int:
    """How many keys there are in these."""
    return sum(stop - start for start, stop in spans)


def take_spans(x: Tensor, spans: Sequence[Span]) -> Tensor:
    """The rows of these spans, one after another; a view, where there is one span."""
    parts = [x[start:stop] for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x[:0]
