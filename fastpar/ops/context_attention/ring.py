"""Attention with keys that go round a ring.

    step t = 0, 1, ... of position r: keys and values of position r - t

    forward   (o_t, l_t) = attention(q, k_t, v_t), merged in this order
    backward  dQ, dK_t, dV_t by the merged lse; dQ stays and is summed in this order, dK_t and dV_t go to position r - t

Steps in which no rank sees a key are left out, and of the others only the keys that are seen travel. Elements sent at
most, of W = b S D: 2 (1 - 1/r) h_k W forward, 4 (1 - 1/r) h_k W backward, half of these in float32. In memory: the keys
of two steps, and gradients of two.

Source: Liu et al. 2023 (arXiv:2310.01889); gradients sent to their owner instead of round the ring, partial results in
float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpar.comm.ranges import annotate
from fastpar.contracts import compute_dtype
from fastpar.contracts.attention import ScoreOptions
from fastpar.ops.context_attention.local import (
    Gradients,
    LocalHeads,
    Merged,
    SavedRows,
    SummedRows,
    attend,
    attend_backward,
)
from fastpar.ops.context_attention.streams import RingCall, open_stream


def forward(
    call: RingCall, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, heads: LocalHeads, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries and all keys; out in the dtype of sums where there are several."""
    stream, steps = open_stream(call, k, v, backward=False), (0, *call.plan.busy)
    dtype = out_dtype if len(steps) == 1 else compute_dtype(q.dtype)
    merged = Merged(q, v, dtype)
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        k_step, v_step, block = stream.keys(step)
        stream.prefetch(following)
        if block is not None:
            with annotate(f"fastpar::context::attention {step}"):
                merged.add(block.rows, *attend(q, k_step, v_step, block, options, heads, dtype))
    stream.finish()
    return merged.result()


def backward(
    call: RingCall, saved: SavedRows, k: Tensor, v: Tensor, options: ScoreOptions, heads: LocalHeads
) -> Gradients:
    """Gradients of this rank's q, k and v, in the dtype of sums."""
    stream = open_stream(call, k, v, backward=True)
    dq = SummedRows(saved.q)
    steps = (0, *call.plan.busy)
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        k_step, v_step, block = stream.keys(step)
        stream.prefetch(following)
        if block is None:
            stream.add(step, None, None)
            continue
        with annotate(f"fastpar::context::attention_backward {step}"):
            grads = attend_backward(saved, k_step, v_step, block, options, heads)
        dq.add(block.rows, grads.q)
        stream.add(step, grads.k, grads.v)
    return Gradients(dq.result(), *stream.grads())
