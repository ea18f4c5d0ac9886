"""Checkpoints of data parallelism with tensor and expert parallelism, loaded under other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fastpar as fp
from tests.dist import run_ranks
from tests.models import VOCAB, build_model

SMALL = {"num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 34, "num_attention_heads": 4}
EXPERTS = {"num_experts": 4, "router_aux_loss_coef": 0.0}
Found = tuple[dict[str, Tensor], list[float]]


def training(sizes: dict[str, int], stage: int, experts: bool, seed: int) -> tuple[fp.Mesh, Any, fp.zero.Zero]:
    mesh = fp.init_mesh(**sizes, device="cpu")
    options = SMALL | (EXPERTS if experts else {})
    model = fp.parallelize(build_model("example", torch.float32, seed, **options), mesh, gather_logits=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mesh, model, fp.zero.shard(model, optimizer, group=mesh, stage=stage)


def steps(model: Any, zero: fp.zero.Zero, numbers: range) -> list[float]:
    """Losses; every rank reads the same, so that the number of ranks does not matter."""
    losses = []
    for number in numbers:
        ids = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(number))
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        zero.optimizers[0].step()
        zero.optimizers[0].zero_grad()
        losses.append(loss.item())
    return losses


def whole(zero: fp.zero.Zero) -> dict[str, Tensor]:
    state = zero.state_dict()
    tensors = {f"model.{name}": x for name, x in state["model"].items()}
    for name, states in state["optimizer"].items():
        tensors |= {f"{name}.{key}": x for key, x in states.items() if isinstance(x, Tensor)}
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in tensors.items()}


def save(folder: str, sizes: dict[str, int], stage: int, experts: bool) -> Found:
    mesh, model, zero = training(sizes, stage, experts, seed=0)
    steps(model, zero, range(3))
    dcp.save({"training": zero}, checkpoint_id=folder)
    found = whole(zero), steps(model, zero, range(3, 5))
    mesh.close()
    return found


def load(folder: str, sizes: dict[str, int], stage: int, experts: bool) -> Found:
    mesh, model, zero = training(sizes, stage, experts, seed=1)
    dcp.load({"training": zero}, checkpoint_id=folder)
    found = whole(zero), steps(model, zero, range(3, 5))
    mesh.close()
    return found


SAVED: list[tuple[dict[str, int], int, bool]] = [
    ({"dp_shard": 2, "tp": 2}, 1, False),
    ({"dp_shard": 2, "tp": 2, "ep": 2}, 2, True),
    ({"dp_shard": 4, "ep": 2}, 1, True),
]
LOADED: list[tuple[dict[str, int], int]] = [
    ({"dp_shard": 2, "tp": 2, "ep": 2}, 1),
    ({"tp": 2}, 0),
    ({"dp_shard": 2}, 3),
    ({}, 0),
]


@pytest.mark.parametrize(("sizes", "stage", "experts"), SAVED, ids=lambda value: str(value))
def test_other_layouts_load_parameters_and_moments(
    tmp_path: Path, sizes: dict[str, int], stage: int, experts: bool
) -> None:
    folder = str(tmp_path / "checkpoint")
    world = sizes.get("dp_shard", 1) * sizes.get("tp", 1)
    before, losses = run_ranks(world, save, folder, sizes, stage, experts)[0]
    assert any(name.endswith("exp_avg") for name in before)
    for other, other_stage in [(sizes, stage), *LOADED]:
        wanted = {name: size for name, size in other.items() if experts or name != "ep"}
        ranks = wanted.get("dp_shard", 1) * wanted.get("tp", 1)
        for after, next_losses in run_ranks(ranks, load, folder, wanted, other_stage, experts):
            assert after.keys() == before.keys()
            for name, x in before.items():
                assert torch.equal(after[name], x), (name, wanted, other_stage)
            if wanted == sizes and other_stage == stage:
                assert next_losses == losses
            else:
                assert next_losses == pytest.approx(losses, rel=1e-5)
