# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels of routing; `moe_route.py` launches them, and fastpar.reference.moe_route has the algebra.

Note: columns
    A program has ROWS tokens with all their experts. For a choice within groups these are padded to PADDED_GROUPS
    groups of PADDED_WIDTH columns, so that a group is a dim of its own; the order of columns is that of experts.

Note: keys
    Experts are compared by int32 keys in the order of float32 values, where NaN counts as -inf. A choice is the largest
    key, and of equal ones the lowest column: two reductions of integers, which no order of terms can change. GONE is
    below every value, and the key of what is padding or has been chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl

GONE = tl.constexpr(-(1 << 31))
LOWEST = tl.constexpr(-2139095041)  # the key of -inf
LOG2_E, LOG2_E_REST = tl.constexpr(1.4426950216293335), tl.constexpr(1.925963033500e-08)
LN_2 = tl.constexpr(0.6931471805599453)


# ---- device functions: numbers ---------------------------------------------------------------------------------------


@triton.jit
def exp(x):
    """e^x to a few roundings for any x: that of x * log2(e), which grows with x, comes as a factor of its own."""
    finite = tl.where(tl.abs(x) < 150.0, x, 0.0)
    low = tl.fma(finite, tl.full(x.shape, LOG2_E, tl.float32), -finite * LOG2_E) + finite * LOG2_E_REST
    return tl.exp2(x * LOG2_E) * (1.0 + low * LN_2)


@triton.jit
def log1p(x):
    """log(1 + x) of x from 0 to 1, to a few roundings."""
    one_more = 1.0 + x
    rounded = one_more - 1.0  # x, as far as it is in the sum
    return tl.where(rounded == 0.0, x, tl.log(one_more) * (x / tl.where(rounded == 0.0, 1.0, rounded)))


@triton.jit
def sigmoid(x):
    small = exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p(exp(-tl.abs(x)))


@triton.jit
def single_score(x, SCORE: tl.constexpr):
    """Scores that do not look at other experts; 0 for softmax."""
    if SCORE == "sigmoid":
        score = sigmoid(x)
    elif SCORE == "sqrtsoftplus":
        score = tl.where(x < -20.0, exp(0.5 * x), tl.sqrt(softplus(x)))
    else:
        score = tl.zeros_like(x)
    return score


@triton.jit
def log_score(x, SCORE: tl.constexpr):
    """Logarithms of scores, for softmax but for a summand per token."""
    if SCORE == "sigmoid":
        found = tl.minimum(x, 0.0) - log1p(exp(-tl.abs(x)))
    elif SCORE == "sqrtsoftplus":
        found = 0.5 * tl.where(x < -20.0, x, tl.log(tl.where(x < -20.0, 1.0, softplus(x))))
    else:
        found = x
    return found


@triton.jit
def log_score_slope(x, SCORE: tl.constexpr):
    """The derivative of `log_score`."""
    if SCORE == "sigmoid":
        slope = sigmoid(-x)
    elif SCORE == "sqrtsoftplus":
        slope = tl.where(x < -20.0, 0.5, 0.5 * sigmoid(x) / tl.where(x < -20.0, 1.0, softplus(x)))
    else:
        slope = tl.full(x.shape, 1.0, tl.float32)
    return slope


@triton.jit
def softmax(x, inside):
    """Over the columns `inside`; 0 in the others, and everywhere if there are none."""
    most = tl.max(tl.where(inside, x, -float("inf")), 1)[:, None]
    part = tl.where(inside, exp(x - most), 0.0)
    return tl.where(inside, part / tl.sum(part, 1)[:, None], 0.0)


# ---- device functions: rows and choices ------------------------------------------------------------------------------


@triton.jit
def load_rows(logits, row, exists, expert, is_expert, NUM_EXPERTS: tl.constexpr):
    """(x float32 [ROWS, columns], -inf in place of NaN and of padding; which are NaN; which rows [ROWS] have one)."""
    place = logits + (row * NUM_EXPERTS)[:, None] + expert[None, :]
    x = tl.load(place, mask=exists[:, None] & is_expert[None, :], other=0.0).to(tl.float32)
    is_nan = x != x
    return tl.where(is_nan | (is_expert[None, :] == 0), -float("inf"), x), is_nan, tl.max(is_nan.to(tl.int32), 1) > 0


@triton.jit
def key_of(value):
    """[-inf, -1, -0, 0, 1] and NaN: keys in this order, those of zeros equal, and of NaN that of -inf."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, LOWEST, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def value_of(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def close_groups(
    key,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):
    """Keys [ROWS, columns], those of -inf outside the TOP_GROUPS groups whose BEST best values have the largest sums.

    Values [[1, 5], [4, 4], [9, 0]] in 3 groups, 2 of them by the sum of 2: those of the first group are closed.
    """
    grouped = tl.reshape(key, (ROWS, PADDED_GROUPS, PADDED_WIDTH))
    w = tl.arange(0, PADDED_WIDTH)[None, None, :]
    rest = grouped
    total = tl.zeros((ROWS, PADDED_GROUPS), tl.float32)
    for _ in tl.static_range(BEST):
        best = tl.max(rest, 2)
        total += value_of(best)
        first = tl.min(tl.where(rest == best[:, :, None], w, PADDED_WIDTH), 2)
        rest = tl.where(w == first[:, :, None], GONE, rest)
    group = tl.arange(0, PADDED_GROUPS)[None, :]
    score = tl.where(group < GROUPS, key_of(total), GONE)
    is_open = tl.zeros((ROWS, PADDED_GROUPS), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(score, 1)[:, None]
        is_first = group == tl.min(tl.where(score == best, group, PADDED_GROUPS), 1)[:, None]
        is_open = tl.where(is_first, 1, is_open)
        score = tl.where(is_first, GONE, score)
    closed = (is_open[:, :, None] == 0) & (grouped != GONE)
    return tl.reshape(tl.where(closed, LOWEST, grouped), (ROWS, PADDED_GROUPS * PADDED_WIDTH))


@triton.jit
def scores_of_chosen(x, is_expert, taken, SCORE: tl.constexpr, SHARE: tl.constexpr):
    """Weights before they are normalised, 0 of experts that are not taken. SHARE: the softmax over the taken ones."""
    if SHARE:
        found = softmax(log_score(x, SCORE), taken)
    elif SCORE == "softmax":
        found = tl.where(taken, softmax(x, is_expert), 0.0)
    else:
        found = tl.where(taken, single_score(x, SCORE), 0.0)
    return found


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits,
    bias,
    mask,
    indices,
    weights,
    counts,
    num_tokens,
    epsilon,
    scale,
    SCORE: tl.constexpr,
    AFTER: tl.constexpr,
    SHARE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):
    """indices, weights [T, TOP_K] and counts [E], which are 0 before, of logits [T, E]. Grid: blocks of ROWS tokens.

    Each expert knows as which choice it was taken, if it was, and writes its own index and weight there.

    softmax, two of three experts, normalised: logits [[0, ln 3, 0]]: indices [[1, 0]], weights [[0.75, 0.25]], counts
    [1, 1, 0].
    """
    column = tl.arange(0, PADDED_GROUPS * PADDED_WIDTH)
    expert, is_expert = column, column < WIDTH
    if GROUPS > 1:
        group, inside = column // PADDED_WIDTH, column % PADDED_WIDTH
        is_expert = (group < GROUPS) & (inside < WIDTH)
        expert = group * WIDTH + inside
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_tokens
    x, is_nan, bad = load_rows(logits, row, exists, expert, is_expert, GROUPS * WIDTH)
    valid = tl.broadcast_to(is_expert[None, :], (ROWS, PADDED_GROUPS * PADDED_WIDTH))
    if AFTER:
        value = x
    elif SCORE == "softmax":
        value = softmax(x, valid)
        is_nan = is_nan | bad[:, None]
    else:
        value = single_score(x, SCORE)
    if bias is not None:
        value += tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    key = tl.where(valid, tl.where(is_nan, LOWEST, key_of(value)), GONE)
    if GROUPS > 1:
        key = close_groups(key, ROWS, GROUPS, TOP_GROUPS, BEST, PADDED_GROUPS, PADDED_WIDTH)
    choice = tl.full((ROWS, PADDED_GROUPS * PADDED_WIDTH), -1, tl.int32)
    for k in range(TOP_K):
        best = tl.max(key, 1)[:, None]
        first = tl.min(tl.where(key == best, column[None, :], PADDED_GROUPS * PADDED_WIDTH), 1)[:, None]
        choice = tl.where(column[None, :] == first, k, choice)
        key = tl.where(column[None, :] == first, GONE, key)
    taken = choice >= 0
    weight = scores_of_chosen(x, valid, taken, SCORE, SHARE)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 1)[:, None] + epsilon)
    weight = tl.where(bad[:, None], float("nan"), weight * scale)
    goes = exists
    if mask is not None:
        goes = goes & (tl.load(mask + row, mask=exists, other=0) != 0)
    place = (row * TOP_K)[:, None] + choice
    written = taken & exists[:, None]
    tl.store(indices + place, tl.where(goes[:, None], expert[None, :], -1).to(tl.int64), mask=written)
    tl.store(weights + place, tl.where(goes[:, None], weight, 0.0), mask=written)
    count = tl.sum((taken & goes[:, None]).to(tl.int32), 0)
    tl.atomic_add(counts + expert, count.to(tl.int64), mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens"])
def route_backward_kernel(
    logits,
    indices,
    grad_weights,
    grad_logits,
    num_tokens,
    epsilon,
    scale,
    SCORE: tl.constexpr,
    SHARE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """grad_logits [T, E] from grad_weights [T, TOP_K]; no expert is twice among the indices of a token.

        s = scores of the chosen, w = scale s / (sum s + epsilon)
        ds = (scale dw - sum(scale dw s) / (sum s + epsilon)) / (sum s + epsilon), or scale dw if not normalised
        softmax of any kind: dx = s (ds - sum(ds s)) * slope of the log score; else ds s * slope of the log score

    logits [[0, ln 3, 0]], indices [[1, 0]], shares of the chosen, grad_weights [[1, 0]]: [[-0.1875, 0.1875, 0]].
    """
    expert = tl.arange(0, PADDED)
    is_expert = expert < NUM_EXPERTS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_tokens
    x, _, bad = load_rows(logits, row, exists, expert, is_expert, NUM_EXPERTS)
    grad = tl.zeros((ROWS, PADDED), tl.float32)
    chosen = tl.zeros((ROWS, PADDED), tl.int32)
    for k in range(TOP_K):
        index = tl.load(indices + row * TOP_K + k, mask=exists, other=-1)
        given = tl.load(grad_weights + row * TOP_K + k, mask=exists, other=0.0)
        here = expert[None, :] == index[:, None]
        grad = tl.where(here, given[:, None] * scale, grad)
        chosen = tl.where(here, 1, chosen)
    taken = chosen > 0
    valid = tl.broadcast_to(is_expert[None, :], (ROWS, PADDED))
    score = scores_of_chosen(x, valid, taken, SCORE, SHARE)
    if NORMALIZE:
        total = tl.sum(score, 1)[:, None] + epsilon
        grad = tl.where(taken, (grad - tl.sum(grad * score, 1)[:, None] / total) / total, 0.0)
    if SHARE or SCORE == "softmax":
        grad -= tl.sum(grad * score, 1)[:, None]
    if SCORE == "softmax" and not SHARE:
        score = softmax(x, valid)
    grad *= score
    if SCORE != "softmax":
        grad *= log_score_slope(x, SCORE)
    place = grad_logits + (row * NUM_EXPERTS)[:, None] + expert[None, :]
    tl.store(place, tl.where(bad[:, None], float("nan"), grad), mask=exists[:, None] & is_expert[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def scores_kernel(
    logits,
    grad_scores,
    out,
    num_tokens,
    SCORE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Scores over all experts with a sum of 1 or, with grad_scores, the gradient of the logits. Grid as above.

    sigmoid: logits [[0, ln 3]]: scores [[0.4, 0.6]]; with grad_scores [[1, 0]] [[0.12, -0.06]].
    """
    expert = tl.arange(0, PADDED)
    is_expert = expert < NUM_EXPERTS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_tokens
    x, _, bad = load_rows(logits, row, exists, expert, is_expert, NUM_EXPERTS)
    found = softmax(log_score(x, SCORE), tl.broadcast_to(is_expert[None, :], (ROWS, PADDED)))
    places = (row * NUM_EXPERTS)[:, None] + expert[None, :]
    written = exists[:, None] & is_expert[None, :]
    if grad_scores is not None:
        grad = tl.load(grad_scores + places, mask=written, other=0.0)
        found = found * (grad - tl.sum(grad * found, 1)[:, None]) * log_score_slope(x, SCORE)
    tl.store(out + places, tl.where(bad[:, None], float("nan"), found), mask=written)
