"""PipeDream's planner: its published answers, and brute force."""

import csv
import itertools
import random
from pathlib import Path

import pytest

from fastpar.planner.replication import LayerProfile, pipedream

PATH = Path(__file__).parents[1] / "data" / "pipedream_profiles.csv"


def profile(model: str) -> list[LayerProfile]:
    with PATH.open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    places = {row["node"]: place for place, row in enumerate(rows)}
    return [
        LayerProfile(
            (float(row["forward_ms"]) + float(row["backward_ms"])) / 1e3,
            float(row["activation_bytes"]),
            float(row["parameter_bytes"]),
            tuple(places[node] for node in row["inputs"].split()),
        )
        for row in rows
    ]


@pytest.mark.parametrize(
    ("model", "machines", "replicas"),
    [
        ("vgg16", 4, [3, 1]),  # what the authors' program prints for 4 machines
        ("vgg16", 8, [7, 1]),  # runtime/image_classification/models/*/hybrid_conf.json
        ("vgg16", 16, [15, 1]),
        ("alexnet", 4, [3, 1]),
        ("alexnet", 16, [15, 1]),
    ],
)
def test_published_stages_of_chains_come_out(model: str, machines: int, replicas: list[int]) -> None:
    found = pipedream(profile(model), machines, 1e9)
    assert [stage.replicas for stage in found.stages] == replicas
    assert found.stages[-1].stop == len(profile(model))


@pytest.mark.parametrize(
    ("model", "bandwidth", "replicas"),
    [
        ("gnmt", 1e9, [1, 1, 1, 1]),  # runtime/translation/models/gnmt/gpus=4: four stages
        ("resnet50", 1e10, [2, 1, 1]),  # runtime/image_classification/models/resnet50/gpus=4/hybrid_conf.json
    ],
)
def test_published_stages_of_graphs_come_out_on_4_machines(model: str, bandwidth: float, replicas: list[int]) -> None:
    """ResNet-50's file gives no bandwidth. At 10 GB/s its plan is as fast as four stages, with one stage less."""
    layers = profile(model)
    found = pipedream(layers, 4, bandwidth)
    assert [stage.replicas for stage in found.stages] == replicas
    places = [place for stage in found.stages for place in stage.layers]
    assert sorted(places) == list(range(len(layers)))
    seen: set[int] = set()
    for stage in found.stages:
        seen |= set(stage.layers)
        assert all(set(layers[place].inputs or ()) <= seen for place in stage.layers)


def test_profiles_have_the_parameters_of_their_models() -> None:
    """What was written down by hand: ResNet-50 has 25,557,032 parameters; running means are none."""
    assert sum(layer.weight_bytes for layer in profile("resnet50")) == 4 * 25_557_032
    assert sum(layer.seconds for layer in profile("gnmt")) == pytest.approx(0.089416)


def test_a_graph_of_branches_is_cut_as_brute_force_cuts_it() -> None:
    """Stages of a graph: every assignment of layers to stages whose inputs lie in the same or earlier stages."""
    rng = random.Random(3)
    for _ in range(30):
        count, machines = rng.randint(2, 5), rng.randint(1, 3)
        inputs = [tuple(sorted(rng.sample(range(place), rng.randint(0, min(2, place))))) for place in range(count)]
        layers = [LayerProfile(rng.random(), 2.0 * rng.random(), rng.random(), each) for each in inputs]
        best = float("inf")
        for stages in range(1, min(count, machines) + 1):
            for where in itertools.product(range(stages), repeat=count):
                if len(set(where)) < stages or any(where[i] > where[p] for p in range(count) for i in inputs[p]):
                    continue
                for replicas in itertools.product(range(1, machines + 1), repeat=stages):
                    if sum(replicas) == machines:
                        best = min(best, seconds_of_stages(layers, where, replicas))
        assert pipedream(layers, machines, 2.0).seconds == pytest.approx(best)


def seconds_of_stages(layers: list[LayerProfile], where: tuple[int, ...], replicas: tuple[int, ...]) -> float:
    slowest = 0.0
    for stage, count in enumerate(replicas):
        own = [layer for layer, place in zip(layers, where, strict=True) if place == stage]
        weights = 4 * (count - 1) * sum(layer.weight_bytes for layer in own) / 2.0 / count
        slowest = max(slowest, (sum(layer.seconds for layer in own) + weights) / count)
        crossing = {i for p, each in enumerate(layers) for i in each.inputs or () if where[i] < stage <= where[p]}
        slowest = max(slowest, 2 * sum(layers[i].output_bytes for i in crossing) / 2.0)
    return slowest


def test_vgg16_on_4_machines_is_cut_after_17_layers() -> None:
    first, second = pipedream(profile("vgg16"), 4, 1e9).stages
    assert (first.start, first.stop, second.start) == (0, 17, 17)


def seconds_of(layers: list[LayerProfile], cuts: tuple[int, ...], replicas: tuple[int, ...], bandwidth: float) -> float:
    slowest = 0.0
    for start, stop, count in zip((0, *cuts), (*cuts, len(layers)), replicas, strict=True):
        own = layers[start:stop]
        time = sum(layer.seconds for layer in own)
        weights = 4 * (count - 1) * sum(layer.weight_bytes for layer in own) / bandwidth / count
        slowest = max(slowest, (time + weights) / count)
        if start:
            slowest = max(slowest, 2 * layers[start - 1].output_bytes / bandwidth)
    return slowest


def test_plans_are_those_of_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(40):
        count, machines = rng.randint(1, 5), rng.randint(1, 4)
        layers = [LayerProfile(rng.random(), 0.3 * rng.random(), rng.random()) for _ in range(count)]
        best = min(
            seconds_of(layers, cuts, replicas, 2.0)
            for stages in range(1, min(count, machines) + 1)
            for cuts in itertools.combinations(range(1, count), stages - 1)
            for replicas in itertools.product(range(1, machines + 1), repeat=stages)
            if sum(replicas) == machines
        )
        found = pipedream(layers, machines, 2.0)
        assert found.seconds == pytest.approx(best)
        cuts = tuple(stage.start for stage in found.stages[1:])
        replicas = tuple(stage.replicas for stage in found.stages)
        assert seconds_of(layers, cuts, replicas, 2.0) == pytest.approx(best)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        pipedream([], 2, 1e9)
    with pytest.raises(ValueError, match="must be positive"):
        pipedream([LayerProfile(1.0, 0.0, 0.0)], 0, 1e9)
    with pytest.raises(ValueError, match="must not be negative"):
        LayerProfile(-1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="must come before"):
        pipedream([LayerProfile(1.0, 0.0, 0.0, (1,)), LayerProfile(1.0, 0.0, 0.0)], 2, 1e9)
    with pytest.raises(ValueError, match="more than 2048 cuts"):
        pipedream([LayerProfile(1.0, 0.0, 0.0, ())] * 12, 2, 1e9)
