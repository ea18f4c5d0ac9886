"""Session-wide set-up: the rank pool ends with the session, and `gpu` tests skip without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests import dist


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish() -> None:
    dist.shutdown()
