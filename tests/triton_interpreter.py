"""Runs tests of Triton kernels in Triton's interpreter, on CPU tensors.

TRITON_INTERPRET is read when a kernel is decorated, so these tests need a process of their own. They stand in
tests/interpreted/check_<stem>.py, a name that ordinary collection passes over, and one wrapper test per stem runs them;
another one, which is slow itself, those that are marked slow.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile

import pytest

from tests.forks import ROOT, Forks
from tests.markers import needs

_FORKS = Forks(("torch", "triton"), lambda: {**os.environ, "TRITON_INTERPRET": "1"})


@needs("device")
def run_interpreted(*test_files: str, markers: str = "not slow") -> None:
    """Run the tests of files in tests/interpreted/ in the interpreter; shows their output if one fails or none ran.

    Skips where triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    paths = [str(ROOT / "tests" / "interpreted" / name) for name in test_files]
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        status = _FORKS.run(["-q", "-p", "no:cacheprovider", "-m", markers, *paths], output.name)
        if status != 0:
            pytest.fail(f"{', '.join(test_files)} failed in the Triton interpreter:\n{output.read()}", pytrace=False)
