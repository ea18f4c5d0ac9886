"""The layout of packed documents: counted as the tables of tiles count, and chosen by what is cheaper."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.context.layout import contiguous, dealt, zigzag
from fastpar.context.packed import cheapest, rank_costs
from fastpar.context.region import Context, ContextRegion
from fastpar.contracts.attention import AttentionMask, Ranges

LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag}


def counted(layout: tuple[Ranges, ...], mask: AttentionMask, pairs_a_key: float, is_hidden: bool) -> list[float]:
    """By tiles, as the ranks exchange and compute them."""
    costs = []
    for own in layout:
        tables = [mask.tiles(own, keys) for keys in layout]
        work = sum(tiles.pairs for tiles in tables)
        others = [tiles for keys, tiles in zip(layout, tables, strict=True) if keys is not own]
        keys = sum(stop - start for tiles in others for start, stop in tiles.keys_read)
        exchange = pairs_a_key * keys * len(mask.documents or ((),))
        costs.append(max(work, exchange) if is_hidden else work + exchange)
    return costs


def named(layout: tuple[Ranges, ...], tokens: int, size: int, mask: AttentionMask, block: int = 512) -> str:
    made = {name: make(tokens, size) for name, make in LAYOUTS.items()}
    made["dealt"] = dealt(tokens, size, mask, block=block)
    return next(name for name, each in made.items() if each == layout)


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize(
    "documents", [((20, 0, 17, 40, 4),), ((20, 17, 44), (81,), (1, 79, 1))], ids=["shared", "by row"]
)
@pytest.mark.parametrize("size", [2, 3])
def test_pairs_and_keys_are_those_of_the_tables(
    size: int, documents: tuple[tuple[int, ...], ...], is_hidden: bool
) -> None:
    mask = AttentionMask(causal=True, documents=documents)
    for layout in (contiguous(81, size), zigzag(81, size), dealt(81, size, mask, block=5)):
        for price in (0.0, 3.5, 100.0):
            found = rank_costs(layout, mask.visible_keys(81), documents, price, is_hidden)
            assert found == counted(layout, mask, price, is_hidden), (layout, price)


class Elements(TorchDispatchMode):
    """Counts those of all tensors that are made."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += sum(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor))
        return out


def test_counting_is_as_long_as_the_sequence_however_many_ranks_there_are() -> None:
    tokens, made = 1 << 14, []
    documents = (128,) * 128, (tokens,)
    mask = AttentionMask(causal=True, documents=documents)
    for size in (2, 64):
        with Elements() as elements:
            rank_costs(zigzag(tokens, size), mask.visible_keys(tokens), documents, 1.0, False)
        made.append(elements.made)
    assert made[1] < 2 * made[0]


def test_documents_are_dealt_out_where_what_is_evened_out_is_more_than_what_is_sent() -> None:
    # Contiguous sends nothing, and leaves rank 1 a document of 3000 tokens, 6 times the pairs of the other's.
    mask = AttentionMask(causal=True, documents=((*[500] * 6, 3000),))
    chosen = [cheapest(6000, 2, mask, pairs_a_key=price) for price in (0.0, 500.0, 2000.0)]
    assert [named(layout, 6000, 2, mask) for layout in chosen] == ["dealt", "dealt", "contiguous"]
    hidden = cheapest(6000, 2, mask, pairs_a_key=2000.0, is_hidden=True)
    assert named(hidden, 6000, 2, mask) == "dealt"  # what travels meanwhile costs nothing


def test_short_documents_stay_and_the_same_ones_16_times_as_long_are_dealt_out() -> None:
    """Those of `fastpar bench context --masks packed`, four query heads a key/value head, ranks of one host."""
    lengths, price = (221, 1284, 1297, 1305, 476, 460, 1102, 1493, 554), 8 * 3000 / (14 * 4)
    found = []
    for scale in (1, 16):
        mask = AttentionMask(causal=True, documents=(tuple(scale * n for n in lengths),))
        tokens = scale * sum(lengths)
        found.append(named(cheapest(tokens, 4, mask, pairs_a_key=price), tokens, 4, mask))
    assert found == ["contiguous", "dealt"]


def test_layouts_that_cost_the_same_are_the_one_with_fewer_ranges() -> None:
    mask = AttentionMask(causal=True, documents=((64, 64),))
    assert cheapest(128, 2, mask, pairs_a_key=1.0) == contiguous(128, 2)


def test_one_rank_has_one_range_of_packed_documents() -> None:
    region = ContextRegion(None, Context())
    assert region.place(10, ((4, 6),)).layout == contiguous(10, 1)
