"""A kept launch is the one that Triton would make: against Triton's own, with its compiler and driver stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
launching: Any = pytest.importorskip("fastpar.kernels.launch")

CPU = torch.device("cpu")
SCALE = tl.constexpr(2)


@triton.jit(do_not_specialize=["free"])
def example_kernel(x, y, count, free, scale, BLOCK: tl.constexpr, FLAG: tl.constexpr = False):
    tl.store(x, SCALE)


@triton.jit
def annotated_kernel(x, factor: tl.float64, count: tl.int64, flag: tl.int1, BLOCK: tl.constexpr):
    tl.store(x, factor)


@triton.jit
def constant_first_kernel(BLOCK: tl.constexpr, x):
    tl.store(x, BLOCK)


class Driver:
    device = 0

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> tuple[str, int]:
        return ("stream", device)


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, key: str, launched: list[Any]) -> None:
        self.key, self.launched = key, launched

    def launch_metadata(self, grid: Any, stream: Any, *arguments: Any) -> Any:
        return None

    def run(self, *arguments: Any) -> None:
        launch, hooks, given = arguments[:6], arguments[7:9], arguments[9:]
        for hook in hooks:
            if hook is not None:
                hook(self.key)
        self.launched.append(
            (self.key, launch, [(type(a), id(a) if isinstance(a, torch.Tensor) else a) for a in given])
        )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def compile_kernel(kernel: Any, key: str, signature: Any, device: int, *others: Any) -> Any:
        assert kernel.cache_key  # finds the globals that it uses, as compiling does
        compiled = kernel.device_caches[device][0][key] = Compiled(f"{device} {key}", found)
        return compiled

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", compile_kernel)
    monkeypatch.setattr(launching, "_LAUNCHES", {})
    for kernel in (example_kernel, annotated_kernel, constant_first_kernel):
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    drivers = triton.runtime.driver
    monkeypatch.setattr(drivers, "_active", Driver())
    return found


def kinds() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    x = torch.zeros(64)
    assert x.data_ptr() % 16 == 0
    options = {"BLOCK": 64, "num_warps": 4}
    for first in (x, x[1:], x[4:], x.double(), x.bfloat16(), x.int(), x.to(torch.float8_e4m3fn), None):
        yield (first, x, 5, 5, 1.0), options
    for count in (1, 2, 16, 17, 0, -16, 2**31 - 1, 2**31, 2**32, 2**63, True, False, 1.0, None):
        yield (x, x, count, 5, 1.0), options
        yield (x, x, 5, count, 1.0), options
    for change in (
        {"BLOCK": 128},
        {"FLAG": True},
        {"FLAG": 1},
        {"FLAG": 1.0},
        {"FLAG": None},
        {"num_warps": 8},
        {"num_stages": 4},
    ):
        yield (x, x[2:], 5, 5, 0.5), {**options, **change}
    yield (x, x, 5, 5, 1.0), {"num_warps": 4, "BLOCK": 64}
    yield (x, x, 5, 5, 1.0), {"num_warps": 64, "BLOCK": 4}
    yield (x, x, 5, 5, 1.0), {"BLOCK": tl.float32}
    yield (x, x, 5, 5, 1.0), {"BLOCK": tl.float64}


def triton_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    own = triton.runtime.jit.JITFunction.run
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda *a, **k: calls.append(a) or own(*a, **k))
    return calls


def test_a_kept_launch_is_tritons(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(grid, *case) for case in kinds() for grid in ((3,), (3, 2), (3, 2, 5))]
    for grid, arguments, options in cases:
        example_kernel[grid](*arguments, **options)
    expected = launched.copy()
    calls = triton_calls(monkeypatch)
    for _ in range(2):
        launched.clear()
        for grid, arguments, options in cases:
            launching.launch(example_kernel, grid, CPU, *arguments, **options)
        assert launched == expected
    assert 20 < len(calls) < len(cases)  # the first launch of each is Triton's
    calls.clear()
    launched.clear()
    for (programs, *_), arguments, options in cases[::3]:
        names = ("x", "y", "count", "free", "scale")
        launching.launch_named(example_kernel, programs, CPU, {**options, **dict(zip(names, arguments, strict=True))})
    assert launched == expected[::3]


def test_launches_of_kernels_with_annotated_arguments_are_kept(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(64)
    cases = [
        (y, f, c, b) for y in (x, x[1:]) for f in (1.0, 2.5, 1, 3) for c in (1, 5, 16, 2**40) for b in (True, False)
    ]
    for case in cases:
        annotated_kernel[(3,)](*case, BLOCK=64)
    expected = launched.copy()
    calls = triton_calls(monkeypatch)
    for _ in range(2):
        launched.clear()
        for case in cases:
            launching.launch(annotated_kernel, 3, CPU, *case, BLOCK=64)
        assert launched == expected
    assert 0 < len(calls) < len(cases)


def test_what_triton_looks_at_besides_is_looked_at(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    calls = triton_calls(monkeypatch)

    def run() -> int:
        """How often Triton was asked by two launches."""
        before = len(calls)
        for _ in range(2):
            launching.launch(example_kernel, 3, CPU, x, x, 5, 5, 1.0, BLOCK=64)
        return len(calls) - before

    assert (run(), run()) == (1, 0)
    monkeypatch.setattr(Driver, "device", 1)
    assert run() == 1
    assert launched[-1][0].startswith("1 ")
    assert launched[-1][1][3] == ("stream", 1)
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    assert run() == 1
    assert launched[-1][0] != launched[-3][0]
    monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", "consan")
    assert run() == 1
    assert launched[-1][0] != launched[-3][0]
    for name in ("launch_enter_hook", "launch_exit_hook"):
        told: list[Any] = []
        getattr(triton.knobs.runtime, name).add(told.append)
        assert run() == 2
        getattr(triton.knobs.runtime, name).remove(told.append)
        assert len(told) == 2
        assert run() == 0
    monkeypatch.setattr(example_kernel, "pre_run_hooks", [lambda *a, **k: None])
    assert run() == 2


def test_a_kernel_whose_globals_have_changed_raises(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    for _ in range(2):
        launching.launch(example_kernel, 3, CPU, x, x, 5, 5, 1.0, BLOCK=64)
    monkeypatch.setitem(globals(), "SCALE", tl.constexpr(3))
    with pytest.raises(RuntimeError, match="SCALE has changed"):
        launching.launch(example_kernel, 3, CPU, x, x, 5, 5, 1.0, BLOCK=64)


def test_a_kernel_that_is_not_like_others_is_launched_by_triton(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = triton_calls(monkeypatch)
    x = torch.zeros(64)
    for _ in range(2):
        launching.launch(constant_first_kernel, 3, CPU, 64, x)
        launching.launch(example_kernel, 3, CPU, x, x, 5, 5, 1.0, 64)
        launching.launch_named(constant_first_kernel, 3, CPU, {"BLOCK": 64, "x": x})
    assert len(calls) == 6
    with pytest.raises(TypeError, match="scale"):
        launching.launch_named(example_kernel, 3, CPU, {"x": x, "y": x, "count": 5, "free": 5, "BLOCK": 64})


@pytest.mark.parametrize("last", [1, 4])
def test_rows_of_contiguous_tensors_are_found_where_they_are(last: int) -> None:
    rows: Any = pytest.importorskip("fastpar.kernels.rows")
    for shape in ((), (1,), (3,), (2, 3), (1, 3), (2, 1, 3), (2, 3, 2)):
        x = torch.zeros(*shape, last)
        for other in (x, torch.zeros(*shape, last + 1)[..., :last]):
            inner, operands = rows.as_rows(x, other)
            for given, (found, outer, step) in zip((x, other), operands, strict=True):
                starts = [r // inner * outer + r % inner * step for r in range(given.shape[:-1].numel())]
                expected = torch.arange(len(starts)) * given.shape[-1] if found is not given else None
                flat = torch.arange(given.untyped_storage().nbytes() // 4).as_strided(given.shape, given.stride())
                assert starts == (flat[..., 0].flatten() if expected is None else expected).tolist()
