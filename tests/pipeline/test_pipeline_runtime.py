"""The runtime: every schedule gives the gradients of a sequential run, bit for bit, and failures are clear."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastpar.comm.errors import CommTimeoutError, PeerFailedError
from fastpar.pipeline import Microbatches, Pipeline, PipelineError, Schedule, make_schedule
from tests.comm.fault_ranks import FaultRanks
from tests.dist import run_ranks
from tests.pipeline.pipeline_models import (
    WIDTH,
    Block,
    build_batch,
    build_parts,
    loss_fn,
    run_parts,
    sequential_step,
    stale_sgd,
)

SYNCHRONOUS = [
    ("naive", {}),
    ("gpipe", {}),
    ("1f1b", {}),
    ("eager_1f1b", {}),
    ("interleaved_1f1b", {"stages_per_rank": 2}),
    ("looped_bfs", {"stages_per_rank": 2}),
    ("zb_h1", {}),
    ("zb_h2", {}),
    ("zbv", {}),
    ("v_half", {}),
    ("v_min", {}),
    ("dualpipev", {}),
]
ROWS = 12


def my_stages(schedule: Schedule, rank: int, parts: list[nn.Module]) -> list[nn.Module]:
    return [parts[schedule.part_of(stage)] for stage in schedule.stages_of(rank)]


def assert_same_grads(actual: nn.Module, expected: nn.Module) -> None:
    for (name, a), (_, e) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        assert (a.grad is None) == (e.grad is None), name
        assert a.grad is None or torch.equal(a.grad, e.grad), f"{name}: {(a.grad - e.grad).abs().max()}"


def run_schedule(name: str, options: dict[str, Any], num_microbatches: int) -> None:
    """On every rank: three steps (the second and third add to the gradients of the first), loss and gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    schedule = make_schedule(name, size, num_microbatches, **options)
    parts, expected = build_parts(schedule.num_parts), build_parts(schedule.num_parts)
    pipe = Pipeline(my_stages(schedule, rank, parts), schedule, dist.group.WORLD, loss=loss_fn)
    for step in range(3):
        x, target = build_batch(ROWS, seed=step)
        loss = pipe.step(x, target=target)
        assert torch.equal(loss, sequential_step(expected, x, target, num_microbatches))
        for stage in schedule.stages_of(rank):
            part = schedule.part_of(stage)
            assert_same_grads(parts[part], expected[part])
    assert len(pipe.timeline.events) == len(pipe.schedule.actions[rank])
    assert all(not run.in_flight for run in pipe._runs.values())
    pipe.close()


@pytest.mark.parametrize(("name", "options"), SYNCHRONOUS, ids=[name for name, _ in SYNCHRONOUS])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_equal_the_sequential_run(name: str, options: dict[str, Any], world_size: int) -> None:
    run_ranks(world_size, run_schedule, name, options, 12 if name == "dualpipev" else 4)


def run_dualpipe(num_microbatches: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    schedule = make_schedule("dualpipe", size, num_microbatches)
    parts = build_parts(size)
    pipe = Pipeline(my_stages(schedule, rank, parts), schedule, dist.group.WORLD, loss=loss_fn)
    x, target = build_batch(num_microbatches)
    loss = pipe.step(x, target=target)
    halves = [build_parts(size), build_parts(size)]
    losses = []
    for half, chain in zip(halves, schedule.chains, strict=True):
        for index in chain.microbatches:
            own = loss_fn(run_parts(half, x[index : index + 1]), target[index : index + 1]) / num_microbatches
            own.backward()
            losses.append(own.detach())
    total = losses[0]
    for own in losses[1:]:
        total = total + own
    assert torch.equal(loss, total)
    for part in {schedule.part_of(stage) for stage in schedule.stages_of(rank)}:
        for p, a, b in zip(*(m[part].parameters() for m in (parts, *halves)), strict=True):
            assert torch.equal(p.grad, a.grad + b.grad)
    pipe.step(x, target=target)  # adds the same once more: doubling is exact
    for part in {schedule.part_of(stage) for stage in schedule.stages_of(rank)}:
        for p, a, b in zip(*(m[part].parameters() for m in (parts, *halves)), strict=True):
            assert torch.equal(p.grad, 2 * (a.grad + b.grad))
    pipe.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_dualpipe_sums_its_two_directions(world_size: int) -> None:
    """Each part exists twice: the gradients of its halves of the batch are summed, equal on both of its ranks."""
    run_ranks(world_size, run_dualpipe, 4 * world_size)


def run_asynchronous(name: str, options: dict[str, Any], num_microbatches: int, per_update: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    schedule = make_schedule(name, size, num_microbatches, **options)
    parts, expected = build_parts(size), build_parts(size)
    make = partial(torch.optim.SGD, lr=0.1, foreach=False)
    pipe = Pipeline([parts[rank]], schedule, dist.group.WORLD, loss=loss_fn, optimizer=make)

    def version(part: int, t: int) -> int:
        if name == "pipedream_2bw":
            return max(0, t // per_update - 1)
        return max(0, t - (size - 1 - (0 if options.get("vertical_sync") else part)))

    for step in range(2):
        x, target = build_batch(num_microbatches, seed=step)
        loss = pipe.step(x, target=target)
        reference = stale_sgd(expected, x, target, num_microbatches, version, per_update, lr=0.1)
        torch.testing.assert_close(loss, reference, rtol=1e-6, atol=0)  # the sum of the losses is taken differently
        for p, e in zip(parts[rank].parameters(), expected[rank].parameters(), strict=True):
            assert torch.equal(p, e)
            assert p.grad is None
    versions = pipe._runs[schedule.stages_of(rank)[0]].versions
    assert versions is not None
    assert not versions._stashed
    pipe.close()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("name", "options", "per_update"),
    [
        ("pipedream", {}, 1),
        ("pipedream", {"vertical_sync": True}, 1),
        ("pipedream_2bw", {"microbatches_per_update": 4}, 4),
    ],
    ids=["pipedream", "vertical_sync", "2bw"],
)
def test_asynchronous_schedules_follow_their_update_rule(name, options, per_update, world_size) -> None:
    run_ranks(world_size, run_asynchronous, name, options, 12, per_update)


# Any model


class Messenger(nn.Module):
    """Takes and returns things of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, ids: Tensor | None = None, *, note: Any = None, scale: float = 1.0) -> dict[str, Any]:
        ids = torch.arange(x.shape[1]) if ids is None else ids + 1
        assert note is None or note == ("kind", 3)
        return {"x": self.block(x) * scale + ids[:, None], "ids": ids, "note": ("kind", 3)}


class Collector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor, ids: Tensor, note: Any, mask: Tensor | None = None) -> Tensor:
        assert note == ("kind", 3)
        assert not ids.requires_grad
        return self.head(x if mask is None else x * mask)


def chain_messengers(parts: list[nn.Module], x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    value = {"x": x}
    for part in parts[:-1]:
        value = part(**value, scale=scale)
    return parts[-1](**value, mask=mask)


def run_structured() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    parts: list[nn.Module] = [Messenger() for _ in range(size - 1)] + [Collector()]
    torch.manual_seed(0)
    expected: list[nn.Module] = [Messenger() for _ in range(size - 1)] + [Collector()]
    for model in (parts, expected):
        for p in model[0].block.norm.parameters():
            p.requires_grad_(False)
    schedule = make_schedule("zb_h1", size, 3)
    pipe = Pipeline([parts[rank]], schedule, dist.group.WORLD, loss=loss_fn, reduction="microbatch_mean")
    shapes = [(2, 5), (1, 3), (4, 1)]  # of each microbatch
    x = [torch.randn(*shape, WIDTH) for shape in shapes]
    target = [torch.randint(11, shape) for shape in shapes]
    mask = [torch.rand(shape)[..., None] for shape in shapes]
    for _ in range(2):
        loss = pipe.step(Microbatches(x), target=Microbatches(target), scale=0.5, mask=Microbatches(mask))
        total = torch.zeros(())
        for xi, yi, mi in zip(x, target, mask, strict=True):
            own = loss_fn(chain_messengers(expected, xi, 0.5, mi), yi) / 3
            own.backward()
            total = total + own.detach()
        assert torch.equal(loss, total)
        assert_same_grads(parts[rank], expected[rank])
    pipe.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_structured_values_and_shapes_that_vary(world_size: int) -> None:
    """Dicts with tensors, integers and plain values between stages; keyword inputs; frozen parameters."""
    run_ranks(world_size, run_structured)


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.detach()


class TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.block(a) + b


def run_odd_stages(name: str) -> None:
    """Part 0 is frozen altogether, part 1 has no parameters, part 2 learns."""
    rank = dist.get_rank()

    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Block().requires_grad_(False), NoParameters(), TakesTwo()]

    parts, expected = build(), build()
    schedule = make_schedule(name, 3, 6)
    pipe = Pipeline([parts[rank]], schedule, dist.group.WORLD, loss=lambda output, target: (output * target).sum())
    x, target = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    loss = pipe.step(x, target=target)
    total = torch.zeros(())
    for i in range(6):
        a, b = expected[1](expected[0](x[i : i + 1]))
        own = (expected[2](a, b) * target[i : i + 1]).sum() / 6
        own.backward()
        total = total + own.detach()
    assert torch.equal(loss, total)
    assert_same_grads(parts[rank], expected[rank])
    pipe.close()


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_frozen_and_empty_stages(name: str) -> None:
    run_ranks(3, run_odd_stages, name)


def run_evaluation() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = build_parts(2 * size)
    schedule = make_schedule("zbv", size, 4)
    pipe = Pipeline(my_stages(schedule, rank, parts), schedule, dist.group.WORLD, loss=loss_fn)
    x, target = build_batch(8)
    outputs = pipe.forward(x)
    loss = pipe.evaluate(x, target=target)
    with torch.no_grad():
        pieces = [run_parts(parts, piece) for piece in x.tensor_split(4)]
        losses = [loss_fn(p, t) / 4 for p, t in zip(pieces, target.tensor_split(4), strict=True)]
    assert torch.equal(loss, losses[0] + losses[1] + losses[2] + losses[3])
    if rank == schedule.stage_ranks[-1]:
        assert outputs is not None
        assert all(torch.equal(a, b) for a, b in zip(outputs, pieces, strict=True))
    else:
        assert outputs is None
    assert all(p.grad is None for p in pipe.parameters())
    pipe.step(x, target=target)  # and training still works
    assert any(p.grad is not None for p in pipe.parameters())
    pipe.close()


def test_forward_only_runs() -> None:
    run_ranks(2, run_evaluation)


# Failures


class Fails(nn.Module):
    def __init__(self, block: nn.Module, at: int) -> None:
        super().__init__()
        self.block, self.at, self.calls = block, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise FloatingPointError("the sky has fallen")
        return self.block(x)


def run_failing_stage() -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = build_parts(size)
    parts[1] = Fails(parts[1], at=3)
    pipe = Pipeline([parts[rank]], make_schedule("1f1b", size, 6), dist.group.WORLD, loss=loss_fn, timeout=30)
    x, target = build_batch(6)
    try:
        pipe.step(x, target=target)
    except (PipelineError, PeerFailedError) as error:
        with pytest.raises(RuntimeError, match="has failed and cannot be used"):
            pipe.step(x, target=target)
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.timeout(60)
def test_a_failing_stage_is_named_on_every_rank() -> None:
    messages = run_ranks(3, run_failing_stage)
    where = "rank 1 of the pipeline, stage 1 (part 1 of the model), microbatch 2, action 1F2"
    assert messages[1].startswith("PipelineError")
    for message in messages:
        assert where in message, message
        assert "FloatingPointError: the sky has fallen" in message
    assert all(message.startswith("PeerFailedError") for message in (messages[0], messages[2]))


def run_missing_rank() -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = build_parts(size)
    pipe = Pipeline([parts[rank]], make_schedule("1f1b", size, 2), dist.group.WORLD, loss=loss_fn, timeout=1.0)
    message = ""
    if rank == 1:
        try:
            pipe.step(target=build_batch(2)[1])
        except CommTimeoutError as error:
            message = str(error)
    dist.barrier()
    return message


@pytest.mark.timeout(60)
def test_a_rank_that_does_not_come_is_named() -> None:
    message = run_ranks(2, run_missing_rank)[1]
    assert "rank 1 of the pipeline, beginning a run" in message
    assert "rank 0" in message


@pytest.mark.timeout(90)
def test_a_killed_rank_is_named_on_the_others_within_two_seconds() -> None:
    """The first to notice raises PeerLostError and tells the others, which may learn it from the process, too."""
    with FaultRanks() as ranks:
        for victim, after in ((1, 0.05), (0, 0.11), (2, 0.03)):
            outcomes = ranks.run(3, "pipeline", fault="kill", victim=victim, after=after)
            assert len(outcomes) == 2
            for outcome in outcomes:
                assert outcome.error in ("PeerLostError", "PeerFailedError"), outcome
                assert f"rank {victim}" in outcome.text, outcome
                assert "of the pipeline" in outcome.text, outcome
                assert outcome.seconds < 2.0, outcome


def one_rank(**options: Any) -> Pipeline:
    schedule = make_schedule("interleaved_1f1b", 1, 2, stages_per_rank=2)
    return Pipeline(build_parts(2), schedule, **{"loss": loss_fn, **options})


def test_one_process_can_hold_all_stages() -> None:
    pipe, expected = one_rank(), build_parts(2)
    x, target = build_batch(4)
    assert torch.equal(pipe.step(x, target=target), sequential_step(expected, x, target, 2))
    for (stage, own), other in zip(pipe.stages.items(), expected, strict=True):
        assert stage in (0, 1)
        assert_same_grads(own.module, other)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reduction": "average"}, "reduction must be"),
        ({"optimizer": torch.optim.SGD}, "does not update the weights on its way"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        one_rank(**options)


def test_wrong_stages_and_batches_are_refused() -> None:
    schedule = make_schedule("gpipe", 1, 2)
    with pytest.raises(ValueError, match=r"rank 0 runs stages \(0,\)"):
        Pipeline(build_parts(2), schedule, loss=loss_fn)
    with pytest.raises(ValueError, match="for 2 ranks, but the group has 1"):
        Pipeline(build_parts(1), make_schedule("gpipe", 2, 2), loss=loss_fn)
    with pytest.raises(ValueError, match="must be given"):
        Pipeline(build_parts(1), make_schedule("pipedream", 1, 2), loss=loss_fn)
    pipe = one_rank()
    with pytest.raises(ValueError, match="batch of 1"):
        pipe.step(torch.zeros(1, 3, WIDTH), target=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="1 microbatches were given"):
        pipe.step(Microbatches([torch.zeros(1, 3, WIDTH)]))
    x, target = build_batch(4)
    with pytest.raises(PipelineError, match="the loss must return a tensor with one element"):
        one_rank(loss=lambda output, target: output).step(x, target=target)
