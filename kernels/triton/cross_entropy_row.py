"""What one program of the cross-entropy kernels does to one row of logits: statistics, gradient, or zeros.

A row is taken in blocks of [K, WIDTH] columns, WIDTH being one 16-byte load of every thread. Whatever is carried from
block to block has shape [WIDTH], so that a reduction over a block is one over dim 0, inside a thread: the loop has no
barrier and no shuffle, and threads meet once, at the end of the row. The price is one more exponential per K elements,
where a column's running sum is rescaled to its new maximum.

Note: base logits. The kernels compute with b, where the logit that enters the softmax is z = outer * b, outer > 0:

    IDENTITY   b = x                     outer = 1
    SCALED     b = inner * x             outer = |logit_scale|, inner = the sign of logit_scale
    SOFTCAP    b = tanh(inner * x)       outer = softcap, inner = logit_scale / softcap

so that scaling costs nothing beyond the multiplication that turns exp into exp2, and cannot round the logits. How one
double holds the normaliser of a row of any size: Note: far rows in csrc/common/far_rows.h.

Numerics. b - m is taken before scaling to base 2: x * log2e - m * log2e would put the rounding error of the products,
5e-4 at |x| = 1e4, on every term. lse arrives in double and is split into two floats; what the second one contributes is
common to the row and joins the factor in front. The target's entry uses expm1, since p - 1 would cancel as p nears 1;
only the block that holds it selects, by a branch that all threads take alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

IDENTITY = tl.constexpr(0)
SCALED = tl.constexpr(1)
SOFTCAP = tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)
FAR_MAXIMUM = tl.constexpr(2.0**30)
SUM_UNIT = tl.constexpr(2.0**-32)  # sums of logits are kept and sent multiplied by this: of 1e38 they would be infinite


# ---- element-wise ----------------------------------------------------------------------------------------------------


@triton.jit
def tanh_and_slope(u: tl.tensor) -> tl.tensor:
    """tanh(u) and 1 - tanh(u)^2, neither with cancellation; infinities saturate, NaN stays.

    With E = exp(-2|u|) and r = 1 / (1 + E): |tanh| = 1 - 2 E r and the slope is 4 E r^2. Near 0, where the difference
    would cost digits, float32 takes a polynomial in u^2 (relative error 1.4e-8 up to 0.6).
    """
    size = tl.abs(u)
    e = tl.exp2(size * (-2.0 * LOG2E))
    if u.dtype == tl.float64:
        r = 1.0 / (1.0 + e)
    else:
        root = tl.rsqrt(1.0 + e)  # one instruction, where a division is several
        r = root * root
    er = e * r
    t = 1.0 - 2.0 * er
    t = tl.where(u < 0.0, -t, t)
    if u.dtype != tl.float64:
        s = u * u
        p = -0.0062763876
        p = p * s + 0.021116214
        p = p * s - 0.053875138
        p = p * s + 0.13332924
        p = p * s - 0.33333330
        t = tl.where(size < 0.6, u + u * (p * s), t)
    return t, 4.0 * er * r


@triton.jit
def base_logits(x: tl.tensor, inner: tl.tensor, TRANSFORM: tl.constexpr, COMPUTE: tl.constexpr) -> tl.tensor:
    """b of `Note: base logits`, and db / d(inner x)."""
    b = x.to(COMPUTE)
    slope = 1.0
    if TRANSFORM != IDENTITY:
        b *= tl.full([], inner, COMPUTE)
    if TRANSFORM == SOFTCAP:
        b, slope = tanh_and_slope(b)
    return b, slope


@triton.jit
def expm1(d: tl.tensor) -> tl.tensor:
    """exp(d) - 1 for d <= 0, by its series where the subtraction would cancel."""
    series = d * 0.0 + 1.0
    if d.dtype == tl.float64:
        for n in tl.static_range(17, 1, -1):
            series = 1.0 + d * series / n
    else:
        for n in tl.static_range(9, 1, -1):
            series = 1.0 + d * series * (1.0 / n)
    return tl.where(tl.abs(d) < 0.5, d * series, tl.exp2(d * LOG2E) - 1.0)


@triton.jit
def finite_or_zero(x: tl.tensor) -> tl.tensor:
    """x, or 0 where it is infinite: a reference to subtract that makes no NaN of -inf."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit
def two_floats(x: tl.tensor, COMPUTE: tl.constexpr) -> tl.tensor:
    """(high, low) of a double, high + low = x; low is 0 where x is not finite, and for float64."""
    high = x.to(COMPUTE)
    low = (x - high.to(tl.float64)).to(COMPUTE)
    return high, tl.where(tl.abs(high) < float("inf"), low, 0.0)


@triton.jit
def far_unit(maximum: tl.tensor) -> tl.tensor:
    """2^(k - 30) for a double of 2^k <= |maximum| < 2^(k + 1) that is far, 1 for others: Note: far rows."""
    size = tl.abs(maximum)
    exponent = maximum.to(tl.int64, bitcast=True) & 0x7FF0000000000000
    unit = (exponent - 0x01E0000000000000).to(tl.float64, bitcast=True)
    return tl.where((size >= FAR_MAXIMUM) & (size < float("inf")), unit, 1.0)


@triton.jit
def join_lse(maximum: tl.tensor, log_sum: tl.tensor, COMPUTE: tl.constexpr) -> tl.tensor:
    """lse of a row as one double: Note: far rows."""
    if tl.float64 == COMPUTE:
        return maximum + log_sum
    rounded = tl.where(tl.abs(maximum) >= FAR_MAXIMUM, maximum.to(COMPUTE).to(tl.float64), maximum)
    return rounded + log_sum * far_unit(rounded)


@triton.jit
def split_parts(lse: tl.tensor, COMPUTE: tl.constexpr) -> tl.tensor:
    """(high, low) of a row's normaliser: lse = high + low, high being the maximum where the row is far.

    In float32: low / 2^(k - 30) with the bits of 2^(30 - k), from the exponent's bits of a float of 2^30 on.
    """
    high, low = two_floats(lse, COMPUTE)
    if tl.float64 != COMPUTE:
        exponent = high.to(tl.int32, bitcast=True) & 0x7F800000
        inverse = (0x4E800000 - (exponent - 0x3F800000)).to(tl.float32, bitcast=True)
        low = tl.where(exponent >= 0x4E800000, low * inverse, low)
    return high, low


@triton.jit
def row_maximum(
    row: tl.tensor,
    vocab: tl.tensor,
    inner: tl.tensor,
    TRANSFORM: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> tl.tensor:
    """The largest b of a row; -inf of none. In narrow blocks: it is rare, and must not cost its callers registers."""
    m = tl.full([WIDTH], float("-inf"), COMPUTE)
    for start in range(0, vocab, WIDTH):
        cols = start + tl.arange(0, WIDTH)
        b, _ = base_logits(tl.load(row + cols, mask=cols < vocab, other=0.0), inner, TRANSFORM, COMPUTE)
        m = tl.maximum(m, tl.where(cols < vocab, b, float("-inf")))
    return tl.max(m, axis=0)


@triton.jit
def split_lse(
    lse: tl.tensor,
    row: tl.tensor,
    vocab: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    TRANSFORM: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> tl.tensor:
    """(high, low), lse = outer (high + low).

    Of a far row `high` is the b of its maximum. Several b may be written alike; the row's own largest is the one,
    unless it is smaller: the maximum is another rank's then, and which of them does not matter.
    """
    if TRANSFORM == IDENTITY:
        high, low = split_parts(lse, COMPUTE)
    else:
        high, low = two_floats(lse / outer, COMPUTE)
        if tl.float64 != COMPUTE:
            maximum = lse.to(COMPUTE)
            is_far = (tl.abs(maximum) >= FAR_MAXIMUM) & (tl.abs(maximum) < float("inf"))
            _, far_low = split_parts(lse, COMPUTE)
            low = tl.where(is_far, (far_low.to(tl.float64) / outer).to(COMPUTE), low)
            top = row_maximum(row, tl.where(is_far, vocab, 0), inner, TRANSFORM, WIDTH, COMPUTE)
            is_top = is_far & ((top.to(tl.float64) * outer).to(COMPUTE) == maximum)
            high = tl.where(is_top, top, high)
    return high, low


@triton.jit
def written_maximum(m: tl.tensor, outer: tl.tensor, COMPUTE: tl.constexpr) -> tl.tensor:
    """(high, low): the row's maximum in z as it is written, and what was rounded away; 0 of a far one, where it is
    beyond all exponents."""
    high, low = two_floats(m.to(tl.float64) * outer, COMPUTE)
    return high, tl.where(tl.abs(high) < FAR_MAXIMUM, low, 0.0)


# ---- statistics ------------------------------------------------------------------------------------------------------


@triton.jit
def add_block(
    m: tl.tensor,
    s: tl.tensor,
    total: tl.tensor,
    row: tl.tensor,
    weight: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    factor: tl.tensor,
    center: tl.tensor,
    inner: tl.tensor,
    MASKED: tl.constexpr,
    SMOOTHING: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    EVICT: tl.constexpr,
) -> tl.tensor:
    """(m, s, total), each [WIDTH], with the block of columns [start, start + K * WIDTH) added."""
    cols = start + tl.arange(0, K)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    valid = cols < vocab
    if MASKED:
        x = tl.load(row + cols, mask=valid, other=0.0, eviction_policy=EVICT)
    else:
        x = tl.load(row + cols, eviction_policy=EVICT)
    b, _ = base_logits(x, inner, TRANSFORM, m.dtype)
    if SMOOTHING:
        part = b if TRANSFORM == SOFTCAP else b * SUM_UNIT - center
        if weight is not None:
            if MASKED:
                part *= tl.load(weight + cols, mask=valid, other=0.0, eviction_policy="evict_last")
            else:
                part *= tl.load(weight + cols, eviction_policy="evict_last")
        if MASKED:
            part = tl.where(valid, part, 0.0)
        total += tl.sum(part, axis=0)
    if MASKED:
        b = tl.where(valid, b, float("-inf"))
    highest = tl.maximum(m, tl.max(b, axis=0))
    # Only -inf so far: with 0 its terms are exp(-inf) = 0. NaN, which the maximum passes over, arrives in the sum.
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    e = tl.exp2((b - reference[None, :]) * factor)
    return highest, s * tl.exp2((m - reference) * factor) + tl.sum(e, axis=0), total


@triton.jit
def row_statistics(
    row: tl.tensor,
    weight: tl.tensor,
    weight_sum: tl.tensor,
    vocab: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    SMOOTHING: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
    EVICT: tl.constexpr,
) -> tl.tensor:
    """(m, s, S): the maximum of b, and in double the sums of exp(outer (b - m)) and of w b, over one row.

    weight      this shard's part of the weights, or None
    weight_sum  the sum of that part, where there is one

    b is summed around one of its own values, since sums of logits of 1e4 in float32 would lose the digits that a
    smoothed loss is made of.
    """
    BLOCK: tl.constexpr = K * WIDTH
    factor = tl.full([], outer * LOG2E, COMPUTE)
    center = tl.full([], 0.0, COMPUTE)
    if SMOOTHING and TRANSFORM != SOFTCAP:
        first = tl.arange(0, WIDTH)
        x = tl.load(row + first, mask=first < vocab, other=float("-inf"))
        center = tl.max(tl.where(first < vocab, base_logits(x, inner, TRANSFORM, COMPUTE)[0], float("-inf")), axis=0)
        center = finite_or_zero(tl.where(center == center, center, 0.0)) * SUM_UNIT
    m = tl.full([WIDTH], float("-inf"), COMPUTE)
    s = tl.zeros([WIDTH], COMPUTE)
    total = tl.zeros([WIDTH], COMPUTE)
    whole = vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        m, s, total = add_block(
            m, s, total, row, weight, start, vocab, factor, center, inner, False, SMOOTHING, TRANSFORM, K, WIDTH, EVICT
        )
    if whole < vocab:
        m, s, total = add_block(
            m, s, total, row, weight, whole, vocab, factor, center, inner, True, SMOOTHING, TRANSFORM, K, WIDTH, EVICT
        )
    top = tl.max(m, axis=0)
    reference = tl.where(top == float("-inf"), 0.0, top)
    # In double: where one term is nearly all of the sum, every step of a float's tree would round the rest of it.
    s = tl.sum((s * tl.exp2((m - reference) * factor)).to(tl.float64), axis=0)
    weighted = tl.sum(total.to(tl.float64), axis=0)
    if SMOOTHING and TRANSFORM != SOFTCAP:
        weighted += center.to(tl.float64) * (vocab if weight is None else tl.load(weight_sum))
        weighted *= 1.0 / SUM_UNIT
    return top, s, weighted


# ---- gradient --------------------------------------------------------------------------------------------------------


@triton.jit
def target_gradient(
    b: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    gamma: tl.tensor,
    delta: tl.tensor,
    beta_w: tl.tensor,
    outer: tl.tensor,
    COMPUTE: tl.constexpr,
) -> tl.tensor:
    """gamma (p - 1) + delta p - beta w for the target's b, p = exp(outer (b - high - low))."""
    log_p = (b - high - low) * tl.full([], outer, COMPUTE)
    return gamma * expm1(log_p) + delta * tl.exp2(log_p * LOG2E) - beta_w


@triton.jit
def write_block(
    row: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    column: tl.tensor,
    value: tl.tensor,
    high: tl.tensor,
    gain: tl.tensor,
    beta: tl.tensor,
    inner: tl.tensor,
    factor: tl.tensor,
    MASKED: tl.constexpr,
    SMOOTHING: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    cols = start + tl.arange(0, K)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    valid = cols < vocab
    if MASKED:
        x = tl.load(row + cols, mask=valid, other=0.0, eviction_policy="evict_first")
    else:
        x = tl.load(row + cols, eviction_policy="evict_first")
    b, slope = base_logits(x, inner, TRANSFORM, high.dtype)
    grad = tl.exp2((b - high) * factor) * gain
    if SMOOTHING:
        if weight is None:
            grad -= beta
        elif MASKED:
            grad -= beta * tl.load(weight + cols, mask=valid, other=0.0, eviction_policy="evict_last")
        else:
            grad -= beta * tl.load(weight + cols, eviction_policy="evict_last")
    if (column >= start) & (column < start + K * WIDTH):
        grad = tl.where(cols == column, value, grad)
    if TRANSFORM == SOFTCAP:
        grad *= slope
    grad = grad.to(out.dtype.element_ty)
    if MASKED:
        tl.store(out + cols, grad, mask=valid, eviction_policy="evict_first")
    else:
        tl.store(out + cols, grad, eviction_policy="evict_first")


@triton.jit
def write_row(
    row: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    vocab: tl.tensor,
    column: tl.tensor,
    value: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    gain: tl.tensor,
    beta: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    SMOOTHING: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """out = (gain p - beta w) slope, p = exp(outer (b - high - low)), and value * slope at `column` (-1: nowhere).

    row and out may be the same memory. Goes from the row's end to its start: what was read last is the likeliest to be
    in the L2 cache still.
    """
    BLOCK: tl.constexpr = K * WIDTH
    factor = tl.full([], outer * LOG2E, COMPUTE)
    gain *= tl.exp2(-low * factor)
    whole = vocab // BLOCK
    if whole * BLOCK < vocab:
        write_block(
            row, out, weight, whole * BLOCK, vocab, column, value, high, gain, beta, inner, factor,
            True, SMOOTHING, TRANSFORM, K, WIDTH,
        )  # fmt: skip
    for done in range(0, whole):
        write_block(
            row, out, weight, (whole - 1 - done) * BLOCK, vocab, column, value, high, gain, beta, inner, factor,
            False, SMOOTHING, TRANSFORM, K, WIDTH,
        )  # fmt: skip


@triton.jit
def zero_row(out: tl.tensor, vocab: tl.tensor, K: tl.constexpr, WIDTH: tl.constexpr) -> None:
    for start in range(0, vocab, K * WIDTH):
        cols = start + tl.arange(0, K)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(out + cols, tl.zeros([K, WIDTH], out.dtype.element_ty), mask=cols < vocab)
