"""Plans beside other plans, layouts and measured steps, and plans that apply themselves."""

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fastpar as fp
from fastpar.cli import main
from fastpar.layouts import LayoutError, ModelShape
from fastpar.planner import Measurement, Plan, find_model


@pytest.fixture(scope="module")
def found() -> Plan:
    return fp.plan("llama-2-7b", "a100x16", batch=32, seq=2048)


def test_a_plan_beside_a_layout_has_the_parts_of_both_and_their_sums(found: Plan) -> None:
    rows = found.compare("pp4 tp4 mb32 full")
    assert rows.columns == (found.layout.words, "pp4 tp4 mb32 full")
    assert rows["step"].left == found.prediction.seconds
    assert rows["step"].change > 0
    parts = sum(row.right for row in rows.rows if row.unit == "s" and row.name != "step")
    assert parts == pytest.approx(rows["step"].right, rel=0.03)
    assert "pp4 tp4" in str(rows)
    with pytest.raises(LayoutError):
        found.compare("tp4")
    lacking = dataclasses.replace(found, limit=1)
    assert "lacks" in str(lacking.compare("pp4 tp4 mb32 full"))
    with pytest.raises(KeyError, match="there is no row"):
        rows["stepp"]


def test_two_plans_are_compared_if_they_are_for_the_same_step(found: Plan, tmp_path: Path) -> None:
    pinned = fp.plan("llama-2-7b", "h100x16", batch=32, seq=2048, pin={"tp": 4})
    rows = found.compare(pinned)
    assert (rows["step"].left, rows["step"].right) == (found.prediction.seconds, pinned.prediction.seconds)
    assert rows["memory"].right == pinned.prediction.peak
    with pytest.raises(ValueError, match="differ in batch"):
        found.compare(fp.plan("llama-2-7b", "a100x16", batch=64, seq=2048))
    for plan, name in ((found, "a.json"), (pinned, "b.json")):
        plan.save(tmp_path / name)
    assert main(["explain", str(tmp_path / "a.json"), "--versus", str(tmp_path / "b.json")]) == 0


def test_predicted_is_laid_beside_measured(found: Plan, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    step = found.prediction.seconds
    ten = (9.0 * step, 3.0 * step, *(1.1 * step,) * 8)
    rows = found.compare(Measurement(ten, memory=(1.2 * found.prediction.peak,)))
    assert rows["step"].change == pytest.approx(0.1)
    assert rows["memory"].change == pytest.approx(0.2)
    assert "within the error bar" in str(rows)
    assert "outside the error bar" in str(found.compare(Measurement((2.0 * step,))))
    with pytest.raises(ValueError, match="ranks"):
        found.compare(Measurement((step,), memory=(1.0,) * (len(found.prediction.ranks) + 2)))
    for wrong in ({"seconds": ()}, {"seconds": (0.0,)}, {"seconds": (1.0,), "memory": (-1.0,)}):
        with pytest.raises(ValueError, match="must be"):
            Measurement(**wrong)
    path = tmp_path / "plan.json"
    found.save(path)
    assert main(["explain", str(path), "--measured", "0.5", "0.6", "--peak", "58GB"]) == 0
    out = capsys.readouterr().out
    assert "predicted" in out
    assert "58.00 GB" in out
    with pytest.raises(SystemExit):
        main(["explain", str(path), "--peak", "58GB"])


def test_ranks_of_a_pipeline_are_compared_one_by_one() -> None:
    found = fp.plan("llama-2-7b", "a100x16", batch=32, seq=2048, pin={"pp": 2})
    peaks = [sum(rank.values()) for rank in found.prediction.ranks]
    rows = found.compare(Measurement((1.0,), memory=(peaks[0], 2 * peaks[1])))
    assert [row.change for row in rows.rows[1:]] == pytest.approx([0.0, 1.0])


def test_a_plan_applies_itself_by_assemble(found: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module = ModuleType("fastpar.assembly.api")
    module.assemble = lambda *args, **options: calls.append((args, options)) or "trained"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastpar.assembly", ModuleType("fastpar.assembly"))
    monkeypatch.setitem(sys.modules, "fastpar.assembly.api", module)
    shape = find_model("llama-2-7b")
    assert found.apply(shape, optimizer=list, max_norm=1.0) == "trained"
    assert calls == [((shape, found.layout, list), {"precision": "bf16", "max_norm": 1.0})]
    found.apply(shape, list, precision="fp32")
    assert calls[-1][1] == {"precision": "fp32"}
    with pytest.raises(ValueError, match="layers 32, but the model has 40"):
        found.apply(find_model("llama-2-13b"), list)
    for change, words in (({"ffn": 8192}, "ffn 11008, but the model has 8192"), ({"kv_heads": 8}, "kv_heads 32")):
        with pytest.raises(ValueError, match=words):
            found.apply(dataclasses.replace(shape, **change), list)
    assert len(calls) == 2


def test_a_module_of_another_size_than_the_plans_is_refused_also_where_its_configuration_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    api = ModuleType("fastpar.assembly.api")
    api.assemble = lambda *_, **__: "trained"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastpar.assembly.api", api)
    shape = ModelShape("plain", layers=1, hidden=32, ffn=128, vocab=64, heads=4)
    found = fp.plan(shape, "h100x1", batch=1, seq=64)
    for config in (None, {"hidden_size": 32, "mamba_d_state": 4}):
        module = torch.nn.Linear(32, shape.parameters // 32, bias=False)
        module.config = config  # type: ignore[assignment]
        assert found.apply(module, list) == "trained"
        module.extra = torch.nn.Linear(64, 64)
        with pytest.raises(ValueError, match="but the module has"):
            found.apply(module, list)
