"""The `fastpar` command: exit status and texts; the doctor on a healthy and on a broken installation."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.rows import load
from fastpar import _ext, cli
from fastpar._version import __version__
from fastpar.doctor import Finding, installation, probes
from fastpar.storage import TensorStore, Transfer
from tests.dist import run_ranks

ROOT = Path(__file__).resolve().parents[2]
BENCHES = sorted(path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py"))


def test_version_and_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in ((["--version"], 0), (["--help"], 0), ([], 2), (["simulate"], 2), (["doctor", "--no"], 2)):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == status, arguments
    assert __version__ in capsys.readouterr().out


def test_module_runs_as_the_command_without_importing_torch() -> None:
    code = (
        "import sys; from fastpar.cli import main; sys.exit(main(['bench', 'nothing']) + 10 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    done = subprocess.run([sys.executable, "-m", "fastpar", "--version"], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, f"fastpar {__version__}\n")


def test_unknown_bench_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "crossentropy"]) == 2
    assert f"'crossentropy'; there are: {', '.join(BENCHES)}" in capsys.readouterr().err


def test_bench_outside_a_checkout_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    assert cli.main(["bench", "cross_entropy"]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert "pip install -e ." in error


def test_bench_help_lists_benches_and_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    assert ",".join(BENCHES) in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "linear", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--dtype", "--ranks", "--threads", "--iters", "--blocks", "--tokens", "--json", "--no-save", "--plot"):
        assert flag in text


@pytest.mark.parametrize("flags", [["--dtype", "fp8"], ["--ranks", "0"], ["--settings", "fast"], ["--tokens", "x"]])
def test_bad_bench_flags_exit_with_2_and_say_why(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "cross_entropy", *flags])
    assert stop.value.code == 2
    assert repr(flags[1]) in capsys.readouterr().err


@pytest.mark.expensive
def test_quick_bench_checks_times_saves_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    flags = ["--quick", "--dtype", "fp32", "--ranks", "1", "--settings", "default", "--only", "fastpar", "--no-memory"]
    assert cli.main(["bench", "cross_entropy", *flags, "--json", str(path), "--plot"]) == 0
    data = load(path)
    fresh = next(row for row in data["rows"] if row["provider"] == "fastpar fresh gradient")
    assert fresh["ms"]["samples"] == 6
    assert fresh["case"] == {"dtype": "fp32", "tokens": 256, "vocab": 8192, "ranks": 1, "threads": 2}
    run = data["runs"][fresh["run"]]
    assert run["command"] == f"fastpar bench cross_entropy {' '.join(flags)} --json {path} --plot"
    assert run["versions"]["torch"] == torch.__version__
    assert {"cpu", "cores", "memory_gib", "gpus"} <= set(run["machine"])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "fastpar in place" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------ simulate


def test_simulate_prints_a_row_per_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["simulate", "--schedule", "1f1b,gpipe,zb_h1", "-p", "4", "-m", "8", "--costs", "10,20,6", "--memory", "4"]
    assert cli.main(flags) == 0
    assert capsys.readouterr().out == (
        "4 ranks, 8 microbatches; F, I, W = 10, 20, 6; hop 0\n"
        "\n"
        "schedule  makespan  idle   bubble  kept until I  kept until W  messages  fits 4\n"
        "1f1b           396   108  27.27 %             4             4        48     yes\n"
        "gpipe          396   108  27.27 %             8             8        48      no\n"
        "zb_h1          360    72  20.00 %             4             4        48     yes\n"
    )


def test_simulate_divides_costs_and_activations_among_the_stages_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Interleaving v stages divides the bubble of 1F1B, (p-1)(F+I+W), by v."""
    flags = ["simulate", "-s", "1f1b,interleaved", "-p", "4", "-m", "8", "-v", "3", "--hop", "1/3"]
    assert cli.main(flags[:-2]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows[0][:3] == ["1f1b", "33", "9"]
    assert rows[1][1:3] == ["27", "3"]
    assert rows[1][5:7] == ["5", "5"]  # (2 * 4 + 2 * 3 + 1) / 3
    assert cli.main(flags) == 0
    assert "hop 0.333333" in capsys.readouterr().out


def test_simulate_writes_pictures_traces_and_schedules_and_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fastpar.pipeline import Schedule, Timeline, make_schedule, simulate
    from fastpar.pipeline.simulation.plot import plot

    schedule = make_schedule("zb_h1", 3, 4)
    names = {flag: str(tmp_path / f"out.{flag}") for flag in ("png", "svg", "trace", "csv")}
    flags = ["-s", "zb_h1", "-p", "3", "-m", "4", "--text", "--arrows", "--png", names["png"], "--svg", names["svg"]]
    assert cli.main(["simulate", *flags, "--trace", names["trace"], "--save-csv", names["csv"]]) == 0
    assert capsys.readouterr().out.endswith(f"\nzb_h1\n{simulate(schedule).timeline.to_text()}\n")
    assert Path(names["png"]).read_bytes().startswith(b"\x89PNG")
    for arrows in (True, False):
        plot(simulate(schedule).timeline, tmp_path / "want.svg", arrows=arrows)
        assert Path(names["svg"]).read_text() == (tmp_path / "want.svg").read_text()
        assert cli.main(["simulate", "-s", "zb_h1", "-p", "3", "-m", "4", "--svg", names["svg"]]) == 0
    capsys.readouterr()
    assert Timeline.from_chrome_trace(names["trace"]) == simulate(schedule).timeline
    assert Schedule.from_csv(Path(names["csv"])).actions == schedule.actions
    assert cli.main(["simulate", "--csv", names["csv"], "-s", "naive"]) == 0
    read, naive = (line.split() for line in capsys.readouterr().out.splitlines()[3:])
    assert read[:2] == ["out", str(simulate(schedule).makespan)]
    assert naive[:2] == ["naive", str(3 * 4 * 3)]


def test_simulate_all_has_every_schedule_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    from fastpar.pipeline import schedule_names

    assert cli.main(["simulate", "-s", "all", "-p", "4", "-m", "7"]) == 0
    text = capsys.readouterr().out
    for name in schedule_names():
        assert re.search(rf"^({name}\b.*%|left out: {name}: \w)", text, re.MULTILINE), name


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--schedule or --csv is needed"),
        (["-s", "1f1b"], "--schedule needs -p and -m"),
        (["-s", "1f2b", "-p", "2", "-m", "2"], "did you mean 1f1b"),
        (["-s", "1f1b", "-p", "0", "-m", "2"], "'0' is not a whole number from 1 on"),
        (["-s", "1f1b", "-p", "2", "-m", "2", "-v", "2"], "-v 2: 1f1b has one stage per rank"),
        (["-s", "1f1b", "-p", "2", "-m", "2", "--costs", "1,2"], "three numbers, of F, I and W, got 2"),
        (["-s", "1f1b", "-p", "2", "-m", "2", "--costs", "1,2,x"], "'x' is not a number"),
        (["-s", "1f1b", "-p", "2", "-m", "2", "--hop", "-1"], "'-1' is negative"),
        (["-s", "1f1b", "-p", "2", "-m", "2", "--overlap", "min"], "'min' is not a number"),
        (["-s", "1f1b", "-p", "2", "-m", "2", "--png", "a.jpg"], "ends in .png, got 'a.jpg'"),
        (["-s", "1f1b", "-p", "2", "-m", "2", "--arrows"], "--arrows needs --png or --svg"),
        (["-s", "1f1b,gpipe", "-p", "2", "-m", "2", "--trace", "a.json"], "--trace takes one schedule, got 2"),
        (["-s", "1f1b,gpipe", "-p", "2", "-m", "2", "--save-csv", "a"], "--save-csv takes one schedule, got 2"),
        (["--csv", "/nowhere/a.csv"], "No such file"),
        (["--speed"], "--speed"),
    ],
)
def test_bad_simulate_flags_exit_with_2_and_say_why(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["simulate", *flags])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0\n1F0,oops\n", "line 2, column 2: 'oops'"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "rank 1 at 1F1 waits"),
    ],
)
def test_simulate_exits_with_1_where_a_file_holds_no_schedule_that_runs(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text(text)
    try:
        status = cli.main(["simulate", "--csv", str(tmp_path / "bad.csv")])
    except SystemExit as stop:
        status = stop.code
    assert status == 1
    assert says in capsys.readouterr().err


def test_simulate_needs_no_torch() -> None:
    flags = ["simulate", "-s", "1f1b", "-p", "2", "-m", "2"]
    code = f"import sys; from fastpar.cli import main; main({flags}); sys.exit(10 * ('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240).returncode == 0


# -------------------------------------------------------------------------------------------------------------- doctor


@pytest.mark.ranks
@pytest.mark.expensive
def test_doctor_finds_a_healthy_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "healthy"
    for words in (
        "LibTorch stable ABI",
        torch.__version__,
        "gloo yes",
        "exchange through memory",
        *(f"ok  {probe.topic}" for probe in probes.PROBES),
    ):
        assert words in text


def test_doctor_says_why_ranks_cannot_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    (finding,) = installation.check_shared_memory()
    assert finding.status == "warning"
    assert "Operation not permitted" in finding.text
    assert "seccomp" in finding.remedy


@pytest.mark.expensive
@pytest.mark.parametrize("content", [None, "not a library"])
def test_doctor_reports_a_missing_or_broken_binary_with_a_remedy(content: str | None, tmp_path: Path) -> None:
    binary = tmp_path / "_C.so"
    if content is not None:
        binary.write_text(content)
    environment = {**os.environ, "FASTPAR_LIBRARY": str(binary)}
    command = [sys.executable, "-m", "fastpar", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["healthy"] is False
    found = {f["topic"]: f for f in answer["findings"]}
    assert found["binary"]["status"] == ("problem" if content is None else "ok")
    assert found["extension"]["status"] == "problem"
    assert str(binary) in found["extension"]["text"]
    assert "pip install -e ." in found["extension"]["remedy"]
    assert found["probes"]["text"].startswith("not run")
    assert "Traceback" not in done.stderr


def read_nothing(store: TensorStore, name: str, out: torch.Tensor) -> Transfer:
    return store.write("other", out.fill_(torch.nan))


def fail(*_: object) -> None:
    raise OSError("no such device")


def doctor_of_broken_ranks(broken: dict[int, Callable[..., Any]]) -> Finding:
    (probe,) = (probe for probe in probes.PROBES if probe.topic == "storage")
    with pytest.MonkeyPatch.context() as patch:
        if (rank := torch.distributed.get_rank()) in broken:
            patch.setattr(TensorStore, "read", broken[rank])
        return probes.agreed(probe)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({1: fail}, "rank 1: fails: OSError: no such device"),
        ({1: read_nothing}, "rank 1: WRONG: relative error nan"),
        ({0: read_nothing, 1: fail}, "rank 0: WRONG"),
    ],
)
def test_what_is_wrong_on_one_rank_is_a_problem_that_names_it(broken: dict[int, Any], text: str) -> None:
    for found in run_ranks(2, doctor_of_broken_ranks, broken):
        assert (found.topic, found.status) == ("storage", "problem")
        assert found.text.startswith(text)
        assert "fp.storage.TensorStore" in found.remedy


def test_a_rank_that_ends_early_names_the_probe_and_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = probes.PROBES[:2]
    line = json.dumps(asdict(Finding(first.topic, "ok", "fine")))
    ends = iter([(line, ""), ("", "ended with exit status -4: Illegal instruction")])
    monkeypatch.setattr(probes, "_end_of", lambda process, deadline: next(ends))
    monkeypatch.setattr(probes.subprocess, "Popen", lambda *_, **__: None)
    found = probes.findings()
    assert [finding.topic for finding in found] == [probe.topic for probe in probes.PROBES]
    assert [finding.status for finding in found] == ["ok", "problem", *["info"] * (len(found) - 2)]
    assert found[1].text == "fails: rank 1 ended with exit status -4: Illegal instruction"
    assert second.parts in found[1].remedy


def test_a_problem_is_counted_and_makes_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probes, "findings", lambda: [Finding("x", "problem", "broken", "mend it")] * 2)
    assert cli.main(["doctor"]) == 1
    assert "2 problems" in capsys.readouterr().out


def test_the_abi_verdict_names_a_symbol_that_is_not_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    binary = Path(_ext.library_path())
    (found,) = installation.check_abi(binary)
    assert found.status == "ok"
    names = ["aoti_torch_get_dim", "_ZNK2at10TensorBase4sizeEl"]
    monkeypatch.setattr(installation, "undefined_symbols", lambda path: names)
    (found,) = installation.check_abi(binary)
    assert found.status == "problem"
    assert "_ZNK2at10TensorBase4sizeEl" in found.text
    monkeypatch.setattr(installation, "undefined_symbols", lambda path: None)
    assert installation.check_abi(binary)[0].text.startswith("not checked")


def test_unstable_symbols_are_those_of_torch_and_python() -> None:
    unstable = [
        "_ZN3c105ErrorC1Ev",
        "_ZNK2at10TensorBase4sizeEl",
        "_ZN5torch3jit4loadEv",
        "_ZTIN3c105ErrorE",
        "PyList_New",
    ]
    stable = ["aoti_torch_get_dim", "torch_parallel_for", "_ZNSt6vectorIiE4sizeEv", "memcpy", "__cxa_throw"]
    assert [installation.is_unstable(name) for name in unstable + stable] == [True] * 5 + [False] * 5


def test_a_problem_without_a_remedy_is_not_allowed() -> None:
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding("x", "problem", "broken")
