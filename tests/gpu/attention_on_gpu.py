"""What the tests of attention on a device share: the op's results, and their distance from float64.

Tolerances: 16-bit weights and dS are rounded once before they are multiplied, so errors are those of a few roundings of
the largest entry; float32 goes through three products of TF32 parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpar import ops
from tests.ops.attention_triton_cases import AttentionCase, expected

DEVICE = "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # of the largest entry


def attend(c: AttentionCase, **options: Any) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) of the op."""
    tiles = ops.AttentionTiles(c.tiles, None, c.q.shape[2], c.k.shape[2])
    q, k, v = (x.detach().to(DEVICE).requires_grad_() for x in c[:3])
    out, lse = ops.attention(q, k, v, tiles, return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), c.dout.to(DEVICE))


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    found, wanted = (x.double().cpu().masked_fill(x.cpu() == float("-inf"), 0.0) for x in (found, wanted))
    assert float((found - wanted).abs().max()) <= TOLERANCE[dtype] * (1.0 + float(wanted.abs().max()))


def assert_matches(c: AttentionCase, scale: float = 0.2, softcap: float = 0.0) -> None:
    out, lse, _, *grads = expected(c, scale, softcap)
    found = attend(c, scale=scale, softcap=softcap or None)
    assert torch.equal(found[1].cpu() == float("-inf"), lse == float("-inf"))
    for mine, wanted in zip(found, (out, lse, *grads), strict=True):
        assert_close(mine, wanted, c.q.dtype)
