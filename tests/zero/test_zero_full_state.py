"""Optimizer states by name, as whole tensors: what one layout gives another takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastpar as fp
from tests.dist import run_ranks
from tests.zero.test_zero_checkpoint import Run

States = dict[str, dict[str, Any]]


def trained(stage: int, kind: str) -> tuple[States, dict[str, torch.Tensor], list[float]]:
    """States and values after three steps, and the losses of two more."""
    run = Run(stage, kind=kind).train(range(3))
    states = fp.zero.full_optimizer_state(run.zero)
    whole = run.whole()
    for name, of_name in states.items():
        for key, value in of_name.items():
            if isinstance(value, torch.Tensor):
                assert type(value) is torch.Tensor
                assert torch.equal(value, whole[f"{name}.{key}"])
    never = {"frozen", "unused"}
    assert set(states) == {*run.zero.optim_param_names().values()} - never
    assert {"first.weight", "twice.weight", "scale"} <= set(states)
    return states, whole, run.train(range(3, 5)).losses[-2:]


def resumed(stage: int, kind: str, states: States, whole: dict[str, torch.Tensor]) -> list[float]:
    run = Run(stage, kind=kind, seed=1)
    assert fp.zero.full_optimizer_state(run.zero) == {}  # nothing has been updated yet
    held = run.zero.state_dict()
    for name, x in held["model"].items():
        value = whole[f"model.{name}"]
        if hasattr(x, "device_mesh"):
            value = torch.distributed.tensor.distribute_tensor(value, x.device_mesh, x.placements, src_data_rank=None)
        held["model"][name] = value
    run.zero.load_state_dict(held)
    fp.zero.load_full_optimizer_state(run.zero, states)
    again = fp.zero.full_optimizer_state(run.zero)
    assert again.keys() == states.keys()
    for name, of_name in states.items():
        assert again[name].keys() == of_name.keys()
        for key, value in of_name.items():
            found = again[name][key]
            same = torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
            assert same, (name, key)
    return run.train(range(3, 5)).losses


@pytest.mark.parametrize("kind", ["adamw", "ours"])
def test_states_of_one_layout_go_on_under_another(kind: str) -> None:
    states, whole, losses = run_ranks(2, trained, 3, kind)[0]
    for stage, size in ((0, 1), (2, 3)):
        for found in run_ranks(size, resumed, stage, kind, states, whole):
            assert found == pytest.approx(losses, rel=1e-5)


def refused() -> list[str]:
    run = Run(2).train(range(1))
    states = fp.zero.full_optimizer_state(run.zero)
    before = run.whole()
    name, key = next(
        (name, key)
        for name, of_name in states.items()
        for key, x in of_name.items()
        if isinstance(x, torch.Tensor) and x.numel() > 1
    )
    messages = []
    for bad, error in (
        ({"nobody": {}}, KeyError),
        ({name: {}}, ValueError),
        ({name: {**states[name], key: torch.zeros(1000)}}, ValueError),
    ):
        with pytest.raises(error, match=r"nobody|must be") as raised:
            fp.zero.load_full_optimizer_state(run.zero, bad)
        messages.append(str(raised.value))
    with pytest.raises(TypeError, match=r"what fp\.zero\.shard returned, got AdamW"):
        fp.zero.full_optimizer_state(run.optimizer)
    after = run.whole()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    return messages


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    (unknown, missing, shape), _ = run_ranks(2, refused)
    assert "no optimizer has a parameter called 'nobody'" in unknown
    assert "must be" in missing
    assert "got [1000]" in shape
