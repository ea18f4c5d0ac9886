"""Every public op on CUDA tensors without a GPU: the CPU's values, no work on the host, no wait that is not allowed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastpar import ops
from fastpar.ops import _backends
from tests.rehearsal import device
from tests.rehearsal.watch import Finding, Watch
from tests.rehearsed.exceptions import ALLOWED, unlisted
from tests.rehearsed.op_cases import CASES

# Names in fastpar.ops that launch nothing, or only time what the others do.
NO_OPS = {
    "AttentionDropout", "AttentionMask", "AttentionTiles", "GatherKeys", "TokenRange", "Usp",
    "Dispatch", "DispatchHandle", "ExpertRule", "ExpertWeights", "Overlap", "OverlapShape", "Padding", "RouteRule",
    "Routing", "StochasticRounding",
    "WeightGradStore", "expert_capacity", "measure_overlap",
}  # fmt: skip
# By Triton where the compiled kernels, which are for sm_90a, do not run.
BOTH_WAYS = [name for name in CASES if "cross_entropy" in name]


@pytest.fixture(scope="module")
def met() -> set[tuple[str, str]]:
    """What was found anywhere: exceptions that are not needed any more have to go."""
    return set()


@pytest.fixture
def triton_only() -> Iterator[None]:
    device.CAPABILITY[:] = [8, 0]
    _backends.capability.cache_clear()
    yield
    device.CAPABILITY[:] = [9, 0]
    _backends.capability.cache_clear()


def run(name: str) -> list[Finding]:
    expected = CASES[name]("cpu")
    with Watch() as watch:
        found = CASES[name]("cuda")
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        # Float32 in another order; 16 bits are rounded once.
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(theirs.dtype, 1e-4)
        torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)
    return watch.found


@pytest.mark.parametrize("name", CASES)
def test_an_op_has_the_values_of_the_cpu_and_waits_for_nothing_unlisted(name: str, met: set[tuple[str, str]]) -> None:
    found = run(name)
    met |= {(finding.kind, finding.place) for finding in found}
    assert not unlisted(found), "\n".join(unlisted(found))


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_an_op_does_so_by_triton_where_no_compiled_kernel_runs(
    name: str, met: set[tuple[str, str]], triton_only: None
) -> None:
    found = run(name)
    met |= {(finding.kind, finding.place) for finding in found}
    assert not unlisted(found), "\n".join(unlisted(found))


def test_every_public_op_has_a_case() -> None:
    named = {name.partition(",")[0] for name in CASES}
    assert named | NO_OPS == set(ops.__all__)


def test_every_exception_is_still_needed(met: set[tuple[str, str]]) -> None:
    """The last test of the file."""
    assert {entry for entry in ALLOWED if "fastpar/ops" in entry[1] or "kernels" in entry[1]} <= met
