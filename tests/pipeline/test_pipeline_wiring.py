"""What runs between stages besides the main stream: skips and masks; over torch.distributed; by torch's schedules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from fastpar.pipeline import Partition, Pipeline, Schedule, StageOutput, make_schedule
from tests.dist import run_ranks
from tests.models import VOCAB, build_model
from tests.pipeline.pipeline_models import WIDTH, Block, build_batch, build_parts, loss_fn, sequential_step

EDGES = [(0, 2, "early"), (0, 3, "early"), (1, 3, "late")]


class Sends(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.block, self.names = Block(), names

    def forward(self, x: Tensor) -> StageOutput:
        hidden = self.block(x)
        return StageOutput(hidden, skips={name: hidden * (i + 2) for i, name in enumerate(self.names)})


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, early: Tensor, late: Tensor | None = None) -> Tensor:
        return self.block(x) + early.sin() + (0 if late is None else late.cos())


def build_skipping() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Sends("early"), Sends("late"), Takes(), Takes()]


def run_unet_like(parts: list[nn.Module], x: Tensor) -> Tensor:
    """What the edges mean, by hand."""
    first = parts[0](x)
    second = parts[1](first.output)
    third = parts[2](second.output, early=first.skips["early"])
    return parts[3](third, early=first.skips["early"], late=second.skips["late"])


def run_skips(name: str, options: dict[str, Any]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    schedule = make_schedule(name, size, 4, **options)
    modules, expected = build_skipping(), build_skipping()
    whole = Partition.of_modules(modules, edges=EDGES)
    stages = whole.stages(schedule.part_of(stage) for stage in schedule.stages_of(rank))
    pipe = Pipeline(stages, schedule, dist.group.WORLD, loss=F.mse_loss, edges=whole.edges)
    x, target = torch.randn(4, 3, WIDTH), torch.randn(4, 3, WIDTH)
    for _ in range(2):
        loss = pipe.step(x, target=target)
        total = torch.zeros(())
        for xi, yi in zip(x.split(1), target.split(1), strict=True):
            own = F.mse_loss(run_unet_like(expected, xi), yi) / 4
            own.backward()
            total = total + own.detach()
        assert torch.equal(loss, total)
    want = dict(nn.ModuleList(expected).named_parameters())
    for param_name, p in pipe.named_parameters():
        # The gradient of a tensor with three readers is added up in another order.
        torch.testing.assert_close(p.grad, want[param_name].grad, rtol=1e-5, atol=1e-7)
    pipe.close()


@pytest.mark.parametrize(
    ("world_size", "name", "options"),
    [
        (4, "1f1b", {}),
        (4, "zb_h1", {}),
        (2, "zbv", {}),
        (2, "interleaved_1f1b", {"stages_per_rank": 2}),
    ],
)
def test_skip_connections_go_straight_to_later_stages(world_size: int, name: str, options: dict[str, Any]) -> None:
    """Between ranks and between stages of one rank, to one receiver and to two."""
    run_ranks(world_size, run_skips, name, options)


def run_masked(schedule_name: str) -> None:
    """Hugging Face's Llama with padding: masks and position ids are keyword inputs of every stage, and the loss is the
    mean over all labels of the batch, of which the microbatches have unequal numbers.
    """
    mesh = fp.init_mesh(pp=2, device="cpu")
    single = build_model("llama", torch.float32, num_hidden_layers=4)
    ids = torch.randint(VOCAB, (4, 9))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[3, :5] = 0
    labels = ids.masked_fill(mask == 0, -100)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    pipe = fp.parallelize_pipeline(
        build_model("llama", torch.float32, num_hidden_layers=4), mesh, schedule_name, num_microbatches=4
    )
    loss = pipe.step(ids, labels=labels, attention_mask=mask, position_ids=positions)
    total = single(ids, attention_mask=mask, position_ids=positions, labels=labels).loss
    total.backward()
    torch.testing.assert_close(loss, total.detach(), rtol=1e-6, atol=0)
    want = dict(single.named_parameters())
    for name, p in pipe.named_parameters():
        torch.testing.assert_close(p.grad, want[name].grad, rtol=1e-4, atol=1e-6, msg=name)
    pipe.close()


def run_unknown_keyword() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = build_parts(size)
    pipe = Pipeline([parts[rank]], make_schedule("1f1b", size, 2), dist.group.WORLD, loss=loss_fn)
    x, target = build_batch(4)
    says = "no stage takes the keyword input 'labels'; what the loss compares with is target="
    with pytest.raises(ValueError, match=says):
        pipe.step(x, labels=target)
    pipe.step(x, target=target)  # nothing has happened
    pipe.close()


def test_a_keyword_input_that_no_stage_takes_is_an_error_on_every_rank() -> None:
    run_ranks(2, run_unknown_keyword)


@pytest.mark.parametrize("schedule_name", ["1f1b", "zbv"])
def test_keyword_inputs_reach_every_stage_of_a_hugging_face_model(schedule_name: str) -> None:
    run_ranks(2, run_masked, schedule_name)


def run_over_torch() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts, expected = build_parts(size), build_parts(size)
    schedule = make_schedule("zb_h1", size, 4)
    pipe = Pipeline([parts[rank]], schedule, dist.group.WORLD, loss=loss_fn, transport="torch")
    x, target = build_batch(8)
    assert torch.equal(pipe.step(x, target=target), sequential_step(expected, x, target, 4))
    for p, e in zip(parts[rank].parameters(), expected[rank].parameters(), strict=True):
        assert torch.equal(p.grad, e.grad)
    merged = pipe.gather_timeline()
    assert merged.num_ranks == size
    assert len(merged.events) == sum(len(own) for own in pipe.schedule.actions)
    pipe.close()


def test_stages_exchange_over_torch_distributed_where_they_share_no_memory() -> None:
    run_ranks(2, run_over_torch)


def run_tied_updates() -> None:
    mesh = fp.init_mesh(pp=2, device="cpu")
    model = build_model("llama", torch.float32, num_hidden_layers=2, tie_word_embeddings=True)
    sgd = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"embed_tokens.weight .* is shared by stages that update"):
        fp.parallelize_pipeline(model, mesh, "pipedream", num_microbatches=2, loss=F.mse_loss, optimizer=sgd)
    dist.barrier()


def test_tied_weights_that_would_drift_apart_are_refused() -> None:
    run_ranks(2, run_tied_updates)


def torch_schedule() -> str:
    """An interleaved zero-bubble schedule as torch writes it to a file."""
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    class Stage:
        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages, self.group_size, self.group_rank = index, 4, 2, 0
            self.has_backward, self.device, self.is_first, self.is_last = True, torch.device("cpu"), False, False
            self.submod = nn.Identity()

    made = ScheduleInterleavedZeroBubble([Stage(0), Stage(2)], n_microbatches=4, loss_fn=loss_fn)  # type: ignore[list-item]
    rows = made.pipeline_order
    return "\n".join(",".join("" if a is None else str(a) for a in rows[rank]) for rank in sorted(rows)) + "\n"


def run_csv(text: str) -> None:
    rank = dist.get_rank()
    schedule = Schedule.from_csv(text, name="torch's")
    parts, expected = build_parts(4), build_parts(4)
    own = [schedule.part_of(stage) for stage in schedule.stages_of(rank)]
    pipe = Pipeline([parts[part] for part in own], schedule, dist.group.WORLD, loss=loss_fn)
    x, target = build_batch(8)
    assert torch.equal(pipe.step(x, target=target), sequential_step(expected, x, target, 4))
    for part in own:
        for p, e in zip(parts[part].parameters(), expected[part].parameters(), strict=True):
            assert torch.equal(p.grad, e.grad)
    pipe.close()


def test_a_schedule_from_torchs_file_runs() -> None:
    run_ranks(2, run_csv, torch_schedule())
