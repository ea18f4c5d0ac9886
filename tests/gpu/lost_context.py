"""A pytest plugin for files of GPU tests: what lost the CUDA context ends the file (`-p tests.gpu.lost_context`).

After an illegal access every later call of the process fails, and so would every later test, with words that say
nothing of where it began.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

_LOST = re.compile(
    r"illegal memory access|unspecified launch failure|misaligned address|illegal instruction|device-side assert"
    r"|cudaErrorLaunchFailure|uncorrectable ECC"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if call.excinfo is not None and (found := _LOST.search(str(call.excinfo.value))):
        item.session.shouldfail = f"the CUDA context is lost ({found[0]}); the tests after {item.name} were not run"
    return report
