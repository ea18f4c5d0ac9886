"""The planner: its search against brute force, its pipelines against full simulations, and what it says."""

import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import fastpar as fp
from fastpar.cli import main
from fastpar.layouts import ExpertShape, Layout, ModelShape, PipelineOptions, ZeroOptions, broken_rules
from fastpar.pipeline import Costs, activation_peaks, make_schedule, schedule_names
from fastpar.planner import MACHINES, Machine, NoLayoutFitsError, Plan, Workload, find_machine, find_model
from fastpar.planner.cost import PARTS, predict
from fastpar.planner.cuts import StageChoice, best_cut, even_parts
from fastpar.planner.layer_time import gemm_seconds
from fastpar.planner.machine import bandwidth
from fastpar.planner.memory import in_flight, predict_memory
from fastpar.planner.pipelines import full_makespan, makespan
from fastpar.planner.planning import parse_bytes
from fastpar.planner.refine import RefinedLayout, refine
from fastpar.planner.search import TIE, evaluate, search
from fastpar.planner.space import PlanOptions
from fastpar.planner.table import SCHEDULES, LayoutTable

SMALL = ModelShape("small", layers=8, hidden=1024, ffn=4096, vocab=32000, heads=8, kv_heads=4, gated=True)


def small_machine(gpus: int, gigabytes: float, per_node: int = 4) -> Machine:
    base = MACHINES["a100"]
    return dataclasses.replace(base, gpus=gpus, per_node=min(per_node, gpus), hbm_bytes=int(gigabytes * 1e9), reserve=0)


# ---- brute force -----------------------------------------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def all_layouts(machine: Machine, work: Workload, cps: tuple[int, ...] = (1,)) -> list[Layout]:
    """Every layout that the planner may look at, by loops; what is legal is asked of the rules one by one."""
    n, model, found = machine.gpus, work.model, []
    for pp, tp, cp in itertools.product(divisors(n), divisors(n), cps):
        if n % (pp * tp * cp) or tp > machine.per_node or machine.per_node % tp or pp > model.layers:
            continue
        dp = n // (pp * tp * cp)
        if work.batch % dp:
            continue
        within = machine.per_node // (tp * cp)
        shards = {dp} | ({within} if 1 < within < dp and dp % within == 0 else set())
        for dp_shard, ep in itertools.product(shards, divisors(model.num_experts) if model.experts else [1]):
            if (dp_shard * cp * tp) % ep:
                continue
            is_sharded = dp_shard * cp > 1 or (ep > 1 and dp_shard * cp * tp > ep)
            stages = ([0, 1] if pp > 1 else [0, 1, 2, 3]) if is_sharded else [0]
            for b, stage, sp, recompute in itertools.product(
                divisors(work.batch // dp), stages, [False, True] if tp > 1 else [False], ("none", "selective", "full")
            ):
                count = work.batch // dp // b
                grid = {"pp": pp, "tp": tp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": dp // dp_shard, "ep": ep}
                options = {"sequence_parallel": sp, "zero": ZeroOptions(stage), "recompute": recompute}
                if pp == 1:
                    found.append(Layout(**grid, **options, accumulate=count))
                    continue
                names = [(name, 1) for name in ("gpipe", "1f1b", "zb_h1", "zbv", "v_half", "dualpipev")]
                names += [("interleaved_1f1b", v) for v in range(2, min(8, model.layers // pp) + 1)]
                found += [Layout(**grid, **options, pipeline=PipelineOptions(name, count, v)) for name, v in names]
    return [x for x in found if not broken_rules(x, model, world_size=n, batch=work.batch)]


def random_instance(seed: int) -> tuple[Machine, Workload]:
    rng = random.Random(seed)
    heads = rng.choice([4, 6, 8])
    experts = ExpertShape(rng.choice([4, 6]), 2, 512) if rng.random() < 0.3 else None
    model = ModelShape(
        "random", rng.randint(2, 6), heads * 64, heads * 256, rng.choice([1000, 32000]), heads,
        gated=rng.random() < 0.5, tied=rng.random() < 0.5, experts=experts,
    )  # fmt: skip
    gpus = rng.choice([1, 2, 4, 6])
    per_node = rng.choice([each for each in divisors(gpus) if each <= 4])
    machine = dataclasses.replace(small_machine(gpus, rng.choice([0.4, 1.0, 3.0]), per_node), launch=1e-4)
    return machine, Workload(model, rng.choice([4, 6]), rng.choice([256, 1024]))


def by_time(each: RefinedLayout) -> float:
    return each.seconds


@pytest.mark.parametrize(
    "seeds",
    [*(pytest.param(range(n, n + 50), marks=pytest.mark.slow) for n in (0, 50, 100, 150)), range(150, 163)],
    ids=str,
)
@pytest.mark.expensive
def test_200_random_instances_have_the_answer_of_brute_force(seeds: range) -> None:
    """The same legal layouts; of those that fit the same least time; and after refining the best of all."""
    num_fitting = num_missed = num_split = 0
    for seed in seeds:
        machine, work = random_instance(seed)
        splits = seed % 3 == 0  # sequences, too
        found = evaluate(machine, work, PlanOptions(allow=frozenset({"cp"} if splits else ())))
        expected = all_layouts(machine, work, (1, 2, 4) if splits else (1,))
        num_split += any(layout.cp > 1 for layout in expected)
        got = [found.table.layout(row) for row in range(len(found.table))]
        assert len(set(got)) == len(got)
        assert set(got) == set(expected), seed
        one_by_one = {}
        for layout in expected:
            x = LayoutTable.of([layout], work.batch)
            if predict_memory(machine, work, x).total[0] <= machine.limit:
                one_by_one[layout] = float(predict(machine, work, x).step[0])
        fitting = [found.table.layout(int(row)) for row in np.flatnonzero(found.fits)]
        assert set(fitting) == set(one_by_one), seed
        if not one_by_one:
            assert search(machine, work, found) is None
            continue
        num_fitting += 1
        assert float(found.step[found.fits].min()) == pytest.approx(min(one_by_one.values()), rel=1e-12)
        if seed % 2:
            continue
        result = search(machine, work, found)
        assert result is not None
        refined = [refine(machine, work, layout, machine.limit) for layout in one_by_one]
        best = min(each.seconds for each in refined if each is not None)
        # Where there are more than NUM_SMALL layouts, closed forms choose which are refined: within a tie, and seldom.
        assert result.ranked[0].seconds <= (1 + TIE) * best, seed
        num_missed += result.ranked[0].seconds > best * (1 + 1e-9)
        measured = [each for each in result.ranked if each.is_backed]
        assert result.recommended.seconds <= (1 + TIE) * min(measured or [result.recommended], key=by_time).seconds
    assert num_fitting >= 0.8 * len(seeds)
    assert num_split >= 0.2 * len(seeds)
    assert num_missed <= 1


def test_the_best_cut_is_that_of_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(60):
        layers, ranks = rng.randint(2, 8), rng.randint(1, 4)
        extra = [rng.random() for _ in range(ranks)]
        room = [rng.randint(1, layers) for _ in range(ranks)]

        def stage(rank: int, count: int, extra: list = extra, room: list = room) -> StageChoice | None:
            if count > 2 * room[rank]:
                return None
            return StageChoice(extra[rank] + count * (1.0 if count <= room[rank] else 1.4), "full")

        cuts = [
            cut
            for cut in itertools.product(range(layers + 1), repeat=ranks)
            if sum(cut) == layers
            and all(count >= (0 if rank in (0, ranks - 1) and ranks > 1 else 1) for rank, count in enumerate(cut))
        ]
        slowest = []
        for cut in cuts:
            choices = [stage(rank, count) for rank, count in enumerate(cut)]
            if all(choice is not None for choice in choices):
                slowest.append(max(choice.seconds for choice in choices if choice is not None))
        found = best_cut(layers, ranks, stage)
        assert (found is None) == (not slowest)
        if found is not None:
            assert sum(found.layers) == layers
            assert found.slowest == pytest.approx(min(slowest))


def test_even_parts_are_those_of_the_docstring_and_balanced() -> None:
    assert even_parts(10, [0, 1, 2, 3], 2.0) == [3, 3, 3, 1]
    assert even_parts(8, [0, 1, 1, 0], 2.0) == [2, 3, 2, 1]


# ---- pipelines -------------------------------------------------------------------------------------------------------


def random_costs(parts: int, seed: int) -> Costs:
    rng = random.Random(seed)

    def times() -> list[int]:
        return [rng.randint(3, 9) for _ in range(parts)]

    return Costs(forward=times(), backward_input=times(), backward_weight=times(), hop=Fraction(rng.randint(0, 4), 3))


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.expensive
def test_a_long_schedule_takes_what_its_steady_state_says(name: str) -> None:
    """Exactly, in Fractions, p <= 8, equal and unequal stages; asynchronous schedules have updates of their own."""
    count = 0
    for p, parts in ((2, 1), (3, 2), (4, 1), (8, 1)):
        if parts > 1 and name not in ("interleaved_1f1b", "looped_bfs"):
            continue
        stages = 2 if name in ("interleaved_1f1b", "looped_bfs") else parts
        for m in (9 * p, (7 * p + 5) * p + 1) if p <= 3 else (10 * p,):
            try:
                schedule = make_schedule(name, p, m, **({"stages_per_rank": stages} if stages > 1 else {}))
            except ValueError:
                continue
            for costs in (Costs(2, 3, 1, hop=Fraction(1, 3)), random_costs(schedule.num_parts, p)):
                exact = full_makespan(name, p, m, costs, stages)
                try:
                    found = makespan(name, p, m, costs, stages)
                    quick = makespan(name, p, m, costs, stages, quick=True)
                except ValueError:  # lengths that dualpipe and 2BW do not have
                    continue
                assert found == exact, (p, m)
                assert abs(quick / exact - 1) < 0.02
                assert not isinstance(found, float)
                count += 1
    assert count >= 4


def test_a_steady_state_with_a_long_period_or_a_late_begin_is_waited_for() -> None:
    """1F1B whose stages make three steps differ; two equal steps are no proof."""
    wrong = 0
    for seed in range(30):
        costs = random_costs(4, seed)
        exact = full_makespan("1f1b", 4, 61, costs)
        assert makespan("1f1b", 4, 61, costs) == exact
        wrong += makespan("1f1b", 4, 61, costs, quick=True) != exact
    assert wrong


@pytest.mark.parametrize("name", SCHEDULES)
def test_microbatches_in_flight_are_those_of_the_schedule(name: str) -> None:
    for p, m, v in itertools.product((2, 3, 4, 8), (8, 16, 32), (1, 2, 3)):
        if (v > 1) != (name == "interleaved_1f1b") or (name == "dualpipev" and m < 2 * p):
            continue
        schedule = make_schedule(name, p, m, **({"stages_per_rank": v} if v > 1 else {}))
        per_rank = schedule.num_parts // p
        peak = float(max(activation_peaks(schedule, until="weight"))) / per_rank
        layout = Layout(pp=p, pipeline=PipelineOptions(name, m, v))
        formula = float(in_flight(LayoutTable.of([layout], m))[0])
        assert peak <= formula + 1e-9
        assert formula <= peak + (0.0 if name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv") else 1.0)


# ---- rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [(8, 1, "nvlink"), (16, 1, "nic*8"), (8, 8, "nic"), (4, 2, "nvlink"), (16, 4, "nic*2"), (1, 8, "nvlink")],
)
def test_bandwidth_follows_from_the_stride_over_nodes(size: int, stride: int, expected: str) -> None:
    machine = find_machine("a100x64")
    rate = float(bandwidth(machine, np.array([size]), np.array([stride]))[0])
    known = {"nvlink": machine.nvlink, "nic": machine.nic}
    name, _, factor = expected.partition("*")
    assert rate == min(machine.nvlink, known[name] * int(factor or 1))


def test_step_time_is_the_sum_of_its_parts_and_more_of_anything_costs_more() -> None:
    machine, work = find_machine("a100x16"), Workload(SMALL, 32, 2048)
    layouts = [Layout.parse(words) for words in ("tp4 dp4 zero1 acc2", "pp4 dp4 mb8", "tp2 dp8 sp zero3 full")]
    x = LayoutTable.of(layouts, 32)
    time_of = predict(machine, work, x)
    assert np.allclose(sum(time_of.parts.values()), time_of.step)
    assert set(time_of.parts) == set(PARTS)
    slower = dataclasses.replace(machine, nvlink=machine.nvlink / 4, nic=machine.nic / 4)
    assert (predict(slower, work, x).step > time_of.step).all()
    longer = predict(machine, dataclasses.replace(work, seq=4096), x)
    assert (longer.step > 1.9 * time_of.step).all()
    assert (predict_memory(machine, dataclasses.replace(work, seq=4096), x).total > 0).all()


def test_half_a_wave_is_lost_of_each_product() -> None:
    machine = dataclasses.replace(find_machine("a100x8"), wave=1e6, hbm=1e15)
    work, tokens = Workload(SMALL, 8, 128), np.array([1000.0])
    forward, backward = gemm_seconds(machine, work, tokens, 2000, 4000)
    plain, plain_back = gemm_seconds(dataclasses.replace(machine, wave=0.0), work, tokens, 2000, 4000)
    assert plain_back == 2 * plain
    assert float(forward[0] / plain[0]) == pytest.approx(1 + 0.5 / 4)
    assert float(backward[0] / plain[0]) == pytest.approx(2 + 0.5 / 2 + 0.5 / 8)


def test_a_floor_makes_small_layers_as_slow_as_their_launches() -> None:
    machine = dataclasses.replace(find_machine("a100x8"), launch=5e-3)
    work = Workload(SMALL, 8, 128)
    found = predict(machine, work, LayoutTable.of([Layout.parse("dp8")], 8))
    assert found.is_floor.all()
    assert float(found.step[0]) >= 2 * SMALL.layers * 5e-3


# ---- what is given ---------------------------------------------------------------------------------------------------


def test_models_have_their_published_sizes() -> None:
    billions = {"llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3.1-405b": 405.9, "mixtral-8x7b": 46.7,
                "qwen3-235b-a22b": 235.1, "gpt3-175b": 174.6, "mistral-7b": 7.24}  # fmt: skip
    for name, size in billions.items():
        assert find_model(name).parameters / 1e9 == pytest.approx(size, rel=0.01), name
    assert find_model("meta-llama/Llama-2-7b-hf") == find_model("llama-2-7b")


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: find_model("lama-3-70b"), "did you mean llama-3-70b"),
        (lambda: find_model({"hidden_size": 8}), "num_hidden_layers"),
        (lambda: find_machine("h10x8"), "did you mean h100"),
        (lambda: find_machine("h100x12"), "whole nodes of 8"),
        (lambda: find_machine("nothing.json"), "No such file"),
        (lambda: Machine.from_json({**MACHINES["a100"].to_json(), "nics": 1}), "did you mean nic"),
        (lambda: Machine.from_json({"name": "x"}), "lacks"),
        (lambda: PlanOptions(pin={"tpp": 2}), "there is no 'tpp'"),
        (lambda: PlanOptions(allow=frozenset({"ofload"})), "there is no 'ofload'"),
        (lambda: parse_bytes("80 pounds"), "memory must be"),
        (lambda: parse_bytes("9" * 400), "memory must fit 64 bits"),
        (lambda: fp.plan("gpt2", "a100x8", batch=8, seq=128, memory=2**64), "memory must fit 64 bits, got bytes of 65"),
        (lambda: fp.plan("gpt2", "a100x8", batch=7, seq=128, pin={"dp_shard": 8}), "no layout of 8 ranks"),
        (lambda: fp.plan("gpt2", "a100x8", batch=8, seq=128, precision="fp8"), "no peak for precision"),
        (lambda: fp.plan("gpt2", "a100x8", batch=8, seq=128, pin={"schedule": "zvb"}), "must be one of"),
        (lambda: fp.plan("gpt2", "a100x8", batch=0, seq=128), "batch"),
        (
            lambda: fp.plan("gpt2", "a100x8", batch=2**63 - 1, seq=128),
            "batch must be at most",
        ),  # and not a search for ever
    ],
)
def test_wrong_arguments_are_refused_with_near_misses(call: object, complaint: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=complaint):
        call()


def test_machines_come_back_from_json(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(find_machine("h100x16").to_json()))
    assert find_machine(path) == find_machine("h100x16")
    assert find_machine(f"{path}:32").gpus == 32
    assert parse_bytes("80GB") == 80 * 10**9


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_legal_fits_and_says_why(tmp_path: Path) -> None:
    found = fp.plan("llama-3-70b", "h100x64", batch=128, seq=8192)
    found.layout.check(find_model("llama-3-70b"), world_size=64, batch=128)
    assert found.is_backed
    assert found.prediction.peak <= found.limit
    assert all(trial.layout != found.layout for trial in found.trials)
    text = str(found)
    for word in ("recommended", found.layout.words, "why", "classical recipe", "not calibrated", "best of"):
        assert word in text
    assert found.prediction.low < found.prediction.seconds < found.prediction.high
    path = tmp_path / "plan.json"
    found.save(path)
    assert Plan.load(path) == found
    picture = tmp_path / "plan.svg"
    found.draw(picture)
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    assert drawn.count("rank 0:") == 6


def test_reasons_are_what_pinning_the_axis_gives() -> None:
    found = fp.plan("llama-2-13b", "a100x32", batch=64, seq=4096)
    options = PlanOptions()
    machine, work = find_machine("a100x32"), Workload(find_model("llama-2-13b"), 64, 4096)
    reasons = [reason for reason in found.reasons if reason.axis == "tp" and reason.change is not None]
    assert reasons
    for reason in reasons:
        pinned = evaluate(machine, work, dataclasses.replace(options, pin={"tp": int(reason.value)}))
        backed = pinned.fits & pinned.backed
        assert backed.any() == reason.is_backed
        pool = backed if reason.is_backed else pinned.fits
        times = {other.change: other for other in reasons}
        assert reason.change in times
        ratio = float(pinned.step[pool].min()) / (1 + (reason.change or 0.0))
        assert ratio == pytest.approx(float(evaluate(machine, work, options).step.min()), rel=0.35)


def test_pins_and_allowances_are_obeyed() -> None:
    pinned = fp.plan("llama-2-13b", "a100x32", batch=64, seq=4096, pin={"tp": 4, "pp": 2, "schedule": "1f1b"})
    assert (pinned.layout.tp, pinned.layout.pp, pinned.layout.pipeline.schedule) == (4, 2, "1f1b")
    zero = fp.plan("llama-2-7b", "a100x8", batch=16, seq=2048, pin={"zero": 3, "pp": 1})
    assert zero.layout.zero.stage == 3
    for schedule in SCHEDULES:
        given = fp.plan("llama-2-7b", "a100x8", batch=32, seq=2048, pin={"pp": 4, "schedule": schedule})
        assert given.layout.pipeline.schedule == schedule
    hybrid = fp.plan("llama-2-7b", "a100x32", batch=64, seq=2048, pin={"dp_replicate": 2, "zero": 3, "tp": 1})
    assert (hybrid.layout.dp_replicate, hybrid.layout.dp_shard) == (2, 16)
    assert fp.plan("llama-2-7b", "a100x32", batch=64, seq=2048, pin={"dp_shard": 2}).layout.dp_shard == 2
    offloaded = fp.plan("llama-2-13b", "a100x8", batch=8, seq=2048, memory="36GB", allow=["offload"])
    assert offloaded.layout.zero.offload == "cpu"


def test_nothing_fits_is_three_misses_with_bytes_and_remedy() -> None:
    with pytest.raises(NoLayoutFitsError) as caught:
        fp.plan("llama-3.1-405b", "h100x8", batch=8, seq=8192)
    assert len(caught.value.misses) == 3
    assert all(miss.missing > 0 for miss in caught.value.misses)
    assert "ranks are enough" in str(caught.value)
    with pytest.raises(NoLayoutFitsError, match="without the pins"):
        fp.plan("llama-2-13b", "a100x8", batch=8, seq=4096, pin={"zero": 0, "tp": 1, "pp": 1})
    with pytest.raises(NoLayoutFitsError, match="allow offload"):
        fp.plan("llama-2-13b", "a100x8", batch=8, seq=2048, memory="36GB")
    with pytest.raises(NoLayoutFitsError, match="fused_loss"):
        fp.plan("gpt2", "a100x1", batch=1, seq=8192, memory="11GB")


def test_remedies_are_what_makes_a_layout_fit() -> None:
    """Of one rank and a batch of one, that more ranks cannot share: the memory that is named is enough, and no less."""
    asked = {"batch": 1, "seq": 1024, "fused_loss": True, "allow": ["offload", "tp_across_nodes", "cp"]}
    with pytest.raises(NoLayoutFitsError, match="GB a rank would do") as caught:
        fp.plan(dataclasses.replace(SMALL, heads=1, kv_heads=1, layers=1), "a100x1", memory="6.7GB", **asked)
    told = re.search(r"([\d.]+) GB a rank would do", str(caught.value))
    assert told is not None
    shape = dataclasses.replace(SMALL, heads=1, kv_heads=1, layers=1)
    assert fp.plan(shape, "a100x1", memory=f"{float(told[1]) + 0.1}GB", **asked).layout.world_size == 1
    with pytest.raises(NoLayoutFitsError):
        fp.plan(shape, "a100x1", memory=f"{float(told[1]) - 0.1}GB", **asked)


def test_trials_are_faster_layouts_with_unmeasured_features_each_schedule_for_itself() -> None:
    machine, work = find_machine("h100x64"), Workload(find_model("llama-3-70b"), 128, 8192)
    result = search(machine, work, evaluate(machine, work, PlanOptions()))
    assert result is not None
    best = result.recommended
    unmeasured = [each for each in result.ranked if not each.is_backed and each.seconds < best.seconds]
    assert result.trials
    assert result.trials[0] == min(unmeasured, key=by_time)
    assert all(trial in unmeasured for trial in result.trials)
    assert any(trial.layout.pp == best.layout.pp and trial.layout.tp == best.layout.tp for trial in result.trials)


def test_experts_are_planned_and_marked_as_not_measured() -> None:
    found = fp.plan("mixtral-8x7b", "h100x32", batch=128, seq=4096)
    assert found.trials
    assert any(trial.layout.ep > 1 and not trial.is_backed and trial.error > 0.4 for trial in found.trials)
    forced = fp.plan("mixtral-8x7b", "h100x32", batch=128, seq=4096, pin={"ep": 8})
    assert not forced.is_backed
    assert "best guess" in str(forced)


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("model", "machine", "batch", "seq", "budget"),
    [
        ("llama-3.1-405b", "h100x16384", 4096, 8192, 10.0),
        # Of the same search, which has sixteen times the ranks above.
        pytest.param("qwen3-235b-a22b", "h100x1024", 1024, 4096, 20.0, marks=pytest.mark.slow),
    ],
)
def test_16384_gpus_take_10_seconds_and_1024_with_128_experts_20(
    model: str, machine: str, batch: int, seq: int, budget: float
) -> None:
    """Processor time of one core: the machine may be busy."""
    before = time.process_time()
    fp.plan(model, machine, batch=batch, seq=seq)
    assert time.process_time() - before < budget


def test_the_command_plans_explains_and_tells_that_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    asked = ["plan", "--model", "llama-2-7b", "--machine", "a100x16", "--batch", "32", "--seq", "2048"]
    assert main([*asked, "--json", str(path), "--draw", str(picture), "--pin", "tp=2"]) == 0
    assert "recommended" in capsys.readouterr().out
    assert picture.exists()
    assert main(["explain", str(path)]) == 0
    assert "tp2" in capsys.readouterr().out
    assert main(["explain", str(path), "--versus", "pp4 tp4 mb32 full"]) == 0
    assert "pp4 tp4" in capsys.readouterr().out
    assert main(["explain", str(path), "--versus", "tp4"]) == 1
    assert "ranks" in capsys.readouterr().err
    big = ["plan", "--model", "gpt3-175b", "--machine", "a100x8", "--batch", "8", "--seq", "2048"]
    assert main(big) == 1
    assert capsys.readouterr().err.count("GB too much") == 3
    for wrong in ([*asked, "--pin", "tp"], [*asked, "--pin", "pt=2"], [*asked[:2], "lama", *asked[3:]]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, fastpar as fp; plan = fp.plan('llama-2-7b', 'a100x16', batch=32, seq=2048)\n"
        "assert plan.layout.world_size == 16 and str(plan)\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
