"""Checkpoints of data-parallel training through torch.distributed.checkpoint: any stage and number of ranks to any."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import fastpar as fp
from fastpar.comm import Communicator
from tests.dist import run_ranks
from tests.values import all_gathered

from .zero_ranks import Net, make_optimizer

BATCH = 12  # of all ranks, so that every number of ranks sees the same samples
PRECISIONS = {"fp32": fp.Precision(), "bf16": fp.Precision.bf16()}


class Run:
    """Training that can be saved and gone on with."""

    def __init__(self, stage, precision="fp32", kind="adamw", seed=0, **options):
        self.comm = Communicator(dist.group.WORLD)
        self.model = Net()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(seed)
        self.optimizer = make_optimizer(kind, self.model.parameters())
        self.zero = fp.zero.shard(
            self.model, self.optimizer, group=self.comm, stage=stage, precision=PRECISIONS[precision], **options
        )
        self.losses = []

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(BATCH, 7, generator=generator), torch.randn(BATCH, 2, generator=generator)
            mine = torch.arange(BATCH).chunk(self.comm.size)[self.comm.rank]
            loss = nn.functional.mse_loss(self.model(x[mine]).float(), y[mine])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(self.comm.all_reduce(loss.detach(), "avg").item())
        return self

    def whole(self):
        """Values and states as they would be on one rank."""
        state = self.zero.state_dict()
        tensors = {f"model.{name}": x for name, x in state["model"].items()}
        for name, states in state["optimizer"].items():
            tensors |= {f"{name}.{key}": x for key, x in states.items() if isinstance(x, torch.Tensor)}
        return all_gathered(tensors)


def save(folder, stage, precision, kind):
    run = Run(stage, precision, kind).train(range(3))
    run.optimizer.param_groups[0]["lr"] = 0.125
    dcp.save({"training": run.zero}, checkpoint_id=folder)
    return run.whole(), Run.train(run, range(3, 5)).losses[-2:]


def load(folder, stage, precision, kind, options):
    run = Run(stage, precision, kind, seed=1, **options)
    dcp.load({"training": run.zero}, checkpoint_id=folder)
    assert run.optimizer.param_groups[0]["lr"] == 0.125
    return run.whole(), run.train(range(3, 5)).losses


SAVED = [(0, 2), (1, 3), (2, 4), (3, 2)]


@pytest.mark.parametrize(
    ("stage", "size", "precision"),
    # What bfloat16 adds to a checkpoint are masters, which two of the stages show.
    [
        *((*saved, "fp32") for saved in SAVED),
        *(pytest.param(*saved, "bf16", marks=[pytest.mark.slow] if saved[0] in (0, 2) else []) for saved in SAVED),
    ],
)
def test_any_stage_and_number_of_ranks_loads_what_another_saved(tmp_path: Path, stage, size, precision):
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(size, save, folder, stage, precision, "adamw")
    before, losses = saved[0]
    for other, ranks in ((stage, size), (0, 1), (3, 3), (1, 2), (2, 2), (3, 4)):
        for after, next_losses in run_ranks(ranks, load, folder, other, precision, "adamw", {}):
            assert after.keys() == before.keys()
            for name, x in before.items():
                assert torch.equal(after[name], x), (name, other, ranks)
            if (other, ranks) == (stage, size):
                assert next_losses == losses
            else:
                assert next_losses == pytest.approx(losses, rel=1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("kind", ["ours", "sgd"])
def test_other_optimizers_and_offload_load_too(tmp_path: Path, kind):
    folder = str(tmp_path / "checkpoint")
    before, losses = run_ranks(2, save, folder, 2, "fp32", kind)[0]
    for options in ({}, {"offload": "cpu"}, {"offload": f"nvme:{tmp_path}"}):
        for after, next_losses in run_ranks(2, load, folder, 2, "fp32", kind, options):
            assert all(torch.equal(after[name], x) for name, x in before.items())
            assert next_losses == losses


def check_straight(stage, precision):
    straight = Run(stage, precision).train(range(6))
    first = Run(stage, precision).train(range(3))
    state = first.zero.state_dict()
    second = Run(stage, precision, seed=1)
    second.zero.load_state_dict(state)
    second.train(range(3, 6))
    resumed = second.whole()
    return straight.losses[3:] == second.losses, [
        name for name, x in straight.whole().items() if not torch.equal(x, resumed[name])
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resumed_run_has_the_bits_of_one_that_went_straight_on(stage, precision):
    for are_equal, different in run_ranks(2, check_straight, stage, precision):
        assert are_equal
        assert not different


def check_unused():
    run = Run(2).train(range(2))
    state = run.zero.state_dict()
    assert not state["has_state"]["unused"]
    assert "exp_avg" in state["optimizer"]["unused"]  # so that all checkpoints have the same keys
    faces = {param.name: param.model_param for param in run.zero.params}
    assert faces["unused"] not in run.optimizer.state
    other = Run(1, seed=1)
    other.zero.load_state_dict(state)
    faces = {param.name: param.model_param for param in other.zero.params}
    assert faces["unused"] not in other.optimizer.state
    assert faces["last.weight"] in other.optimizer.state
    return True


def test_parameters_that_were_never_updated_have_no_state_afterwards():
    assert run_ranks(2, check_unused) == [True, True]


def in_two_groups(**options):
    model = Net()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:], **options}], lr=1e-2)
    return optimizer, fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=1)


def check_groups():
    state = Run(1).train(range(1)).zero.state_dict()
    optimizer, zero = in_two_groups(weight_decay=0.5)
    zero.load_state_dict(state)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1]
    _, zero = in_two_groups(weight_decay=0.5)
    with pytest.raises(ValueError, match=r"were saved with different weight_decay \(0.01 and 0.5\)"):
        Run(1).zero.load_state_dict(zero.state_dict())
    del state["groups"]["last.bias"]
    with pytest.raises(ValueError, match=r"no options of last\.bias"):
        Run(1).zero.load_state_dict(state)


def test_parameters_take_their_options_along_and_groups_of_different_ones_are_an_error():
    run_ranks(2, check_groups)


def check_missing(folder):
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=1)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint"):
        dcp.load({"training": zero}, checkpoint_id=folder)


def test_another_model_s_checkpoint_is_refused(tmp_path: Path):
    folder = str(tmp_path / "checkpoint")
    run_ranks(2, save, folder, 1, "fp32", "adamw")
    run_ranks(2, check_missing, folder)
