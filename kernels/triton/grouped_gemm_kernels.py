# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels of products with several experts' weights; `grouped_gemm.py` has the algebra and launches them.

Note: tiles
    Rows lie by expert, and how many each has is known on the device alone. A table of tiles, (expert, first row, rows,
    tiles in use) of int32, is written there too: none crosses from one expert to the next. It has as many entries as
    there can be tiles at most, ceil(rows / BLOCK_M) + experts; those that are too many have 0 rows.

    A product's programs walk over the tiles in use times the tiles of columns, each by the number of programs. There
    are as many as there can be steps, and then each takes one or none; or, PERSISTENT, as many as are resident: the
    compiler makes one loop of the walk and the terms, so that the loads of a tile begin before the one before is
    stored. Such programs wait for nobody, but hold every multiprocessor until the product ends.

Note: gathered rows
    With an index, row i of an operand is x[index[i]], read where it lies: no permuted copy exists. -1 is padding, a row
    of zeros. A product over features reads row 0 in its place and writes 0; a product over rows masks its loads.

Note: bits
    A sum runs in one program in one order, in float32, and is rounded once. There are no atomics. So a row's bits
    depend on the row, the expert's weight and the blocks, and not on what other rows there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpar.kernels.grouped_gemm_tiles import gathered_matmul, multiply, source_rows, tile_of_step


@triton.jit(do_not_specialize=["num_experts", "num_tiles"])
def tile_table_kernel(
    splits, tiles, num_experts, num_tiles, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr
):
    """`Note: tiles`. TILES of them by each program.

    splits [0, 3, 3, 8], blocks of 4 rows, 5 tiles: (0, 0, 3, 3), (2, 3, 4, 3), (2, 7, 1, 3), and twice (0, 0, 0, 3).
    """
    e = tl.arange(0, EXPERTS)
    is_expert = e < num_experts
    begin = tl.load(splits + e, mask=is_expert, other=0).to(tl.int32)
    end = tl.load(splits + e + 1, mask=is_expert, other=0).to(tl.int32)
    needed = (end - begin + BLOCK_M - 1) // BLOCK_M
    up_to = tl.cumsum(needed, 0)
    t = tl.program_id(0) * TILES + tl.arange(0, TILES)
    is_before = up_to[None, :] <= t[:, None]
    expert = tl.sum(is_before.to(tl.int32), 1)
    exists = expert < num_experts
    nth = t - tl.sum(tl.where(is_before, needed[None, :], 0), 1)
    row = tl.load(splits + expert, mask=exists, other=0).to(tl.int32) + nth * BLOCK_M
    stop = tl.load(splits + expert + 1, mask=exists, other=0).to(tl.int32)
    entry = tiles + t * 4
    tl.store(entry, tl.where(exists, expert, 0), mask=t < num_tiles)
    tl.store(entry + 1, tl.where(exists, row, 0), mask=t < num_tiles)
    tl.store(entry + 2, tl.where(exists, tl.minimum(stop - row, BLOCK_M), 0), mask=t < num_tiles)
    tl.store(entry + 3, tl.zeros_like(t) + tl.sum(needed, 0), mask=t < num_tiles)


@triton.jit
def linear_tile(
    walked,
    num_tiles,
    num_cols,
    x,
    stride_x,
    index,
    weight,
    stride_e,
    stride_n,
    stride_k,
    bias,
    scale,
    out,
    tiles,
    N,
    K,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What one step of grouped_gemm_kernel computes and stores."""
    expert, row, rows, tile_n = tile_of_step(walked, tiles, num_tiles, num_cols, GROUP)
    m = tl.arange(0, BLOCK_M)
    source = source_rows(index, row, rows, m)
    col = tile_n * BLOCK_N
    acc = gathered_matmul(
        x, stride_x, source, weight + expert.to(tl.int64) * stride_e, stride_n, stride_k, 0, col, N, K, False,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION,
    )  # fmt: skip
    n = col + tl.arange(0, BLOCK_N)
    if scale is not None:
        acc *= tl.load(scale + row + m, mask=m < rows, other=0.0)[:, None]
    acc = tl.where((source < 0)[:, None], 0.0, acc)
    if bias is not None:
        acc += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = out + row * N + (m[:, None] * N + n[None, :])
    tl.store(place, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def grouped_gemm_kernel(
    x,
    stride_x,
    index,
    weight,
    stride_e,
    stride_n,
    stride_k,
    bias,
    scale,
    out,
    tiles,
    N,
    K,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """out[i] = scale[i] * x[index[i]] @ weight[expert of i].T + bias[expert of i]; bias alone where index[i] is -1.

    weight [[[2]], [[3]]], tiles (0, 0, 1) and (1, 1, 2), index [1, 0, -1], x [[10], [20]]: out [[40], [30], [0]].
    """
    num_tiles, num_cols = tl.load(tiles + 3), tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        tl.assume(K > 0)  # else the compiler keeps the plain loops beside the flattened one
        for walked in tl.range(tl.program_id(0), num_tiles * num_cols, tl.num_programs(0), flatten=True):
            linear_tile(
                walked,
                num_tiles,
                num_cols,
                x,
                stride_x,
                index,
                weight,
                stride_e,
                stride_n,
                stride_k,
                bias,
                scale,
                out,
                tiles,
                N,
                K,
                GROUP,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                EVEN_N,
                EVEN_K,
                PRECISION,
            )
    elif tl.program_id(0) < num_tiles * num_cols:
        linear_tile(
            tl.program_id(0),
            num_tiles,
            num_cols,
            x,
            stride_x,
            index,
            weight,
            stride_e,
            stride_n,
            stride_k,
            bias,
            scale,
            out,
            tiles,
            N,
            K,
            GROUP,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
            PRECISION,
        )


@triton.jit
def grouped_wgrad_kernel(
    left,
    stride_left,
    left_index,
    right,
    stride_right,
    right_index,
    splits,
    factor,
    out,
    F,
    K,
    GROUP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[e] = factor * left[rows of e].T @ right[rows of e]: [F, K] for every expert; zeros for one without rows.

    splits [0, 2, 2], left [[1], [2]], right [[10], [20]], factor [2]: out [[[100]], [[0]]].
    """
    tiles_f, tiles_k = tl.cdiv(F, BLOCK_F), tl.cdiv(K, BLOCK_K)
    program = tl.program_id(0)
    expert = program // (tiles_f * tiles_k)
    program -= expert * tiles_f * tiles_k
    group = program // (GROUP * tiles_k)
    members = tl.minimum(tiles_f - group * GROUP, GROUP)
    place = program - group * (GROUP * tiles_k)
    begin, end = tl.load(splits + expert).to(tl.int32), tl.load(splits + expert + 1).to(tl.int32)
    tile_f, tile_k = group * GROUP + place % members, place // members
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_F, BLOCK_K), tl.float32)
    f, k = tile_f * BLOCK_F + tl.arange(0, BLOCK_F), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    for start in range(begin, end, BLOCK_R):
        row = (start + r).to(tl.int64)
        left_row = row if left_index is None else tl.load(left_index + row, mask=row < end, other=-1).to(tl.int64)
        right_row = row if right_index is None else tl.load(right_index + row, mask=row < end, other=-1).to(tl.int64)
        inside = (row < end) & (left_row >= 0) & (right_row >= 0)
        a = tl.load(
            left + (left_row * stride_left)[:, None] + f[None, :], mask=inside[:, None] & (f < F)[None, :], other=0.0
        )
        b = tl.load(
            right + (right_row * stride_right)[:, None] + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0
        )
        acc = multiply(tl.trans(a), b, acc, PRECISION)
    if factor is not None:
        acc *= tl.load(factor)
    target = out + expert.to(tl.int64) * F * K + (f.to(tl.int64)[:, None] * K + k[None, :])
    tl.store(target, acc.to(out.dtype.element_ty), mask=(f < F)[:, None] & (k < K)[None, :])


@triton.jit
def grouped_bias_grad_kernel(
    dout, stride, index, scale, splits, factor, out, F, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr
):
    """out[e] = factor * the sum of scale[i] * dout[index[i]] over the rows i of expert e: [E, F].

    splits [0, 2, 2], dout [[1, 2], [3, 4]], scale [1, 10], factor [2]: out [[62, 84], [0, 0]].
    """
    tiles = tl.cdiv(F, BLOCK_F)
    expert = tl.program_id(0) // tiles
    f = tl.program_id(0) % tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    begin, end = tl.load(splits + expert).to(tl.int32), tl.load(splits + expert + 1).to(tl.int32)
    r = tl.arange(0, BLOCK_R)
    total = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for start in range(begin, end, BLOCK_R):
        row = (start + r).to(tl.int64)
        source = row if index is None else tl.load(index + row, mask=row < end, other=-1).to(tl.int64)
        inside = (row < end) & (source >= 0)
        value = tl.load(
            dout + (source * stride)[:, None] + f[None, :], mask=inside[:, None] & (f < F)[None, :], other=0.0
        ).to(tl.float32)
        if scale is not None:
            value *= tl.load(scale + row, mask=inside, other=0.0)[:, None]
        total += value
    result = tl.sum(total, 0)
    if factor is not None:
        result *= tl.load(factor)
    tl.store(out + expert * F + f, result.to(out.dtype.element_ty), mask=f < F)
