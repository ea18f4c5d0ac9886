"""Attention over a table of tiles for CUDA tensors in Triton.

    q [b, h_q, s_q, D]   k [b, h_k, s_k, D]   v [b, h_k, s_k, D_v]             query head h reads head h // (h_q / h_k)

    forward   s = scale * q k^T, with a softcap c * tanh(s / c)      lse = log(sum of exp(s))      P = exp(s - lse)
              out = (P * Z / (1 - p)) v                              empty rows: out 0, lse -inf
    backward  dV = (P * Z / (1 - p))^T dO      dP = dO V^T * Z / (1 - p)      dS = P * (dP - delta) [* (1 - (s / c)^2)]
              dQ = scale * dS K      dK = scale * dS^T Q             rows whose lse is -inf give 0

Sums are over the visible pairs, in float32; Z is 0 where dropout takes a weight, else 1. Weights are rounded to the
dtype of v before they are multiplied with it, dS to that of q. lse and delta of backward are given, so that a ring can
call it once for every source of keys, with those of all of them.

Three kernels, `attention_kernels.py`, over tables of steps, `attention_steps.py`: forward and dq own a block of
queries, dk and dv a block of keys, for which they walk over the query heads of a group. So scores are made twice in
backward, and nothing is added across programs. A fourth has delta.

Products of a visible pair and query head: forward 4 D flops; backward 14 D (dq 6 D, dk and dv 8 D) where one pass with
atomics would have 10 D. Bytes at least, with e of an element and W = b s D of equal lengths: forward
e (2 h_q + 2 h_k) W + 4 b h_q s; backward twice (2 h_q + 2 h_k) e W + 8 b h_q s, and e (h_q + 2 h_k) W written. Every
block of queries reads its keys and values again, from the L2 cache where that has room for those of a head.

Blocks are chosen by a table, from the head dim and the dtype. Nothing spills on sm_90a and gfx942 but float32 with head
dims above 128, and dkv as the next table has it (8 bytes a thread of head dim 64 with Triton 3.7, 256 of 128 with 3.6:
slower without) and 8 bytes of dq with 3.6 under a softcap and dropout. Products of float32 are three of TF32 parts on
sm_90a, and float32 on gfx942. Gradients of 16 bits are rounded where they are summed, stored by parts of the columns,
with the spills of float32: stored whole, dkv spilled up to 996 bytes and dq up to 136 (Triton 3.7).

Measured on an H200, Triton 3.6, bfloat16, causal, 16 heads, 4 key heads, CUDA graphs; (queries, keys, warps, stages);
of backward dq and dkv together, with one of them changed:

                   4096 tokens              16384 tokens       before, and what else was tried at 16384
    forward, 64    0.137 -> 0.127 ms        1.48 -> 1.45 ms    (128, 128, 8, 3); (128, 64, 8, 3) 1.58; 2 stages 1.74
    forward, 128   0.213 -> 0.184           2.34 -> 2.10       (128, 128, 8, 2), masked steps of 32; 3 stages 2.12;
                                                               masked steps of 64 2.36; (128, 64, 8, 3) 2.22
    dq, 64         0.720 -> 0.689           6.40 -> 6.05       (128, 128, 8, 2); (64, 64, 4, 3) 6.09; 2 stages 6.42
    dq, 128        0.943 -> 0.933           8.36 -> 8.24       (128, 128, 8, 2); (64, 64, 4, 2) 8.33; 2 stages 8.75
    dkv, 64        0.724 -> 0.644           6.42 -> 5.59       (32, 128, 8, 2); 3 stages 5.74; this with 3 stages 5.79
    dkv, 128       0.947 -> 0.905           8.35 -> 7.84       (32, 128, 8, 2); 3 stages 8.04

Small blocks win where two programs or more share a multiprocessor: one's softmax runs beside another's products.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels import attention_kernels as kernels
from fastpar.kernels.attention_steps import HostTables, StepShape
from fastpar.kernels.launch import cdiv, launch, next_power_of_2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
DELTA_TILE = 4096  # elements of a program of row_delta
_tables = HostTables()


class AttentionConfig(NamedTuple):
    """Queries and keys of a block, warps of a program, stages of the loads' pipeline; keys of forward's masked steps
    where these are others."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    masked_step: int = 0


class DropoutHash(NamedTuple):
    """p, the seed, global positions int64 [s] (None: local numbers), global indices of the first batch row and head."""

    p: float = 0.0
    seed: int = 0
    first_batch: int = 0
    first_head: int = 0
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        """What the kernels take; positions may be on the host."""
        if self.p == 0.0:
            return None, None, 0, 0, 0, 0, 0.0
        scale, threshold = 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0, round(self.p * (1 << 24))
        positions = (None if x is None else _tables.on(device, x) for x in (self.q_positions, self.k_positions))
        return *positions, self.seed, self.first_batch, self.first_head, threshold, scale


# By the kernel and the head dim, up to 64, 128 and 256. A hash for every pair takes registers: some are smaller. Calls
# that are "plain" (`_kinds`) leave some: these are larger.
_Choices = dict[str, dict[Any, AttentionConfig]]
_CUDA: _Choices = {
    "plain": {
        ("forward", 64): AttentionConfig(64, 64, 4, 3),
        ("forward", 128): AttentionConfig(64, 64, 4, 3),
        ("dq", 64): AttentionConfig(64, 128, 4, 2),
        ("dq", 128): AttentionConfig(128, 64, 8, 3),
        ("dkv", 64): AttentionConfig(64, 128, 8, 2),
        ("dkv", 128): AttentionConfig(64, 128, 8, 2),
    },
    "16 bits": {
        ("forward", 64): AttentionConfig(128, 128, 8, 3),
        ("forward", 128): AttentionConfig(128, 64, 8, 3),
        ("forward", 256): AttentionConfig(128, 32, 8, 2),
        ("dq", 64): AttentionConfig(128, 64, 8, 2),
        ("dq", 128): AttentionConfig(128, 64, 8, 2),
        ("dq", 256): AttentionConfig(128, 32, 8, 2),
        ("dkv", 64): AttentionConfig(32, 128, 8, 2),
        ("dkv", 128): AttentionConfig(32, 128, 8, 2),
        ("dkv", 256): AttentionConfig(16, 64, 8, 2),
    },
    "dropout": {
        ("forward", 64): AttentionConfig(128, 64, 8, 3),
        ("dkv", 128): AttentionConfig(16, 128, 8, 2),
        ("dkv", 256): AttentionConfig(32, 32, 8, 2),
    },
    "float32": {
        ("forward", 64): AttentionConfig(64, 32, 8, 1),
        ("forward", 128): AttentionConfig(32, 32, 8, 1),
        ("forward", 256): AttentionConfig(32, 16, 8, 1),
        ("dq", 64): AttentionConfig(32, 32, 8, 1),
        ("dq", 128): AttentionConfig(32, 16, 8, 1),
        ("dq", 256): AttentionConfig(16, 16, 8, 1),
        ("dkv", 64): AttentionConfig(32, 32, 8, 1),
        ("dkv", 128): AttentionConfig(16, 16, 8, 1),
        ("dkv", 256): AttentionConfig(16, 16, 8, 1),
    },
}
_HIP: _Choices = {
    "plain": {},
    "16 bits": {
        ("forward", 64): AttentionConfig(64, 64, 4, 1),
        ("forward", 128): AttentionConfig(64, 64, 4, 1),
        ("forward", 256): AttentionConfig(64, 32, 4, 1),
        ("dq", 64): AttentionConfig(64, 64, 4, 1),
        ("dq", 128): AttentionConfig(64, 64, 4, 1),
        ("dq", 256): AttentionConfig(32, 32, 4, 1),
        ("dkv", 64): AttentionConfig(32, 64, 4, 1),
        ("dkv", 128): AttentionConfig(32, 32, 4, 1),
        ("dkv", 256): AttentionConfig(16, 32, 4, 1),
    },
    "dropout": {("dq", 128): AttentionConfig(32, 32, 4, 1)},
    "float32": {
        (kind, width): AttentionConfig(32, 32, 4, 1) for kind in ("forward", "dq", "dkv") for width in (64, 128, 256)
    },
}


def configuration(
    kind: str, head_dim: int, dtype: torch.dtype, device: torch.device, *, dropout: bool = False, plain: bool = False
) -> AttentionConfig:
    """The configuration for kind "forward", "dq" or "dkv", by the wider of both head dims; dkv owns keys and steps over
    queries."""
    if device.type == "cpu":
        return AttentionConfig(16, 16, 4, 1)
    width = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    table = _HIP if torch.version.hip is not None else _CUDA
    if dtype == torch.float32:
        return table["float32"][kind, width]
    special = table["plain"] if plain else table["dropout"] if dropout else {}
    return special.get((kind, width)) or table["16 bits"][kind, width]


def _kinds(q: Tensor, v: Tensor, softcap: float, dropout: DropoutHash) -> dict[str, bool]:
    """Keywords of `configuration`. "plain" is what has registers left: one head dim, loaded without a mask or in
    halves of a line, and nothing done to a pair but the softmax."""
    is_plain = softcap == 0.0 and dropout.p == 0.0 and q.shape[-1] == v.shape[-1]
    return {"dropout": dropout.p > 0, "plain": is_plain and q.shape[-1] >= 64 and q.shape[-1] % 16 == 0}


# ---- launchers -------------------------------------------------------------------------------------------------------


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels have the dtype and the head dims of a call."""
    return q.dtype in DTYPES and max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_DIM


def _scores(scale: float, softcap: float) -> tuple[float, float]:
    """(factor, inner) of `Note: scores`."""
    log2e = kernels.LOG2E.value
    return (softcap * log2e, scale / softcap) if softcap else (scale * log2e, 1.0)


def _rows(x: Tensor) -> Tensor:
    """x with a last dim that is contiguous."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _options(q: Tensor, v: Tensor, config: AttentionConfig, softcap: float, p: float) -> dict[str, Any]:
    kind = (q.dtype, softcap != 0.0, p != 0.0, torch.version.hip is None)
    return _kept_options(q.shape[-1], v.shape[-1], config, *kind)


@functools.lru_cache(maxsize=256)
def _kept_options(
    head_dim: int,
    value_dim: int,
    config: AttentionConfig,
    dtype: torch.dtype,
    has_softcap: bool,
    has_dropout: bool,
    is_cuda: bool,
) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "BLOCK_DV": max(16, next_power_of_2(value_dim)), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "SOFTCAP": has_softcap, "DROPOUT": has_dropout,
        # Products of float32 in full would be multiply-adds of one thread each, unrolled, with kilobytes of spills.
        "PRECISION": "tf32x3" if dtype == torch.float32 and is_cuda else "ieee",
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    tile_offsets: Tensor | None,
    scale: float,
    softcap: float,
    dropout: DropoutHash,
    out_dtype: torch.dtype,
    *,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [b, h_q, s_q, D_v], lse float32 [b, h_q, s_q]); out_dtype is that of q, or float32."""
    batch, heads, num_queries, _ = q.shape
    out = q.new_empty((batch, heads, num_queries, v.shape[-1]), dtype=out_dtype)
    lse = q.new_empty((batch, heads, num_queries), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    if scale < 0:  # `Note: scores`
        q, scale = -q, -scale
    q, k, v = _rows(q), _rows(k), _rows(v)
    kinds = _kinds(q, v, softcap, dropout)
    config = config or configuration("forward", max(q.shape[-1], v.shape[-1]), q.dtype, q.device, **kinds)
    steps = _tables.steps(tiles, tile_offsets, StepShape(num_queries, config.block_m, config.block_n), q.device)
    launch(
        kernels.attention_forward_kernel, (steps.num_blocks, heads, batch), q.device,
        q, k, v, q.stride()[:3], k.stride()[:3], v.stride()[:3], out, lse, steps.blocks, steps.runs,
        steps.batch_stride, heads // max(k.shape[1], 1), num_queries, k.shape[2], _scores(scale, softcap),
        dropout.arguments(q.device), MASKED_STEP=config.masked_step or config.block_n,
        **_options(q, v, config, softcap, dropout.p),
    )  # fmt: skip
    return out, lse


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse: float32 [b, h_q, s_q] of dout and out [b, h_q, s_q, D_v], dlse [b, h_q, s_q] or None.
    Any strides, that of the last dim among them; nothing is copied."""
    delta = out.new_empty(out.shape[:-1], dtype=torch.float32)
    if delta.numel() == 0:
        return delta
    batch, heads, num_rows, dim = out.shape
    block_d = max(16, next_power_of_2(dim))
    block_m = DELTA_TILE // block_d
    launch(
        kernels.row_delta_kernel, (cdiv(num_rows, block_m), heads, batch), out.device, dout, out, dlse, dout.stride(),
        out.stride(), None if dlse is None else dlse.stride(), delta, num_rows, DIM=dim, BLOCK_M=block_m,
        BLOCK_D=block_d,
    )  # fmt: skip
    return delta


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    tiles: Tensor,
    tile_offsets: Tensor | None,
    scale: float,
    softcap: float,
    dropout: DropoutHash,
    grad_dtype: torch.dtype = torch.float32,
    *,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) summed in float32, rounded once to grad_dtype, that of q or float32, dense; lse and delta float32
    [b, h_q, s_q]."""
    dq, dk, dv = (torch.empty(x.shape, dtype=grad_dtype, device=x.device) for x in (q, k, v))
    batch, heads, num_queries, _ = q.shape
    if dq.numel() == 0 or dk.numel() == 0 or dv.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    dout, q, k, v, lse, delta = _rows(dout), _rows(q), _rows(k), _rows(v), lse.contiguous(), delta.contiguous()
    head_dim = max(q.shape[-1], v.shape[-1])
    strides = (dout.stride()[:3], q.stride()[:3], k.stride()[:3], v.stride()[:3])
    numbers = (_scores(scale, softcap), float(scale), dropout.arguments(q.device))
    sizes = (heads // k.shape[1], num_queries, k.shape[2])
    kinds = _kinds(q, v, softcap, dropout)
    of_dq = config or configuration("dq", head_dim, q.dtype, q.device, **kinds)
    steps = _tables.steps(tiles, tile_offsets, StepShape(num_queries, of_dq.block_m, of_dq.block_n), q.device)
    launch(
        kernels.attention_dq_kernel, (steps.num_blocks, heads, batch), q.device, dout, q, k, v, *strides, lse, delta,
        dq, steps.blocks, steps.runs, steps.batch_stride, *sizes, *numbers,
        **_options(q, v, of_dq, softcap, dropout.p),
    )  # fmt: skip
    of_dkv = config or configuration("dkv", head_dim, q.dtype, q.device, **kinds)
    shape = StepShape(k.shape[2], of_dkv.block_n, of_dkv.block_m, by_key=True)
    turned = _tables.steps(tiles, tile_offsets, shape, q.device)
    launch(
        kernels.attention_dkv_kernel, (turned.num_blocks, k.shape[1], batch), q.device, dout, q, k, v, *strides, lse,
        delta, dk, dv, turned.blocks, turned.runs, turned.batch_stride, *sizes, *numbers,
        **_options(q, v, of_dkv, softcap, dropout.p),
    )  # fmt: skip
    return dq, dk, dv
