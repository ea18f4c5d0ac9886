"""PipeDream's planner: its published answers, and brute force."""

import csv
import itertools
import random
from pathlib import Path

import pytest

from fastpar.planner.replication import LayerProfile, pipedream

PATH = Path(__file__).parent / "data" / "pipedream_profiles.csv"


def profile(model: str) -> list[LayerProfile]:
    with PATH.open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    return [
        LayerProfile(
            (float(row["forward_ms"]) + float(row["backward_ms"])) / 1e3,
            float(row["activation_bytes"]),
            float(row["parameter_bytes"]),
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


def test_vgg16_on_4_machines_is_cut_after_17_layers() -> None:
    first, second = pipedream(profile("vgg16"), 4, 1e9).stages
    assert (first.start, first.stop, second.start) == (0, 17, 17)


def seconds_of(layers: list[LayerProfile], cuts: tuple[int, ...], replicas: tuple[int, ...], bandwidth: float) -> float:
    slowest = 0.0
    for start, stop, count in zip((0, *cuts), (*cuts, len(layers)), replicas, strict=True):
        own = layers[start:stop]
        time = sum(layer.seconds for layer in own)
        weights = 4 * (count - 1) * sum(layer.weight_bytes for layer in own) / bandwidth
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
