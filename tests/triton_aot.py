"""Compiles Triton kernels ahead of time, which needs no GPU, and reads what the compiler says about them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.markers import needs

Target = tuple[str, Any, int]  # arguments of triton.backends.compiler.GPUTarget

HOPPER = ("cuda", 90, 32)
MI300 = ("hip", "gfx942", 64)
SHARED_LIMIT = 227 * 1024  # bytes that one block may have on sm_90; 64 KiB on gfx942
LDS_LIMIT = 64 * 1024


@needs("device")
def compile_for(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: tuple[str, int | str, int],
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compile the @triton.jit function `fn` and report on it.

    signature   type of every argument that is not in `constexprs`, in Triton's words ("*bf16", "i64", "fp32"); ":16"
                at the end says that the value is divisible by 16, which Triton finds out by itself at a launch
    target      HOPPER or MI300: arguments of triton.backends.compiler.GPUTarget
    options     num_warps, num_stages, ...

    Returns registers (per thread), spills (bytes on sm_90, registers on gfx942), vector_spills (those that go to
    memory: AMD keeps scalar registers in lanes of vector registers), shared (bytes per block), ptx (the assembly
    text, of AMD too), wide_loads and wide_stores (how many 128-bit accesses to global memory are in it).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, name in enumerate(fn.arg_names):
        if name in constexprs:
            types[name] = "constexpr"
            continue
        types[name], _, divisor = signature[name].partition(":")
        if divisor:
            attributes[(position,)] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(fn=fn, signature=types, constexprs=dict(constexprs), attrs=attributes)
    return _report(triton.compile(source, target=GPUTarget(*target), options=dict(options or {})), target)


class CompilingDriver:
    """What Triton asks of a driver before it launches; in place of triton.runtime.driver._active it names the target of
    `compile_launch`."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*self.target)

    def get_current_device(self) -> int:
        return 1000 + self.target[2]  # no device of this machine: kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


def each_target(*modules: Any) -> Any:
    """A fixture that runs a test with HOPPER and with MI300 as what Triton compiles for.

    modules  that chose WARP_SIZE for this machine when they were imported
    """

    @pytest.fixture(params=[HOPPER, MI300], ids=["sm_90", "gfx942"])
    def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
        import triton

        chosen: Target = request.param
        for module in modules:
            monkeypatch.setattr(module, "WARP_SIZE", chosen[2])
        monkeypatch.setattr(torch.version, "hip", None if chosen == HOPPER else "6.4")
        monkeypatch.setattr(triton.runtime.driver, "_active", CompilingDriver(chosen))
        return chosen

    return target


@needs("device")
def compile_launch(
    kernel: Any, target: Target, programs: int, arguments: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Compile what kernel[(programs,)](*arguments, **options) would launch, and report as `compile_for`; and threads.

    A CompilingDriver of the target has to be in place.
    """
    result = kernel.warmup(*arguments, grid=(programs,), **options)
    return {**_report(result, target), "threads": result.metadata.num_warps * target[2]}


def loops(assembly: str) -> list[str]:
    """The text of every loop in PTX: from a label to a later branch back to it."""
    found = []
    for label in re.finditer(r"^(\$L\w+):", assembly, re.MULTILINE):
        back = re.search(rf"bra(?:\.uni)?\s+{re.escape(label[1])};", assembly[label.end() :])
        if back:
            found.append(assembly[label.end() : label.end() + back.start()])
    return found


def _report(kernel: Any, target: Target) -> dict[str, Any]:
    if target[0] == "cuda":
        found = _nvidia_usage(kernel.asm["ptx"], int(target[1]))
        found["wide_loads"] = len(re.findall(r"ld\.global\S*\.(?:v4\.b32|v2\.b64)", found["ptx"]))
        found["wide_stores"] = len(re.findall(r"st\.global\S*\.(?:v4\.b32|v2\.b64)", found["ptx"]))
    else:
        found = _amd_usage(kernel.asm["amdgcn"])
        found["wide_loads"] = len(re.findall(r"(?:global|buffer)_load_dwordx4", found["ptx"]))
        found["wide_stores"] = len(re.findall(r"(?:global|buffer)_store_dwordx4", found["ptx"]))
    return {**found, "shared": kernel.metadata.shared}


def _nvidia_usage(ptx: str, arch: int) -> dict[str, Any]:
    """Assembles the PTX once more, since only `ptxas -v` tells spills apart from other stack memory."""
    import triton

    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        name = re.search(r"^\.target (\S+?),?$", ptx, re.MULTILINE)
        gpu = name[1].rstrip(",") if name else f"sm_{arch}"
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={gpu}", str(source), "-o", f"{folder}/kernel"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert spills, report
    assert registers, report
    total = sum(map(int, spills))
    return {"registers": int(registers[1]), "spills": total, "vector_spills": total, "ptx": ptx}


def _amd_usage(assembly: str) -> dict[str, Any]:
    """The code object's notes hold the counts."""
    counts = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", assembly)}
    vector, scalar = counts["vgpr_spill_count"], counts["sgpr_spill_count"]
    return {"registers": counts["vgpr_count"], "spills": vector + scalar, "vector_spills": vector, "ptx": assembly}
