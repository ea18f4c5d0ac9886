# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels of experts' first product with its activation, and of the gradient of both.

Tiles, rows and bits are those of `grouped_gemm_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpar.kernels.grouped_activations import activate, activate_backward
from fastpar.kernels.grouped_gemm_tiles import gathered_matmul, source_rows, tile_of_step


@triton.jit
def column_halves(acc):
    """The left and the right half of the columns."""
    M: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    return tl.split(tl.permute(tl.reshape(acc, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def dact_columns(
    acc,
    factor,
    hidden,
    dhidden,
    act,
    stride_hidden,
    step,
    second_hidden,
    limit,
    alpha,
    m,
    rows,
    col,
    N,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write COLS columns of dhidden and act from `col` on; <acc, activation> of each row."""
    n = col + tl.arange(0, COLS)
    mask = (m < rows)[:, None] & (n < N)[None, :]
    place = m[:, None] * stride_hidden + n[None, :] * step
    gate = tl.load(hidden + place, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(hidden + place + second_hidden, mask=mask, other=0.0).to(tl.float32)
    value = activate(gate, up, limit, alpha, ACTIVATION)
    dot = tl.sum(acc * value, 1)
    target = act + (m[:, None] * N + n[None, :])
    tl.store(target, (value * factor[:, None]).to(act.dtype.element_ty), mask=mask)
    dgate, dup = activate_backward(acc * factor[:, None], gate, up, limit, alpha, ACTIVATION)
    tl.store(dhidden + place, dgate.to(dhidden.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(dhidden + place + second_hidden, dup.to(dhidden.dtype.element_ty), mask=mask)
    return dot


@triton.jit
def act_columns(
    gate,
    up,
    source,
    factor,
    row_weights,
    hidden,
    act,
    bias,
    stride_hidden,
    limit,
    alpha,
    expert,
    row,
    m,
    rows,
    col,
    N,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Write columns of hidden from `col` on, `gate` (and `up`, N further) times `factor`, and their activation."""
    COLS: tl.constexpr = gate.shape[1]
    WIDTH: tl.constexpr = 2 if INTERLEAVED else 1
    n = col + tl.arange(0, COLS)
    mask = (m < rows)[:, None] & (n < WIDTH * N)[None, :]
    place = hidden + row * stride_hidden + (m[:, None] * stride_hidden + n[None, :])
    feature = bias + expert * stride_hidden + n if bias is not None else None
    gate = tl.where((source < 0)[:, None], 0.0, gate * factor[:, None])
    if bias is not None:
        gate += tl.load(feature, mask=n < WIDTH * N, other=0.0).to(tl.float32)[None, :]
    rounded_gate = gate.to(hidden.dtype.element_ty)
    tl.store(place, rounded_gate, mask=mask)
    gate = rounded_gate.to(tl.float32)
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(gate, (gate.shape[0], COLS // 2, 2)))
    elif GATED:
        up = tl.where((source < 0)[:, None], 0.0, up * factor[:, None])
        if bias is not None:
            up += tl.load(feature + N, mask=n < N, other=0.0).to(tl.float32)[None, :]
        rounded_up = up.to(hidden.dtype.element_ty)
        tl.store(place + N, rounded_up, mask=mask)
        up = rounded_up.to(tl.float32)
    value = activate(gate, up, limit, alpha, ACTIVATION)
    if row_weights is not None:
        value *= tl.load(row_weights + row + m, mask=m < rows, other=0.0)[:, None]
    f = col // WIDTH + tl.arange(0, COLS // WIDTH)
    target = act + row * N + (m[:, None] * N + f[None, :])
    tl.store(target, value.to(act.dtype.element_ty), mask=(m < rows)[:, None] & (f < N)[None, :])


@triton.jit
def act_halves(
    gate,
    up,
    source,
    factor,
    row_weights,
    hidden,
    act,
    bias,
    stride_hidden,
    limit,
    alpha,
    expert,
    row,
    m,
    rows,
    col,
    N,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """act_columns of the left half and then of the right one: so many erf at once as all take do not fit registers."""
    COLS: tl.constexpr = gate.shape[1]
    left, right = column_halves(gate)
    left_up, right_up = left, right
    if GATED:
        left_up, right_up = column_halves(up)
    act_columns(
        left, left_up, source, factor, row_weights, hidden, act, bias, stride_hidden, limit, alpha, expert, row, m,
        rows, col, N, ACTIVATION, GATED, False,
    )  # fmt: skip
    act_columns(
        right, right_up, source, factor, row_weights, hidden, act, bias, stride_hidden, limit, alpha, expert, row, m,
        rows, col + COLS // 2, N, ACTIVATION, GATED, False,
    )  # fmt: skip


@triton.jit
def act_tile(
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
    second,
    bias,
    scale,
    row_weights,
    hidden,
    act,
    stride_hidden,
    limit,
    alpha,
    tiles,
    N,
    K,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What one step of grouped_gemm_act_kernel computes and stores."""
    expert, row, rows, tile_n = tile_of_step(walked, tiles, num_tiles, num_cols, GROUP)
    m = tl.arange(0, BLOCK_M)
    source = source_rows(index, row, rows, m)
    # Of features that alternate, the tile is one of all of them, and a thread has the gate beside its up.
    WIDTH: tl.constexpr = 2 if INTERLEAVED else 1
    col = tile_n * (WIDTH * BLOCK_N)
    acc = gathered_matmul(
        x, stride_x, source, weight + expert.to(tl.int64) * stride_e, stride_n, stride_k, second, col, WIDTH * N, K,
        GATED and not INTERLEAVED, BLOCK_M, WIDTH * BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION,
    )  # fmt: skip
    if GATED and not INTERLEAVED:
        gate, up = column_halves(acc)
    else:
        gate, up = acc, acc
    factor = tl.where(source < 0, 0.0, 1.0)
    if scale is not None:
        factor *= tl.load(scale + row + m, mask=m < rows, other=0.0)
    if ACTIVATION == "gelu":
        left, right = column_halves(gate)
        act_halves(
            left, left, source, factor, row_weights, hidden, act, bias, stride_hidden, limit, alpha, expert, row, m,
            rows, col, N, ACTIVATION, GATED,
        )  # fmt: skip
        act_halves(
            right, right, source, factor, row_weights, hidden, act, bias, stride_hidden, limit, alpha, expert, row, m,
            rows, col + BLOCK_N // 2, N, ACTIVATION, GATED,
        )  # fmt: skip
    elif ACTIVATION == "geglu" and not INTERLEAVED:
        act_halves(
            gate, up, source, factor, row_weights, hidden, act, bias, stride_hidden, limit, alpha, expert, row, m,
            rows, col, N, ACTIVATION, GATED,
        )  # fmt: skip
    else:
        act_columns(
            gate, up, source, factor, row_weights, hidden, act, bias, stride_hidden, limit, alpha, expert, row, m,
            rows, col, N, ACTIVATION, GATED, INTERLEAVED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["limit", "alpha"])
def grouped_gemm_act_kernel(
    x,
    stride_x,
    index,
    weight,
    stride_e,
    stride_n,
    stride_k,
    second,
    bias,
    scale,
    row_weights,
    hidden,
    act,
    stride_hidden,
    limit,
    alpha,
    tiles,
    N,
    K,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """hidden[i] = scale[i] * x[index[i]] @ weight[e].T + bias[e], act[i] = row_weights[i] * activation(hidden[i]).

    act     [rows, N]
    hidden  [rows, stride_hidden]: features of the gate (or all), then those of up; INTERLEAVED: up behind its gate.
            In the weight up is `second` elements further

    The activation is that of the rounded hidden features: a backward that reads these computes the same.
    """
    num_tiles, num_cols = tl.load(tiles + 3), tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        tl.assume(K > 0)  # else the compiler keeps the plain loops beside the flattened one
        for walked in tl.range(tl.program_id(0), num_tiles * num_cols, tl.num_programs(0), flatten=True):
            act_tile(
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
                second,
                bias,
                scale,
                row_weights,
                hidden,
                act,
                stride_hidden,
                limit,
                alpha,
                tiles,
                N,
                K,
                ACTIVATION,
                GATED,
                INTERLEAVED,
                GROUP,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                EVEN_N,
                EVEN_K,
                PRECISION,
            )
    elif tl.program_id(0) < num_tiles * num_cols:
        act_tile(
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
            second,
            bias,
            scale,
            row_weights,
            hidden,
            act,
            stride_hidden,
            limit,
            alpha,
            tiles,
            N,
            K,
            ACTIVATION,
            GATED,
            INTERLEAVED,
            GROUP,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
            PRECISION,
        )


@triton.jit
def dact_halves(
    acc,
    factor,
    hidden,
    dhidden,
    act,
    stride_hidden,
    step,
    second_hidden,
    limit,
    alpha,
    m,
    rows,
    col,
    N,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    COLS: tl.constexpr,
):
    """dact_columns of the left half of COLS columns, and then of the right one."""
    left, right = column_halves(acc)
    dot = dact_columns(
        left, factor, hidden, dhidden, act, stride_hidden, step, second_hidden, limit, alpha, m, rows, col, N,
        ACTIVATION, GATED, COLS // 2,
    )  # fmt: skip
    dot += dact_columns(
        right, factor, hidden, dhidden, act, stride_hidden, step, second_hidden, limit, alpha, m, rows,
        col + COLS // 2, N, ACTIVATION, GATED, COLS // 2,
    )  # fmt: skip
    return dot


@triton.jit(do_not_specialize=["num_rows", "limit", "alpha"])
def grouped_gemm_dact_kernel(
    dout,
    stride_dout,
    index,
    weight,
    stride_e,
    stride_n,
    stride_k,
    row_weights,
    hidden,
    dhidden,
    act,
    dots,
    stride_hidden,
    step,
    second_hidden,
    limit,
    alpha,
    tiles,
    num_rows,
    N,
    K,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    QUARTERS: tl.constexpr,
):
    """The gradient through the second product and the activation, in one pass over the hidden features.

    p[i]       = dout[index[i]] @ weight[e].T          weight: the second one as [features, outputs]
    dhidden[i] = activation'(hidden[i]) * row_weights[i] * p[i]
    act[i]     = row_weights[i] * activation(hidden[i])     what the weight gradient of the second product needs
    dots[c, i] = <p[i], activation(hidden[i])> over column tile c: summed over c, the gradient of row_weights[i]
    """
    num_tiles, num_cols = tl.load(tiles + 3), tl.cdiv(N, BLOCK_N)
    if tl.program_id(0) < num_tiles * num_cols:
        expert, row, rows, tile_n = tile_of_step(tl.program_id(0), tiles, num_tiles, num_cols, GROUP)
        m = tl.arange(0, BLOCK_M)
        source = source_rows(index, row, rows, m)
        col = tile_n * BLOCK_N
        acc = gathered_matmul(
            dout, stride_dout, source, weight + expert.to(tl.int64) * stride_e, stride_n, stride_k, 0, col, N, K, False,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
        acc = tl.where((source < 0)[:, None], 0.0, acc)
        factor = tl.full((BLOCK_M,), 1.0, tl.float32)
        if row_weights is not None:
            factor = tl.load(row_weights + row + m, mask=m < rows, other=0.0)
        # In halves of the columns: five tiles of float32 do not fit the registers. In quarters where gate and up
        # alternate.
        here = hidden + row * stride_hidden, dhidden + row * stride_hidden, act + row * N
        if QUARTERS:
            left, right = column_halves(acc)
            dot = dact_halves(
                left, factor, here[0], here[1], here[2], stride_hidden, step, second_hidden, limit, alpha, m, rows, col,
                N, ACTIVATION, GATED, BLOCK_N // 2,
            )  # fmt: skip
            dot += dact_halves(
                right, factor, here[0], here[1], here[2], stride_hidden, step, second_hidden, limit, alpha, m, rows,
                col + BLOCK_N // 2, N, ACTIVATION, GATED, BLOCK_N // 2,
            )  # fmt: skip
        else:
            dot = dact_halves(
                acc, factor, here[0], here[1], here[2], stride_hidden, step, second_hidden, limit, alpha, m, rows, col,
                N, ACTIVATION, GATED, BLOCK_N,
            )  # fmt: skip
        tl.store(dots + tile_n.to(tl.int64) * num_rows + row + m, dot, mask=m < rows)
