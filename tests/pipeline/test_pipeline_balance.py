"""Cutting a chain of costs into equal parts, and layouts as text."""

from __future__ import annotations

import itertools
import random

import pytest

from fastpar.pipeline.stages.balance import balance
from fastpar.pipeline.stages.placement import StagePlacement


def loads(costs: list[int], bounds: list[int], ranks: list[int]) -> list[int]:
    """Cost per rank."""
    parts = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    return [sum(c for c, r in zip(parts, ranks, strict=True) if r == rank) for rank in sorted(set(ranks))]


def best_by_enumeration(costs: list[int], ranks: list[int]) -> tuple[int, int]:
    """(largest load, sum of squared loads) of the best of all cuts."""
    cuts = itertools.combinations(range(1, len(costs)), len(ranks) - 1)
    scored = (loads(costs, [0, *cut, len(costs)], ranks) for cut in cuts)
    return min((max(x), sum(v * v for v in x)) for x in scored)


PLACEMENTS = {
    "one part a rank": lambda p: list(range(p)),
    "V": lambda p: [*range(p), *reversed(range(p))],
    "looped": lambda p: [*range(p), *range(p)],
}


def test_balance_is_the_docstring_example() -> None:
    assert balance([1] * 10, 4) == [0, 3, 6, 8, 10]
    assert balance([5, 1, 1, 1, 1, 1], 2) == [0, 1, 6]
    assert balance([1] * 7 + [3], 4, [0, 1, 1, 0]) == [0, 2, 5, 7, 8]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_other_cut_has_a_smaller_largest_rank_or_is_more_even(placement: str) -> None:
    generator = random.Random(0)
    for case in range(150):
        ranks = PLACEMENTS[placement](generator.randint(1, 4))
        count = generator.randint(len(ranks), max(len(ranks), 10))
        costs = [generator.choice([0, 1, 1, 2, 3, 7]) for _ in range(count)]
        bounds = balance(costs, len(ranks), ranks)
        assert bounds[0] == 0
        assert bounds[-1] == count
        assert all(a < b for a, b in itertools.pairwise(bounds)), "every part gets a unit"
        found = loads(costs, bounds, ranks)
        assert (max(found), sum(v * v for v in found)) == best_by_enumeration(costs, ranks), (case, costs, ranks)


@pytest.mark.parametrize("ranks", [[0, 1] * 3, [0, 1, 2] * 3, [0, 1, 1, 0, 0, 1, 1, 0]], ids=str)
def test_more_parts_per_rank_nearly_always_reach_the_optimum(ranks: list[int]) -> None:
    generator = random.Random(1)
    excess = []
    for _ in range(20):
        costs = [generator.choice([1, 1, 2, 3]) for _ in range(generator.randint(len(ranks), 12))]
        found = max(loads(costs, balance(costs, len(ranks), ranks), ranks))
        excess.append(found - best_by_enumeration(costs, ranks)[0])
    assert max(excess) <= 1  # the smallest unit
    assert excess.count(0) >= 18  # the optimum of the parts alone: 8 to 13 of 20


@pytest.mark.parametrize("num_layers", [30, 32, 61, 80])
@pytest.mark.parametrize(
    "ranks", [list(range(4)), list(range(4)) * 4, list(range(8)) * 2, [0, 1, 2, 3, 3, 2, 1, 0]], ids=len
)
def test_every_layer_is_placed_whether_or_not_the_count_divides(num_layers: int, ranks: list[int]) -> None:
    costs = [0, *[10] * num_layers, 25]
    bounds = balance(costs, len(ranks), ranks)
    assert bounds[-1] == num_layers + 2
    assert max(loads(costs, bounds, ranks)) < sum(costs) / len(set(ranks)) + 10  # less than a layer above the mean


def test_measured_times_are_compared_exactly() -> None:
    assert balance([0.1, 0.2, 0.3], 2) == [0, 2, 3]  # 0.1 + 0.2 > 0.3 as floats, and still the best
    assert balance([1e-9, 1.0, 1.0, 1e300], 2) == [0, 3, 4]
    assert balance([1.0, 1.0, 1.0 - 1e-12], 2) == [0, 1, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], 3), "2 units cannot fill 3 parts; use at most 2"),
        (([1, -2], 1), "not negative, got -2"),
        (([1, float("nan")], 1), "must be finite"),
        (([1, 2], 0), "num_parts must be at least 1"),
        (([1, 2], 2, [0]), "stage_ranks has 1 entries for 2 parts"),
    ],
)
def test_wrong_costs_and_counts_are_errors(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(*arguments)


# ------------------------------------------------------------------------------------------------------- layout strings

MODEL = {"num_layers": 4, "embedding": True, "norm": True, "head": True, "names": [f"layers.{i}" for i in range(4)]}


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("E,t*3|t*1,H", "E,t*3|t,H"),
        ("E t t|t,t,N,H", "E,t*2|t*2,H"),
        ("E|t*4|N|H", "E|t*4|N|H"),
        ("E,t||t * 3,H", "E,t||t*3,H"),
        ("E,t*4,H", "E,t*4,H"),
    ],
)
def test_layout_text_is_parsed_and_printed(text: str, canonical: str) -> None:
    layout = StagePlacement.parse(text, **MODEL)
    assert str(layout) == canonical
    assert StagePlacement.parse(canonical, **MODEL) == layout
    assert sum(part.count("t") for part in layout.parts) == 4
    assert sum(part.count("N") for part in layout.parts) == 1


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("E,t*2|x,H", "'x' is none of E \\(embedding\\), t \\(layer\\)", 6),
        ("E,t*2|t*0,H", "'t\\*0' places nothing", 6),
        ("E,t*2|t*3,H", "the model has 4 layers, and this places 5", 6),
        ("E,t*2|t,H", "1 of 4 layers are in no part: layers.3", 9),
        ("E|H", "4 of 4 layers are in no part: layers.0, layers.1, layers.2, layers.3", 3),
        ("t*2,E|t*2,H", "E \\(embedding\\) cannot run after t", 4),
        ("E,t*2|t*2", "H \\(head\\) is in no part", 9),
        ("E,t*2|t*2,H,H", "H \\(head\\) is placed a second time", 12),
        ("|E,t*4,H", "the first and the last part cannot be empty", 0),
        ("E,t*4,H|", "the first and the last part cannot be empty", 8),
    ],
)
def test_wrong_layout_text_is_shown_with_the_place_marked(text: str, message: str, column: int) -> None:
    with pytest.raises(ValueError, match=message) as info:
        StagePlacement.parse(text, **MODEL)
    shown, mark = str(info.value).splitlines()[1:]
    assert shown.strip() == text
    assert mark.index("^") - 4 == column


def test_layout_names_units_that_the_model_lacks() -> None:
    with pytest.raises(ValueError, match="this model has no embedding"):
        StagePlacement.parse("E,t", num_layers=1, embedding=False, norm=False, head=False, names=["0"])


@pytest.mark.parametrize(
    ("counts", "message"),
    [([2, 1], "places 3 layers, but the model has 4"), ([5, -1], "not negative"), ([], "not negative")],
)
def test_layers_per_part_must_add_up(counts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StagePlacement.of_counts(counts, num_layers=4, embedding=True, norm=True, head=True)
