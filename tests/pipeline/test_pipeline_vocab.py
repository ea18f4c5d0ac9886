"""A head that is sharded by vocabulary over pipeline ranks: arithmetic, schedules, and runs against the whole model."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fastpar as fp
from fastpar.pipeline import (
    Action,
    Costs,
    CrossEntropy,
    Pipeline,
    PipelineError,
    Schedule,
    ScheduleError,
    ShardedHead,
    add_communication,
    add_unshard,
    make_schedule,
    measured_costs,
    merge_backward,
    partition,
    schedule_names,
    shard_head,
    simulate,
    split_backward,
    validate,
)
from fastpar.pipeline.runtime.sharded_head import combine
from tests.dist import run_ranks
from tests.models import VOCAB, build_model
from tests.pipeline.pipeline_models import WIDTH, Block, run_parts

GRID = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 5), (4, 4), (4, 9), (6, 7)]
IGNORED = -100


# Arithmetic


def passes(head: nn.Linear, hidden: Tensor, target: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, list[ShardedHead]]:
    """S on all ranks, the combination, T on all ranks, in one process."""
    heads = [ShardedHead(head, rank, num_ranks) for rank in range(num_ranks)]
    found = [own(hidden, target) for own in heads]
    together = combine(heads[0], target, [results for results, _ in found], 1)
    for own, (_, kept) in zip(heads, found, strict=True):
        own.backward_weight(kept, together.normalisers, 1)
    return together.loss, together.hidden_grad, heads


def whole_grad(heads: list[ShardedHead], name: str) -> Tensor:
    return torch.cat([getattr(head, name).grad for head in heads])


def test_the_worked_example_has_its_numbers() -> None:
    head = nn.Linear(1, 4, bias=False, dtype=torch.float64)
    head.weight.data = torch.tensor([[0.0], [math.log(2)], [0.0], [math.log(4)]], dtype=torch.float64)
    loss, grad, heads = passes(head, torch.ones(1, 1, dtype=torch.float64), torch.tensor([1]), 2)
    results, _ = heads[1](torch.ones(1, 1, dtype=torch.float64), torch.tensor([1]))
    assert [t.item() for t in results[:4]] == pytest.approx([math.log(4), 1.25, 0, math.log(4)])
    assert len(results.rows) == 0
    assert loss.item() == pytest.approx(math.log(4))
    assert grad.item() == pytest.approx(math.log(2) / 4)
    assert whole_grad(heads, "weight").flatten().tolist() == pytest.approx([1 / 8, -6 / 8, 1 / 8, 4 / 8])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("vocab", "num_ranks"), [(11, 1), (11, 2), (11, 4), (12, 4), (5, 4), (2, 4)])
def test_loss_and_gradients_equal_cross_entropy(vocab: int, num_ranks: int, bias: bool) -> None:
    """By torch.chunk's rule rank 3 of 4 has fewer rows than the others, or none at all. Sums of 11 float64s."""
    torch.manual_seed(vocab)
    head = nn.Linear(6, vocab, bias=bias, dtype=torch.float64)
    hidden = (torch.randn(9, 6, dtype=torch.float64) * 3).requires_grad_()
    target = torch.randint(vocab, (9,))
    target[4:6] = IGNORED
    expected = F.cross_entropy(head(hidden), target)
    expected.backward()
    loss, grad, heads = passes(head, hidden.detach(), target, num_ranks)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, hidden.grad, rtol=0, atol=1e-13)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(whole_grad(heads, name), parameter.grad, rtol=0, atol=1e-13)


def test_tokens_that_are_all_ignored_give_nan_and_no_gradients_as_in_torch() -> None:
    head = nn.Linear(6, 5)
    loss, grad, heads = passes(head, torch.randn(3, 6), torch.full((3,), IGNORED), 2)
    assert loss.isnan()
    assert not grad.any()
    assert not whole_grad(heads, "weight").any()


def test_bfloat16_keeps_the_gradient_of_a_token_that_is_predicted_well() -> None:
    """p = 1 - 1e-4: sum_r A_r - B with the target in the sums would be a difference of numbers near 1, each rounded to
    2^-9. Tolerance: products of bfloat16 factors."""
    torch.manual_seed(0)
    head = nn.Linear(32, 40, bias=False).bfloat16()
    hidden = torch.randn(1, 32).bfloat16()
    target = torch.tensor([7])
    with torch.no_grad():
        head.weight[7] += hidden[0] * (
            (head(hidden).float().logsumexp(-1) + 9.2 - head(hidden)[0, 7]) / hidden.float().square().sum()
        )
    exact_head, exact_hidden = head.weight.double().detach(), hidden.double().requires_grad_()
    loss = F.cross_entropy(exact_hidden @ exact_head.T, target)
    loss.backward()
    assert loss < 1e-3
    _, grad, _ = passes(head, hidden, target, 2)
    error = (grad.double() - exact_hidden.grad).norm() / exact_hidden.grad.norm()
    assert error < 0.02


def test_targets_outside_of_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="target 5 is neither below the vocabulary size 5 nor the ignore_index -100"):
        ShardedHead(nn.Linear(6, 5), 0, 2)(torch.randn(2, 6), torch.tensor([1, 5]))


# Schedules


def sharded_schedules(num_ranks: int, num_microbatches: int) -> list[Schedule]:
    made = []
    for name in schedule_names():
        try:
            schedule = make_schedule(name, num_ranks, num_microbatches)
        except ValueError:
            continue  # does not exist at this size
        if len(schedule.chains) == 1 and not name.startswith("pipedream"):
            made.append(shard_head(schedule))
    return made


@pytest.mark.expensive
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), GRID)
def test_every_schedule_can_have_a_sharded_head(num_ranks: int, num_microbatches: int) -> None:
    """Without warnings: S and T ascend, and so do the backwards. Transfers, gathers and text keep it so."""
    made = sharded_schedules(num_ranks, num_microbatches)
    assert len(made) >= 9
    for schedule in made:
        assert validate(schedule) == [], schedule.name
        for lowered in (add_communication(schedule), add_communication(add_unshard(schedule))):
            assert validate(lowered) == [], schedule.name
        assert simulate(schedule).makespan == simulate(add_communication(schedule)).makespan
        for rank, own in enumerate(schedule.actions):
            words = [str(a) for a in own if a.type.is_head]
            assert len(words) == 2 * num_microbatches
            kept = [sum((w.count("S") - w.count("T")) for w in words[: i + 1]) for i in range(len(words))]
            assert set(kept) <= {0, 1, 2}, (schedule.name, rank)
        again = Schedule.from_csv(schedule.to_csv(), name=schedule.name)
        assert (again.actions, again.sharded_head) == (schedule.actions, True)


def test_what_was_in_the_schedule_stays_in_its_order_but_for_one_forward_more() -> None:
    plain = make_schedule("1f1b", 3, 5)
    kept, pulled = shard_head(plain, extra_forwards=0), shard_head(plain)
    assert [[a for a in own if not a.type.is_head] for own in kept.actions] == [list(own) for own in plain.actions]
    words = [" ".join(str(a) for a in own if not a.type.is_head) for own in pulled.actions]
    assert words[2] == "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4"
    peaks = [simulate(schedule).peak_until_weight for schedule in (plain, kept, pulled)]
    assert peaks == [(3, 2, 1), (3, 2, 1), (4, 3, 2)]


def test_the_docstrings_example_is_what_comes_out() -> None:
    schedule = shard_head(make_schedule("1f1b", 2, 3))
    for own in schedule.to_text().splitlines():
        assert own.split(": ")[1] in " ".join(shard_head.__doc__.split())
    assert split_backward(merge_backward(split_backward(schedule))) == split_backward(schedule)


def heavy_costs(num_ranks: int, layers: int, weight: int) -> tuple[Costs, Costs]:
    """`layers` layers of F = I = W = 1 per rank; a head like `weight` layers on the last one, or on all."""
    last = (*[layers] * (num_ranks - 1), layers + weight)
    share = Fraction(weight, num_ranks)
    return Costs(last, last, last), Costs(layers, layers, layers, head_forward=2 * share, head_weight=share)


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "weight", "name", "on_last", "sharded"),
    [
        (4, 8, 2, "1f1b", 180, 143),
        (4, 8, 4, "1f1b", 228, 154),
        (4, 8, 2, "zb_h1", 156, 120),
        (4, 8, 4, "zb_h1", 204, 132),
        (8, 32, 2, "1f1b", 660, Fraction(983, 2)),
        (8, 32, 4, "1f1b", 852, 515),
        (8, 32, 2, "zb_h1", 604, 436),
        (8, 32, 4, "zb_h1", 796, 460),
    ],
)
def test_a_heavy_head_costs_less_on_all_ranks(
    num_ranks: int, num_microbatches: int, weight: int, name: str, on_last: int, sharded: int | Fraction
) -> None:
    """Four layers per rank, and a head like 2 or 4 of them. The sharded one is within the idle time that the schedule
    would have if every rank simply computed its share: (p - 1) stages of it for 1F1B."""
    plain = make_schedule(name, num_ranks, num_microbatches)
    before, after = heavy_costs(num_ranks, 4, weight)
    schedule = shard_head(plain, after)
    assert simulate(plain, before).makespan == on_last
    assert simulate(schedule, after).makespan == sharded
    assert sharded <= num_microbatches * (12 + Fraction(3 * weight, num_ranks)) + (num_ranks - 1) * 12


def test_costs_messages_and_memory_of_the_head_are_counted() -> None:
    schedule = shard_head(make_schedule("1f1b", 3, 4))
    found = simulate(schedule, Costs(head_forward=5, head_weight=7, head_activation=10, message_bytes=(1, 1, 100)))
    assert found.busy == (4 * (3 + 12),) * 3
    # From the last rank: hidden states, normalisers (without bytes), and its own gradients to rank 1 alone.
    assert (found.messages_per_link[2, 0], found.messages_per_link[2, 1]) == (8, 12)
    assert (found.bytes_per_link[2, 0], found.bytes_per_link[0, 2]) == (400, 400)
    assert max(found.peak_until_weight) > 10
    again = measured_costs(schedule, found.timeline)
    assert (again.head_forward, again.head_weight) == (5, 7)
    with pytest.raises(TypeError, match="head_forward is one number"):
        Costs(head_forward=(1, 2))


def test_a_hop_delays_the_head_by_what_crosses_ranks() -> None:
    """F of the last stage, a hop, S, a hop, B of the last stage (a hop, T elsewhere): 1 + 3 + 1 + 3 + 2 + 3 + 1."""
    schedule = Schedule.from_csv("0F0,2S0,0B0,2T0\n1F0,2S0,1B0,2T0\n")
    assert (
        simulate(replace(schedule, stage_ranks=(0, 1)), Costs(hop=3)).makespan == 1 + 3 + 1 + 3 + 1 + 3 + 2 + 3 + 2 + 1
    )


# Faults


def without(schedule: Schedule, rank: int, word: str) -> Schedule:
    action = Action.parse(word)
    assert action in schedule.actions[rank]
    own = tuple(a for a in schedule.actions[rank] if a != action)
    return replace(schedule, actions=tuple(own if r == rank else o for r, o in enumerate(schedule.actions)))


def kinds(schedule: Schedule, **options: Any) -> set[str]:
    return {problem.kind for problem in validate(schedule, **options)}


def of_ranks(*ranks: str) -> Schedule:
    return Schedule.from_csv("\n".join(own.replace(" ", ",") for own in ranks) + "\n")


RIGHT = ("0F0 0F1 2S0 2S1 0B0 2T0 0B1 2T1", "1F0 2S0 1F1 2S1 1B0 2T0 1B1 2T1")


def test_a_right_schedule_is_accepted() -> None:
    assert validate(of_ranks(*RIGHT)) == []
    assert validate(of_ranks("0F0 2S0", "1F0 2S0"), forward_only=True) == []


@pytest.mark.parametrize("word", ["2S0", "2T1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_pass_is_found(rank: int, word: str) -> None:
    (problem,) = validate(without(of_ranks(*RIGHT), rank, word))
    assert (problem.kind, problem.rank, str(problem.action)) == ("missing", rank, word)


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        ((RIGHT[0], "1F0 2S0 1F1 2S1 2T0 1B0 1B1 2T1"), "order", "which the backward of stage 1 combines"),
        (("0F0 0F1 2T0 2S0 2S1 0B0 0B1 2T1", RIGHT[1]), "order deadlock", "what its S keeps"),
        ((RIGHT[0], "2S0 1F0 1F1 2S1 1B0 2T0 1B1 2T1"), "order", "the hidden states of stage 1"),
        ((RIGHT[0], "1F0 1F1 2S1 1B0 2S0 2T0 1B1 2T1"), "order", "the head's results of rank 1"),
        (("0F0 0F1 2S1 2S0 0B0 2T0 0B1 2T1", "1F0 2S0 1B0 2T0 1F1 2S1 1B1 2T1"), "deadlock", "2S1"),
        (("0F0 2S0 2T0 0B0 0F1 2S1 0B1 2T1", "1F0 2S0 1F1 2S1 1B0 2T0 1B1 2T1"), "deadlock", "2T0"),
        (("0F0 0F1 2S0 2S1 0B0 2T1 0B1 2T0", RIGHT[1]), "accumulation", "adds its gradient after 2T1"),
        (("0F0 0F1 2S0 2S0 2S1 0B0 2T0 0B1 2T1", RIGHT[1]), "duplicate", "already done by 2S0"),
    ],
)  # fmt: skip
def test_passes_in_the_wrong_place_are_found(ranks: tuple[str, ...], kind: str, words: str) -> None:
    problems = validate(of_ranks(*ranks))
    assert [p.kind for p in problems] == kind.split()
    assert words in problems[0].message


def test_passes_without_a_sharded_head_are_found() -> None:
    plain = replace(of_ranks(*RIGHT), sharded_head=False)
    assert kinds(plain) == {"stage"}
    with pytest.raises(ScheduleError, match="S and T have the stage number 2"):
        of_ranks("0F0 3S0 0B0 3T0", "1F0 3S0 1B0 3T0")
    with pytest.raises(ScheduleError, match="needs a schedule with one chain"):
        replace(make_schedule("dualpipe", 2, 4), sharded_head=True)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv"])
def test_swapped_actions_are_refused_exactly_if_the_run_stands_still(name: str) -> None:
    """The simulator executes the mutant and is the judge: it shares no code with the validator."""
    rng = random.Random(0)
    schedule = add_communication(shard_head(make_schedule(name, 3, 4)))
    refused = accepted = 0
    for rank, own in enumerate(schedule.actions):
        for a in range(len(own)):
            b = rng.randrange(len(own))
            swapped = list(own)
            swapped[a], swapped[b] = own[b], own[a]
            mutant = replace(
                schedule, actions=tuple(tuple(swapped) if r == rank else o for r, o in enumerate(schedule.actions))
            )
            try:
                simulate(mutant)
                runs = True
            except ScheduleError:
                runs = False
            problems = [p for p in validate(mutant) if not p.is_warning]
            assert bool(problems) != runs, (own[a], own[b], problems)
            refused, accepted = refused + (not runs), accepted + runs
    assert refused > 20
    assert accepted > 10


def test_what_cannot_have_a_sharded_head_says_why() -> None:
    with pytest.raises(ScheduleError, match="comes before add_communication"):
        shard_head(add_communication(make_schedule("1f1b", 2, 2)))
    with pytest.raises(ScheduleError, match="updates weights on its way"):
        shard_head(make_schedule("pipedream", 2, 4))
    with pytest.raises(ScheduleError, match="has 2"):
        shard_head(make_schedule("dualpipe", 2, 4))
    with pytest.raises(ScheduleError, match="has a sharded head already"):
        shard_head(shard_head(make_schedule("1f1b", 2, 2)))
    with pytest.raises(ValueError, match="max_kept at least 1"):
        shard_head(make_schedule("1f1b", 2, 2), max_kept=0)


def test_pictures_name_the_head(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    from fastpar.pipeline.simulation.plot import boxes, plot

    timeline = simulate(shard_head(make_schedule("1f1b", 2, 3))).timeline
    assert len({box.colour for box in boxes(timeline)}) == 4
    plot(timeline, tmp_path / "head.svg")
    assert "gradients of the head" in (tmp_path / "head.svg").read_text()
    assert timeline.to_text().splitlines()[1] == "rank 1  ·· F0 S0 F1 S1 B0━━━ F2 B1━━━ T0 S2 B2━━━ T1 T2 ··"


# Runs


def build(num_parts: int, vocab: int, dtype: torch.dtype, bias: bool) -> list[nn.Module]:
    """The parts of a model, the same on every rank; last its head."""
    torch.manual_seed(0)
    parts: list[nn.Module] = [Block() for _ in range(num_parts)]
    return [part.to(dtype) for part in (*parts, nn.Linear(WIDTH, vocab, bias=bias))]


def batch(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, WIDTH, generator=generator).to(dtype)
    target = torch.randint(vocab, (rows, 3), generator=generator)
    return x, target.masked_fill(torch.rand(rows, 3, generator=generator) < 0.3, IGNORED)


def sequential(model: list[nn.Module], x: Tensor, target: Tensor, count: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for inputs, labels in zip(x.tensor_split(count), target.tensor_split(count), strict=True):
        logits = run_parts(model, inputs)
        share = int((labels != IGNORED).sum()) / int((target != IGNORED).sum())
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED) * share
        loss.backward()
        total = total + loss.detach().double()
    return total


def run_schedule(name: str, vocab: int, dtype: torch.dtype, bias: bool, tolerance: float) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    schedule = shard_head(make_schedule(name, size, 4))
    *parts, whole = build(schedule.num_parts, vocab, dtype, bias)
    *expected, expected_head = build(schedule.num_parts, vocab, dtype, bias)
    head = ShardedHead(whole, rank, size, name="out")
    stages = [parts[schedule.part_of(stage)] for stage in schedule.stages_of(rank)]
    pipe = Pipeline(stages, schedule, dist.group.WORLD, head=head)
    for step in range(2):  # the second adds to the gradients of the first
        x, target = batch(12, vocab, dtype, seed=step)
        loss = pipe.step(x, target=target if rank == schedule.stage_ranks[schedule.last_stage] else None)
        reference = sequential([*expected, expected_head], x, target, 4)
        torch.testing.assert_close(loss.double(), reference, rtol=tolerance, atol=0)
        for stage in schedule.stages_of(rank):
            pairs = zip(parts[stage].parameters(), expected[stage].parameters(), strict=True)
            for own, other in pairs:
                torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=tolerance)
        for own, other in zip(head.parameters(), expected_head.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad[head.start : head.stop], rtol=0, atol=tolerance)
    assert [name for name, _ in pipe.named_parameters()][-1] == ("out.bias" if bias else "out.weight")
    assert pipe._head is not None
    assert not pipe._head.in_flight
    assert len(pipe.timeline.events) == len(pipe.schedule.actions[rank])
    with torch.no_grad():
        logits = [run_parts([*expected, expected_head], piece) for piece in x.tensor_split(4)]
    total = pipe.evaluate(x, target=target)
    torch.testing.assert_close(total, loss, rtol=tolerance, atol=0)
    outputs = pipe.forward(x)
    assert (outputs is None) == (rank != schedule.stage_ranks[schedule.last_stage])
    for own, other in zip(outputs or (), logits, strict=outputs is not None):
        torch.testing.assert_close(own, other, rtol=0, atol=max(tolerance, 1e-12))
    pipe.close()
    return loss.item()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_equal_the_unsharded_model(world_size: int, name: str) -> None:
    """float64, V = 11 with a third of the targets ignored; every rank has the same loss, to the bit."""
    losses = run_ranks(world_size, run_schedule, name, 11, torch.float64, True, 1e-10)
    assert len(set(losses)) == 1


@pytest.mark.parametrize(
    ("dtype", "vocab", "tolerance"), [(torch.float32, 13, 1e-5), (torch.bfloat16, 13, 3e-2), (torch.float64, 2, 1e-10)]
)
def test_other_dtypes_and_an_empty_shard(dtype: torch.dtype, vocab: int, tolerance: float) -> None:
    """Rounding of float32, and of bfloat16, whose gradients are below 1; with V = 2, ranks 2 and 3 have no rows."""
    run_ranks(4, run_schedule, "1f1b", vocab, dtype, False, tolerance)


def run_failures() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    schedule = make_schedule("1f1b", size, 2)
    head = ShardedHead(nn.Linear(WIDTH, 5), rank, size)
    with pytest.raises(ValueError, match="has a sharded head: head= must be this rank's shard"):
        Pipeline([Block()], shard_head(schedule), dist.group.WORLD)
    with pytest.raises(ValueError, match="has no sharded head"):
        Pipeline([Block()], schedule, dist.group.WORLD, head=head)
    with pytest.raises(ValueError, match="computes the loss"):
        Pipeline([Block()], shard_head(schedule), dist.group.WORLD, head=head, loss=CrossEntropy())
    wrong = ShardedHead(nn.Linear(WIDTH, 5), (rank + 1) % size, size)
    with pytest.raises(ValueError, match="got the head's shard of rank"):
        Pipeline([Block()], shard_head(schedule), dist.group.WORLD, head=wrong)
    pipe = Pipeline([Block()], shard_head(schedule), dist.group.WORLD, head=head)
    error: type[Exception] = PipelineError if rank == size - 1 else fp.comm.PeerFailedError
    with pytest.raises(error, match=r"needs target= with one number for each of the hidden states \(2, 3\)"):
        pipe.step(torch.randn(4, 3, WIDTH))
    pipe.close()


def test_wrong_heads_and_targets_are_refused() -> None:
    run_ranks(2, run_failures)


# Whole models

STEPS, BATCH, SEQ = 3, 4, 9


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    draws = [torch.randint(VOCAB, (2, BATCH, SEQ), generator=generator) for _ in range(STEPS)]
    return [(ids, target.masked_fill(target % 5 == 0, IGNORED)) for ids, target in draws]


def train_single(architecture: str) -> tuple[list[float], dict[str, Tensor]]:
    """The whole batch at once: the mean over its tokens, of which the microbatches ignore unequal numbers."""
    model = build_model(architecture, torch.float64, num_hidden_layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for input_ids, target in batches():
        output: Any = model(input_ids)
        loss = CrossEntropy()(output if isinstance(output, Tensor) else output.logits, target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def train_pipeline(architecture: str, schedule: str, layout: str | None) -> tuple[list[float], dict[str, Tensor]]:
    mesh = fp.init_mesh(pp=dist.get_world_size(), device="cpu")
    model = build_model(architecture, torch.float64, num_hidden_layers=4)
    pipe = fp.parallelize_pipeline(
        model, mesh, schedule, num_microbatches=BATCH, layout=layout, loss=CrossEntropy(), shard_head=True
    )
    assert pipe.head is not None
    assert isinstance(pipe.head.weight, DTensor)
    assert pipe.head.weight.shape == (VOCAB, 48)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for input_ids, target in batches():
        losses.append(pipe.step(input_ids, target=target).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in pipe.named_parameters()}
    pipe.close()
    return losses, weights


@pytest.mark.parametrize(
    ("architecture", "schedule", "world_size", "layout"),
    [("example", "1f1b", 2, None), ("llama", "zb_h1", 4, None), ("llama", "zbv", 2, "E,t|t|t|t")],
)
def test_models_train_as_in_one_process(architecture: str, schedule: str, world_size: int, layout: str | None) -> None:
    losses, weights = train_single(architecture)
    seen: set[str] = set()
    for own_losses, own in run_ranks(world_size, train_pipeline, architecture, schedule, layout):
        assert own_losses == pytest.approx(losses, rel=1e-10)
        for name, value in own.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-10)
        assert "lm_head.weight" in own, "every rank has a shard"
        seen |= set(own)
    assert seen == set(weights)


def test_a_partition_without_its_head_balances_the_layers() -> None:
    """The head of this model is as heavy as more than a layer; with it, the last part gets fewer layers."""
    whole = partition(build_model("example", torch.float32, num_hidden_layers=8), 4, shard_head=True)
    assert str(whole.layout) == "E,t*2|t*2|t*2|t*2,N"
    assert whole.head == "lm_head"
    stages = whole.stages(range(4))
    names = {name for stage in stages for name, _ in stage.module.named_parameters()}
    assert not any(name.startswith("lm_head") for name in names)


def refuse() -> None:
    mesh = fp.init_mesh(pp=2, device="cpu")
    options: dict[str, Any] = {"num_microbatches": 2, "shard_head": True}
    with pytest.raises(ValueError, match=r"lm_head is tied to .*embed_tokens.weight: a head"):
        fp.parallelize_pipeline(build_model("llama", torch.float32, tie_word_embeddings=True), mesh, **options)
    model = build_model("llama", torch.float32)
    with pytest.raises(ValueError, match=r"pass loss=fastpar\.pipeline\.CrossEntropy"):
        fp.parallelize_pipeline(model, mesh, loss=F.cross_entropy, **options)
    with pytest.raises(ValueError, match="this model has no head"):
        fp.parallelize_pipeline(model, mesh, layout="E,t|t,H", **options)
    with pytest.raises(ValueError, match="needs a layered model with a head"):
        fp.parallelize_pipeline(nn.Sequential(Block(), Block()), mesh, **options)
    dist.barrier()


def refuse_tensor_parallel() -> None:
    mesh = fp.init_mesh(tp=2, device="cpu")
    with pytest.raises(ValueError, match="splits the head over pp, and cannot with tp=2"):
        fp.parallelize_pipeline(build_model("llama", torch.float32), mesh, num_microbatches=2, shard_head=True)
    dist.barrier()


def test_what_cannot_be_sharded_is_refused_before_anything_runs() -> None:
    run_ranks(2, refuse)
    run_ranks(2, refuse_tensor_parallel)
