"""linear_cross_entropy on CUDA tensors: against float64 on the CPU, and without waiting for the device.

See tests.ops.linear_cross_entropy_cases for the tolerances; a GPU's float32 GEMMs must not be TF32 for them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops
from tests.ops.linear_cross_entropy_cases import (
    DTYPES,
    OPTIONS,
    assert_close_to_exact,
    example,
    options_for,
    plain,
    run,
)

pytestmark = pytest.mark.gpu
ROWS = (2, 1200)  # more than one chunk, which has at least 1024 rows


def on_device(tensors: list[Tensor], target: Tensor, grads: list[Tensor], **options: Any) -> list[Tensor]:
    """The op on the device, from CPU tensors and back to them."""
    options = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in options.items()}
    results = run(
        ops.linear_cross_entropy, [x.cuda() for x in tensors], target.cuda(), [g.cuda() for g in grads], **options
    )
    return [x.cpu() for x in results]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_match_float64_on_the_device(name: str, dtype: torch.dtype, reduction: str) -> None:
    *tensors, target = example(ROWS, 24, 131, dtype)
    options = {"reduction": reduction, "shift": 1, **options_for(name, 131)}
    grads = [torch.linspace(-1.0, 2.0, target.numel()).view(ROWS) if reduction == "none" else torch.tensor(0.75)]
    found = on_device(tensors, target, grads, chunk_bytes=1, **options)
    exact = plain(tensors, target, torch.float64, grads, **options)
    rough = None if dtype in (torch.float32, torch.float64) else plain(tensors, target, dtype, grads, **options)
    assert_close_to_exact(found, exact, dtype, rough)


def test_nothing_waits_for_the_device() -> None:
    hidden, weight, _, target = (x.cuda() for x in example(ROWS, 24, 131, torch.bfloat16))
    hidden.requires_grad_()
    weight.requires_grad_()
    for warm in (True, False):  # the first call may compile and allocate
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            loss = ops.linear_cross_entropy(hidden, weight, target, shift=1, chunk_bytes=1)
            (loss * 3.0).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
