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

# Triton's interpreter multiplies bfloat16 as if its bits were integers.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# ---- device functions ------------------------------------------------------------------------------------------------


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


@triton.jit
def column_halves(acc):
    """The left and the right half of the columns."""
    M: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    return tl.split(tl.permute(tl.reshape(acc, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def normal_cdf(x):
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def normal_density(x):
    return 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def activate(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """`fastpar.contracts.moe.activate`; `up` is of no interest without a gate."""
    if ACTIVATION == "swiglu":
        act = gate * sigmoid(gate) * up
    elif ACTIVATION == "geglu":
        act = gate * normal_cdf(gate) * up
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        act = (up + 1.0) * gate * sigmoid(alpha * gate)
    elif ACTIVATION == "gelu":
        act = gate * normal_cdf(gate)
    elif ACTIVATION == "silu":
        act = gate * sigmoid(gate)
    else:
        act = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACTIVATION == "relu2":
            act *= act
    return act


@triton.jit
def activate_backward(dact, gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """(dgate, dup) of `activate`; without a gate dup is dgate."""
    if ACTIVATION == "swiglu":
        s = sigmoid(gate)
        dgate, dup = dact * up * s * (1.0 + gate * (1.0 - s)), dact * gate * s
    elif ACTIVATION == "geglu":
        cdf = normal_cdf(gate)
        dgate, dup = dact * up * (cdf + gate * normal_density(gate)), dact * gate * cdf
    elif ACTIVATION == "clamped_swiglu":
        low = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        within = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        s = sigmoid(alpha * low)
        dgate = tl.where(gate > limit, 0.0, dact * (within + 1.0) * s * (1.0 + alpha * low * (1.0 - s)))
        dup = tl.where(tl.abs(up) > limit, 0.0, dact * low * s)
    else:
        if ACTIVATION == "gelu":
            dgate = dact * (normal_cdf(gate) + gate * normal_density(gate))
        elif ACTIVATION == "silu":
            s = sigmoid(gate)
            dgate = dact * s * (1.0 + gate * (1.0 - s))
        elif ACTIVATION == "relu2":
            dgate = dact * 2.0 * tl.maximum(gate, 0.0)
        else:
            dgate = tl.where(gate > 0.0, dact, 0.0)
        dup = dgate
    return dgate, dup


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


# ---- kernels ---------------------------------------------------------------------------------------------------------


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


@triton.jit
def dact_tile(
    walked,
    num_tiles,
    num_cols,
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
    """What one step of grouped_gemm_dact_kernel computes and stores."""
    expert, row, rows, tile_n = tile_of_step(walked, tiles, num_tiles, num_cols, GROUP)
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
    # In halves of the columns: five tiles of float32 do not fit the registers. In quarters beside the next loads, and
    # where gate and up alternate.
    here = hidden + row * stride_hidden, dhidden + row * stride_hidden, act + row * N
    if QUARTERS:
        left, right = column_halves(acc)
        dot = dact_halves(
            left, factor, here[0], here[1], here[2], stride_hidden, step, second_hidden, limit, alpha, m, rows, col, N,
            ACTIVATION, GATED, BLOCK_N // 2,
        )  # fmt: skip
        dot += dact_halves(
            right, factor, here[0], here[1], here[2], stride_hidden, step, second_hidden, limit, alpha, m, rows,
            col + BLOCK_N // 2, N, ACTIVATION, GATED, BLOCK_N // 2,
        )  # fmt: skip
    else:
        dot = dact_halves(
            acc, factor, here[0], here[1], here[2], stride_hidden, step, second_hidden, limit, alpha, m, rows, col, N,
            ACTIVATION, GATED, BLOCK_N,
        )  # fmt: skip
    tl.store(dots + tile_n.to(tl.int64) * num_rows + row + m, dot, mask=m < rows)


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
    PERSISTENT: tl.constexpr,
):
    """The gradient through the second product and the activation, in one pass over the hidden features.

    p[i]       = dout[index[i]] @ weight[e].T          weight: the second one as [features, outputs]
    dhidden[i] = activation'(hidden[i]) * row_weights[i] * p[i]
    act[i]     = row_weights[i] * activation(hidden[i])     what the weight gradient of the second product needs
    dots[c, i] = <p[i], activation(hidden[i])> over column tile c: summed over c, the gradient of row_weights[i]
    """
    num_tiles, num_cols = tl.load(tiles + 3), tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        tl.assume(K > 0)  # else the compiler keeps the plain loops beside the flattened one
        for walked in tl.range(tl.program_id(0), num_tiles * num_cols, tl.num_programs(0), flatten=True):
            dact_tile(
                walked,
                num_tiles,
                num_cols,
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
                ACTIVATION,
                GATED,
                GROUP,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                EVEN_N,
                EVEN_K,
                PRECISION,
                QUARTERS,
            )
    elif tl.program_id(0) < num_tiles * num_cols:
        dact_tile(
            tl.program_id(0),
            num_tiles,
            num_cols,
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
            ACTIVATION,
            GATED,
            GROUP,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
            PRECISION,
            QUARTERS,
        )


@triton.jit
def wgrad_place(walked, splits, tiles_f, tiles_k, GROUP: tl.constexpr):
    """(expert, tile of left's features, tile of right's, first row, one past the last row)."""
    expert = walked // (tiles_f * tiles_k)
    walked -= expert * tiles_f * tiles_k
    group = walked // (GROUP * tiles_k)
    members = tl.minimum(tiles_f - group * GROUP, GROUP)
    place = walked - group * (GROUP * tiles_k)
    begin, end = tl.load(splits + expert).to(tl.int32), tl.load(splits + expert + 1).to(tl.int32)
    return expert, group * GROUP + place % members, place // members, begin, end


@triton.jit
def wgrad_rows(
    acc,
    row,
    end,
    f,
    k,
    left,
    stride_left,
    left_index,
    right,
    stride_right,
    right_index,
    F,
    K,
    PRECISION: tl.constexpr,
):
    """acc with the products of some rows."""
    left_row = row if left_index is None else tl.load(left_index + row, mask=row < end, other=-1).to(tl.int64)
    right_row = row if right_index is None else tl.load(right_index + row, mask=row < end, other=-1).to(tl.int64)
    inside = (row < end) & (left_row >= 0) & (right_row >= 0)
    a = tl.load(
        left + (left_row * stride_left)[:, None] + f[None, :], mask=inside[:, None] & (f < F)[None, :], other=0.0
    )
    b = tl.load(
        right + (right_row * stride_right)[:, None] + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0
    )
    return multiply(tl.trans(a), b, acc, PRECISION)


@triton.jit
def wgrad_store(acc, factor, out, expert, f, k, F, K):
    if factor is not None:
        acc *= tl.load(factor)
    target = out + expert.to(tl.int64) * F * K + (f.to(tl.int64)[:, None] * K + k[None, :])
    tl.store(target, acc.to(out.dtype.element_ty), mask=(f < F)[:, None] & (k < K)[None, :])


@triton.jit
def wgrad_steps(splits, per_expert, num_tiles, BLOCK_R: tl.constexpr, TILES: tl.constexpr):
    """Steps of rows that this program takes in a walk; an expert without rows has one for each of its tiles."""
    steps = 0
    for first in range(tl.program_id(0), num_tiles, TILES * tl.num_programs(0)):
        tile = first + tl.arange(0, TILES) * tl.num_programs(0)
        entry = splits + tile // per_expert
        begin = tl.load(entry, mask=tile < num_tiles, other=0).to(tl.int32)
        end = tl.load(entry + 1, mask=tile < num_tiles, other=0).to(tl.int32)
        steps += tl.sum(tl.where(tile < num_tiles, tl.maximum((end - begin + BLOCK_R - 1) // BLOCK_R, 1), 0), 0)
    return steps


@triton.jit(do_not_specialize=["num_tiles"])
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
    num_tiles,
    GROUP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """out[e] = factor * left[rows of e].T @ right[rows of e]: [F, K] for every expert; zeros for one without rows.

    splits [0, 2, 2], left [[1], [2]], right [[10], [20]], factor [2]: out [[[100]], [[0]]].

    PERSISTENT: a program walks over its tiles and their rows in one loop, whose state says where it is. Tiles have as
    many rows as their experts; the compiler pipelines no loop that it makes of two by itself where the inner one's
    length is read from memory.
    """
    tiles_f, tiles_k = tl.cdiv(F, BLOCK_F), tl.cdiv(K, BLOCK_K)
    walked = tl.program_id(0)
    expert, tile_f, tile_k, start, end = wgrad_place(walked, splits, tiles_f, tiles_k, GROUP)
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_F, BLOCK_K), tl.float32)
    if PERSISTENT:
        for _ in range(0, wgrad_steps(splits, tiles_f * tiles_k, num_tiles, BLOCK_R, 128)):
            f, k = tile_f * BLOCK_F + tl.arange(0, BLOCK_F), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
            row = (start + r).to(tl.int64)
            acc = wgrad_rows(
                acc, row, end, f, k, left, stride_left, left_index, right, stride_right, right_index, F, K, PRECISION
            )
            start += BLOCK_R
            if start >= end:
                wgrad_store(acc, factor, out, expert, f, k, F, K)
                acc = tl.zeros((BLOCK_F, BLOCK_K), tl.float32)
                walked += tl.num_programs(0)
                following = tl.minimum(walked, num_tiles - 1)  # of the last one nothing is done
                expert, tile_f, tile_k, start, end = wgrad_place(following, splits, tiles_f, tiles_k, GROUP)
    else:
        f, k = tile_f * BLOCK_F + tl.arange(0, BLOCK_F), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        for first in range(start, end, BLOCK_R):
            row = (first + r).to(tl.int64)
            acc = wgrad_rows(
                acc, row, end, f, k, left, stride_left, left_index, right, stride_right, right_index, F, K, PRECISION
            )
        wgrad_store(acc, factor, out, expert, f, k, F, K)


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
