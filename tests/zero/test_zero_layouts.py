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
from fastpar.contracts import optimizer_formats as formats
from tests.dist import run_ranks
from tests.models import VOCAB, build_model
from tests.values import all_gathered

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
    return whole_of(zero.state_dict())


def whole_of(state: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {f"model.{name}": x for name, x in state["model"].items()}
    for name, states in state["optimizer"].items():
        tensors |= {f"{name}.{key}": x for key, x in states.items() if isinstance(x, Tensor)}
    return all_gathered(tensors)


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
    ({"dp_shard": 4, "ep": 2}, 1, True),  # slow: its experts are split as those above
]
LOADED: list[tuple[dict[str, int], int]] = [
    ({"dp_shard": 2, "tp": 2, "ep": 2}, 1),
    ({"tp": 2}, 0),
    ({"dp_shard": 2}, 3),
    ({}, 0),
]


@pytest.mark.parametrize(
    ("sizes", "stage", "experts"), [*SAVED[:2], pytest.param(*SAVED[2], marks=pytest.mark.slow)], ids=str
)
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


# ---- states of the fused optimizers in fewer bits --------------------------------------------------------------------

FORMATS: dict[str, dict[str, Any]] = {
    "8bit": {"state_dtype": "8bit"},
    "bfloat16": {"state_dtype": torch.bfloat16},
    "split": {"state_dtype": torch.bfloat16, "master": "split"},
}


def narrow_training(sizes: dict[str, int], stage: int, form: str, seed: int) -> tuple[fp.Mesh, Any, fp.zero.Zero]:
    """8-bit states of float32 parameters; else parameters and states in bfloat16, rounded stochastically."""
    mesh = fp.init_mesh(**sizes, device="cpu")
    options = SMALL | (EXPERTS if "ep" in sizes else {})
    dtype = torch.float32 if form == "8bit" else torch.bfloat16
    model = fp.parallelize(build_model("example", dtype, seed, **options), mesh, gather_logits=True)
    optimizer = fp.optim.AdamW(model.parameters(), lr=1e-2, **FORMATS[form])
    return mesh, model, fp.zero.shard(model, optimizer, group=mesh, stage=stage)


def save_narrow(folder: str, sizes: dict[str, int], stage: int, form: str) -> Found:
    mesh, model, zero = narrow_training(sizes, stage, form, seed=0)
    steps(model, zero, range(3))
    dcp.save({"training": zero}, checkpoint_id=folder)
    found = whole(zero), steps(model, zero, range(3, 5))
    mesh.close()
    return found


def requantised(x: Tensor, signed: bool) -> Tensor:
    """What 8 bits keep of this rank's part."""
    rows = x.to_local() if isinstance(x, DTensor) else x
    codes, scales = formats.quantise(rows, signed=signed)
    return formats.dequantise(codes, scales, signed=signed)


def load_narrow(folder: str, sizes: dict[str, int], stage: int, form: str) -> Found:
    """What the checkpoint has, and the next losses."""
    mesh, model, zero = narrow_training(sizes, stage, form, seed=1)
    state = zero.state_dict()
    dcp.load({"training": state}, checkpoint_id=folder)
    saved = whole_of(state)
    zero.load_state_dict(state)
    held = zero.state_dict()["optimizer"]
    for name, states in state["optimizer"].items():
        for key, x in states.items():
            mine, wanted = (y.to_local() if isinstance(y, DTensor) else y for y in (held[name][key], x))
            if form == "8bit" and key != "step":
                wanted = requantised(x, signed=key == "exp_avg")
            assert torch.equal(mine, wanted), (name, key)
    found = saved, steps(model, zero, range(3, 5))
    mesh.close()
    return found


def check_narrow(folder: str, form: str, sizes: dict[str, int], stage: int, others: Any) -> None:
    world = sizes.get("dp_shard", 1) * sizes.get("tp", 1)
    before, losses = run_ranks(world, save_narrow, folder, sizes, stage, form)[0]
    if form == "split":
        assert any(name.endswith("remainder") for name in before)
    for other, other_stage in [(sizes, stage), *others]:
        ranks = other.get("dp_shard", 1) * other.get("tp", 1)
        for after, next_losses in run_ranks(ranks, load_narrow, folder, other, other_stage, form):
            assert after.keys() == before.keys()
            for name, x in before.items():
                assert torch.equal(after[name], x), (name, other, other_stage)
            if (other, other_stage) == (sizes, stage):
                assert next_losses == losses
            else:  # 8 bits: blocks cut anew; bfloat16: products in another order
                assert next_losses == pytest.approx(losses, rel=1e-3 if form == "8bit" else 2e-2)


# "split" has states in bfloat16, too.
@pytest.mark.parametrize("form", ["8bit", "split", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_other_layouts_load_states_in_fewer_bits(tmp_path: Path, form: str) -> None:
    others: Any = [({"dp_shard": 3}, 3), ({"tp": 2}, 0)]
    check_narrow(str(tmp_path / "checkpoint"), form, {"dp_shard": 2, "tp": 2}, 1, others)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_loads_states_in_fewer_bits_from_every_other(tmp_path: Path, form: str, stage: int) -> None:
    others: Any = [({"dp_shard": size}, other) for other in range(4) for size in (1, 2, 4)]
    check_narrow(str(tmp_path / "checkpoint"), form, {"dp_shard": 2}, stage, others)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_other_layouts_of_experts_load_states_in_fewer_bits(tmp_path: Path, form: str) -> None:
    others: Any = [({"dp_shard": 2, "tp": 2, "ep": 2}, 2), ({"ep": 1}, 0)]
    check_narrow(str(tmp_path / "checkpoint"), form, {"dp_shard": 4, "ep": 2}, 1, others)
