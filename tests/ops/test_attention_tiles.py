"""Masks as tables of band tiles: equal to dense masks in every layout, and work dealt evenly."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpar.context.layout import contiguous, dealt, striped, zigzag
from fastpar.contracts.attention import AttentionMask, AttentionTiles, Ranges, TokenRange, num_tokens, positions
from fastpar.reference.attention import dense_mask, dense_tiles

LAYOUTS = ("contiguous", "zigzag", "striped", "dealt")


def laid_out(layout: str, tokens: int, size: int, mask: AttentionMask) -> tuple[Ranges, ...]:
    if layout == "dealt":
        return dealt(tokens, size, mask, block=3)
    return {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}[layout](tokens, size)


@st.composite
def masks(draw: st.DrawFn) -> tuple[int, AttentionMask]:
    tokens = draw(st.integers(1, 40))
    side = st.integers(0, tokens)
    documents = None
    if draw(st.booleans()):
        cuts = st.lists(side, max_size=5).map(sorted)
        lengths = cuts.map(lambda c: tuple(b - a for a, b in zip([0, *c], [*c, tokens], strict=True)))
        documents = tuple(draw(st.lists(lengths, min_size=1, max_size=3)))
    return tokens, AttentionMask(
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(side, side)),
        chunk=draw(st.none() | st.integers(1, tokens)),
        documents=documents,
    )


@settings(max_examples=40, deadline=None)
@given(masks(), st.sampled_from(LAYOUTS), st.integers(1, 4))
def test_tiles_equal_dense_masks_in_every_layout(case: tuple[int, AttentionMask], layout: str, size: int) -> None:
    tokens, mask = case
    ranks = laid_out(layout, tokens, size, mask)
    assert sorted(torch.cat([positions(r) for r in ranks]).tolist()) == list(range(tokens))
    for queries in ranks:
        for keys in ranks:
            tiles = mask.tiles(queries, keys)
            found, expected = dense_tiles(tiles), dense_mask(mask, queries, keys)
            assert torch.equal(found.expand_as(expected), expected.int())
            assert tiles.pairs == int(found.sum())
            read = {j for start, stop in tiles.keys_read for j in range(start, stop)}
            assert read >= set(found.any(0).any(0).nonzero().flatten().tolist())


@settings(max_examples=40, deadline=None)
@given(masks(), st.sampled_from(LAYOUTS), st.integers(1, 3))
def test_every_row_and_column_of_a_tile_is_used_and_tiles_are_sorted(
    case: tuple[int, AttentionMask], layout: str, size: int
) -> None:
    tokens, mask = case
    ranks = laid_out(layout, tokens, size, mask)
    tiles = mask.tiles(ranks[0], ranks[-1])
    offsets = tiles.batch or (0, len(tiles.table))
    for start, stop in itertools.pairwise(offsets):
        rows = tiles.table[start:stop].tolist()
        assert [r[:1] + r[2:3] for r in rows] == sorted(r[:1] + r[2:3] for r in rows)
    for q0, q1, k0, k1, lo, hi in tiles.table.tolist():
        band = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None]
        seen = (lo <= band) & (band <= hi)
        assert bool(seen.any(0).all())
        assert bool(seen.any(1).all())


@settings(max_examples=40, deadline=None)
@given(masks())
def test_visible_keys_are_the_row_sums_of_the_dense_mask(case: tuple[int, AttentionMask]) -> None:
    tokens, mask = case
    whole = (TokenRange(0, tokens),)
    assert torch.equal(mask.visible_keys(tokens), dense_mask(mask, whole, whole).sum((0, 2)))


def test_tiles_of_the_module_docstring() -> None:
    ranks, mask = contiguous(8, 2), AttentionMask(causal=True)
    assert mask.tiles(ranks[1], ranks[1]).table.tolist() == [[0, 4, 0, 4, -3, 0]]
    assert mask.tiles(ranks[1], ranks[0]).table.tolist() == [[0, 4, 0, 4, -3, 3]]
    assert len(mask.tiles(ranks[0], ranks[1]).table) == 0


def test_a_document_of_another_batch_row_does_not_count() -> None:
    tiles = AttentionMask(causal=True, documents=((2, 2), (4,))).tiles(*[(TokenRange(0, 4),)] * 2)
    assert tiles.batch == (0, 2, 3)
    assert tiles.table.tolist() == [[0, 2, 0, 2, -1, 0], [2, 4, 2, 4, -1, 0], [0, 4, 0, 4, -3, 0]]
    equal = AttentionMask(causal=True, documents=((2, 2), (2, 2))).tiles(*[(TokenRange(0, 4),)] * 2)
    assert equal.batch is None


def test_a_window_reads_its_halo_only() -> None:
    ranks, mask = contiguous(4096, 4), AttentionMask(causal=True, window=(127, 0))
    assert mask.tiles(ranks[2], ranks[1]).keys_read == ((1024 - 127, 1024),)
    assert mask.tiles(ranks[2], ranks[0]).keys_read == ()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_work_is_balanced_as_the_layouts_say(size: int) -> None:
    tokens = 8192 + 5

    def imbalance(ranks: tuple[Ranges, ...], mask: AttentionMask) -> float:
        seen = mask.visible_keys(tokens)
        work = torch.stack([seen[positions(r)].sum() for r in ranks]).double()
        return float(work.max() / work.mean())

    causal = AttentionMask(causal=True)
    assert imbalance(contiguous(tokens, size), causal) > (2 * size - 1) / size - 0.01
    assert imbalance(zigzag(tokens, size), causal) < 1.005
    assert imbalance(striped(tokens, size), causal) < 1.005
    assert imbalance(dealt(tokens, size, causal, block=128), causal) < 1.005
    generator = torch.Generator().manual_seed(size)
    lengths = (torch.rand(25, generator=generator) ** 3 * 1000).long().tolist()
    packed = AttentionMask(causal=True, documents=((*lengths, tokens - sum(lengths)),))
    assert imbalance(dealt(tokens, size, packed, block=128), packed) < 1.03
    window = AttentionMask(causal=True, window=(255, 0))
    assert imbalance(contiguous(tokens, size), window) < 1.02


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tokens", [0, 1, 7, 257, 1023])
def test_token_counts_are_balanced(tokens: int, size: int) -> None:
    for layout in (contiguous, zigzag, striped):
        counts = [num_tokens(r) for r in layout(tokens, size)]
        assert sum(counts) == tokens
        assert max(counts) - min(counts) <= 1
    counts = [num_tokens(r) for r in dealt(tokens, size, AttentionMask(causal=True), block=64)]
    blocks = 2 * max(1, -(-tokens // (2 * size * 64)))
    assert sum(counts) == tokens
    assert max(counts) - min(counts) <= blocks


def test_tiles_are_made_once_and_are_real_under_a_fake_mode() -> None:
    from torch._subclasses import FakeTensorMode

    ranges, mask = (TokenRange(0, 97),), AttentionMask(causal=True, window=(13, 0))
    with FakeTensorMode(), torch.device("meta"):
        first = mask.tiles(ranges, ranges)
    assert type(first.table) is torch.Tensor
    assert first.table.device.type == "cpu"
    assert mask.tiles(ranges, ranges) is first


def test_bad_masks_and_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 4095 tokens, but there are tokens up to 4096"):
        AttentionMask(documents=((4095,),)).tiles(*[(TokenRange(0, 4096),)] * 2)
    with pytest.raises(ValueError, match=r"one length in every batch row, got \[3, 4\]"):
        AttentionMask(documents=((3,), (4,)))
    with pytest.raises(ValueError, match="must not be negative"):
        AttentionMask(documents=((3, -1),))
    with pytest.raises(ValueError, match="window must be"):
        AttentionMask(window=(-1, 0))
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        AttentionMask(chunk=0)
    with pytest.raises(ValueError, match="must have one step"):
        AttentionMask(causal=True).tiles((TokenRange(0, 8, 2),), (TokenRange(0, 8),))
    with pytest.raises(ValueError, match="step must be at least 1"):
        TokenRange(0, 8, 0)
    with pytest.raises(ValueError, match="start <= stop"):
        TokenRange(3, 2)
    with pytest.raises(TypeError, match="documents"):
        AttentionMask(documents=(3, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tile 0"):
        AttentionTiles(torch.tensor([[0, 5, 0, 4, 0, 0]], dtype=torch.int32), None, 4, 4)


def test_lists_of_lengths_are_taken_as_tuples() -> None:
    assert AttentionMask(window=[1, 0], documents=[[3, 1]]) == AttentionMask(window=(1, 0), documents=((3, 1),))  # type: ignore[arg-type]


def test_full_and_unseen_pairs_of_two_steps_are_tiles() -> None:
    mask = AttentionMask(causal=True)
    late, early = (TokenRange(10, 20, 3),), (TokenRange(0, 8),)
    assert mask.tiles(late, early).table.tolist() == [[0, 4, 0, 8, -3, 7]]
    assert len(mask.tiles(early, late).table) == 0
