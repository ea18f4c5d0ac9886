"""A profile of a training step reads like its schedule: ranges of ZeRO's units and of a pipeline's actions."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import fastpar as fp
from fastpar.pipeline import Pipeline, one_f_one_b
from tests.comm.test_comm_ranges import ranges_of
from tests.dist import run_ranks


def profile_stage3() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=3, units=["0", "1"], persistent_share=0.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    zero.detach()
    return list(ranges_of(profile))


def test_a_profile_of_stage_3_names_units_and_phases() -> None:
    for found in run_ranks(2, profile_stage3):
        for unit in ("0", "1"):
            assert f"fastpar::zero::all_gather {unit}" in found
            assert f"fastpar::zero::wait all_gather {unit}" in found
            assert f"fastpar::zero::reduce_scatter {unit}" in found
        assert {"fastpar::zero::reduce and clip", "fastpar::zero::update"} <= set(found)


def profile_pipeline() -> tuple[list[str], list[str]]:
    pipe = Pipeline([nn.Linear(4, 4)], one_f_one_b(2, 2), dist.group.WORLD, loss=nn.functional.mse_loss)
    try:
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        found = [name for name in ranges_of(profile) if name.startswith("fastpar::pipeline::")]
        return found, [f"fastpar::pipeline::{event.action}" for event in pipe.timeline.events]
    finally:
        pipe.close()


def test_a_profile_of_a_pipeline_step_names_every_action_of_the_rank() -> None:
    for found, actions in run_ranks(2, profile_pipeline):
        assert len(actions) > 4
        assert sorted(found) == sorted(actions)
