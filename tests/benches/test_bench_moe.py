"""The benches of experts: every provider that runs here is right before anything is timed, and flags are understood.

Those of CUDA alone are in tests/interpreted/check_bench_moe.py, as far as Triton's interpreter runs them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bench import bench_moe, bench_moe_push, bench_moe_route, bench_permute, options
from bench.bench_moe import MoeCase
from bench.bench_moe_route import RouteCase
from bench.harness import Provider, Rank


def providers_of(case: Any) -> dict[str, Provider]:
    """Those that are not roofs and can run."""
    return {p.name: p for p in case.build(Rank()) if p.kind != "roof" and not p.absent}


def assert_right(providers: dict[str, Provider], names: Sequence[str]) -> None:
    for name in names:
        errors = providers[name].check()
        assert errors, name
        assert all(error.ok for error in errors.values()), (name, errors)


def test_experts_are_right_in_both_passes_and_forward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> bench_moe.Block:
        raise ImportError("takes seconds to import")

    monkeypatch.setattr(bench_moe, "peer_block", missing)
    for passes in bench_moe.PASSES:
        case = MoeCase("fp32", 24, 32, 16, 4, 2, passes)
        providers = providers_of(case)
        assert_right(providers, ["fastpar"])
        assert list(providers["fastpar"].check()) == (["out"] if passes == "forward" else list(bench_moe.NAMES))
        assert providers["fastpar"].flops == (6 if passes == "forward" else 18) * 24 * 2 * 32 * 16
        providers["GEMMs alone"].call()


def test_the_composition_with_grouped_mm_is_right() -> None:
    problem = bench_moe.Problem(MoeCase("fp32", 24, 32, 16, 4, 2), Rank())
    block = bench_moe.grouped_block(problem)
    assert all(error.ok for error in problem.errors(block).values())
    with torch.no_grad():
        block.second[1, 0, 0] += 1.0
    assert not problem.errors(block)["out"].ok


def test_rows_of_forward_alone_are_not_those_of_both() -> None:
    assert "passes" not in MoeCase("fp32", 24, 32, 16, 4, 2).describe()
    assert MoeCase("fp32", 24, 32, 16, 4, 2, "forward").describe()["passes"] == "forward"


@pytest.mark.parametrize(("dtype", "passes"), [("fp32", "both"), ("fp32", "forward"), ("bf16", "both")])
@pytest.mark.parametrize("preset", ["deepseek_v3", "qwen3_moe"])
def test_routing_is_right_and_a_wrong_route_is_an_error(preset: str, dtype: str, passes: str) -> None:
    case = RouteCase(preset, dtype, 50, 32, passes)
    providers = providers_of(case)
    assert_right(providers, ["fastpar", "torch"])
    problem = bench_moe_route.Problem(case, "cpu")
    indices, weights, counts, *grads = problem.step(problem.fastpar())
    wrong = {
        "choices": (indices.flip(1), weights, counts, *grads),
        "weights": (indices, weights + 1e-4, counts, *grads),
        "counts": (indices, weights, counts + 1, *grads),
    }
    if grads:
        wrong["grad"] = (indices, weights, counts, 1.01 * grads[0])
    for name, results in wrong.items():
        assert not problem.errors(lambda results=results: results)[name].ok, name


@pytest.mark.parametrize(
    ("bench", "argv"),
    [
        (
            bench_moe,
            "--tokens 32768 --hidden 2048 --ffn 768 --experts 128 --top-k 8 --passes forward,both --only fastpar",
        ),
        (bench_permute, "--tokens 4096 --hidden 7168 --top-k 8 --experts 256"),
        (bench_moe_route, "--dtype fp32 --presets deepseek_v3 --tokens 4096 --experts 256"),
        (bench_moe_push, "--virtual-ranks 8 --tokens 4096 --hidden 7168 --top-k 8"),
    ],
    ids=["moe", "permute", "moe_route", "moe_push"],
)
def test_what_make_gpu_asks_for_makes_cases(bench: Any, argv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of tools/run_gpu.py, on a machine that has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found: list[Any] = []

    def run(given: options.Bench, flags: argparse.Namespace, command: Sequence[str]) -> int:
        options.apply_device(given, flags)
        found.extend(given.cases(flags, 1))
        assert command[:3] == ["fastpar", "bench", given.name]
        return 0

    monkeypatch.setattr(bench, "run", run)
    common = "--device cuda --dtype bf16 --ranks 1 --blocks 5 --iters 4"
    assert bench.main([*common.split(), *argv.split()]) == 0
    assert len(found) == {"moe": 2, "permute": 4, "moe_route": 2, "moe_push": 2}[bench.BENCH.name]
    assert len({str(case.describe()) for case in found}) == len(found)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for bench, argv, text in (
        (bench_moe, ["--passes", "backward"], "unknown passes 'backward'; choose from both, forward"),
        (bench_moe_route, ["--presets", "gpt"], "unknown preset 'gpt'; choose from mixtral"),
        (bench_moe_route, ["--passes", "backward"], "unknown passes 'backward'; choose from forward, both"),
    ):
        with pytest.raises(SystemExit):
            bench.main(argv)
        assert text in capsys.readouterr().err


def test_the_bench_of_pushed_rows_is_left_out_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_moe_push.main([]) == 0
    assert "nothing to measure on the CPU" in capsys.readouterr().err
