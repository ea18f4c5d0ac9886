"""The exact sum of squares on CUDA tensors: the bits of the CPU kernel; graphs; the host does not wait.

`make gpu` runs the tests with "small" in their names once more under compute-sanitizer.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fastpar as fp
from fastpar import ops

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def spread_out(count: int, lowest: int, highest: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    exponents = torch.randint(lowest, highest, (count,), generator=generator).double()
    return (torch.randn(count, generator=generator, dtype=torch.float64) * exponents.exp2()).to(dtype)


def assert_same(*tensors: Tensor) -> None:
    wanted = ops.exact_square_sum(tensors)
    found = ops.exact_square_sum([x.to(DEVICE) for x in tensors])
    assert torch.equal(found.cpu(), wanted)
    for dtype in (torch.float32, torch.float64):
        norms = ops.square_sum_norm(found, dtype).cpu(), ops.square_sum_norm(wanted, dtype)
        torch.testing.assert_close(*norms, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("lowest", "highest"), [(-10, 1), (-150, 128)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_small_sums_have_the_bits_of_the_cpu(dtype: torch.dtype, lowest: int, highest: int) -> None:
    for count in (1, 257, 16_385, 70_001):
        assert_same(spread_out(count, lowest, highest, dtype))
    assert_same(torch.tensor([math.nan, math.inf, 1.0, -math.inf], dtype=dtype))
    assert_same(torch.zeros(5000, dtype=dtype), torch.full((9000,), torch.finfo(dtype).tiny, dtype=dtype))


def test_small_tensors_of_all_dtypes_at_odd_addresses_are_one_sum() -> None:
    tensors = [spread_out(count, -20, 5, dtype) for dtype in FLOATS for count in (0, 1, 5000)]
    wanted = ops.exact_square_sum(tensors)
    moved = [torch.cat([x.new_zeros(1), x]).to(DEVICE)[1:] for x in tensors]
    assert torch.equal(ops.exact_square_sum(moved).cpu(), wanted)
    assert torch.equal(ops.exact_square_sum([torch.stack([x, x])[0] for x in moved]).cpu(), wanted)


def test_more_than_2_to_the_31_elements_are_summed_exactly() -> None:
    x = torch.ones(2**31 + 4097, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = 3.0
    sums = ops.exact_square_sum([x])
    assert ops.square_sum_norm(sums, torch.float64).item() == math.sqrt(2**31 + 4096 + 9)


def test_clipping_does_not_wait_for_the_device() -> None:
    params = [torch.nn.Parameter(torch.randn(300, 70, device=DEVICE)) for _ in range(5)]
    for p in params:
        p.grad = torch.randn_like(p)
    wanted = fp.clip_grad_norm_([torch.nn.Parameter(p.detach().cpu()) for p in params], 1.0)  # nothing to clip
    assert wanted == 0
    fp.clip_grad_norm_(params, 1.0)  # compiles
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = fp.clip_grad_norm_(params, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert norm.item() == pytest.approx(1.0, rel=1e-5)
    assert fp.grad_norm(params).item() == pytest.approx(0.5, rel=1e-5)


def test_a_captured_sum_follows_its_gradients() -> None:
    x = torch.randn(40_000, device=DEVICE)
    ops.square_sum_norm(ops.exact_square_sum([x]))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = ops.square_sum_norm(ops.exact_square_sum([x]))
    for scale in (1.0, 2.0):
        x.mul_(scale)
        graph.replay()
        assert torch.equal(norm.cpu(), ops.square_sum_norm(ops.exact_square_sum([x.cpu()])))
