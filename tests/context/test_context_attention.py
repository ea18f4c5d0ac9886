"""Context attention: every method, layout and mask against float64 attention of the whole sequence on one rank."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastpar.context import layout as layouts
from fastpar.contracts.attention import AttentionMask, TokenRange, positions
from fastpar.ops.attention import attention
from fastpar.ops.context_attention.local import merge_
from fastpar.ops.context_attention.methods import GatherKeys, HeadSpread, Usp, spread_heads
from fastpar.ops.context_attention.plan import TokenOrder, check_layout, make_plan
from fastpar.reference.attention import dense_mask
from tests.context.context_attention_ranks import (
    HEADS,
    MASKS,
    TOKENS,
    Case,
    bad_calls,
    chosen_methods,
    dense,
    differing_bits,
    differing_layers,
    inputs_of,
    make_layout,
    options_of,
    recomputed,
    run_cases,
    second_derivatives,
    sent_elements,
    whole_of,
)
from tests.dist import run_ranks

LAYOUTS = ("contiguous", "zigzag", "striped", "dealt", "scrambled")
NAMES = ("out", "dq", "dk", "dv", "dsink")
oracle = functools.lru_cache(maxsize=None)(dense)


def methods_of(size: int) -> list[Any]:
    return ["ring", "gather", Usp(3, uneven=True) if size == 3 else "ulysses", *([Usp(2)] if size == 4 else [])]


def assert_matches_one_rank(size: int, cases: Iterable[Case], tolerance: float, transport: str = "auto") -> None:
    """By the largest error, over the largest entry."""
    cases = list(cases)
    found = run_ranks(size, run_cases, cases, transport)
    wrong = []
    for index, case in enumerate(cases):
        # What it is to be depends on neither of these.
        wanted = oracle(replace(case, method="ring", layout="", overlap=True))
        for name, got, want in zip(NAMES, whole_of(case, [rank[index] for rank in found]), wanted, strict=True):
            error = float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30))
            if not error <= tolerance and want.abs().max() > 0:
                wrong.append((name, error, case))
    assert not wrong, f"{len(wrong)} wrong, as {wrong[:3]}"


@pytest.mark.parametrize("every_third", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["pairs", "all"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_methods_layouts_masks_and_heads_match_one_rank(size: int, every_third: bool) -> None:
    """`every_third`: each method in each layout with each mask, where heads go round, so that all meet all others."""
    product = itertools.product(*map(enumerate, (methods_of(size), LAYOUTS, ("causal", "packed", "window"), HEADS)))
    cases = []
    for (m, method), (at, layout), (k, mask), (h, heads) in product:
        if (size > 1 or layout == "zigzag") and not (every_third and (m + at + k + h) % 3):
            cases.append(Case(method, layout, mask, HEADS[heads]))
    assert_matches_one_rank(size, cases, 1e-10)


@pytest.mark.parametrize("transport", ["auto", "torch"])
def test_options_match_one_rank(transport: str) -> None:
    options: list[dict[str, Any]] = [
        {"mask": "packed rows", "layout": "dealt", "widths": (8, 5)},
        {"mask": "both sides", "layout": "striped", "sink": True},
        {"mask": "chunk", "softcap": 0.7},
        {"mask": "full", "layout": "contiguous", "dropout": 0.3},
        {"mask": "packed rows", "dropout": 0.4, "sink": True, "softcap": 2.0, "heads": (6, 3)},
        {"tokens": 2},
        {"mask": "window", "tokens": 300, "layout": "contiguous"},
    ]
    methods = ["ring", "gather", Usp(3, uneven=True), GatherKeys(2)]
    cases = [
        Case(method, **given) for method in methods for given in options if given.get("tokens") != 2 or method != 3
    ]
    assert_matches_one_rank(3, cases, 1e-10, transport)


def test_heads_that_are_cut_unevenly_or_within_their_groups_match_one_rank() -> None:
    heads = [(12, 4), (6, 2), (5, 5), (3, 1), (12, 3), (7, 7)]
    cases = [Case(Usp(3, uneven=True), mask="packed", heads=pair, dropout=0.2) for pair in heads]
    assert_matches_one_rank(3, cases, 1e-10)
    cases = [Case(Usp(2, uneven=True), layout, heads=pair) for pair in heads for layout in ("contiguous", "striped")]
    assert_matches_one_rank(4, cases, 1e-10)


def test_float32_matches_one_rank() -> None:
    cases = [
        Case(m, dtype=torch.float32, heads=(4, 2), mask=mask) for m in methods_of(4) for mask in ("causal", "packed")
    ]
    assert_matches_one_rank(4, cases, 1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_bfloat16_errors_are_roundings_of_results_and_do_not_grow_with_ranks(size: int) -> None:
    cases = [Case(method, dtype=torch.bfloat16, tokens=tokens) for method in methods_of(size) for tokens in (64, 256)]
    found = run_ranks(size, run_cases, cases)
    for index, case in enumerate(cases):
        got = whole_of(case, [rank[index] for rank in found])
        for name, one, want in list(zip(NAMES, got, dense(case), strict=True))[:4]:
            assert (one.double() - want).norm() / want.norm() < (2.5e-3 if name == "out" else 5e-3), (name, case)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_bits_are_those_of_any_run_transport_and_delay_with_overlap_or_without(size: int) -> None:
    cases = [
        Case(method, mask=mask, dtype=torch.bfloat16, sink=True, heads=(4, heads))
        for method in (*methods_of(size), GatherKeys(2)) for mask, heads in (("causal", 2), ("packed", 4))
    ]  # fmt: skip
    assert run_ranks(size, differing_bits, cases) == [[]] * size


def test_layers_in_a_row_do_not_overwrite_what_a_late_rank_still_reads() -> None:
    # Of different keys at the same place.
    cases = [
        Case("ring", "zigzag", "full", (4, heads), (8, width)) for heads, width in ((2, 8), (1, 16), (4, 4), (2, 4))
    ]
    assert run_ranks(3, differing_layers, cases) == [[False] * len(cases)] * 3


def test_merging_rows_that_see_nothing_gives_nothing() -> None:
    empty = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf)
    some = torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2)
    for first, second, want in ((empty, empty, empty), (empty, some, some), (some, empty, some)):
        out, lse = (x.clone() for x in first)
        merge_(out, lse, *second)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_ulysses_has_the_bits_of_one_rank(dtype: torch.dtype) -> None:
    cases = [
        Case("ulysses", layout, mask, heads, dtype=dtype, sink=sink, dropout=dropout)
        for layout, mask, heads, sink, dropout in (
            ("contiguous", "causal", (4, 4), True, 0.0), ("zigzag", "packed", (4, 2), False, 0.3),
            ("striped", "window", (6, 2), True, 0.0), ("scrambled", "packed rows", (4, 2), False, 0.0),
        )
    ]  # fmt: skip
    found = run_ranks(2, run_cases, cases)
    for index, case in enumerate(cases):
        q, k, v, dout, sink = (x.to(dtype) for x in inputs_of(case))
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
        whole = (TokenRange(0, TOKENS),)
        tiles = MASKS[case.mask].tiles(whole, whole)
        out = attention(*leaves[:3], tiles, sink=leaves[3] if case.sink else None, **options_of(case))
        out.backward(dout)
        got = whole_of(case, [rank[index] for rank in found])[:4]
        for name, one, want in zip(NAMES, got, (out, *(leaf.grad for leaf in leaves[:3])), strict=False):
            assert torch.equal(one, want), (name, case)


# ---- words -----------------------------------------------------------------------------------------------------------


def elements(case: Case, size: int, ulysses: int = 1) -> tuple[float, float]:
    """Elements sent per rank, forward and backward, of a mask under which every query sees every key: the table of
    the docstring, of equal heads that divide, b = 2."""
    (h_q, h_k), width = case.heads, 2 * case.tokens * case.widths[0]
    rings, kept = size // ulysses, max(h_k, ulysses)
    heads = 2 * (1 - 1 / ulysses) * (h_q + kept) * width / size if ulysses > 1 else 0.0
    keys = 2 * (1 - 1 / rings) * (kept if ulysses > 1 else h_k) * width / ulysses
    return heads + keys, heads + 2 * keys


@pytest.mark.parametrize(("size", "ulysses"), [(2, (2,)), (3, (3,)), (4, (4, 2))])
def test_elements_sent_are_those_of_the_formulas(size: int, ulysses: tuple[int, ...]) -> None:
    methods: list[tuple[Any, int]] = [("ring", 1), ("gather", 1), (GatherKeys(2), 1), *((Usp(u), u) for u in ulysses)]
    heads = [(12, 12), (12, 2), (12, 1)]
    cases = [(Case(m, "contiguous", "full", pair, tokens=24), u) for m, u in methods for pair in heads]
    cases = [case for case in cases if not (isinstance(case[0].method, GatherKeys) and case[0].heads[1] < 2)]
    found = run_ranks(size, sent_elements, [case for case, _ in cases])
    for index, (case, degree) in enumerate(cases):
        # Key/value heads that ranks share: as many as are read, which is max(h_k, u) where one divides the other.
        if max(case.heads[1], degree) % min(case.heads[1], degree):
            continue
        for rank in found:
            assert [sum(n for _, n in log) for log in rank[index]] == pytest.approx(elements(case, size, degree)), case


def test_a_message_of_ulysses_holds_q_k_and_v() -> None:
    for rank in run_ranks(2, sent_elements, [Case("ulysses", "contiguous", "full")]):
        (forward, backward) = rank[0]
        assert [op for op, _ in forward] == [op for op, _ in backward] == ["all_to_all"] * 2


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "dealt"])
@pytest.mark.parametrize("mask", ["causal", "packed", "window", "both sides"])
def test_a_ring_sends_the_keys_that_are_seen_and_no_others(layout: str, mask: str) -> None:
    case, size = Case("ring", layout, mask), 3
    ranges = make_layout(layout, MASKS[mask], size)
    needed = sum(
        int(dense_mask(MASKS[mask], ranges[r], ranges[t]).any(0).any(0).sum())
        for r, t in itertools.permutations(range(size), 2)
    )
    found = run_ranks(size, sent_elements, [case])
    forward, backward = (sum(n for rank in found for _, n in rank[0][way]) for way in (0, 1))
    each = 2 * 2 * case.heads[1] * case.widths[0]  # of k and v, two batch rows
    assert (forward, backward) == (needed * each, 2 * needed * each)
    if (layout, mask) == ("contiguous", "window"):
        assert needed == 2 * 6  # the halo, at both cuts


def test_a_ring_of_a_window_has_as_many_steps_as_the_window_reaches() -> None:
    plan = make_plan(layouts.contiguous(64, 8), MASKS["window"], 3, 1)
    assert plan.busy == (1,)
    assert [step.read for step in plan.steps[:3]] == [((0, 8),), ((2, 8),), ()]
    assert make_plan(layouts.zigzag(64, 8), MASKS["causal"], 3, 1).busy == tuple(range(1, 8))


def test_ranks_that_share_memory_send_nothing_round_a_ring() -> None:
    for rank in run_ranks(2, sent_elements, [Case("ring"), Case("ring", "contiguous", "both sides")], "auto"):
        for forward, backward in rank:
            assert not forward
            assert {op for op, _ in backward} == {"barrier"}


def test_documents_that_lie_on_one_rank_each_need_nobody() -> None:
    layout, mask = layouts.contiguous(16, 2), AttentionMask(causal=True, documents=((8, 8),))
    assert make_plan(layout, mask, 0, 1).busy == ()


# ---- heads, orders and choices ---------------------------------------------------------------------------------------


def test_heads_are_spread_as_the_docstring_says() -> None:
    assert spread_heads(6, 3, 2) == HeadSpread(((0, 3), (3, 6)), ((0, 2), (1, 3)), 2)
    assert spread_heads(6, 3, 2).segments(0) == (((0, 2), (0, 1)), ((2, 3), (1, 2)))
    assert spread_heads(12, 4, 2).segments(1) == (((0, 6), (0, 2)),)
    assert spread_heads(8, 2, 8).keys == ((0, 1),) * 4 + ((1, 2),) * 4
    assert spread_heads(8, 2, 8).is_shared
    assert not spread_heads(8, 2, 2).is_shared
    assert spread_heads(6, 3, 2, uneven=True).queries == ((0, 3), (3, 6))
    assert spread_heads(10, 5, 3, uneven=True).queries == ((0, 2), (2, 6), (6, 10))
    with pytest.raises(ValueError, match=r"6 query heads .* ulysses=4 ranks evenly; 1, 2, 3 and 6 can. .*uneven=True"):
        spread_heads(6, 3, 4)


def test_tokens_of_several_ranks_are_in_ascending_order_where_that_is_one_band() -> None:
    assert TokenOrder(layouts.zigzag(16, 4)).ranges == (TokenRange(0, 16),)
    assert TokenOrder(layouts.zigzag(16, 4)[:2]).ranges == (TokenRange(0, 4), TokenRange(12, 16))
    assert TokenOrder(layouts.striped(16, 4)).ranges == (TokenRange(0, 16),)
    assert TokenOrder(layouts.striped(16, 4), keep_steps=True).ranges == sum(layouts.striped(16, 4), ())
    for layout in (layouts.zigzag(17, 4), layouts.striped(17, 4), make_layout("scrambled", MASKS["causal"], 4)):
        order, x = TokenOrder(layout), torch.empty(1, 1, sum(map(len, sum(layout, ()))), 1)
        for rank, ranges in enumerate(layout):
            order.put(rank, positions(ranges).float()[None, None, :, None], x)
        assert torch.equal(x.flatten().long(), positions(order.ranges))
        part = torch.empty(1, 1, order.sizes[2], 1)
        order.take(2, x, part)
        assert torch.equal(part.flatten().long(), positions(layout[2]))


def test_a_layout_must_have_every_token_once() -> None:
    with pytest.raises(ValueError, match="token 2 is on no rank"):
        check_layout(((TokenRange(0, 2),), (TokenRange(3, 5),)), 2)
    with pytest.raises(ValueError, match="token 2 is on two ranks, or twice on one"):
        check_layout(((TokenRange(0, 2),), (TokenRange(1, 4),)), 2)


def test_auto_is_a_ring_where_little_is_seen_and_ulysses_where_that_sends_less() -> None:
    cases = [
        Case(mask="window", layout="contiguous", tokens=400),
        Case(mask="causal", heads=(4, 4)),
        Case(mask="causal", heads=(6, 6)),
        Case(mask="causal", heads=(16, 1)),
        Case(mask="causal", heads=(7, 7)),
    ]
    found = run_ranks(4, chosen_methods, cases)
    assert found[0] == [(1, 0, False), (4, 0, False), (2, 0, False), (1, 0, False), (1, 0, False)]
    assert found == [found[0]] * 4


# ---- recomputation, errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_recomputed_layer_attends_and_communicates_once(method: str) -> None:
    for equal, again, ops in run_ranks(2, recomputed, Case(method)):
        assert equal == [True] * 4
        assert again == 0
        assert ops == {"ring": ["barrier"] * 3, "ulysses": ["all_to_all"] * 2}[method]


def test_wrong_arguments_of_one_rank_are_errors_on_all_and_the_next_call_is_right() -> None:
    texts = [
        "q must be a Tensor|q must be a tensor",
        "q must have the 4 tokens|q and k must have the same tokens",
        "must have one dtype",
        "multiple of key/value heads",
        "the layout must be equal",
        "each of the 2 ranks",
        "token . is on",
        "layout must have a tuple of TokenRange",
        "the mask must be equal",
        "documents add up to 7 tokens, but layout",
        "for each of the 1 batch rows",
        "mask must be an AttentionMask",
        "the method must be equal",
        "method must be one",
        r"must divide the 2 ranks of the group: \[1, 2\]",
        "at most the 4 key/value heads",
        "scale, softcap and dropout must be equal",
        "softcap must be positive",
        "whether there is a sink must be equal",
        "number for each query head",
        "dropout must be equal",
        "which inputs require gradients .* must be equal",
        "overlap must be a bool",
    ]
    first, last = run_ranks(2, bad_calls)
    assert first[-1] == last[-1] == "True"
    assert len(first) == len(last) == len(texts) + 1
    for text, mine, other in zip(texts, first, last, strict=False):
        assert re.search(text, other), (text, other)
        assert "must be equal on all ranks" in mine or "wrong arguments on rank 1 of the group" in mine, (text, mine)


def test_second_derivatives_are_refused() -> None:
    for texts in run_ranks(2, second_derivatives, ["ring", "gather", "ulysses"]):
        assert len(texts) == 6
        assert all("context_attention has a first derivative only" in text for text in texts)
