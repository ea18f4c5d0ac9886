"""Rotary position embeddings of queries and keys (Su et al. 2021, arXiv:2104.09864).

Every pair (a, b) of a head's elements is turned by its angle, position * frequency:

    a' = a * cos - b * sin          backward: by -angle, the same op
    b' = b * cos + a * sin

    halves        pairs (i, i + R / 2)     Llama, GPT-NeoX and most of Hugging Face's models
    interleaved   pairs (2 i, 2 i + 1)     the paper, GPT-J, Cohere, Llama 4, DeepSeek

of the first R of a head's D elements; the rest is copied. One read and one write of q and of k: eager torch makes the
turned copy, two products and a sum of them. Nothing is saved but the tables: a rotation has no other derivative.

Angles come from positions that the caller gives, never from the place of a token in the tensor: with a sequence split
over ranks, in zigzag order or packed from several documents, each rank passes the positions of its own tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.contracts.transformer import check_rotary, rotary_tables
from fastpar.ops._autograd import needs_grad
from fastpar.ops._backends import fallback, has_kernels, op_on_cuda

__all__ = ["rotary_embedding", "rotary_tables"]

_ext.load()
_rotate_ = torch.ops.fastpar.rotary_embedding_.default


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def _rotate_cuda(x: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, interleaved: bool, inverse: bool) -> Tensor:
    from fastpar.kernels import rotary_embedding as kernels

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.rotate(x, out, cos, sin, heads_first, interleaved, inverse)
    return out


_rotate = op_on_cuda("rotary_embedding", _rotate_cuda)


@torch.library.impl("fastpar::rotary_embedding_", "cuda")
def _rotate_in_place_cuda(
    x: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, interleaved: bool, inverse: bool
) -> None:
    from fastpar.kernels import rotary_embedding as kernels

    kernels.rotate(x, x, cos, sin, heads_first, interleaved, inverse)


# ---- fakes -----------------------------------------------------------------------------------------------------------


@torch.library.register_fake("fastpar::rotary_embedding")
def _rotate_fake(x: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, interleaved: bool, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("fastpar::rotary_embedding_")
def _rotate_in_place_fake(
    x: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, interleaved: bool, inverse: bool
) -> None:
    return None


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Rotary(torch.autograd.Function):
    """Outside the ops, so that a call without gradients costs nothing. Its backward is itself, so any derivative is."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads_first: bool,
        interleaved: bool,
        inverse: bool,
        inplace: bool,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.options = heads_first, interleaved, not inverse
        if not inplace:
            return cast(Tensor, _rotate(x, cos, sin, heads_first, interleaved, inverse))
        ctx.mark_dirty(x)
        _rotate_(x, cos, sin, heads_first, interleaved, inverse)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # Never in place: others may hold the gradient.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grad = _Rotary.apply(grads[0], cos, sin, *ctx.options, False)
        else:
            grad = _rotate(grads[0], cos, sin, *ctx.options)
        return grad, None, None, None, None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, interleaved: bool, inplace: bool) -> Tensor:
    if not has_kernels(x):
        out: Tensor = fallback("transformer").rotated(x, cos, sin, heads_first=heads_first, interleaved=interleaved)
        return x.copy_(out) if inplace else out
    options = heads_first, interleaved, False
    # A copy besides: of what no kernel can turn where it is, and for Dynamo, which traces no function that writes to
    # its arguments.
    copies = inplace and (x.stride(-1) != 1 or torch.compiler.is_compiling())
    direct = inplace and not copies
    if needs_grad(x):
        out = cast(Tensor, _Rotary.apply(x, cos, sin, *options, direct))
    elif direct:
        _rotate_(x, cos, sin, *options)
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)  # graphs that have saved the old values are to say so
        out = x
    else:
        out = cast(Tensor, _rotate(x, cos, sin, *options))
    return x.copy_(out) if copies else out


def _check_own_memory(x: Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(
            f"inplace needs a place for every element, but x is expanded (strides {list(x.stride())}): pass "
            "x.contiguous()"
        )


# ---- public ----------------------------------------------------------------------------------------------------------


@checked(meta=True)
def rotary_embedding(
    x: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bshd",
    inplace: bool = False,
) -> Tensor:
    """Turn the pairs of every head of x, queries or keys, by the angles of their tokens' positions.

        x          [B, S, heads, D]   layout "bshd"; "bhsd": [B, heads, S, D]; either without B. float32, bfloat16,
                                      float16 or float64, any strides
        cos, sin   [S, R / 2] or [B, S, R / 2]    one angle for every pair, as `rotary_tables` gives them; or
        positions  [S] or [B, S]                  int64 or int32, of which tables are made
        out        as x

        forward  a' = a * cos - b * sin; b' = b * cos + a * sin     computed in float32, rounded once
        dgrad    the same with -sin                                 no gradient for the tables

    Where every rank of a group has a part of the sequence, each passes the positions of its own tokens: no collective.
    A model computes the tables once for queries and keys of all its layers, with `rotary_tables`. On CPU a C++ kernel;
    on CUDA a Triton kernel, tested on an H200, not timed; elsewhere, and on CUDA without Triton,
    `fastpar.reference.rotary_embedding`. Hugging Face multiplies in the input's dtype, with tables of that dtype: up to
    three roundings more in 16 bits.

    Args:
        theta: the base of the frequencies, for `positions`; other rules of frequencies: `rotary_tables`.
        rotary_dim: R, the first elements of a head that are turned; the others stay. By default D.
        interleaved: pairs are (2 i, 2 i + 1) instead of (i, i + R / 2).
        inplace: write into x, which is returned. As any change in place: not for leaves that require a gradient,
            nor for what another backward needs.

    Worked example: one head [1, 2, 3, 4], cos [0, 1], sin [1, 0]: halves give [-3, 2, 1, 4], interleaved pairs
    [-2, 1, 3, 4]; the gradient of the first for dout [1, 0, 0, 0] is [0, 0, -1, 0].

    Raises:
        TypeError: dtypes.
        ValueError: shapes; both or neither of tables and positions; tables with a column for every element, which are
            told apart by no op; tables that require a gradient; an odd rotary_dim; a layout that there is not.
    """
    cos, sin = check_rotary(x, cos, sin, positions, theta, rotary_dim, layout)
    if inplace:
        _check_own_memory(x)
    return _turned(x, cos, sin, layout == "bhsd", interleaved, inplace)
