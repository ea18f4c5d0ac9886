"""The trainer's meter: bytes of a step by kind, from storages and from what autograd saves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastpar as fp
from fastpar.zero.buckets import Staging
from tests.dist import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))  # as `python examples/train.py` does

from memory import MemoryMeter, num_bytes, reachable_tensors, span, union


def test_spans_that_overlap_or_touch_are_one_and_empty_ones_none() -> None:
    assert union([(8, 12), (0, 4), (2, 6), (6, 7), (20, 20)]) == [(0, 7), (8, 12)]
    assert num_bytes([(8, 12), (0, 4), (2, 6)]) == 10


def test_a_view_has_the_span_of_the_whole_storage_and_a_freed_one_none() -> None:
    x = torch.zeros(10)
    assert span(x[3:5]) == span(x)
    assert num_bytes([span(x[3:5]), span(x.view(5, 2))]) == 40
    x.untyped_storage().resize_(0)
    assert num_bytes([span(x), span(torch.empty(4, device="meta"))]) == 0


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train(meter: MemoryMeter, model: nn.Module, optimizer: torch.optim.Optimizer, passes: int = 1) -> None:
    """Two steps, the second one watched."""
    for is_watched in (False, True):
        with meter.watching(is_watched):
            for _ in range(passes):
                model(torch.ones(32, 8)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()


def test_kinds_of_a_plain_step_are_counted_to_the_byte() -> None:
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    meter = MemoryMeter(model, optimizer)
    train(meter, model, optimizer)
    words = 8 * 16 + 16 + 16 * 4 + 4
    saved = 32 * 8 + 32 * 16  # the input of the first layer; of the second, which tanh saves too
    steps = 4  # a count per parameter
    assert meter.peaks == {
        "parameters": 4 * words,
        "gradients": 4 * words,
        "states": 4 * (2 * words + steps),
        "activations": 4 * saved,
    }
    # Activations are gone when the last gradient comes: together it is less than the sum.
    rest = 4 * (3 * words + steps)
    assert rest + max(4 * saved, 4 * words) <= meter.together < sum(meter.peaks.values())


def test_activations_are_gone_after_backward_and_not_after_forward() -> None:
    model = two_layers()
    meter = MemoryMeter(model, torch.optim.SGD(model.parameters()))
    with meter.watching():
        kept = model(torch.ones(32, 8))
        assert meter._spans()["activations"]
        kept.sum().backward()
        del kept
        assert not meter._spans()["activations"]


def test_nothing_is_measured_while_not_watching() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters())
    meter = MemoryMeter(model, optimizer)
    with meter.watching(False):
        model(torch.ones(32, 8)).sum().backward()
        optimizer.step()
    assert set(meter.peaks.values()) == {0} == {meter.together}


def test_tensors_are_found_in_closures_and_containers_but_not_in_memory_of_peers() -> None:
    mine, inner, theirs = torch.zeros(3), torch.zeros(4), torch.zeros(5)
    staging = Staging.__new__(Staging)
    staging.__dict__.update(numel={"a": [mine]}, hold=lambda: inner, _peers=[theirs])
    assert {len(x) for x in reachable_tensors([(staging,)])} == {3, 4}


def measure(stage: int, passes: int, dtype: str, num_equal_layers: int = 0) -> dict[str, int]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    if num_equal_layers:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(num_equal_layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    meter = MemoryMeter(model, optimizer)
    precision = fp.Precision.bf16() if dtype == "bf16" else None
    meter.zero = fp.zero.shard(
        model, optimizer, group=dist.group.WORLD, stage=stage, precision=precision, accumulate=passes
    )
    for is_watched in (False, True):
        with meter.watching(is_watched):
            for _ in range(passes):
                (model(torch.ones(2, 64, dtype=next(model.parameters()).dtype)).sum() / passes).backward()
            optimizer.step()
        optimizer.zero_grad()
    return meter.peaks


WORDS = 64 * 256 + 256 + 256 * 64 + 64


@pytest.mark.parametrize(
    ("stage", "dtype", "parameters", "states"),
    [
        (0, "fp32", 4, 8),
        (1, "fp32", 4, 8 / 2),
        (2, "fp32", 4, 8 / 2),
        (3, "fp32", 4 / 2 + 4 / 2, 8 / 2),  # and one of two layers, whole while it runs
        (0, "bf16", 2, 12),
        (2, "bf16", 2, 12 / 2),
    ],
)
def test_parameters_and_states_of_a_stage_follow_the_formula(
    stage: int, dtype: str, parameters: float, states: float
) -> None:
    """Bytes per parameter at two ranks: fp32 with two moments; bf16 with fp32 master weights besides."""
    for peaks in run_ranks(2, measure, stage, 1, dtype):
        assert peaks["parameters"] == pytest.approx(parameters * WORDS, rel=0.02)
        assert peaks["states"] == pytest.approx(states * WORDS, rel=0.02)
        # The inputs of both layers, and not their weights, which autograd saves too.
        assert peaks["activations"] == (64 + 256) * 2 * (2 if dtype == "bf16" else 4)


def test_layers_that_stage_3_has_freed_are_neither_parameters_nor_activations() -> None:
    layer = 64 * 64 * 4
    for peaks in run_ranks(2, measure, 3, 1, "fp32", 6):
        assert 6 * layer / 2 + layer <= peaks["parameters"] <= 6 * layer / 2 + 2 * layer
        assert peaks["activations"] == 6 * 2 * 64 * 4
