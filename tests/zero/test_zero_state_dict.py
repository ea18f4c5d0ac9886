"""torch.distributed.checkpoint.state_dict: what it gets and sets of a model and an optimizer under ZeRO."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import fastpar as fp
import fastpar.zero.offload.shard_store as offload_module
from tests.dist import run_ranks
from tests.zero.zero_ranks import make_optimizer

STAGES = (0, 1, 2, 3)
BATCH = 8  # of all ranks


class Tied(nn.Module):
    """A weight at two places, one that is frozen, rows that do not divide."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.frozen
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Run:
    def __init__(self, stage: int | None, seed: int = 0, kind: str = "adamw", **options: Any) -> None:
        self.model = Tied(seed)
        wide = [p for p in self.model.parameters() if p.ndim > 1]
        thin = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": thin, "weight_decay": 0.0}]
        self.optimizer = make_optimizer(kind, groups)
        self.optimizer.param_groups[1]["lr"] = 2e-2
        self.size, self.rank = 1, 0
        if stage is not None:
            self.zero = fp.zero.shard(self.model, self.optimizer, stage=stage, **options)
            self.size, self.rank = dist.get_world_size(), dist.get_rank()

    def train(self, steps: Sequence[int]) -> list[float]:
        losses = []
        for step in steps:
            ids = torch.randint(11, (BATCH,), generator=torch.Generator().manual_seed(step))
            of_ranks = [ids[rows] for rows in torch.arange(BATCH).chunk(self.size)]
            mine = of_ranks[self.rank]
            loss = nn.functional.cross_entropy(self.model(mine).float(), (mine + 1) % 11)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def copied(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, dict):
        return {key: copied(value) for key, value in x.items()}
    return type(x)(copied(value) for value in x) if isinstance(x, (list, tuple)) else x


def masters(run: Run) -> dict[str, Tensor]:
    """What the optimizer has."""
    return {name: whole(x) for name, x in run.zero.state_dict()["model"].items()}


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


SHARDED = StateDictOptions()
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def through_files(folder: str, stage: int, others: Sequence[int], before: int, options: dict[str, Any]) -> None:
    """Saves after some steps in one stage, and goes on in others."""
    for how in (SHARDED, FLAT, FULL):
        run = Run(stage, **options)
        run.train(range(before))
        model, states = copied(get_state_dict(run.model, run.optimizer, options=how))
        where = f"{folder}/{how.flatten_optimizer_state_dict}{how.full_state_dict}"
        dcp.save({"model": model, "optimizer": states}, checkpoint_id=where)
        kept = masters(run)
        expected = run.train(range(before, before + 3))
        for other in others:
            again = Run(other, seed=1, **options)
            again.train([50])
            if how is FULL:
                box = [copied((model, states))]  # torch writes to what it is given
                dist.broadcast_object_list(box)
                held = {"model": box[0][0], "optimizer": box[0][1]}
                assert not any(hasattr(x, "placements") for x in held["optimizer"]["state"]["embed.weight"].values())
            else:
                held = dict(
                    zip(("model", "optimizer"), get_state_dict(again.model, again.optimizer, options=how), strict=True)
                )
                dcp.load(held, checkpoint_id=where)
            set_state_dict(
                again.model,
                again.optimizer,
                model_state_dict=held["model"],
                optim_state_dict=held["optimizer"],
                options=how,
            )
            assert [group["weight_decay"] for group in again.optimizer.param_groups] == [0.1, 0.0]
            for name, x in masters(again).items():
                assert torch.equal(x.view(-1), kept[name].view(-1)), (other, how, name)
            found = again.train(range(before, before + 3))
            if other == stage:
                assert found == expected, (other, how)
            else:  # sums over ranks associate otherwise
                assert found == pytest.approx(expected, rel=2e-2 if "precision" in options else 1e-5), (other, how)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "other"), [(0, 1), (1, 3), (2, 0), (3, 2)])
def test_what_get_state_dict_gives_any_stage_goes_on_with(
    tmp_path: Path, stage: int, other: int, options: dict[str, Any]
) -> None:
    run_ranks(2, through_files, str(tmp_path), stage, (stage, other), 2, options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"kind": "ours"}, {"kind": "8bit"}, {"kind": "sgd"}, {"offload": "cpu"}])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_get_state_dict_works_for_every_optimizer_and_before_the_first_step(
    tmp_path: Path, stage: int, before: int, options: dict[str, Any]
) -> None:
    run_ranks(2, through_files, str(tmp_path), stage, (stage,), before, options)


def from_a_file(folder: str) -> None:
    before, offload_module.SMALL_BYTES = offload_module.SMALL_BYTES, 0
    try:
        through_files(f"{folder}/saved", 1, (1,), 2, {"offload": f"nvme:{folder}"})
    finally:
        offload_module.SMALL_BYTES = before


def test_states_that_are_in_a_file_are_read_for_get_state_dict(tmp_path: Path) -> None:
    run_ranks(2, from_a_file, str(tmp_path))


# ---- the optimizer's own


def load_plain() -> None:
    """States as one process has them."""
    plain = Run(None)
    plain.train(range(2))
    names = [name for name, p in plain.model.named_parameters() if p.requires_grad]
    saved = plain.optimizer.state_dict()
    expected = {name: plain.optimizer.state[plain.model.get_parameter(name)]["exp_avg_sq"] for name in names}
    for stage in STAGES:
        for precision in (None, "bf16"):
            run = Run(stage, precision=precision)
            run.optimizer.load_state_dict(copied(saved))
            for name in names:
                found = whole(run.optimizer.state[run.model.get_parameter(name)]["exp_avg_sq"])
                assert torch.equal(found, expected[name]), (stage, precision, name)
            again = copied(run.optimizer.state_dict())
            run.train(range(1))
            run.optimizer.load_state_dict(again)
            for name in names:
                found = whole(run.optimizer.state[run.model.get_parameter(name)]["exp_avg_sq"])
                assert torch.equal(found, expected[name]), (stage, precision, name)


def test_an_optimizer_loads_whole_states_and_its_own() -> None:
    run_ranks(2, load_plain)


def overwrite() -> None:
    """Values for parameters that have master weights."""
    given = {name: x.clone() for name, x in Tied(3).state_dict().items()}
    for stage in STAGES:
        run = Run(stage, precision="bf16")
        run.train(range(2))
        set_model_state_dict(run.model, copied(given), options=StateDictOptions(full_state_dict=True))
        run.model.eval()
        run.model(torch.arange(3))
        for name, x in masters(run).items():
            assert torch.equal(x, given[name].bfloat16().float()), (stage, name)
        run.train([2])
        kept = masters(run)
        assert not torch.equal(kept["embed.weight"], kept["embed.weight"].bfloat16().float())
        with torch.no_grad():
            run.model.layers[0].bias.zero_()
        run.model(torch.arange(3))
        now = masters(run)
        assert not now.pop("layers.0.bias").any()
        assert all(torch.equal(x, kept[name]) for name, x in now.items())  # others keep their digits


def test_master_weights_follow_what_is_written_to_parameters() -> None:
    run_ranks(2, overwrite)


def _copied_and_saved() -> None:
    """One row: the other rank has none of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 3, bias=False))
    whole = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fp.zero.shard(model, optimizer, stage=3, units=[model], persistent_share=0.0)
    kept = copy.deepcopy(model.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for state in (kept, saved):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(state)
        assert torch.equal(copy.deepcopy(model)(x), whole(x))


def test_shards_without_rows_are_copied_and_saved_as_others() -> None:
    run_ranks(2, _copied_and_saved)


def _saved_by_rank_0() -> list[str]:
    """What the other rank says to a file that the first one alone has written."""
    mesh = fp.init_mesh(tp=2, device="cpu")
    embed = nn.Embedding(8, 4)
    split = fp.parallelize(nn.Sequential(embed, nn.Linear(4, 4)), mesh, {"0": "vocab"}, sync_weights="broadcast")
    runs = [Run(1), Run(3)]
    for run in runs:
        run.train(range(1))
    said = []
    for whole_state, load in (
        (split.state_dict(), split.load_state_dict),
        (runs[0].optimizer.state_dict(), runs[0].optimizer.load_state_dict),
        (runs[1].model.state_dict(), runs[1].model.load_state_dict),
        (runs[1].zero.state_dict(), runs[1].zero.load_state_dict),
    ):
        file = io.BytesIO()
        torch.save(whole_state, file)
        sent = [file.getvalue()]
        dist.broadcast_object_list(sent, 0)
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="part that another rank has saved") as caught:
                load(torch.load(io.BytesIO(sent[0]), weights_only=False))
            said.append(str(caught.value))
    return said


def test_what_one_rank_has_saved_of_split_tensors_is_refused_by_the_others() -> None:
    first, second = run_ranks(2, _saved_by_rank_0)
    assert (len(first), len(second)) == (0, 4)
    assert second[1].startswith("exp_avg of embed.weight is the part")
