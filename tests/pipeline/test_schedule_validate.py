"""The validator: against hand-made faults, and against mutants of every schedule judged by a run in numbers.

A mutant counts as a false accept if the validator finds nothing and the run (schedule_oracle.py) fails, hangs or
gives a wrong result; as a false reject if the validator finds an error and the run is right. Both must be zero, over
all mutants, many of which are harmless (a swap of two independent actions, for example).
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from fastpar.pipeline import Action, Chain, Schedule, ScheduleError, check, make_schedule, validate
from fastpar.pipeline.schedules.lowering import add_communication
from tests.pipeline.schedule_mutants import generated, lowered, mutants, with_steps
from tests.pipeline.schedule_oracle import execute

GRID = [
    (1, 1),
    (1, 3),
    (2, 1),
    (2, 2),
    (2, 4),
    (2, 5),
    (3, 3),
    (3, 6),
    (4, 4),
    (4, 8),
    (4, 10),
    (6, 12),
    (8, 8),
    pytest.param(8, 32, marks=pytest.mark.slow),
]


def parsed(*ranks: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action.parse(word) for word in own.split()) for own in ranks)


def straight(num_microbatches: int, *ranks: str) -> Schedule:
    """One stage per rank."""
    return Schedule.of_one_chain("test", range(len(ranks)), num_microbatches, parsed(*ranks))


def kinds(schedule: Schedule, **options: object) -> list[str]:
    return sorted({problem.kind for problem in validate(schedule, **options)})  # type: ignore[arg-type]


def peak(schedule: Schedule, until: str) -> int:
    """The smallest limit that the run in numbers respects."""
    return next(n for n in range(1, 10_000) if execute(schedule, limit=n, until=until).reason != "out of memory")


# What torch.distributed.pipelining's check accepts: two ranks, two stages, two microbatches


def test_a_duplicated_forward_is_found() -> None:
    assert kinds(straight(2, "0F0 0F1 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")) == ["duplicate"]


def test_a_duplicated_backward_is_found() -> None:
    assert kinds(straight(2, "0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1")) == ["duplicate"]


def test_whole_and_split_backward_of_one_microbatch_and_none_of_the_other_is_found() -> None:
    problems = validate(straight(2, "0F0 0F1 0B0 0I0 0W0", "1F0 1B0 1F1 1B1"))
    assert [(problem.kind, str(problem.action)) for problem in problems] == [
        ("duplicate", "0I0"),
        ("duplicate", "0W0"),
        ("missing", "0B1"),
    ]


def test_a_deadlock_across_ranks_is_found_and_its_circle_shown() -> None:
    schedule = straight(2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0")
    (deadlock,) = [problem for problem in validate(schedule) if problem.kind == "deadlock"]
    assert "rank 0 at position 1 (0B0) waits for rank 1 to do position 3 (1B0)" in deadlock.message
    assert "rank 1 at position 1 (1F1) waits for rank 0 to do position 2 (0F1)" in deadlock.message


def test_a_microbatch_out_of_range_is_found() -> None:
    problems = validate(straight(2, "0F0 0F7 0B0 0B1", "1F0 1B0 1F1 1B1"))
    assert next((problem.kind, problem.position) for problem in problems) == ("microbatch", 1)


# Mutants


def count_mistakes(suite: str, schedules: Iterable[Schedule], at_most: int | None) -> Counter[str]:
    """Validator against run, over mutants of the schedules (at `at_most` positions of each)."""
    rng = random.Random(suite)
    counts: Counter[str] = Counter()
    mistakes = []
    for schedule in schedules:
        until = rng.choice(["weight", "input"])
        limit = peak(schedule, until)
        edges = edges_of(schedule)
        for label, mutant in mutants(schedule, rng, at_most):
            problems = validate(mutant, max_activations=limit, until=until, edges=edges)
            verdict = execute(mutant, limit=limit, until=until, edges=edges)
            accepted = all(problem.is_warning for problem in problems)
            counts["mutants"] += 1
            counts["harmless"] += verdict.is_right
            counts[label] += 1
            if accepted != verdict.is_right:
                kind = "false accepts" if accepted else "false rejects"
            elif accepted and bool(problems) == verdict.in_order:
                kind = "wrong warnings"
            else:
                continue
            counts[kind] += 1
            found = "; ".join(map(str, problems[:3]))
            mistakes.append(
                f"{kind}: {label} of {schedule.name}: run: {verdict.reason}; found: {found}\n{mutant.to_text()}"
            )
    for kind in ("false accepts", "false rejects", "wrong warnings"):
        counts[kind] += 0
    print(f"{suite}:", dict(counts))
    assert not mistakes, f"{len(mistakes)} mistakes, such as\n" + "\n".join(mistakes[:3])
    return counts


def edges_of(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    return ((0, schedule.num_parts - 1),) if schedule.name.endswith("skip") else ()


def small() -> list[Schedule]:
    return [s for p, m in [(1, 2), (2, 2), (2, 4), (3, 3)] for s in generated(p, m)]


# Schedules, and how many positions of each to change in the quick run
SUITES: dict[str, tuple[Callable[[], list[Schedule]], int]] = {
    "compute": (small, 1),
    "executed": (lambda: [lowered(s) for s in small()], 1),
    "stepped": (lambda: [with_steps(s) for s in small() if len(s.chains) == 1], 1),
    "sharded": (lambda: [lowered(s, sharded=True) for s in small()], 1),
    "skip connections": (lambda: [with_skip(s) for s in generated(3, 3) if s.num_parts > 2], 2),
    "larger": (lambda: [form for s in generated(4, 8) for form in (s, lowered(s))], 1),
}


def with_skip(schedule: Schedule) -> Schedule:
    served = lowered(schedule, edges=((0, schedule.num_parts - 1),))
    return replace(served, name=f"{schedule.name} skip")


@pytest.mark.expensive
@pytest.mark.parametrize("suite", [suite for suite in SUITES if suite != "larger"])
def test_no_mutant_is_misjudged(suite: str) -> None:
    make, at_most = SUITES[suite]
    counts = count_mistakes(suite, make(), at_most)
    assert counts["mutants"] > 500
    assert 0 < counts["harmless"] < counts["mutants"] / 2


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes, on a machine with other load
@pytest.mark.parametrize("suite", SUITES)
def test_no_mutant_is_misjudged_at_any_position(suite: str) -> None:
    make, _ = SUITES[suite]
    count_mistakes(suite, make(), None if suite != "larger" else 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_mutant_of_large_schedules_is_misjudged() -> None:
    schedules = [s for p, m in [(3, 6), (4, 10), (6, 12), (8, 16)] for s in generated(p, m)]
    count_mistakes("large", [form for s in schedules for form in (s, lowered(s), lowered(s, sharded=True))], 5)


# No false rejects


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), GRID)
def test_generated_schedules_are_right(num_ranks: int, num_microbatches: int) -> None:
    for schedule in generated(num_ranks, num_microbatches):
        for form in (schedule, lowered(schedule), lowered(schedule, sharded=True)):
            assert validate(form) == [], f"{schedule.name}\n{form.to_text()}"
            if num_ranks * num_microbatches <= 32:
                assert execute(form).is_right


def test_memory_limits_are_exact() -> None:
    for schedule in generated(4, 8):
        for until in ("weight", "input"):
            most = peak(schedule, until)
            assert validate(schedule, max_activations=most, until=until) == []
            assert kinds(schedule, max_activations=most - 1, until=until) == ["memory"]
            assert kinds(lowered(schedule), max_activations=most - 1, until=until) == ["memory"]


# Single faults and what is said about them

RIGHT = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"
ASYNC = "0F0@0 0B0@0 0STEP 0F1@1 0B1@1 0STEP"
FAULTS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "stage": (("0F0 0F1 0B0 0B1 2F0", RIGHT[1]), "stage", "there are stages 0 to 1"),
    "rank": (("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"), "rank", "stage 1 lives on rank 1"),
    "forward missing": (("0F0 0B0 0B1", RIGHT[1]), "missing", "never does F of microbatch 1"),
    "weight missing": (("0F0 0F1 0B0 0I1", RIGHT[1]), "missing", "never does W of microbatch 1"),
    "no backward": (("0F0 0F1", "1F0 1F1"), "missing", "forward_only=True"),
    "backward first": (("0B0 0F0 0F1 0B1", RIGHT[1]), "order", "needs the activations of its forward, but 0F0"),
    "weight first": (("0F0 0F1 0W0 0I0 0B1", RIGHT[1]), "order", "needs what the first half of the backward keeps"),
    "overlap": (("(0F0;0B0)OVERLAP_F_B 0F1 0B1", RIGHT[1]), "overlap", "which 0F0 makes at the same time"),
    "descending": (("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"), "accumulation", "rounds differently"),
    "send twice": (("0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "duplicate", "done by"),
    "send missing": (("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "missing", "its partner is 1RECV_F0"),
    "send early": (("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "order", "the activations to send"),
    "last sends": (("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1SEND_F0 1B0 1SEND_B0"), "transfer", "last of its"),
    "step early": (("0F0 0STEP 0B0", "1F0 1B0 1STEP"), "step", "no gradients since the last STEP"),
    "no step": (("0F0 0B0 0STEP", "1F0 1B0"), "step", "most stages make 1"),
    "uneven steps": (
        ("0F0 0B0 0STEP 0F1 0B1 0F2 0B2 0STEP",
         *(f"{s}F0 {s}B0 {s}F1 {s}B1 {s}STEP {s}F2 {s}B2 {s}STEP" for s in "12")),
        "step", "but other stages [0, 1]",
    ),
    "no reduce": (("0F0 0B0 0REDUCE_GRAD", "1F0 1B0"), "reduce", "never summed over replicas"),
    "reduce early": (("0F0 0REDUCE_GRAD 0B0", "1F0 1B0 1REDUCE_GRAD"), "reduce", "no gradients to sum yet"),
    "not gathered": (("0F0 0UNSHARD 0B0 0RESHARD", "1F0 1B0"), "shard", "put 0UNSHARD in front"),
    "not freed": (("0UNSHARD 0F0 0B0", "1F0 1B0"), "shard", "never freed"),
    "stale": (("0UNSHARD 0F0 0B0 0STEP 0RESHARD", "1F0 1B0 1STEP"), "shard", "would be stale"),
    "version gone": (("0F0 0F1 0B0 0STEP 0B1@0 0STEP",), "version", "keep it with 0STASH@0 before the STEP"),
    "version mixed": (("0F0 0F1 0B0 0STEP 0B1 0STEP",), "version", "uses version 1 of the weights, but 0F1"),
    "version to come": (("0F0@1 0B0@1 0STEP",), "version", "only 0 STEPs were made"),
    "stashed late": (("0F0 0F1 0B0 0STEP 0STASH@0 0B1@0 0STEP 0DROP@0",), "version", "which are version 1"),
    "dropped early": (("0STASH@0 0F0 0F1 0B0 0STEP 0DROP@0 0B1@0 0STEP",), "version", "none is kept"),
    "dropped twice": (("0STASH@0 0F0 0B0 0DROP@0 0DROP@0",), "version", "is not kept"),
    "never dropped": (("0STASH@0 0F0 0B0",), "version", "add 0DROP@0 after its use"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    ranks, kind, says = FAULTS[fault]
    count = 1 + max(a.microbatch or 0 for own in parsed(*ranks) for action in own for a in action.flat())
    problems = validate(straight(count, *ranks))
    assert any(problem.kind == kind and says in problem.message for problem in problems), problems


def test_the_schedules_that_the_faults_stand_beside_are_right() -> None:
    for ranks in (RIGHT, (ASYNC,), ("0STASH@0 0F0 0F1 0B0 0STEP 0B1@0 0DROP@0 0STEP",)):
        assert validate(straight(2, *ranks)) == []


def test_forward_only_schedules_need_no_backward() -> None:
    schedule = add_communication(straight(2, "0F0 0F1", "1F0 1F1"))
    check(schedule, forward_only=True)
    assert kinds(straight(1, "0F0 0B0"), forward_only=True) == ["unexpected"]
    assert kinds(straight(2, "0F0", "1F0 1F1"), forward_only=True) == ["missing"]
    with pytest.raises(ValueError, match="keeps no activations"):
        validate(schedule, forward_only=True, max_activations=1)


def test_versions_may_differ_on_request() -> None:
    schedule = straight(2, "0F0 0F1 0B0 0STEP 0B1 0STEP")
    assert kinds(schedule) == ["version"]
    assert validate(schedule, same_version=False) == []


def test_a_demanded_skip_connection_must_be_served() -> None:
    schedule = make_schedule("gpipe", 3, 2)
    served = add_communication(schedule, [(0, 2)])
    assert validate(served) == validate(served, edges=[(0, 2)]) == []
    assert kinds(add_communication(schedule), edges=[(0, 2)]) == ["missing"]
    assert kinds(served, edges=[]) == ["transfer"]
    with pytest.raises(ValueError, match="got \\(0, 1\\)"):
        validate(served, edges=[(0, 1)])


def test_replicas_that_reduce_in_opposite_orders_deadlock() -> None:
    def both_ways(first: str, second: str) -> Schedule:
        chains = (Chain((0, 1), (0,)), Chain((2, 3), (1,)))
        return Schedule(
            "both ways", (0, 1, 1, 0), chains, parsed(f"0F0 3F1 3B1 0B0 {first}", f"2F1 1F0 1B0 2B1 {second}")
        )

    assert validate(both_ways("0REDUCE_GRAD 3REDUCE_GRAD", "2REDUCE_GRAD 1REDUCE_GRAD")) == []
    (problem,) = validate(both_ways("0REDUCE_GRAD 3REDUCE_GRAD", "1REDUCE_GRAD 2REDUCE_GRAD"))
    assert problem.kind == "deadlock"
    assert "to reach position 5 (2REDUCE_GRAD)" in problem.message
    assert kinds(both_ways("0REDUCE_GRAD 0STEP 3REDUCE_GRAD 3STEP", "2REDUCE_GRAD 2STEP 1STEP")) == ["reduce"]
    assert kinds(both_ways("0STEP 3STEP", "2STEP 1STEP")) == ["reduce"]


def test_replicas_on_one_rank_step_after_both_have_reduced() -> None:
    def halves(*orders: str) -> Schedule:
        chains = (Chain((0, 1), (0,)), Chain((2, 3), (1,)))
        computes = "0F0 2F1 0B0 2B1", "1F0 3F1 1B0 3B1"
        return Schedule("halves", (0, 1, 0, 1), chains, parsed(*map(" ".join, zip(computes, orders, strict=True))))

    together = "1REDUCE_GRAD 3REDUCE_GRAD 1STEP 3STEP"
    assert validate(halves("0REDUCE_GRAD 2REDUCE_GRAD 0STEP 2STEP", together)) == []
    early = halves("0REDUCE_GRAD 0STEP 2REDUCE_GRAD 2STEP", together)
    assert not execute(early).is_right
    (problem,) = validate(early)
    assert (problem.kind, str(problem.action)) == ("reduce", "0STEP")
    assert "2REDUCE_GRAD (rank 0, position 6) adds the gradients of its replica only later" in problem.message


def test_the_shortest_circle_is_shown() -> None:
    ranks = ["0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1RECV_B0 1SEND_F0 1B0 1SEND_B0"]
    schedule = straight(1, *ranks, "2RECV_F0 2F0 2B0 2SEND_B0")
    (deadlock,) = [problem for problem in validate(schedule) if problem.kind == "deadlock"]
    assert deadlock.message.count("waits for rank") == 2
    assert "rank 0 at position 0 (0RECV_B0) waits for rank 1" in deadlock.message


def test_memory_is_counted_in_the_sizes_given() -> None:
    schedule = straight(2, *RIGHT)
    assert validate(schedule, max_activations=[60, 20], activation_size=[30, 20]) == []
    (problem,) = validate(schedule, max_activations=[59, 20], activation_size=[30, 20])
    assert (problem.kind, problem.rank, problem.position) == ("memory", 0, 1)
    assert "limit of 59 from here on, 60 at its peak" in problem.message
    with pytest.raises(ValueError, match="one per rank \\(2\\), got 3"):
        validate(schedule, max_activations=[1, 2, 3])
    with pytest.raises(ValueError, match="one per part \\(2\\), got 1"):
        validate(schedule, max_activations=1, activation_size=[1])
    with pytest.raises(ValueError, match="got 'end'"):
        validate(schedule, max_activations=1, until="end")


def test_check_raises_with_all_problems_and_warnings_on_request() -> None:
    check(straight(2, "0F0 0F1 0B1 0B0"))
    with pytest.raises(ScheduleError, match="accumulation"):
        check(straight(2, "0F0 0F1 0B1 0B0"), strict=True)
    with pytest.raises(ScheduleError, match=r"(?s)has 30 problems.*and 10 more"):
        check(straight(1, " ".join(["0F0 0B0", *["0F0"] * 30])))
