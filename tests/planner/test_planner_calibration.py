"""Calibrated machines: measured by ranks, read again, used by plans, and open about what was not measured."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import fastpar as fp
from fastpar.cli import main
from fastpar.layouts import Layout, ModelShape
from fastpar.planner import GemmTable, Machine, Workload, calibration, find_machine
from fastpar.planner.cost import predict
from fastpar.planner.layer_time import gemm_seconds
from fastpar.planner.table import LayoutTable
from tests.dist import run_ranks
from tests.planner.planner_ranks import TINY, calibrated

SMALL = ModelShape("small", layers=4, hidden=128, ffn=512, vocab=1000, heads=8, gated=True)


def test_ranks_agree_on_what_they_measured_and_plans_use_it(tmp_path: Path) -> None:
    first, second = run_ranks(2, calibrated)
    assert first == second
    machine = Machine.from_json(first)
    assert (machine.gpus, machine.per_node, machine.source) == (2, 2, "calibrated")
    assert machine.assumed == ("nic", "alpha_net")
    assert machine.gemm is not None
    assert max(map(max, machine.gemm.shares)) == 1.0
    assert min(machine.launch, machine.optimizer) > 0
    assert 0 < machine.efficiency <= 1
    assert set(machine.errors) == {"base", "floor"}
    path = tmp_path / "machine.json"
    machine.save(path)
    assert find_machine(path) == machine
    found = fp.plan(SMALL, str(path), batch=8, seq=128, precision="fp32")
    assert "nic, alpha_net were not measured" in str(found)
    assert "is not calibrated" not in str(found)
    assert found.prediction.error == pytest.approx(machine.errors["base"], rel=1.0)


def test_layers_are_measured_with_sequences_as_long_as_those_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rate depends on their length: of others, the efficiency would make up for attention."""
    shapes: list[tuple[int, ...]] = []
    forward = calibration._Layer.forward

    def recorded(self, x):
        shapes.append(tuple(x.shape))
        return forward(self, x)

    monkeypatch.setitem(calibration.SIZES, "cpu", TINY)
    monkeypatch.setattr(calibration._Layer, "forward", recorded)
    calibration._Bench("cpu", "fp32", 1.0, {}, 1)._fitted(find_machine("cpux1"))
    assert set(shapes) == {(2, 32, 32), (1, 16, 32)}


def test_a_measured_optimizer_takes_its_seconds_for_each_parameter_that_a_rank_owns() -> None:
    machine, work = dataclasses.replace(find_machine("cpu"), optimizer=1e-6), Workload(SMALL, 8, 128, "fp32")
    seconds = [predict(machine, work, LayoutTable.of([Layout.parse(text)], 8)) for text in ("dp2", "dp2 zero1")]
    found = [float(each.parts["optimizer"][0]) for each in seconds]
    assert found == pytest.approx([1e-6 * SMALL.parameters, 0.5e-6 * SMALL.parameters], rel=0.01)


def test_features_that_calibration_has_not_measured_are_named() -> None:
    machine = dataclasses.replace(find_machine("a100x8"), source="calibrated", errors={"base": 0.05})
    assert "not measured" not in str(fp.plan("llama-2-7b", machine, batch=32, seq=2048, pin={"schedule": "1f1b"}))
    forced = fp.plan("llama-2-7b", machine, batch=32, seq=2048, pin={"schedule": "zbv", "pp": 2})
    assert "calibration has not measured schedule" in str(forced)
    assert forced.prediction.error > 0.2


def test_a_table_of_rates_is_read_by_logarithms_and_ends_at_its_edges() -> None:
    table = GemmTable((100, 400), (10, 1000), ((0.2, 0.4), (0.6, 1.0)))
    share = table.share(np.array([100, 400, 200, 200, 1, 10**6]), np.array([10, 1000, 10, 100, 1, 10**6]))
    assert share == pytest.approx([0.2, 1.0, 0.4, 0.55, 0.2, 1.0])
    machine = dataclasses.replace(find_machine("a100x8"), gemm=table, efficiency=1.0, hbm=1e18, wave=0.0)
    forward, _ = gemm_seconds(machine, Workload(SMALL, 8, 128), np.array([200.0]), 100, 4000)
    assert float(forward[0]) == pytest.approx(2 * 200 * 100 * 4000 / (0.55 * 312e12))
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine
    for wrong in (((100, 100), (1,), ((1.0,), (1.0,))), ((1,), (1,), ((0.0,),)), ((1,), (1, 2), ((1.0,),))):
        with pytest.raises(ValueError, match="must"):
            GemmTable(*wrong)


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture) -> None:
    for wrong in (["--seconds", "0"], ["--precision", "fp8"], ["--seconds", "nan"]):
        with pytest.raises(SystemExit) as caught:
            main(["calibrate", "--out", "unused.json", *wrong])
        assert caught.value.code == 2
    assert "seconds must be at least 1" in capsys.readouterr().err
