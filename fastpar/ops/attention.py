"""Softmax attention over a table of band tiles: causal, windowed, packed, in any order of tokens.

For every query row of a head, over the keys j that a tile lets it see (fastpar.contracts.attention):

    s_j  = softcap * tanh(scale * q.k_j / softcap)        scale * q.k_j without a softcap
    lse  = log(exp(sink) + sum of exp(s_j))               no exp(sink) without a sink
    out  = sum of exp(s_j - lse) * z_j * v_j              z_j = kept_j / (1 - p); 1 without dropout

and backward, from the final lse alone, so that parts of the keys may lie anywhere:

    P = exp(s - lse)    delta = rowsum(dout * out) - dlse    dS = P * ((dout v^T) * Z - delta) * (1 - (s / softcap)^2)
    dq = scale dS k     dk = scale dS^T q     dv = (P * Z)^T dout     dsink = -sum of exp(sink - lse) * delta

A row that sees nothing has out 0 and lse -inf (the sink, with one), whatever the backend. Query head h reads key/value
head h // (h_q / h_k); nothing is repeated. Saved for backward: q, k, v, out and lse.

The order of sums does not depend on the number of threads, nor on the run. Gradients are summed in float32 (float64
for float64) and rounded once. What torch's own kernels keep of this, where they are asked for, is said in
`_attention_torch.py`, and which kernels serve CUDA tensors in `_attention_cuda.py`.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.contracts import compute_dtype
from fastpar.contracts.attention import (
    AttentionDropout,
    AttentionTiles,
    ScoreOptions,
    autocast_heads,
    check_attention,
    check_score_options,
)
from fastpar.ops import _attention_blocks, _attention_cuda, _attention_torch
from fastpar.ops._autograd import apply_plain, first_derivative_only, needs_grad
from fastpar.ops._backends import is_direct

_ext.load()
_forward = torch.ops.fastpar.attention_forward.default  # not the packet: torch need not choose at every call
_backward = torch.ops.fastpar.attention_backward.default
torch.library.define(
    "fastpar::attention_backward_from_out",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor tiles, Tensor? tile_offsets, "
    "float scale, ScalarType grad_dtype) -> (Tensor, Tensor, Tensor)",
)
_backward_from_out = torch.ops.fastpar.attention_backward_from_out.default
torch.library.define("fastpar::attention_row_delta", "(Tensor grad_out, Tensor out, Tensor? grad_lse) -> Tensor")
torch.library.impl("fastpar::attention_row_delta", "cuda", _attention_cuda.row_delta)
_row_delta = torch.ops.fastpar.attention_row_delta.default

# ---- every device without kernels of its own -------------------------------------------------------------------------

torch.library.impl("fastpar::attention_forward", "default", _attention_blocks.forward)
torch.library.impl("fastpar::attention_backward", "default", _attention_blocks.backward)
torch.library.impl("fastpar::attention_row_delta", "default", _attention_blocks.row_delta)


def backward_from_out(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the final out and lse, without a softcap or dropout: by torch's kernels, where they have it."""
    tiles, tile_offsets, scale, grad_dtype = options
    inputs = _attention_torch.Operands(q, k, v)
    found = _attention_torch.backward(inputs, (grad_out, out, lse), tiles, tile_offsets, scale, grad_dtype)
    if found is not None:
        return found
    delta = row_delta(grad_out, out, None)
    return _rounded_gradients(grad_dtype, grad_out, *inputs, lse, delta, tiles, tile_offsets, *ScoreOptions(scale))


torch.library.impl("fastpar::attention_backward_from_out", "CompositeExplicitAutograd", backward_from_out)


# ---- fakes -----------------------------------------------------------------------------------------------------------


@torch.library.register_fake("fastpar::attention_forward")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=options[-1])
    return out, q.new_empty(q.shape[:-1], dtype=compute_dtype(q.dtype))


@torch.library.register_fake("fastpar::attention_backward")
def _backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q.dtype)
    dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
    return dq, dk, dv


@torch.library.register_fake("fastpar::attention_backward_from_out")
def _backward_from_out_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape, dtype=options[-1]) for x in (q, k, v))
    return dq, dk, dv


@torch.library.register_fake("fastpar::attention_row_delta")
def _row_delta_fake(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    return out.new_empty(out.shape[:-1], dtype=compute_dtype(out.dtype))


# ---- autograd --------------------------------------------------------------------------------------------------------


def merge_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) with one more key a head, of score sink [h_q] and value 0: a block like any other."""
    final = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    return out * torch.exp(lse - final).masked_fill(lse == -torch.inf, 0.0)[..., None], final


def sink_grad(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum of exp(sink - lse) * delta over rows, in the sink's dtype."""
    return -(torch.exp(sink.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sink.dtype)


def row_delta(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, in the dtype of the computation: an op on CUDA, plain PyTorch elsewhere."""
    if out.device.type != "cuda":
        return _attention_blocks.row_delta(grad_out, out, grad_lse)
    call = _attention_cuda.row_delta if is_direct(grad_out, out, grad_lse) else _row_delta
    return cast(Tensor, call(grad_out, out, grad_lse))


def _rounded_gradients(dtype: torch.dtype, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What fastpar::attention_backward gives of these operands, in a dtype."""
    if operands[0].device.type == "cuda" and is_direct(*operands[:5]):
        return _attention_cuda.backward(*operands, grad_dtype=dtype)
    dq, dk, dv = _backward(*operands)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, table: Tensor, offsets: Tensor | None, options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    forward = _attention_cuda.forward if q.device.type == "cuda" and is_direct(q, k, v) else _forward
    if sink is None:
        return cast("tuple[Tensor, Tensor]", forward(q, k, v, table, offsets, *options, q.dtype))
    out, lse = forward(q, k, v, table, offsets, *options, compute_dtype(q.dtype))
    out, lse = merge_sink(out, lse, sink)
    return out.to(q.dtype), lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        table: Tensor,
        offsets: Tensor | None,
        options: ScoreOptions,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _attend(q, k, v, sink, table, offsets, options)
        positions = options.q_positions, options.k_positions
        ctx.save_for_backward(q, k, v, sink, out, lse, table, offsets, *positions)
        ctx.options = options[:-2]
        ctx.return_lse = return_lse
        ctx.by_torch = options.is_plain and _attention_torch.are_asked_for(q)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse, table, offsets, *positions = ctx.saved_tensors
        grad_out, grad_lse = grads[0], grads[1] if ctx.return_lse else None  # a compiled graph has zeros for None
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        needs = ctx.needs_input_grad
        with torch.no_grad():
            found: list[Tensor | None] = [None] * 4
            by_torch = ctx.by_torch and grad_lse is None
            if not by_torch or needs[3]:
                delta = row_delta(grad_out, out, grad_lse)
            if by_torch and any(needs[:3]):
                from_out = backward_from_out if is_direct(grad_out, q, k, v, out, lse) else _backward_from_out
                found[:3] = from_out(grad_out, q, k, v, out, lse, table, offsets, ctx.options[0], q.dtype)
            elif any(needs[:3]):
                operands = (grad_out, q, k, v, lse, delta, table, offsets, *ctx.options, *positions)
                found[:3] = _rounded_gradients(q.dtype, *operands)
            if needs[3]:
                found[3] = sink_grad(sink, lse, delta)
        alternative = "torch.nn.functional.scaled_dot_product_attention"
        inputs = (grad_out, grad_lse, q, k, v, sink)
        wanted = [
            first_derivative_only(grad, "attention", alternative, *inputs) if need and grad is not None else None
            for grad, need in zip(found, needs[:4], strict=True)
        ]
        return *wanted, None, None, None, None


# ---- public ----------------------------------------------------------------------------------------------------------


@checked(meta=True)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: AttentionTiles | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    return_lse: bool = False,
) -> Any:
    """Softmax attention of these queries over these keys, where tiles let one see the other.

        q    [b, h_q, s_q, D]     float32, bfloat16, float16 or float64, any strides
        k    [b, h_k, s_k, D]     as q; h_q is a multiple of h_k, and query head h reads head h // (h_q / h_k)
        v    [b, h_k, s_k, D_v]   as q; under torch.autocast all three are taken in its dtype, as by torch
        sink [h_q]                optional: the logit of one more key, whose value is 0 (GPT-OSS)
        out  [b, h_q, s_q, D_v]   q's dtype, contiguous; with return_lse the result is (out, lse)
        lse  [b, h_q, s_q]        float32 (float64 for float64); it has a gradient

        forward  s = scale * q k^T, capped; lse = logsumexp(s, sink); out = (exp(s - lse) * Z) v
        dgrad    P = exp(s - lse), delta = rowsum(dout * out) - dlse,
                 dS = P * ((dout v^T) * Z - delta) * (1 - (s / softcap)^2);
                 dq = scale dS k, dk = scale dS^T q, dv = (P * Z)^T dout, dsink = -sum of exp(sink - lse) * delta

    Sums are float32 (float64 for float64) and rounded once. CPUs that multiply pairs of bfloat16 (AVX-512 BF16, AMX)
    round exp(s - lse) and dS of bfloat16 inputs to it before they are multiplied; everything else widens its inputs
    first. On AMX float32 and float16 are multiplied as sums of three bfloat16, with float32's errors (numbers below
    2^-110 lose low bits; csrc/attention/attention_split.h). On CPU bits
    depend on which pairs are visible, not on how tiles are cut or on the number of threads. A query that sees no key
    has out 0 and lse -inf. No collective: `context_attention` is this over keys that lie on several ranks. Memory
    beside the results is that of a few blocks of scores, on CPU also of packed operands of two key heads for each
    thread; saved for backward are q, k, v, out and lse.

    On CUDA, torch's cuDNN and flash attention serve forwards of 16 bits whose mask they have (full, causal, windows,
    packed documents), without softcap, sink and dropout; the rest is Triton's. Bits do not change from run to run. In
    `torch.nn.attention.sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])`, or after
    `torch.backends.cuda.enable_math_sdp(False)`, torch's kernels serve the backward of such a forward too, as they are:
    with atomics, so that bits change from run to run unless `torch.use_deterministic_algorithms(True)`; a key head's
    gradients rounded for each of its query heads before they are summed; memory for a float32 dq and for dk and dv of
    every query head. In `sdpa_kernel(SDPBackend.MATH)` everything is Triton's.

    Args:
        tiles: which query sees which key, from `AttentionMask.tiles`; None: every one, or those before it with causal.
        causal: query i sees keys 0..i, of as many keys as queries. Without tiles only.
        scale: 1 / sqrt(D) by default.
        softcap: bounds the scores: softcap * tanh(s / softcap) (Gemma 2).
        dropout: of probabilities, by global positions; see `AttentionDropout`.
        return_lse: also return lse.

    Worked example: q = k = [[1], [0]], v = [[1], [3]], causal, scale 1: out = [1, 2] and lse = [1, log 2].

    Raises:
        TypeError: a dtype that is not floating.
        ValueError: shapes, dtypes or devices that do not fit one another or the tiles; causal beside tiles, or of other
            numbers of queries than keys; a softcap that is not positive.
    """
    q, k, v = autocast_heads(q, k, v)
    check_attention(q, k, v, tiles, causal, dropout)
    check_score_options(q, scale, softcap, sink)
    options = ScoreOptions.of(q.shape[-1], scale, softcap, dropout)
    if tiles is None:
        one_tile = _kept_tile if is_direct(q, k, v) else _one_tile
        table, offsets = one_tile(q.shape[2], k.shape[2], causal), None
    else:
        table, offsets = tiles.table, tiles.offsets
    if needs_grad(q, k, v, sink):
        out, lse = apply_plain(_Attention, q, k, v, sink, table, offsets, options, return_lse)
    else:
        out, lse = _attend(q, k, v, sink, table, offsets, options)
    return (out, lse) if return_lse else out


def _one_tile(rows: int, columns: int, causal: bool) -> Tensor:
    if rows == 0 or columns == 0:
        return torch.empty((0, 6), dtype=torch.int32, device="cpu")
    band = (1 - rows, 0 if causal else columns - 1)
    return torch.tensor([[0, rows, 0, columns, *band]], dtype=torch.int32, device="cpu")


@functools.lru_cache(maxsize=256)  # a call takes microseconds to make it
def _kept_tile(rows: int, columns: int, causal: bool) -> Tensor:
    with torch.inference_mode(False):  # or what a later call saves for backward would be refused
        return _one_tile(rows, columns, causal)
