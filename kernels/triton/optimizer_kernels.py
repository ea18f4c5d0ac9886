# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (parameters of Triton kernels have no Python types)
"""The kernel of the optimizer steps in Triton; fastpar.kernels.optimizer launches it and explains it."""

from __future__ import annotations

import triton
import triton.language as tl

# What the table holds of a tensor: addresses, then numbers.
PARAM, GRAD, STATE0, STATE1, SCALE0, SCALE1, OUTPUT, REMAINDER = (tl.constexpr(i) for i in range(8))
COUNT, KEY, FIRST_INDEX, FIRST_PROGRAM = (tl.constexpr(i) for i in range(8, 12))
FIELDS = tl.constexpr(12)
STATE_BLOCK = tl.constexpr(256)  # elements that share a scale

# The rules, and how many states each has.
ADAMW, SGD, PLAIN_SGD, LION = (tl.constexpr(i) for i in range(4))
NUM_STATES = (2, 1, 0, 1)


# ---- memory ----------------------------------------------------------------------------------------------------------


@triton.jit
def _address(entry, FIELD: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(entry + FIELD).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _load(address, at, left, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(address + at, mask=at < left, other=0)
    else:
        return tl.load(address + at)


@triton.jit
def _store(address, at, left, value, MASKED: tl.constexpr):
    if MASKED:
        tl.store(address + at, value, mask=at < left)
    else:
        tl.store(address + at, value)


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _floats(bits):
    return bits.to(tl.float32, bitcast=True)


# ---- formats ---------------------------------------------------------------------------------------------------------


@triton.jit
def _splitmix(z):
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _random_bits(key, first, at):
    """(a, b): 16 bits for the parameter in the lower half of a, for two states in the upper and in the lower of b.

    The elements' indices are first + at, less than 2^31 apart, so their upper halves are one number or two.
    """
    low_key = _splitmix(key + (first >> 32))
    high_key = low_key
    low_first = first.to(tl.uint32)
    if low_first + 0x7FFFFFFF < low_first:  # seldom: another key beyond a multiple of 2^32
        high_key = _splitmix(key + (first >> 32) + 1)
    index = low_first + at.to(tl.uint32)
    is_low = index >= low_first
    k0 = tl.where(is_low, low_key.to(tl.uint32), high_key.to(tl.uint32))
    k1 = tl.where(is_low, (low_key >> 32).to(tl.uint32), (high_key >> 32).to(tl.uint32))
    k2 = tl.where(is_low, _splitmix(low_key).to(tl.uint32), _splitmix(high_key).to(tl.uint32))
    a = _mix(_mix(index ^ k0) + k1)
    return a, _mix(a ^ k2)


@triton.jit
def _round_stochastically(x, random):
    """A float that bfloat16 holds."""
    bits = _bits(x)
    return tl.where(x == x, _floats((bits + random) & 0xFFFF0000), x)


@triton.jit
def _join(param, remainder):
    """float32 masters of the bits of bfloat16 (int16) and int16 remainders."""
    high = param.to(tl.int32) << 16
    return (high + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _split(master):
    """(bits of bfloat16, remainder), both int16"""
    bits = tl.where(master == master, _bits(master), 0x7FC00000)
    return ((bits + 0x8000) >> 16).to(tl.int16), bits.to(tl.int16)


@triton.jit
def _decode_block(code, scale, SIGNED: tl.constexpr):
    """The float32 values of uint8 codes [blocks, 256] and scales [blocks, 1]."""
    lowest: tl.constexpr = 1016 - (127 if SIGNED else 255)
    word = code.to(tl.uint32)
    size = word & (127 if SIGNED else 255)
    bits = tl.where(size == 0, 0, (size + lowest) << 20)
    if SIGNED:
        bits = bits | ((word & 128) << 24)
    return _floats(bits) * scale


@triton.jit
def _encode_block(x, SIGNED: tl.constexpr):
    """(codes [blocks, 256], scales [blocks]) of float32 values; beyond the end of a tensor they are zeros."""
    lowest: tl.constexpr = 1016 - (127 if SIGNED else 255)
    most: tl.constexpr = 127 if SIGNED else 255
    largest = tl.max((_bits(x) & 0x7FFFFFFF).to(tl.int32), axis=1)  # as integers, in whose order NaN is last
    bits = tl.where(largest >= 0x7F800000, 0x7FC00000, tl.maximum(largest, 0x00800000))
    scale = bits.to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    ratio = (_bits(tl.abs(x) * inverse[:, None]) & 0x7FFFFFFF).to(tl.int32)
    code = ((ratio + 0x7FFFF + ((ratio >> 20) & 1)) >> 20) - lowest
    code = tl.minimum(tl.maximum(code, 0), most)
    # a sign; or else what is not zero stays so
    code = code | (_bits(x) >> 31 << 7).to(tl.int32) if SIGNED else tl.maximum(code, tl.minimum(ratio, 1))
    return code.to(tl.uint8), scale


# ---- rules -----------------------------------------------------------------------------------------------------------


# Numbers are those of fastpar.kernels.optimizer; operations are those of csrc/optimizer/optimizer_kernel.h, one by one.


@triton.jit
def _adamw(p, g, m, v, decay, grad_weight, beta2, square_weight, inverse_root, eps, step_size):
    m = tl.fma(grad_weight, g - m, m)
    v = tl.fma(beta2, v, g * square_weight * g)
    divisor = tl.fma(tl.sqrt_rn(v), inverse_root, eps)
    return tl.fma(-step_size, tl.div_rn(m, divisor), p * decay), m, v


@triton.jit
def _sgd(
    p,
    g,
    buffer,
    lr,
    momentum,
    grad_weight,
    weight_decay,
    RULE: tl.constexpr,
    NESTEROV: tl.constexpr,
    FIRST: tl.constexpr,
):
    g = tl.fma(weight_decay, p, g)
    direction = g
    if RULE == SGD:
        buffer = g if FIRST else tl.fma(momentum, buffer, g * grad_weight)
        direction = tl.fma(momentum, buffer, g) if NESTEROV else buffer
    return tl.fma(-lr, direction, p), buffer


@triton.jit
def _lion(p, g, m, decay, beta1, direction_weight, grad_weight, lr):
    direction = tl.fma(beta1, m, g * direction_weight)
    # where the direction is 0 or NaN, that is what is added
    step = tl.where(direction > 0, -lr, tl.where(direction < 0, lr, direction))
    return p * decay + step, tl.fma(grad_weight, g - m, m)


# ---- a chunk ---------------------------------------------------------------------------------------------------------


@triton.jit
def _pointers(
    entry,
    begin,
    RULE: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    SPLIT: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE: tl.constexpr,
    OUTPUT_DTYPE: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Where element `begin` of everything in the table is: (param, grad, state0, state1, scale0, scale1, output,
    remainder). They are read together, so that a program waits for memory once; what there is not is another one."""
    param = _address(entry, PARAM, tl.int16 if SPLIT else PARAM_DTYPE, ALIGNED) + begin
    grad = _address(entry, GRAD, GRAD_DTYPE, ALIGNED) + begin
    state0 = grad
    state1 = grad
    scale0 = grad
    scale1 = grad
    output = grad
    remainder = grad
    if RULE != PLAIN_SGD:
        state0 = _address(entry, STATE0, STATE, ALIGNED) + begin
        if tl.uint8 == STATE:
            scale0 = _address(entry, SCALE0, tl.float32, False) + begin // STATE_BLOCK
    if RULE == ADAMW:
        state1 = _address(entry, STATE1, STATE, ALIGNED) + begin
        if tl.uint8 == STATE:
            scale1 = _address(entry, SCALE1, tl.float32, False) + begin // STATE_BLOCK
    if HAS_OUTPUT:
        output = _address(entry, OUTPUT, OUTPUT_DTYPE, ALIGNED) + begin
    if SPLIT:
        remainder = _address(entry, REMAINDER, tl.int16, ALIGNED) + begin
    return param, grad, state0, state1, scale0, scale1, output, remainder


@triton.jit
def _load_state(address, scales, block, at, left, SIGNED: tl.constexpr, STATE: tl.constexpr, MASKED: tl.constexpr):
    x = _load(address, at, left, MASKED)
    if tl.uint8 == STATE:
        scale = _load(scales, block, (left + STATE_BLOCK - 1) // STATE_BLOCK, MASKED)
        return _decode_block(x, scale[:, None], SIGNED)
    else:
        return x.to(tl.float32)


@triton.jit
def _store_state(address, scales, block, at, left, x, SIGNED: tl.constexpr, STATE: tl.constexpr, MASKED: tl.constexpr):
    if tl.uint8 == STATE:
        codes, scale = _encode_block(x, SIGNED)
        _store(address, at, left, codes, MASKED)
        _store(scales, block, (left + STATE_BLOCK - 1) // STATE_BLOCK, scale, MASKED)
    else:
        _store(address, at, left, x.to(STATE), MASKED)


@triton.jit
def _update_chunk(
    pointers,
    begin,
    left,
    first_index,
    key,
    factor,
    numbers,
    RULE: tl.constexpr,
    NESTEROV: tl.constexpr,
    FIRST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    SPLIT: tl.constexpr,
    STATE: tl.constexpr,
    OUTPUT_DTYPE: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Elements [begin, begin + BLOCKS * 256) past the pointers, of which there are `left`."""
    param, grad, state0, state1, scale0, scale1, output, remainder = pointers
    block = begin // STATE_BLOCK + tl.arange(0, BLOCKS)
    at = begin + tl.arange(0, BLOCKS)[:, None] * STATE_BLOCK + tl.arange(0, STATE_BLOCK)[None, :]
    stored = _load(param, at, left, MASKED)
    g = _load(grad, at, left, MASKED)
    p = _join(stored, _load(remainder, at, left, MASKED)) if SPLIT else stored.to(tl.float32)
    s0 = g
    s1 = g
    if RULE != PLAIN_SGD:
        s0 = _load_state(state0, scale0, block, at, left, True, STATE, MASKED)
    if RULE == ADAMW:
        s1 = _load_state(state1, scale1, block, at, left, False, STATE, MASKED)
    g = g.to(tl.float32) * factor

    if RULE == ADAMW:
        p, s0, s1 = _adamw(p, g, s0, s1, *numbers)
    elif RULE == LION:
        p, s0 = _lion(p, g, s0, *numbers)
    else:
        p, s0 = _sgd(p, g, s0, *numbers, RULE, NESTEROV, FIRST)

    if STOCHASTIC:
        a, b = _random_bits(key, first_index, at)
        if tl.bfloat16 == PARAM_DTYPE and not SPLIT:
            p = _round_stochastically(p, a & 0xFFFF)
        if tl.bfloat16 == STATE and RULE != PLAIN_SGD:
            s0 = _round_stochastically(s0, a >> 16)
        if tl.bfloat16 == STATE and RULE == ADAMW:
            s1 = _round_stochastically(s1, b & 0xFFFF)

    if RULE != PLAIN_SGD:
        _store_state(state0, scale0, block, at, left, s0, True, STATE, MASKED)
    if RULE == ADAMW:
        _store_state(state1, scale1, block, at, left, s1, False, STATE, MASKED)
    if SPLIT:
        high, low = _split(p)
        _store(param, at, left, high, MASKED)
        _store(remainder, at, left, low, MASKED)
    else:
        _store(param, at, left, p.to(PARAM_DTYPE), MASKED)
    if HAS_OUTPUT:
        _store(output, at, left, p.to(OUTPUT_DTYPE), MASKED)


@triton.jit(do_not_specialize=["seed_key", "factor"])
def optimizer_kernel(
    table,
    owners,
    factor,
    grad_factor,
    found_inf,
    corrections,
    seed_key,
    numbers,
    RULE: tl.constexpr,
    NESTEROV: tl.constexpr,
    FIRST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    SPLIT: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE: tl.constexpr,
    OUTPUT_DTYPE: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Updates STEPS chunks, of BLOCKS * 256 elements, of the row of `table` [n, FIELDS] that `owners` [programs] names.

    Loads are issued before the first of them is waited for, as far as they do not need one another.
    """
    chunk = BLOCKS * STATE_BLOCK
    entry = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * FIELDS
    is_skipped = False
    if found_inf is not None:
        is_skipped = tl.load(found_inf) != 0.0
    if grad_factor is not None:
        factor = tl.load(grad_factor)
    if corrections is not None:
        numbers = numbers[:4] + (tl.load(corrections), numbers[5], tl.load(corrections + 1))  # noqa: RUF005
    begin = (tl.program_id(0) - tl.load(entry + FIRST_PROGRAM)) * (STEPS * chunk)
    pointers = _pointers(entry, begin, RULE, PARAM_DTYPE, SPLIT, GRAD_DTYPE, STATE, OUTPUT_DTYPE, HAS_OUTPUT, ALIGNED)
    left = tl.minimum(tl.load(entry + COUNT) - begin, STEPS * chunk).to(tl.int32)
    if found_inf is not None:
        left = tl.where(is_skipped, 0, left)
    first_index = begin.to(tl.uint64)
    key = begin.to(tl.uint64)
    if STOCHASTIC:
        first_index += tl.load(entry + FIRST_INDEX).to(tl.uint64)
        key = _splitmix(seed_key.to(tl.uint64) + tl.load(entry + KEY).to(tl.uint64))
    done = 0
    for masked in tl.static_range(2):
        # Whole chunks, then blocks of what is left: if a thread had 4 or 8 elements there, each behind a mask, the few
        # that are last would take more registers than all others, and leave room for fewer programs.
        end = left if masked else left - chunk + 1
        while done < end:
            _update_chunk(
                pointers,
                done,
                left,
                first_index,
                key,
                factor,
                numbers,
                RULE,
                NESTEROV,
                FIRST,
                STOCHASTIC,
                PARAM_DTYPE,
                SPLIT,
                STATE,
                OUTPUT_DTYPE,
                HAS_OUTPUT,
                1 if masked else BLOCKS,
                masked == 1,
            )
            done += STATE_BLOCK if masked else chunk
