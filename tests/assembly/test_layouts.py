"""`fp.Layout`: its words and JSON, the rules about it, and the nearest legal layout."""

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpar as fp
from fastpar.layouts import (
    RULES,
    ContextOptions,
    ExpertShape,
    GridOptions,
    Layout,
    LayoutError,
    LayoutFields,
    ModelShape,
    PipelineOptions,
    ZeroOptions,
    broken_rules,
    nearest_legal,
)
from fastpar.parallel.on_grid import is_one_dim
from fastpar.pipeline import make_schedule, schedule_names
from fastpar.tensor import GridRegion

DENSE = ModelShape("dense", layers=12, hidden=768, ffn=3072, vocab=50257, heads=12)
TIED = ModelShape("tied", layers=12, hidden=768, ffn=3072, vocab=50257, heads=12, tied=True)
EXPERTS = ModelShape("experts", layers=12, hidden=768, ffn=3072, vocab=50257, heads=12, experts=ExpertShape(6, 2, 512))

SIZES = st.sampled_from([1, 2, 3, 4, 8])
LAYOUTS = st.builds(
    Layout,
    **dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "accumulate"), SIZES),
    sequence_parallel=st.booleans(),
    zero=st.builds(
        ZeroOptions,
        stage=st.integers(0, 3),
        offload=st.sampled_from(["none", "cpu", "cpu+parameters", "nvme:/a", "nvme+parameters:/a b/50%,c%2C"]),
    ),
    pipeline=st.builds(
        PipelineOptions,
        schedule=st.sampled_from(schedule_names()),
        microbatches=st.sampled_from([1, 2, 7, 16]),
        stages_per_rank=st.sampled_from([1, 2, 3]),
        shard_head=st.booleans(),
        cut=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    ),
    context=st.builds(ContextOptions, method=st.sampled_from(["auto", "ring", "gather", "ulysses"])),
    recompute=st.sampled_from(["none", "selective", "full", ("full", "none")]),
    tp_grid=st.sampled_from(
        [
            GridOptions(),
            GridOptions(1, 2, 2),
            GridOptions(2, 2, 1, "copy"),
            GridOptions(1, 2, 4, "features", 2),
            GridOptions(1, 2, 4, "features", 2, stream=True),
            GridOptions(1, 4, 1),
        ]
    ),
)


@given(LAYOUTS)
@settings(max_examples=200, deadline=None)
def test_words_and_json_give_the_same_layout_back(layout: Layout) -> None:
    assert Layout.parse(layout.words) == layout
    assert Layout.from_json(json.dumps(layout.to_json())) == layout


def test_a_layout_says_itself_in_the_words_that_people_use() -> None:
    layout = Layout(
        pp=2, tp=2, dp_shard=2, ep=2, sequence_parallel=True, zero=ZeroOptions(1),
        pipeline=PipelineOptions("zbv", microbatches=8),
    )  # fmt: skip
    assert layout.words == str(layout) == "pp2 tp2 dp2 ep2 sp zero1 zbv mb8"
    assert Layout.parse("dp2, ep=2 zbv mb8 zero1 pp2 tp2 sp") == layout
    assert layout.to_json() == {
        "pp": 2, "dp_shard": 2, "tp": 2, "ep": 2, "sequence_parallel": True, "zero": {"stage": 1},
        "pipeline": {"schedule": "zbv", "microbatches": 8},
    }  # fmt: skip
    assert (layout.world_size, layout.dp, layout.num_parts) == (8, 2, 4)
    assert Layout().words == "one rank"
    assert Layout.parse("one rank") == Layout()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("pp2 tpp2", "did you mean"),
        ("pp2 zvb", "zbv"),
        ("tp2 tp4", "a second time"),
        ("zero4", "stage must be 0, 1, 2 or 3"),
        ("tp0", "tp must be at least 1"),
        ("nvme", "needs one"),
        ("cpu+params", "offload"),
        ("tp4 grid2x2", "gridXxYxZ"),
        ("tp4 grid2x2x1:features", "x must be 1"),
        ("tp4 grid1x1x4/3", "replicas must divide z"),
        ("tp8 grid1x2x4:stream", "y == z / replicas"),
        ("grid1x1x1:copy", "more than one rank"),
        ("recompute:full/all", "recompute must be"),
        ("", "unknown word"),
    ],
)
def test_wrong_words_are_refused_with_near_misses(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [({"tpp": 2}, "did you mean tp"), ({"zero": {"stages": 2}}, "did you mean stage"), ({"tp": 0}, "at least 1")],
)
def test_wrong_json_is_refused_with_near_misses(data: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Layout.from_json(data)
    with pytest.raises(TypeError):
        Layout.from_json({"zero": 3})


BROKEN = [
    ("ranks", "dp2", None, {"world_size": 3}),
    ("expert grid", "dp2 ep3", EXPERTS, {}),
    ("experts", "dp2 ep2", DENSE, {}),
    ("equal experts", "dp4 ep4", EXPERTS, {}),
    ("split experts", "dp3 etp3", EXPERTS, {}),
    ("heads", "tp8", DENSE, {}),
    ("ulysses heads", "tp2 cp4 ulysses", DENSE, {}),
    ("sequence parallel", "dp2 sp", None, {}),
    ("heads", "tp10 grid1x5x2", DENSE, {}),
    ("grid ranks", "tp8 grid1x2x2", None, {}),
    ("grid form", "tp4 grid1x4x1", None, {}),
    ("grid form", "tp4 sp grid1x2x2", None, {}),
    ("grid dims", "pp2 cp2 tp4 mb2 grid1x2x2", None, {}),
    ("grid dims", "cp2 tp4 grid2x2x1:copy", None, {}),
    ("grid dims", "dp2 tp2 ep2 grid1x1x2", EXPERTS, {}),
    ("grid dims", "tp2 grid2x1x1", EXPERTS, {}),
    ("grid batch", "tp4 grid1x1x4", None, {"batch": 5}),
    ("grid batch", "pp2 tp2 mb4 grid1x1x2", None, {"batch": 7}),
    ("grid batch", "dp2 tp4 grid1x1x4/2 acc2", None, {"batch": 12}),
    ("pipeline words", "dp2 mb4", None, {}),
    ("asynchronous", "pp2 pipedream mb4", None, {}),
    ("stages per rank", "pp2 zbv stages2 mb4", None, {}),
    ("stages per rank", "pp2 interleaved_1f1b mb4", None, {}),
    ("stages per rank", "pp2 looped_bfs mb4", DENSE, {}),
    ("microbatches", "pp2 dualpipev mb3", None, {}),
    ("dualpipe", "pp3 dualpipe mb6", None, {}),
    ("parts", "pp4 interleaved_1f1b stages4 mb8", DENSE, {}),
    ("cut", "pp2 mb2 cut6/5", DENSE, {}),
    ("empty part", "pp3 mb3 cut0/0/4", None, {}),
    ("cut", "pp2 mb2 cut4/4/4", DENSE, {}),
    ("sharded head", "pp2 tp2 mb2 shard_head", None, {}),
    ("sharded head", "pp2 mb2 shard_head", TIED, {}),
    ("sharded head", "pp2 dualpipe mb4 shard_head", None, {}),
    ("context words", "dp2 ring", None, {}),
    ("context words", "dp2 striped", None, {}),
    ("offload", "dp2 zero2 cpu+parameters", None, {}),
    ("recompute", "pp3 mb3 recompute:full/none", None, {}),
    ("batch", "dp3", None, {"batch": 8}),
    ("small batch", "pp2 dp2 mb4", None, {"batch": 4}),
]


@pytest.mark.parametrize(("rule", "words", "model", "options"), BROKEN)
def test_a_broken_rule_is_named_with_a_legal_layout_beside(
    rule: str, words: str, model: ModelShape | None, options: dict
) -> None:
    layout = Layout.parse(words)
    assert [each.name for each in broken_rules(layout, model, **options)] == [rule]
    with pytest.raises(LayoutError) as caught:
        layout.check(model, **options)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{rule}: ")
    assert "{" not in str(caught.value)
    near = caught.value.nearest
    assert near is not None
    assert near.words in str(caught.value)
    near.check(model, **options)


def test_every_rule_but_that_of_unknown_names_has_a_case() -> None:
    assert {rule.name for rule in RULES} - {case[0] for case in BROKEN} == {"schedule"}
    layout = Layout(pp=2, pipeline=PipelineOptions("zigzag", 4))
    assert [rule.name for rule in broken_rules(layout)] == ["schedule"]


def test_all_that_is_wrong_is_raised_at_once() -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse("pp2 tp8 sp zero3 mb2 shard_head").check(DENSE, world_size=32, batch=7)
    names = {problem.partition(":")[0] for problem in caught.value.problems}
    assert names == {"ranks", "heads", "sharded head"}
    assert caught.value.nearest is not None
    caught.value.nearest.check(DENSE, world_size=32, batch=32)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("tp8 sp", "tp4 dp2 sp"),
        ("dp2 zero2 cpu+parameters", "dp2 zero2 cpu"),
        ("dp4 ep4", "dp4 ep2"),
        ("pp2 tp2 mb2 shard_head", "pp2 tp2 mb2"),
        ("tp4 grid1x4x1", "tp4"),
        ("pp2 interleaved_1f1b mb4", "pp2 interleaved_1f1b mb4 stages2"),
    ],
)
def test_the_nearest_legal_layout_changes_what_is_wrong(words: str, near: str) -> None:
    layout = Layout.parse(words)
    model = EXPERTS if layout.ep > 1 else DENSE
    assert nearest_legal(layout, model, world_size=layout.world_size) == Layout.parse(near)


def test_rules_refuse_exactly_the_pipelines_that_cannot_be_made() -> None:
    """Of schedules that run in a step; v-shaped ones have no option stages_per_rank."""
    about_schedules = {"stages per rank", "microbatches", "dualpipe"}
    count = 0
    for name, pp, m, v in itertools.product(schedule_names(), (2, 3, 4), (1, 2, 3, 6, 8), (1, 2)):
        if name.startswith("pipedream"):
            continue
        layout = Layout(pp=pp, pipeline=PipelineOptions(name, m, v))
        broken = about_schedules & {rule.name for rule in broken_rules(layout)}
        try:
            made = make_schedule(name, pp, m, **({"stages_per_rank": v} if v > 1 else {}))
        except (ValueError, TypeError):
            assert broken, layout.words
            continue
        # One that winds around the ranks has 2 stages where nobody says how many, which is not what the layout says.
        assert bool(broken) == (layout.num_parts != made.num_parts), layout.words
        count += 1
    assert count > 100


def test_rules_about_grids_are_those_of_meshes_and_regions() -> None:
    """Sizes as `fp.GridSpec` takes them, one dim as `parallelize` sees it, sequences as they are dealt over z."""
    for x, y, z, replicas in itertools.product((1, 2), (1, 2, 4), (1, 2, 4, 6), (1, 2, 3)):
        for spread in ("rows", "copy", "features"):
            try:
                spec = fp.GridSpec(x, y, z, spread, replicas)
            except ValueError:
                with pytest.raises(ValueError, match=r"replicas|x must be 1"):
                    GridOptions(x, y, z, spread, replicas)
                continue
            if spec.ranks > 1:
                layout = Layout(tp=spec.ranks, tp_grid=GridOptions(x, y, z, spread, replicas))
                assert ["grid form"] * is_one_dim(spec) == [rule.name for rule in broken_rules(layout)]
    for rows, (z, replicas) in itertools.product(range(1, 17), ((2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3))):
        region = object.__new__(GridRegion)  # of ranks that are not there
        ends = {"replicas": SimpleNamespace(size=replicas, rank=0), "z": SimpleNamespace(size=z // replicas, rank=0)}
        region.grid = SimpleNamespace(**ends)
        layout = Layout(tp=z, tp_grid=GridOptions(1, 1, z, replicas=replicas))
        broken = [rule.name for rule in broken_rules(layout, batch=rows)]
        try:
            region.set_shape(rows, 8, 8)
        except ValueError:
            assert broken == ["grid batch"], (rows, z, replicas)
        else:
            assert not broken, (rows, z, replicas)


@given(st.lists(LAYOUTS, min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_rule_says_the_same_of_one_layout_and_of_an_array_of_them(layouts: list[Layout]) -> None:
    for model in (None, DENSE, EXPERTS):
        rows = [LayoutFields.of(layout, model, world_size=8, batch=48) for layout in layouts]
        shared = {"model": model, "world_size": 8, "batch": 48}
        names = [name for name in vars(rows[0]) if name not in shared]
        columns = LayoutFields(**{name: np.array([getattr(row, name) for row in rows]) for name in names}, **shared)
        for rule in RULES:
            together = np.broadcast_to(rule.breaks(columns), len(rows)).tolist()
            assert together == [bool(rule.breaks(row)) for row in rows], rule.name


def test_layouts_need_no_torch() -> None:
    code = (
        "import sys, fastpar as fp; layout = fp.Layout.parse('dp2 zero2 cpu+parameters')\n"
        "try: layout.check()\n"
        "except ValueError as error: print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert "nearest legal layout: dp2 zero2 cpu" in out.stdout


@pytest.mark.parametrize("options", [{"world_size": 0}, {"batch": -1}, {"batch": True}, {"world_size": 2.0}])
def test_wrong_arguments_of_a_check_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="integer of at least 1"):
        Layout().check(**options)
    with pytest.raises(TypeError, match="ModelShape"):
        Layout().check("llama")  # type: ignore[arg-type]


def test_shapes_count_their_parameters() -> None:
    """Published: GPT-2's 124M (117M matrices and embeddings without positions and biases), Mixtral's 46.7B."""
    mixtral = ModelShape(
        "mixtral", layers=32, hidden=4096, ffn=14336, vocab=32000, heads=32, kv_heads=8, gated=True,
        experts=ExpertShape(8, 2, 14336),
    )  # fmt: skip
    assert round(mixtral.parameters / 1e9, 1) == 46.7
    assert TIED.parameters == 12 * (12 * 768**2 + 2 * 768) + 50257 * 768 + 768
    with pytest.raises(ValueError, match="divisible by heads"):
        ModelShape("odd", layers=1, hidden=100, ffn=1, vocab=1, heads=3)
    with pytest.raises(ValueError, match="top_k"):
        ExpertShape(2, 4, 8)
    assert fp.Layout is Layout
