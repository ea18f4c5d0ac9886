"""Checkpoints of data parallelism over pipeline stages: names are those of the whole model, whoever asks for them."""

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
Found = tuple[dict[str, Tensor], list[float]]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Training:
    """A model in a pipeline of `pp` stages, or whole, with data parallelism.

    how    what `shard` is given of a pipeline: itself, its parameters, or these with names
    """

    def __init__(
        self, mesh: fp.Mesh, how: str, seed: int, tied: bool = False, groups: int = 1, schedule: str = "1f1b"
    ) -> None:
        self.mesh = mesh
        model = build_model("example", torch.float32, seed, **SMALL, tie_word_embeddings=tied)
        self.pipe: Any = None
        self.model: Any = model
        if mesh.size("pp") > 1:
            self.pipe = fp.parallelize_pipeline(model, mesh, schedule, num_microbatches=2, loss=next_token_loss)
            self.model = self.pipe
        parameters = list(self.model.parameters())
        split = [parameters[i::groups] for i in range(groups)]
        options = [{"params": p, "weight_decay": 0.1 * i} for i, p in enumerate(split)]
        self.optimizer = torch.optim.AdamW(options, lr=1e-2)
        given = {"itself": self.model, "names": self.model.named_parameters(), "parameters": self.model.parameters()}
        stage = 1
        self.zero = fp.zero.shard(given[how], self.optimizer, group=mesh, stage=stage, overlap=self.pipe is None)

    def steps(self, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            ids = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(number))
            if self.pipe is not None:
                loss = self.pipe.step(ids[:, :-1], target=ids[:, 1:])
            else:
                halves = [next_token_loss(self.model(row[:, :-1]), row[:, 1:]) / 2 for row in ids.split(1)]
                loss = halves[0] + halves[1]
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def values(self) -> dict[str, Tensor]:
        """What this rank has, whole."""
        state = self.zero.state_dict()
        tensors = {f"model.{name}": x for name, x in state["model"].items()}
        for name, states in state["optimizer"].items():
            tensors |= {f"{name}.{key}": x for key, x in states.items() if isinstance(x, Tensor)}
        return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in tensors.items()}

    def close(self) -> None:
        self.zero.close()
        if self.pipe is not None:
            self.pipe.close()
        self.mesh.close()


def save(folder: str, sizes: dict[str, int], how: str, tied: bool, schedule: str = "1f1b") -> Found:
    training = Training(fp.init_mesh(**sizes, device="cpu"), how, 0, tied, schedule=schedule)
    training.steps(range(3))
    dcp.save({"training": training.zero}, checkpoint_id=folder)
    found = training.values(), training.steps(range(3, 5))
    training.close()
    return found


def load(folder: str, sizes: dict[str, int], how: str, tied: bool, schedule: str = "1f1b") -> Found:
    training = Training(fp.init_mesh(**sizes, device="cpu"), how, 1, tied, schedule=schedule)
    dcp.load({"training": training.zero}, checkpoint_id=folder)
    found = training.values(), training.steps(range(3, 5))
    training.close()
    return found


@pytest.mark.parametrize("how", ["itself", "names", "parameters"])
def test_every_stage_finds_its_parameters_in_the_checkpoint_of_any_layout(tmp_path: Path, how: str) -> None:
    """Stages of two equal layers: equal names would not even be noticed."""
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(2, save, folder, {"pp": 2}, how, False)
    values = {**saved[0][0], **saved[1][0]}
    assert len(values) == len(saved[0][0]) + len(saved[1][0])  # no name is on two stages
    layouts: list[tuple[int, dict[str, int]]] = [(2, {"pp": 2}), (1, {}), (2, {"dp_shard": 2})]
    if how == "itself":
        layouts.append((4, {"pp": 2, "dp_shard": 2}))
    for ranks, sizes in layouts:
        for after, losses in run_ranks(ranks, load, folder, sizes, how if "pp" in sizes else "itself", False):
            assert after.keys() <= values.keys()
            assert all(torch.equal(x, values[name]) for name, x in after.items()), sizes
            assert losses == pytest.approx(saved[0][1], rel=1e-5)


def test_a_pipeline_loads_what_a_whole_model_saved(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    before, losses = run_ranks(2, save, folder, {"dp_shard": 2}, "itself", False)[0]
    for after, next_losses in run_ranks(2, load, folder, {"pp": 2}, "itself", False):
        assert all(torch.equal(x, before[name]) for name, x in after.items())
        assert next_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("saved", "loaded", "schedule"),  # of zbv one rank has both copies
    [({"pp": 2}, {"pp": 2}, "1f1b"), ({"pp": 2}, {}, "1f1b"), ({}, {"pp": 2}, "1f1b"), ({}, {"pp": 2}, "zbv")],
    ids=str,
)
def test_tied_weights_of_two_stages_load_into_one_and_the_other_way_round(
    tmp_path: Path, saved: dict[str, int], loaded: dict[str, int], schedule: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    found = run_ranks(saved.get("pp", 1), save, folder, saved, "itself", True, schedule)
    values = {name: x for each, _ in found for name, x in each.items()}
    for after, losses in run_ranks(loaded.get("pp", 1), load, folder, loaded, "itself", True, schedule):
        assert all(torch.equal(x, values[name]) for name, x in after.items() if name in values)
        assert losses == pytest.approx(found[0][1], rel=1e-5)


def unnamed() -> None:
    mesh = fp.init_mesh(pp=2, device="cpu")
    layer = torch.nn.Linear(3, 2)
    zero = fp.zero.shard(list(layer.parameters()), torch.optim.SGD(layer.parameters()), group=mesh)
    with pytest.raises(ValueError, match="parameters without names"):
        zero.state_dict()
    mesh.close()


def test_parameters_that_have_no_names_are_not_saved_from_stages() -> None:
    run_ranks(2, unnamed)


def grouped_by_name() -> str:
    """Weights that decay, but for embeddings: the other name of a tied one has no "embed" in it."""
    mesh = fp.init_mesh(pp=2, device="cpu")
    model = build_model("example", torch.float32, 0, **SMALL, tie_word_embeddings=True)
    pipe = fp.parallelize_pipeline(model, mesh, "1f1b", num_microbatches=2, loss=next_token_loss)
    groups = [{"params": [p], "weight_decay": 0.0 if "embed" in name else 0.5} for name, p in pipe.named_parameters()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    zero = fp.zero.shard(pipe, optimizer, group=mesh, stage=3)
    ids = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    pipe.step(ids[:, :-1], target=ids[:, 1:])
    optimizer.step()
    with pytest.raises(RuntimeError) as error:
        pipe.step(ids[:, :-1], target=ids[:, 1:])
    for each in (zero, pipe, mesh):
        each.close()
    return str(error.value)


def test_copies_of_a_tied_weight_in_groups_with_other_options_are_an_error_on_all_ranks() -> None:
    for said in run_ranks(2, grouped_by_name):
        assert "its weights differ" in said
        assert "the same options in the optimizers' param_groups" in said
