# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Device functions of products with several experts' weights: where a tile lies, and its sum over the terms."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter multiplies bfloat16 as if its bits were integers.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def tile_of_step(program, tiles, num_tiles, num_cols, GROUP: tl.constexpr):
    """(expert, first row, rows, column tile). GROUP tiles of rows take a column after the other together: their weight
    is read from the cache."""
    group = program // (GROUP * num_cols)
    members = tl.minimum(num_tiles - group * GROUP, GROUP)
    place = program - group * (GROUP * num_cols)
    entry = tiles + (group * GROUP + place % members) * 4
    return tl.load(entry), tl.load(entry + 1).to(tl.int64), tl.load(entry + 2), place // members


@triton.jit
def source_rows(index, row, rows, m):
    """int64 [BLOCK_M]: where rows `row` + m of an operand lie; -1: padding, or past the end of the tile."""
    if index is None:
        return tl.where(m < rows, row + m, -1)
    else:  # Triton compiles what stands behind a return
        return tl.load(index + row + m, mask=m < rows, other=-1).to(tl.int64)


@triton.jit
def load_block(pointers, inside_k, inside_n, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr):
    """Zeros past the ends that the blocks do not divide."""
    if EVEN_K and EVEN_N:
        block = tl.load(pointers)
    elif EVEN_K:
        block = tl.load(pointers, mask=inside_n, other=0.0)
    elif EVEN_N:
        block = tl.load(pointers, mask=inside_k, other=0.0)
    else:
        block = tl.load(pointers, mask=inside_k & inside_n, other=0.0)
    return block


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def gathered_matmul(
    x,
    stride_x,
    source,
    weight,
    stride_n,
    stride_k,
    second,
    col,
    N,
    K,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N]: x[source] @ weight[col..].T; with GATED twice as wide: the other columns are those of
    the weight `second` further on. One product of all is faster than two.
    """
    WIDE: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    k = tl.arange(0, BLOCK_K)
    wide = tl.arange(0, WIDE)
    n = wide % BLOCK_N
    inside_n = (col + n < N)[None, :]
    place = n * stride_n
    if GATED:
        place += (wide // BLOCK_N).to(tl.int64) * second
    rows = x + tl.maximum(source, 0) * stride_x
    x_block = rows[:, None] + k[None, :]
    weight_block = weight + col.to(tl.int64) * stride_n + (place[None, :] + k[:, None] * stride_k)
    acc = tl.zeros((BLOCK_M, WIDE), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(x_block) if EVEN_K else tl.load(x_block, mask=k[None, :] < K - start, other=0.0)
        inside_k = k[:, None] < K - start
        acc = multiply(a, load_block(weight_block, inside_k, inside_n, EVEN_K, EVEN_N), acc, PRECISION)
        x_block += BLOCK_K
        weight_block += BLOCK_K * stride_k
    return acc
