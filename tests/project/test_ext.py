"""Loading the compiled library: what goes wrong is an ImportError with the remedy, never a crash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastpar import _ext

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The code in a fresh interpreter; a crash shows as a negative return code."""
    variables = {k: v for k, v in os.environ.items() if k != "FASTPAR_LIBRARY"}
    variables |= {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, timeout=120)


@pytest.mark.expensive
def test_a_missing_binary_is_an_import_error_with_the_command_that_builds_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "_C.so")
    result = run_python("import fastpar.ops\nfastpar.ops.vocab_parallel_cross_entropy", FASTPAR_LIBRARY=missing)
    assert result.returncode == 1
    assert "ImportError: fastpar's compiled library is missing" in result.stderr
    assert missing in result.stderr
    assert "pip install -e ." in result.stderr


@pytest.mark.expensive
def test_importing_the_package_needs_no_binary(tmp_path: Path) -> None:
    result = run_python("import fastpar, fastpar.ops, fastpar._ext", FASTPAR_LIBRARY=str(tmp_path / "none.so"))
    assert result.returncode == 0, result.stderr


@pytest.mark.expensive
def test_a_second_copy_is_an_import_error_that_names_the_first(tmp_path: Path) -> None:
    first = tmp_path / "elsewhere" / "_C.so"
    first.parent.mkdir()
    shutil.copy(_ext.library_path(), first)
    code = f"import torch\ntorch.ops.load_library({str(first)!r})\nfrom fastpar import _ext\n_ext.load()"
    result = run_python(code)
    assert result.returncode == 1, f"rc {result.returncode}: {result.stderr}"
    assert "ImportError: another copy of fastpar's library is already loaded" in result.stderr
    assert str(first) in result.stderr


@pytest.mark.expensive
def test_loading_the_same_file_again_is_fine() -> None:
    code = "from fastpar import _ext\nassert _ext.load() == _ext.load()\n_ext.load.cache_clear()\n_ext.load()"
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.expensive
def test_an_old_torch_is_an_import_error_before_anything_is_loaded() -> None:
    versions = ["2.10.1", "1.13.0+cpu", "2.9.0a0+git1234"]
    code = (
        "import torch\nfrom fastpar import _ext\n"
        f"for version in {versions!r}:\n"
        "    torch.__version__ = version\n"
        "    try: _ext.load()\n"
        "    except ImportError as error: print('ImportError:', str(error).replace(chr(10), ' '))\n"
        "assert not hasattr(torch.ops.fastpar, 'build_info')"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    for version, line in zip(versions, result.stdout.splitlines(), strict=True):
        assert f"ImportError: fastpar needs torch >= 2.11, found {version}" in line
        assert "pip install 'torch>=2.11'" in line


@pytest.mark.expensive
def test_a_file_that_is_no_library_is_an_import_error_with_the_loaders_reason(tmp_path: Path) -> None:
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    result = run_python("from fastpar import _ext\n_ext.load()", FASTPAR_LIBRARY=str(broken))
    assert result.returncode == 1
    assert "ImportError: fastpar's compiled library" in result.stderr
    assert "file too short" in result.stderr or "invalid ELF header" in result.stderr


def test_build_info_describes_the_library_in_use() -> None:
    info = _ext.build_info()
    assert info["torch_target"] == "0x020B000000000000"
    assert Path(info["library"]) == _ext.library_path()
    assert info["cpu_capabilities"].split()[-1] == "portable"
    assert info["compiler"]
    assert "cuda_archs" in info


def test_cpu_capability_can_be_chosen_and_a_bad_name_lists_what_is_possible() -> None:
    before = _ext.cpu_capability()
    assert before == _ext.build_info()["cpu_capabilities"].split()[0], "the best one is the default"
    _ext.set_cpu_capability("portable")
    assert _ext.cpu_capability() == "portable"
    _ext.set_cpu_capability(before)
    with pytest.raises(ValueError, match=r"'sse9' is not available; this machine can run .*portable"):
        _ext.set_cpu_capability("sse9")
