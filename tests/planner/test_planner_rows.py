"""The planner's time and memory against published measurements (tests/data/planner_rows.csv, with sources).

One number is fitted for each stack, the efficiency of its GEMMs, on some of its rows; the others are judged. Sets A, C,
F and G have shaped the model (which effects it has); of E, J and H only the scalar was fitted, to two rows or a few.
Set A's microbatches and stages per rank are those of the authors' scripts; E gives no stages per rank, and
tests/planner/planner_rows.py says what was assumed.
"""

import csv
import dataclasses
import functools
import io
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from fastpar.planner.machine import Machine
from fastpar.planner.memory import in_flight, kept_activations, predict_memory
from tests.planner.planner_rows import PublishedRow, fit, read_rows

GOLDEN = Path(__file__).parents[1] / "data" / "planner_predictions.csv"
_OVERLAPS = {"E": 0.7, "J": 0.7}  # FSDP sends behind backward; the other stacks reduce after it


@functools.cache
def timed(kind: str) -> list[PublishedRow]:
    return [row for row in read_rows() if row.kind == kind and row.seconds and not row.work.model.experts]


def stack_of(machine: Machine, efficiency: float, kind: str) -> Machine:
    return dataclasses.replace(machine, efficiency=efficiency, overlap=_OVERLAPS.get(kind, 0.0))


@functools.cache
def judged(kind: str) -> tuple[list[tuple[PublishedRow, float]], dict[str, float]]:
    """(row, error) of the rows that were not fitted, and the efficiencies by stack."""
    stacks: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in timed(kind):
        recipe = row.values["precision"] if kind in ("E", "J") else ""
        stacks[f"{row.values['gpu']} {recipe}".strip()].append(row)
    found, efficiencies = [], {}
    for name, rows in stacks.items():
        fitted = rows[::2] if kind in ("F", "G", "A") else rows[:: max(1, len(rows) // 2)][:2]
        if kind == "J" and len(rows) > 16:
            fitted = rows[::8]
        efficiency = fit(fitted, lambda machine, value: stack_of(machine, value, kind), 0.05, 1.0)
        efficiencies[name] = efficiency
        found += [(row, row.error(stack_of(row.machine, efficiency, kind))) for row in rows if row not in fitted]
    return found, efficiencies


def mape(errors: Sequence[float]) -> float:
    return statistics.mean(map(abs, errors))


@pytest.mark.parametrize(
    ("kind", "target", "rows"),
    [("A", 0.12, 5), ("C", 0.08, 6), ("F", 0.13, 60), ("G", 0.13, 54), ("E", 0.18, 22), ("J", 0.12, 85)],
)
def test_published_steps_are_predicted_within_the_target(kind: str, target: float, rows: int) -> None:
    found, _ = judged(kind)
    assert len(found) >= rows
    assert mape([error for _, error in found]) <= target


def test_85_percent_of_the_steps_of_vtrain_are_within_20_percent() -> None:
    errors = [error for _, error in judged("G")[0]]
    assert sum(abs(error) < 0.2 for error in errors) / len(errors) >= 0.85


def test_stacks_on_one_gpu_differ_and_their_efficiencies_are_plausible() -> None:
    for kind in ("A", "C", "F", "G", "E", "J"):
        for name, efficiency in judged(kind)[1].items():
            assert 0.2 < efficiency < 0.9, (kind, name)
    assert judged("F")[1]["A100-80"] < judged("A")[1]["A100-80"]


@pytest.mark.parametrize("row", [row for row in read_rows() if row.kind == "Cm"], ids=lambda row: row.id)
def test_activations_are_korthikantis_values(row: PublishedRow) -> None:
    """Figure 1 of arXiv:2205.05198: 18 bytes of 12 l h^2 / (t p), and the activations of the first stage."""
    assert row.mem_bytes is not None
    work, x, model = row.work, row.table(), row.work.model
    static = 18 * 12 * model.layers * model.hidden**2 / (x.tp * x.pp)
    kept = in_flight(x) * model.layers / x.pp * kept_activations(work, x)
    unit = 2**30 if "GiB" in row.values["mem_kind"] else 1e9
    text = row.values["mem_kind"].split("+ ")[-1].split(" GiB")[0]
    assert float(kept[0]) / unit == pytest.approx(float(text), rel=1e-6)
    assert float(static[0] + kept[0]) / 1e9 == pytest.approx(row.mem_bytes / 1e9, rel=1e-6)


def test_allocated_memory_of_megatron_is_within_6_percent() -> None:
    rows = [row for row in read_rows() if row.kind == "H" and row.mem_bytes and "gpt3_7b" in row.id]
    errors = [float(row.memory().total[0]) / row.mem_bytes - 1.0 for row in rows if row.mem_bytes]
    assert len(errors) == 6
    assert max(map(abs, errors)) <= 0.06


def device_offset(rows: Sequence[PublishedRow]) -> float:
    """What nvidia-smi counts beside tensors, in bytes: one number for the stack, fitted to every eighth row."""
    return statistics.median(row.mem_bytes - float(row.memory().total[0]) for row in rows[::8] if row.mem_bytes)


def test_device_memory_of_bigscience_is_within_6_percent_and_ooms_are_told() -> None:
    rows = [row for row in read_rows() if row.kind == "F"]
    seen = [row for row in rows if row.mem_bytes and "low" not in row.values["confidence"]]
    offset = device_offset(seen)
    judged_rows = [row for row in seen if row not in seen[::8]]
    errors = [(float(row.memory().total[0]) + offset) / row.mem_bytes - 1.0 for row in judged_rows if row.mem_bytes]
    assert len(errors) >= 70
    assert mape(errors) <= 0.06
    limit = 80 * 2**30
    told = [row for row in rows if row.is_oom and float(row.memory().total[0]) + offset > limit]
    assert len(told) >= 5
    assert not [row.id for row in seen if float(row.memory().total[0]) + offset > limit]


@pytest.mark.parametrize(("kind", "share"), [("B", 0.8), ("N", 0.9)])
def test_weak_sources_are_ordered(kind: str, share: float) -> None:
    """Rows without schedule or recomputation, or of ZeRO-3 far beyond its use: pairs that differ by a half and more."""
    rows = timed(kind)
    efficiency = fit(rows, lambda machine, value: stack_of(machine, value, kind), 0.05, 1.0)
    flops = [(row, float(row.predict(stack_of(row.machine, efficiency, kind)).step[0])) for row in rows]
    pairs = [
        (a, b) for a in flops for b in flops if a[0].seconds and b[0].seconds and a[0].seconds > 1.5 * b[0].seconds
    ]
    assert len(pairs) > 30
    assert sum(a[1] > b[1] for a, b in pairs) / len(pairs) >= share


# ---- what a chosen layout would have cost ----------------------------------------------------------------------------


def regrets(kind: str) -> dict[str, tuple[float, bool, int]]:
    """By model, ranks and batch: measured seconds of the layout predicted best, over the least, minus 1; whether the
    group has steps at the floor or cliffs; layouts."""
    groups: dict[tuple, list[PublishedRow]] = defaultdict(list)
    efficiency = statistics.median(judged(kind)[1].values())
    for row in timed(kind):
        groups[(row.work.model, row.machine.gpus, row.work.batch)].append(row)
    found = {}
    for (model, gpus, batch), rows in groups.items():
        if len({row.layout for row in rows}) < 4:
            continue
        stack = [
            (float(row.predict(stack_of(row.machine, efficiency, kind)).step[0]), row.seconds or 0.0) for row in rows
        ]
        chosen, best = min(stack)[1], min(seconds for _, seconds in stack)
        cliffs = bool(model.head_dim % 8) or any(row.work.model.layers % row.layout.pp for row in rows)
        found[f"{model.name} {gpus} {batch} {model.heads}"] = (chosen / best - 1.0, cliffs, len(rows))
    return found


# Second iterations on Jean Zay: two sequences a microbatch cost 9 % more than four under tp 8, and nothing tells why.
KNOWN_REGRETS = {"bloom-196B 384 2048 64": 0.12, "bloom-181B 384 2016 64": 0.12}


def test_the_predicted_best_of_several_published_layouts_costs_at_most_5_percent_more() -> None:
    found = {**regrets("G"), **regrets("F")}
    plain = {name: regret for name, (regret, is_flagged, _) in found.items() if not is_flagged}
    assert len(plain) >= 8
    assert sum(count for _, _, count in found.values()) >= 150
    assert not {name: regret for name, regret in plain.items() if regret > KNOWN_REGRETS.get(name, 0.05)}, plain


# ---- the golden file -------------------------------------------------------------------------------------------------


def predictions() -> str:
    """Every row's predicted step and memory, at the machine of its GPU: what a change of the model moves."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["id", "layout", "predicted_s", "measured_s", "predicted_GB", "measured_GB"])
    for row in read_rows():
        memory = predict_memory(row.machine, row.work, row.table())
        seconds = f"{row.seconds:.4g}" if row.seconds else ""
        measured = f"{row.mem_bytes / 1e9:.4g}" if row.mem_bytes else ""
        step, total = float(row.predict().step[0]), float(memory.total[0]) / 1e9
        writer.writerow([row.id, row.layout.words, f"{step:.4g}", seconds, f"{total:.4g}", measured])
    return out.getvalue()


def test_predictions_are_those_of_the_golden_file() -> None:
    """Write it anew after a change that is meant: python -m tests.planner.test_planner_rows"""
    assert predictions().splitlines() == GOLDEN.read_text().splitlines()


if __name__ == "__main__":
    GOLDEN.write_text(predictions())
