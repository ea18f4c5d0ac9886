"""Tests that run once with each instruction set of the CPU kernels that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fastpar import _ext


def available(*names: str) -> list[str]:
    """Those of these instruction sets that this machine has; all of its, where none is named."""
    found = _ext.build_info()["cpu_capabilities"].split()
    return [name for name in names or found if name in found]


@contextmanager
def using(name: str) -> Iterator[None]:
    """CPU kernels use this instruction set in the block."""
    before = _ext.cpu_capability()
    _ext.set_cpu_capability(name)
    try:
        yield
    finally:
        _ext.set_cpu_capability(before)


def each(*names: str) -> Any:
    """A fixture that runs a test with each of these that there are; all, where none is named."""

    @pytest.fixture(params=available(*names))
    def capability(request: pytest.FixtureRequest) -> Iterator[str]:
        with using(request.param):
            yield request.param

    return capability
