"""The compiled library and the wheel: light checks that need no build beyond a few seconds of compiling."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fastpar import _ext
from tests import programs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return programs.load("_build/native.py")


def symbols(path: Path, *flags: str) -> list[str]:
    output = subprocess.run(["nm", *flags, str(path)], capture_output=True, text=True, check=True).stdout
    return output.splitlines()


needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")


@needs_nm
def test_the_library_uses_no_cpython_and_no_cplusplus_symbol_of_torch() -> None:
    undefined = [line.split()[-1] for line in symbols(_ext.library_path(), "-D", "--undefined-only")]
    assert any(name.startswith("aoti_torch_") for name in undefined), "this is not our library"
    assert [name for name in undefined if name.startswith(("Py", "_Py"))] == []
    assert [name for name in undefined if "c10" in name or "2at" in name or "5torch" in name] == []


@needs_nm
def test_what_only_a_cuda_torch_has_is_weak() -> None:
    lines = symbols(_ext.library_path(), "-D", "--undefined-only")
    # every torch has aoti_torch_device_type_cuda, which is a number
    cuda = [line.split() for line in lines if "cuda" in line and "device_type" not in line]
    assert all(kind in ("w", "v") for kind, _ in cuda), cuda
    assert bool(cuda) == bool(_ext.build_info()["cuda_archs"])


@needs_nm
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has several instruction sets")
@pytest.mark.expensive
@pytest.mark.parametrize(
    ("family", "isa"),
    [(family, isa) for family in ("cross_entropy", "attention") for isa in ("avx2", "avx512", "avx512bf16")]
    + [("attention", "amx")],
)
def test_files_of_one_instruction_set_define_no_symbol_that_could_replace_anothers(
    native: ModuleType, tmp_path: Path, family: str, isa: str
) -> None:
    # -O0 inlines nothing, so every inline function that the file uses is there to be seen.
    options = native.options_from_environment()
    source, target = ROOT / "csrc" / family / f"{family}_{isa}.cpp", tmp_path / "object.o"
    command = [flag for flag in native._compile_command(source, target, options) if flag != "-O3"]
    subprocess.run([*command, "-O0"], check=True, capture_output=True)
    weak = [line for line in symbols(target, "--defined-only") if line.split()[-2] in ("W", "V", "u")]
    assert weak == []


def test_the_library_follows_the_stable_abi() -> None:
    pytest.importorskip("torch_abi_audit")
    audit = Path(sys.executable).with_name("torch-abi-audit")
    command = [str(audit), "--check", "torch", str(_ext.library_path())]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_build_targets_the_torch_that_loading_asks_for(native: ModuleType) -> None:
    target = int(native.TORCH_TARGET, 16)
    assert (target >> 56, target >> 48 & 0xFF) == _ext.MIN_TORCH


def test_torch_is_found_without_importing_it() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT / '_build')!r}); import native; print(native.find_torch())"
    code += "; assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (Path(result.stdout.strip()) / "include").is_dir()


def test_the_build_asks_for_torch_only_where_there_is_none() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / '_build')!r}); import backend, native\n"
        "print(backend._torch_requirement()); backend.find_torch = lambda: None; print(backend._torch_requirement())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split("\n")[:2] == ["[]", "['torch>=2.11']"], result.stderr


def test_a_build_without_nvcc_says_so_in_one_line(native: ModuleType) -> None:
    options = native.Options(torch_dir=Path("/torch"), cxx="g++", cuda_archs=())
    assert native.describe(options).count("\n") == 0
    assert "CPU only (no nvcc on PATH, a CPU build of torch, or FASTPAR_CUDA=0)" in native.describe(options)
    cuda = native.Options(torch_dir=Path("/torch"), cxx="g++", cuda_archs=("90a",))
    assert "CPU + CUDA (sm_90a)" in native.describe(cuda)


def test_only_what_changed_is_compiled_again(
    native: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, header = tmp_path / "csrc" / "one.cpp", tmp_path / "csrc" / "one.h"
    source.parent.mkdir()
    header.write_text("constexpr int kValue = 1;\n")
    source.write_text('#include "one.h"\nextern "C" int value() { return kValue; }\n')
    (tmp_path / "csrc" / "two.cpp").write_text('extern "C" int other() { return 2; }\n')
    monkeypatch.setattr(native, "ROOT", tmp_path)
    options = native.options_from_environment()
    options = native.Options(options.torch_dir, options.cxx, ())
    compiled: list[str] = []

    def run(command: list[str]) -> str:
        compiled.extend(Path(part).name for part in command if part.endswith(".cpp"))
        output: str = native._run(command)
        return output

    output = tmp_path / "_C.so"
    native.build(output, options, run)
    assert sorted(compiled) == ["one.cpp", "two.cpp"]
    compiled.clear()
    native.build(output, options, run)
    assert compiled == []
    header.write_text("constexpr int kValue = 3;\n")
    native.build(output, options, run)
    assert compiled == ["one.cpp"]


def test_the_wheel_is_tagged_for_any_python_on_this_platform() -> None:
    code = (
        "import runpy, setuptools\n"
        "from setuptools.dist import Distribution\n"
        "given = {}\n"
        "setuptools.setup = given.update\n"
        "runpy.run_path('setup.py')\n"
        "distribution = Distribution({'name': 'x', 'ext_modules': given['ext_modules']})\n"
        "wheel = given['cmdclass']['bdist_wheel'](distribution)\n"
        "wheel.finalize_options()\n"
        "print(*wheel.get_tag())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    python, abi, tag = result.stdout.split() if result.returncode == 0 else ("", "", result.stderr)
    assert (python, abi) == ("py3", "none"), tag
    assert platform.machine() in tag
