"""The bench harness: what it computes from times, what it refuses to time, what it keeps, and its rank processes."""

import builtins
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import harness, options, peers
from bench.bench_cross_entropy import BENCH as CROSS_ENTROPY
from bench.bench_cross_entropy import CrossEntropyCase, LossOptions, Problem, step_of, torch_loss_with
from bench.bench_linear import BENCH as LINEAR
from bench.bench_linear import MlpCase
from bench.bench_linear_cross_entropy import LinearCrossEntropyCase, plain_loss
from bench.bench_linear_cross_entropy import Problem as LinearProblem
from bench.device import CudaDevice, Recorded
from bench.harness import (
    CUDA_SETTINGS,
    SETTINGS,
    Error,
    LoadMeter,
    Measurement,
    Provider,
    ProviderError,
    ProviderInfo,
    Rank,
    Sampling,
    Setting,
    Worker,
    absent,
    measure,
    percentile,
    slowest,
    summary,
)
from bench.ranks import LaneError, ProcessLane
from bench.report import load_note, plain_table, plot, print_table, table
from bench.rows import default_path, gpu_name, load, machine_name, make_rows, save
from bench.virtual import VirtualRanks
from fastpar import ops, reference

DEFAULT, TUNED = SETTINGS["default"], SETTINGS["tuned"]


class FakeLane:
    """Answers without doing anything, and notes the order of the samples."""

    def __init__(self, setting: Setting, errors: dict[str, Any], log: list[tuple[str, str, tuple[int, int]]]) -> None:
        self.setting, self.errors, self.log = setting, errors, log
        self.world_size = self.threads = 1

    def build(self, case: Any) -> list[ProviderInfo]:
        return [ProviderInfo(name, "torch") for name in self.errors]

    def check(self, name: str) -> dict[str, Error]:
        if isinstance(self.errors[name], Exception):
            raise self.errors[name]
        return {"out": Error(self.errors[name], 1e-3)}

    def sample(self, name: str, iters: int, lead: int = 0) -> tuple[list[float], float]:
        self.log.append((self.setting.name, name, (lead, iters)))
        return [1.0] * iters, 0.0


class FakeClock:
    """Time passes only where a provider says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds

        return run


@dataclass(frozen=True)
class ListCase:
    """A case with given providers, for a Worker in this process."""

    providers: list[Provider] = field(default_factory=list)
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {"dtype": "fp32"}

    def build(self, rank: Rank) -> list[Provider]:
        return self.providers


# ---------------------------------------------------------------------------------------------------------- statistics


def test_percentile_interpolates_between_the_closest_samples() -> None:
    values = [40.0, 10.0, 30.0, 20.0, 50.0]
    assert [percentile(values, p) for p in (0, 10, 50, 90, 100)] == [10.0, 14.0, 30.0, 46.0, 50.0]
    with pytest.raises(ValueError, match="must not be empty"):
        percentile([], 50)
    with pytest.raises(ValueError, match=r"percent \(101\)"):
        percentile(values, 101)


def test_summary_is_in_milliseconds() -> None:
    assert summary([0.001, 0.002, 0.009]) == pytest.approx(
        {"median": 2.0, "min": 1.0, "p10": 1.2, "p90": 7.6, "samples": 3}
    )


def test_a_sample_is_the_time_of_its_slowest_rank() -> None:
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]
    with pytest.raises(ValueError, match="different numbers of samples"):
        slowest([[1.0], [1.0, 2.0]])


def test_load_meter_counts_what_others_used() -> None:
    busy, clock = iter([10.0, 13.0, 20.0, 21.0]), FakeClock()
    meter = LoadMeter(lambda: next(busy), clock)
    for own_cpu in (2.0, 1.5):  # 3 s busy of which 2 ours; then 1 s busy, of which ours is overestimated
        meter.start()
        clock.now += 2.0
        meter.stop(own_cpu)
    assert meter.other_cores == pytest.approx(1.0 / 4.0)


# ------------------------------------------------------------------------------------------------- order, and refusal


def test_providers_of_all_lanes_take_turns_with_fixed_counts() -> None:
    log: list[tuple[str, str, tuple[int, int]]] = []
    lanes = [FakeLane(s, {"a": 0.0, "b": 0.0}, log) for s in (DEFAULT, TUNED)]
    found = measure(ListCase(), lanes, Sampling(blocks=4, iters=3, lead=2))
    everyone = {(s, n) for s in ("default", "tuned") for n in "ab"}
    rounds = [log[i : i + 4] for i in range(0, len(log), 4)]
    assert len(rounds) == 4
    assert all({entry[:2] for entry in turn} == everyone for turn in rounds)
    assert {entry[2] for entry in log} == {(2, 3)}
    assert len({turn[0][:2] for turn in rounds}) == 4  # another one begins each time
    assert [len(m.seconds) for m in found] == [12] * 4


@pytest.mark.parametrize("error", [2e-3, float("nan"), float("inf")])
def test_a_wrong_provider_is_never_timed(error: float) -> None:
    log: list[tuple[str, str, tuple[int, int]]] = []
    good, wrong = measure(ListCase(), [FakeLane(DEFAULT, {"good": 1e-3, "wrong": error}, log)], Sampling(2, 1))
    assert {name for _, name, _ in log} == {"good"}
    assert wrong.seconds == []
    assert wrong.problem.startswith("wrong result, not timed: out error")
    assert good.problem == ""


def test_a_provider_that_raises_is_reported_and_the_others_are_timed() -> None:
    log: list[tuple[str, str, tuple[int, int]]] = []
    lane = FakeLane(DEFAULT, {"broken": ProviderError("no compiler"), "good": 0.0}, log)
    broken, good = measure(ListCase(), [lane], Sampling(1, 1))
    assert broken.problem == "failed: no compiler"
    assert len(good.seconds) == 1


def test_a_slow_check_is_named_and_one_that_is_interrupted_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=clock))

    class Lane(FakeLane):
        def check(self, name: str) -> dict[str, Error]:
            clock.now += {"quick": 5.0, "slow": 12.4, "endless": 100.0}[name]
            if name == "endless":
                raise KeyboardInterrupt
            return super().check(name)

    with pytest.raises(KeyboardInterrupt):
        measure(ListCase(), [Lane(DEFAULT, dict.fromkeys(("quick", "slow", "endless"), 0.0), [])], Sampling(1, 1))
    said = capsys.readouterr().err.splitlines()
    assert said == ["checking slow (default) took 12 s", "checking endless (default) took 100 s"]


def test_only_keeps_named_providers_and_roofs() -> None:
    lane = FakeLane(DEFAULT, {"fastpar": 0.0, "torch": 0.0}, [])
    assert [m.provider.name for m in measure(ListCase(), [lane], Sampling(1, 1), only=["fast"])] == ["fastpar"]
    assert [m.provider.name for m in measure(ListCase(), [lane], Sampling(1, 1), only=["=fast", "=torch"])] == ["torch"]


def test_plan_rejects_counts_that_measure_nothing() -> None:
    with pytest.raises(ValueError, match=r"blocks \(0\)"):
        Sampling(blocks=0)


def test_worker_times_the_call_and_not_its_preparation() -> None:
    clock = FakeClock()
    provider = Provider("p", "torch", call=clock.advance(2.0), prepare=clock.advance(100.0))
    assert Worker(ListCase([provider]), Rank(), clock).sample("p", 3)[0] == [2.0, 2.0, 2.0]
    assert Worker(ListCase([provider], calls=5), Rank(), clock).sample("p", 1)[0] == [2.0]  # per call
    assert clock.now == 3 * 102.0 + 110.0


def test_worker_leaves_leading_samples_out() -> None:
    clock, costs = FakeClock(), iter([9.0, 8.0, 1.0, 2.0])
    provider = Provider("p", "torch", call=lambda: clock.advance(next(costs))())
    assert Worker(ListCase([provider]), Rank(), clock).sample("p", 2, lead=2)[0] == [1.0, 2.0]


def test_absent_peers_are_neither_run_nor_rows_nor_problems(capsys: pytest.CaptureFixture[str]) -> None:
    def never() -> dict[str, Error]:
        raise AssertionError("an absent provider was run")

    class Lane(FakeLane):
        def build(self, case: Any) -> list[ProviderInfo]:
            return [*super().build(case), absent("peer", "ModuleNotFoundError: No module named 'peer'").info()]

        def check(self, name: str) -> dict[str, Error]:
            return super().check(name) if name != "peer" else never()

    log: list[tuple[str, str, tuple[int, int]]] = []
    lanes = [Lane(s, {"here": 0.0}, log) for s in (DEFAULT, TUNED)]
    found = measure(ListCase(), lanes, Sampling(1, 1))
    assert {name for _, name, _ in log} == {"here"}
    rows = make_rows("toy", {}, found, "r")
    assert [row["provider"] for row in rows] == ["here", "here"]
    options._name_absent(found, set())
    assert capsys.readouterr().out == "left out: peer (ModuleNotFoundError: No module named 'peer')\n"


def test_a_peer_that_breaks_on_import_gives_its_reason() -> None:
    def load() -> Callable[..., torch.Tensor]:
        import no_such_library

        return no_such_library.loss

    assert peers.find(load) == "ModuleNotFoundError: No module named 'no_such_library'"
    assert peers.find(lambda: 7) == 7


# ---------------------------------------------------------------------------------------------------------------- CUDA


class FakeCuda:
    """Behaves like torch.cuda: launches cost the host nothing, and time passes on the device in stream order."""

    def __init__(self) -> None:
        self.device_now = 0.0
        self.log: list[str] = []
        self.in_use = self.peak = 0

    def launch(self, seconds: float, what: str = "kernel") -> Callable[[], None]:
        def run() -> None:
            self.device_now += seconds
            self.log.append(what)

        return run

    def allocate(self, num_bytes: int) -> None:
        self.in_use += num_bytes
        self.peak = max(self.peak, self.in_use)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.in_use

    def memory_allocated(self) -> int:
        return self.in_use

    def max_memory_allocated(self) -> int:
        return self.peak

    def Event(self, enable_timing: bool) -> "FakeEvent":
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.synchronized = cuda, False

    def record(self) -> None:
        self.at = self.cuda.device_now
        self.cuda.log.append("event")

    def synchronize(self) -> None:
        self.synchronized = True

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert later.synchronized, "read before the device was there"
        return (later.at - self.at) * 1e3


def test_cuda_samples_are_device_time_after_a_flush_and_without_the_preparation() -> None:
    cuda = FakeCuda()
    provider = Provider("p", "torch", call=cuda.launch(2e-3), prepare=cuda.launch(5.0, "prepare"))
    device = CudaDevice(cuda.launch(1.0, "flush"), cuda)
    seconds, _ = Worker(ListCase([provider]), Rank(), device=device).sample("p", 2, lead=1)
    assert seconds == pytest.approx([2e-3, 2e-3])
    assert cuda.log == ["prepare", "synchronize", "flush", "event", "kernel", "event"] * 3
    seconds, _ = Worker(ListCase([provider], calls=4), Rank(), device=device).sample("p", 1)
    assert seconds == pytest.approx([2e-3])  # per call


def test_hot_cuda_samples_have_no_flush() -> None:
    cuda = FakeCuda()
    provider = Provider("p", "torch", call=cuda.launch(2e-3))
    Worker(ListCase([provider]), Rank(), device=CudaDevice(None, cuda)).sample("p", 1)
    assert cuda.log == ["synchronize", "event", "kernel", "event"]


def test_cuda_memory_is_the_allocators_peak_without_what_was_there_and_the_results() -> None:
    cuda = FakeCuda()
    cuda.allocate(10_000)  # the inputs

    def call() -> None:
        cuda.allocate(700)
        cuda.allocate(-700)

    provider = Provider("p", "torch", call=call, warm=lambda: cuda.allocate(50_000) or cuda.allocate(-50_000))
    worker = Worker(ListCase([provider]), Rank(), device=CudaDevice(None, cuda))
    assert worker.memory("p") == 700
    with_results = Provider("p", "torch", call=call, result_bytes=600)
    assert Worker(ListCase([with_results]), Rank(), device=CudaDevice(None, cuda)).memory("p") == 100


def flags_for(bench: options.Bench, *argv: str) -> Any:
    return options.parser(bench, "a test").parse_args(argv)


def test_settings_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for argv, settings, ranks in (
        ([], ["default", "tuned"], [1, 2]),
        (["--device", "cuda"], ["cold"], [1]),  # a rank has a device to itself
        (["--device", "cuda", "--settings", "hot,cold"], ["hot", "cold"], [1]),
    ):
        flags = flags_for(CROSS_ENTROPY, *argv)
        options.apply_device(CROSS_ENTROPY, flags)
        assert (flags.settings, flags.ranks) == (settings, ranks)
    assert CUDA_SETTINGS["cold"].flush
    assert not CUDA_SETTINGS["hot"].flush


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cuda", "--settings", "tuned"], "on cuda choose from cold, hot"),
        (["--settings", "cold"], "on cpu choose from default, tuned"),
        (["--device", "cuda", "--ranks", "2"], "1 CUDA devices"),
    ],
)
def test_flags_that_do_not_fit_the_device_are_refused(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert options.run(CROSS_ENTROPY, flags_for(CROSS_ENTROPY, *argv), []) == 2
    assert message in capsys.readouterr().err


def test_cuda_is_refused_without_a_device_and_by_benches_on_cpu_tensors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert options.run(CROSS_ENTROPY, flags_for(CROSS_ENTROPY, "--device", "cuda"), []) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err
    assert options.run(LINEAR, flags_for(LINEAR, "--device", "cuda"), []) == 2
    assert "'linear' runs on cpu only" in capsys.readouterr().err


def test_rows_of_a_gpu_are_filed_under_its_name() -> None:
    facts = {"cpu": "Xeon", "cores": 16, "memory_gib": 128, "gpus": ["NVIDIA H100 80GB HBM3"]}
    assert gpu_name(facts) == "nvidia-h100-80gb-hbm3"
    assert default_path("toy", facts, "cuda").parts[-2:] == ("nvidia-h100-80gb-hbm3", "toy.json")
    with pytest.raises(ValueError, match="no GPU"):
        gpu_name({**facts, "gpus": []})


# ------------------------------------------------------------------------------------------------------ rows and files


def measured(name: str, kind: str, setting: str, ms: float, **work: Any) -> Measurement:
    return Measurement(ProviderInfo(name, kind, **work), setting, {"out": Error(1e-6, 1e-3)}, [ms / 1e3] * 3, 0.01)


def example_rows(run: str = "r1", fast: float = 10.0) -> list[dict[str, Any]]:
    found = [
        measured("fast", "fastpar", "default", fast, num_bytes=2e8, memory_bound=1000),
        measured("peer", "torch", "default", 80.0, num_bytes=2e8),
        measured("peer", "torch", "tuned", 40.0, num_bytes=2e8),
        measured("no communication", "bound", "default", 8.0, num_bytes=2e8),
        measured("copy", "roof", "tuned", 5.0, num_bytes=2e8),
    ]
    found[0].extra_bytes = 900
    found.append(Measurement(ProviderInfo("bad", "torch"), "default", {"out": Error(1.0, 1e-3)}, problem="wrong: 1"))
    return make_rows("toy", {"dtype": "fp32", "ranks": 1}, found, run)


def test_rows_carry_rates_roof_fractions_and_ratios_to_every_peer() -> None:
    fast, peer, _, bound, roof, bad = example_rows()
    assert fast["gb_s"] == pytest.approx(20.0)
    assert fast["roof_fraction"] == pytest.approx(0.5)
    assert fast["ratio"]["peer"] == pytest.approx({"default": 8.0, "tuned": 4.0})
    assert peer["ratio"]["peer"] == pytest.approx({"default": 1.0, "tuned": 0.5})
    assert fast["above_bound"] == pytest.approx(0.2)
    assert bound["above_bound"] is roof["above_bound"] is None
    assert fast["quiet"] is True
    assert "ms" not in bad
    assert bad["problem"]


def test_saved_rows_come_back_and_replace_only_what_was_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "toy.json"
    first = example_rows("r1")
    save(path, "r1", {"commit": "a"}, first)
    assert load(path)["rows"] == first
    save(path, "r2", {"commit": "b"}, example_rows("r2", fast=5.0)[:1])
    data = load(path)
    assert len(data["rows"]) == len(first)
    assert {row["provider"]: row["run"] for row in data["rows"]}["fast"] == "r2"
    assert set(data["runs"]) == {"r1", "r2"}
    save(path, "r3", {"commit": "c"}, example_rows("r3"))
    assert set(load(path)["runs"]) == {"r3"}  # no row names the others any more


def test_a_stopped_run_keeps_the_cases_it_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lane(FakeLane):
        def __init__(self, setting: Setting, *args: Any, **kwargs: Any) -> None:
            super().__init__(setting, {"a": 0.0}, [])

        def __enter__(self) -> "Lane":
            return self

        def __exit__(self, *args: object) -> None:
            pass

    @dataclass(frozen=True)
    class NamedCase(ListCase):
        name: str = ""

        def describe(self) -> dict[str, Any]:
            return {"name": self.name}

    def measure_or_stop(case: NamedCase, *args: Any) -> list[Measurement]:
        if case.name == "second":
            raise LaneError("stopped")
        return measure(case, *args)

    monkeypatch.setattr(options, "ProcessLane", Lane)
    monkeypatch.setattr(options, "measure", measure_or_stop)
    cases = [NamedCase(name=name) for name in ("first", "second")]
    toy = options.Bench("toy", (), lambda flags, world_size: cases, memory=False, quick={})
    path = tmp_path / "toy.json"
    assert options.run(toy, flags_for(toy, "--ranks", "1", "--json", str(path)), ["toy"]) == 1
    assert [row["case"]["name"] for row in load(path)["rows"]] == ["first", "first"]  # in two settings


def test_a_file_of_another_schema_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="schema 99"):
        save(path, "r", {}, [])


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    picture = plot(example_rows(), tmp_path / "toy.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no timed rows"):
        plot([], tmp_path / "none.png")


def test_table_shows_ratios_memory_bound_and_refusals() -> None:
    titles, lines = table(example_rows(), "peer")
    fast = dict(zip(titles, lines[0], strict=True))
    assert (fast["x same"], fast["x tuned"], fast["above bound"]) == ("8.00", "4.00", "20%")
    assert fast["extra MB"] == "0.00 (bound 0.00)"
    assert lines[-1][2] == "wrong"
    without = table(example_rows()[1:3], "peer")[0]
    assert "extra MB" not in without  # a column in which nobody says anything is left out
    text = plain_table("toy", titles, lines, load_note(example_rows()))
    assert text.splitlines()[-1].endswith("quiet machine")


def test_table_needs_no_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def without_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    print_table(example_rows(), ["absent", "peer"])
    assert 'times faster than "peer"' in capsys.readouterr().out


def test_disturbed_rows_are_called_so() -> None:
    rows = example_rows()
    rows[0] |= {"other_cores": 0.9, "quiet": False}
    assert "NOT QUIET: 1 of 5" in load_note(rows)


def test_machine_name_is_a_folder_name() -> None:
    facts = {
        "cpu": "AMD EPYC (family 26, model 2)",
        "cores": 2,
        "memory_gib": 23,
        "gpus": ["NVIDIA H100", "NVIDIA H100"],
    }
    assert machine_name(facts) == "amd-epyc-family-26-model-2-2c-23g-nvidia-h100"


# ------------------------------------------------------------------------------------------------- the benches' checks


def test_cross_entropy_providers_pass_their_check_and_a_wrong_one_does_not() -> None:
    worker = Worker(CrossEntropyCase("fp32", 70, 1001), Rank())
    for name in ("fastpar in place", "fastpar fresh gradient", "torch F.cross_entropy"):
        errors = worker.check(name)
        assert set(errors) == {"loss", "grad", "grad off target"}
        assert all(e.ok for e in errors.values()), (name, errors)

    def no_maximum_scale(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits * 1.01, target)

    errors = Problem(CrossEntropyCase("fp32", 70, 1001), Rank()).errors(step_of(no_maximum_scale))
    assert not errors["loss"].ok
    assert not errors["grad off target"].ok


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cross_entropy_reference_agrees_with_torch_on_every_option(dtype: str) -> None:
    chosen = LossOptions()
    problem = Problem(CrossEntropyCase(dtype, 70, 1001, options=chosen), Rank())
    assert all(e.ok for e in problem.errors(step_of(torch_loss_with(problem.weight, chosen))).values())
    for wrong in (LossOptions(label_smoothing=0.11), LossOptions(z_loss=2e-4), LossOptions(softcap=29.0)):
        assert not all(e.ok for e in problem.errors(step_of(torch_loss_with(problem.weight, wrong)), "fp32").values())
    plain = problem.without_options()
    assert all(e.ok for e in plain.errors(step_of(torch.nn.functional.cross_entropy), dtype).values())


def test_option_providers_pass_their_check() -> None:
    worker = Worker(CrossEntropyCase("fp32", 70, 1001, options=LossOptions()), Rank())
    kinds = {info.name: info.kind for info in worker.infos()}
    assert kinds["fastpar in place, no options"] == "bound"
    for name in ("fastpar in place, no options", "fastpar in place, all options", "torch, all options"):
        assert all(e.ok for e in worker.check(name).values()), name


def test_virtual_ranks_replay_what_the_others_would_send() -> None:
    logits = torch.randn(5, 12, dtype=torch.float64)
    target = torch.tensor([0, 5, 11, -100, 4])
    bounds = [(0, 4, 12), (4, 8, 12), (8, 12, 12)]

    def loss(comm: VirtualRanks, x: torch.Tensor) -> torch.Tensor:
        return ops.vocab_parallel_cross_entropy(x, target, group=comm, vocab_range=bounds[comm.rank])

    sent = []
    for rank in (0, 2):
        comm = VirtualRanks(rank, 3)
        sent.append(comm.captured(lambda comm=comm, rank=rank: loss(comm, logits[:, slice(*bounds[rank][:2])])))
    x = logits[:, 4:8].clone().requires_grad_()
    got = loss(VirtualRanks(1, 3, sent), x)
    whole = logits.clone().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(whole, target)
    torch.testing.assert_close(got, wanted)
    (grad,), (wanted_grad,) = torch.autograd.grad(got, x), torch.autograd.grad(wanted, whole)
    torch.testing.assert_close(grad, wanted_grad[:, 4:8])
    with pytest.raises(RuntimeError, match="no all-gather"):
        VirtualRanks(0, 2).captured(lambda: None)


@pytest.mark.parametrize("options", [None, LossOptions()])
def test_providers_of_a_virtual_rank_pass_their_check(options: LossOptions | None) -> None:
    worker = Worker(CrossEntropyCase("fp32", 70, 501, virtual_ranks=3, options=options), Rank())
    if dist.is_initialized():  # by the peers, for themselves alone; this is not their process
        dist.destroy_process_group()
    names = [info.name for info in worker.infos() if info.name.startswith("fastpar")]
    assert len(names) == 2
    for name in names:
        assert all(e.ok for e in worker.check(name).values()), name


def linear_cross_entropy_stub(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **how: Any) -> Any:
    """The op's signature over the plain version."""
    logits = torch.nn.functional.linear(hidden, weight, how.pop("bias", None))
    return reference.vocab_parallel_cross_entropy(logits, target, weight=how.pop("class_weight", None), **how)


@pytest.mark.parametrize("chosen", [None, LossOptions()])
def test_linear_cross_entropy_providers_pass_their_check(
    chosen: LossOptions | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(ops, "linear_cross_entropy"):
        monkeypatch.setattr(ops, "linear_cross_entropy", linear_cross_entropy_stub, raising=False)
    worker = Worker(LinearCrossEntropyCase("fp32", 70, 24, 1001, options=chosen), Rank())
    names = ["fastpar", "torch linear + F.cross_entropy"]
    if chosen is not None:
        names = ["fastpar, no options", "fastpar, all options", "torch, all options"]
    for name in names:
        errors = worker.check(name)
        assert set(errors) == {"loss", "dx", "dw", "dw off target"}
        assert all(e.ok for e in errors.values()), (name, errors)
    for kind, name in (("roof", "roof: GEMM dX = dZ W"), *([("bound", "three bare GEMMs")] if chosen is None else [])):
        assert worker.providers[name].kind == kind
        worker.sample(name, 1)


def test_linear_cross_entropy_check_sees_rows_of_the_weight_that_are_no_target() -> None:
    problem = LinearProblem(LinearCrossEntropyCase("fp32", 70, 24, 1001), Rank())

    def drops_improbable(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        used = torch.zeros(weight.size(0), 1).index_fill_(0, target, 1.0)
        return plain_loss(hidden, weight * used + weight.detach() * (1 - used), target)

    errors = problem.errors(drops_improbable, None)
    assert errors["loss"].ok
    assert not errors["dw off target"].ok


def test_in_place_gradient_is_restored_before_every_sample() -> None:
    worker = Worker(CrossEntropyCase("bf16", 70, 1001), Rank())
    worker.sample("fastpar in place", 2)
    assert all(e.ok for e in worker.check("fastpar in place").values())


def test_linear_providers_pass_their_check() -> None:
    worker = Worker(MlpCase("fp32", 33, 24, 40), Rank())
    for name in ("fastpar", "fastpar + sequence", "plain torch"):
        errors = worker.check(name)
        assert set(errors) == {"y", "dx", "dup", "ddown"}
        assert all(e.ok for e in errors.values()), (name, errors)


# ------------------------------------------------------------------------------------------------------ rank processes


@dataclass(frozen=True)
class RealCase:
    """Providers that show what the processes are."""

    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {}

    def build(self, rank: Rank) -> list[Provider]:
        def facts() -> dict[str, Error]:
            total = torch.tensor([float(rank.rank + 1)])
            dist.all_reduce(total)
            return {
                "sum": Error(float(total), 0.0),
                "huge pages": Error(float(os.environ["THP_MEM_ALLOC_ENABLE"]), 0.0),
                "threads": Error(float(torch.get_num_threads()), 0.0),
                "rank": Error(float(rank.rank), 0.0),
            }

        def sleep() -> None:
            time.sleep(0.05 * rank.rank)

        def fail_together() -> None:
            raise OSError("no such luck")

        def fail_alone() -> None:
            if rank.rank == 1:
                print("last words")
                raise OSError("rank 1 only")

        return [
            Provider("facts", "torch", lambda: None, check=facts),
            Provider("sleep", "torch", sleep),
            Provider("64 MB", "torch", lambda: torch.ones(16 << 20), warm=lambda: torch.ones(8)),
            Provider("fails", "torch", fail_together),
            Provider("fails alone", "torch", fail_alone),
        ]


@pytest.mark.ranks  # of bench/, which is not looked into
@pytest.mark.clock
def test_process_lane_runs_ranks_under_a_setting_and_reports_failures() -> None:
    before = dict(os.environ)
    with ProcessLane(TUNED, world_size=2, threads=1, timeout=60.0) as lane:
        assert dict(os.environ) == before
        assert [info.name for info in lane.build(RealCase())][:2] == ["facts", "sleep"]
        facts = {name: error.value for name, error in lane.check("facts").items()}
        assert facts == {"sum": 3.0, "huge pages": 1.0, "threads": 1.0, "rank": 1.0}
        seconds, cpu = lane.sample("sleep", 2)
        assert all(0.05 <= s < 1.0 for s in seconds)  # rank 0 does not sleep; the slowest counts
        assert 0.0 <= cpu < 2.0
        assert 63 << 20 <= lane.memory("64 MB") < 70 << 20
        with pytest.raises(ProviderError, match="no such luck"):
            lane.sample("fails", 1)
        lane.sample("sleep", 1)  # the lane is still usable
        processes = list(lane._processes)
        with pytest.raises(LaneError, match=r"(?s)ranks \[1\] failed.*rank 1 only.*last words"):
            lane.sample("fails alone", 1)
        assert not any(p.is_alive() for p in processes)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA graphs whose replays call again; what has happened."""
    happened: list[str] = []

    class Graph:
        def replay(self) -> None:
            happened.append("replay")

    @contextlib.contextmanager
    def record(graph: Graph) -> Iterator[None]:
        happened.append("record")
        yield

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    return happened


def test_a_provider_is_recorded_once_and_replays_are_timed(graphs: list[str]) -> None:
    def call() -> list[torch.Tensor]:
        graphs.append("call")
        return [torch.tensor(float(len(graphs)))]

    recorded = Recorded(call)
    first, second = recorded(), recorded()
    assert graphs == ["call", "record", "call", "replay", "replay"]
    assert first is second  # what the replays write


def test_the_launch_before_a_recording_is_undone(graphs: list[str]) -> None:
    moved, seen = torch.ones(3), []

    def call() -> None:
        seen.append(moved.clone())
        if not graphs:  # a capture launches nothing
            moved.add_(1.0)

    Recorded(call, [moved])()
    assert [x.tolist() for x in (*seen, moved)] == 3 * [[1.0, 1.0, 1.0]]
