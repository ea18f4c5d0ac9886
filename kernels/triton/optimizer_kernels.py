# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (parameters of Triton kernels have no Python types)
"""The kernel of the optimizer steps in Triton; fastpar.kernels.optimizer launches it and explains it."""

from __future__ import annotations

import triton
import triton.language as tl

# What the table holds of a tensor: addresses, then numbers.
PARAM, GRAD, STATE0, STATE1, SCALE0, SCALE1, OUTPUT, REMAINDER = (tl.constexpr(i) for i in range(8))
COUNT, KEY, FIRST_INDEX, FIRST_CHUNK = (tl.constexpr(i) for i in range(8, 12))
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
def _load(address, at, count, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(address + at, mask=at < count, other=0)
    else:
        return tl.load(address + at)


@triton.jit
def _store(address, at, count, value, MASKED: tl.constexpr):
    if MASKED:
        tl.store(address + at, value, mask=at < count)
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
def _random_bits(key, index, first):
    """(a, b): 16 bits for the parameter in the lower half of a, for two states in the upper and in the lower of b.

    `index` are adjacent from `first` on, so their upper halves are one number or two.
    """
    low_key = _splitmix(key + (first >> 32))
    high_key = _splitmix(key + (first >> 32) + 1)
    is_low = (index >> 32) == (first >> 32)
    k0 = tl.where(is_low, low_key.to(tl.uint32), high_key.to(tl.uint32))
    k1 = tl.where(is_low, (low_key >> 32).to(tl.uint32), (high_key >> 32).to(tl.uint32))
    k2 = tl.where(is_low, _splitmix(low_key).to(tl.uint32), _splitmix(high_key).to(tl.uint32))
    a = _mix(_mix(index.to(tl.uint32) ^ k0) + k1)
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
def _load_state(
    entry, scale_place, at, count, WHICH: tl.constexpr, STATE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):
    x = _load(_address(entry, STATE0 + WHICH, STATE, ALIGNED), at, count, MASKED)
    if tl.uint8 == STATE:
        scales = tl.load(entry + SCALE0 + WHICH).to(tl.pointer_type(tl.float32))
        scale = _load(scales, scale_place, (count + STATE_BLOCK - 1) // STATE_BLOCK, MASKED)
        return _decode_block(x, scale[:, None], WHICH == 0)
    else:
        return x.to(tl.float32)


@triton.jit
def _store_state(
    entry,
    scale_place,
    at,
    count,
    x,
    WHICH: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    address = _address(entry, STATE0 + WHICH, STATE, ALIGNED)
    if tl.uint8 == STATE:
        codes, scale = _encode_block(x, WHICH == 0)
        scales = tl.load(entry + SCALE0 + WHICH).to(tl.pointer_type(tl.float32))
        _store(address, at, count, codes, MASKED)
        _store(scales, scale_place, (count + STATE_BLOCK - 1) // STATE_BLOCK, scale, MASKED)
    else:
        _store(address, at, count, x.to(STATE), MASKED)


@triton.jit
def _update_chunk(
    entry,
    begin,
    count,
    factor,
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
    MASKED: tl.constexpr,
):
    row = tl.arange(0, BLOCKS)
    at = begin + row[:, None] * STATE_BLOCK + tl.arange(0, STATE_BLOCK)[None, :]
    scale_place = begin // STATE_BLOCK + row
    param = _address(entry, PARAM, tl.int16 if SPLIT else PARAM_DTYPE, ALIGNED)
    stored = _load(param, at, count, MASKED)
    g = _load(_address(entry, GRAD, GRAD_DTYPE, ALIGNED), at, count, MASKED)
    if SPLIT:
        remainder = _address(entry, REMAINDER, tl.int16, ALIGNED)
        p = _join(stored, _load(remainder, at, count, MASKED))
    else:
        p = stored.to(tl.float32)
    s0 = g
    s1 = g
    if RULE != PLAIN_SGD:
        s0 = _load_state(entry, scale_place, at, count, 0, STATE, ALIGNED, MASKED)
    if RULE == ADAMW:
        s1 = _load_state(entry, scale_place, at, count, 1, STATE, ALIGNED, MASKED)
    g = g.to(tl.float32) * factor

    if RULE == ADAMW:
        p, s0, s1 = _adamw(p, g, s0, s1, *numbers)
    elif RULE == LION:
        p, s0 = _lion(p, g, s0, *numbers)
    else:
        p, s0 = _sgd(p, g, s0, *numbers, RULE, NESTEROV, FIRST)

    if STOCHASTIC:
        first = tl.load(entry + FIRST_INDEX).to(tl.uint64) + begin.to(tl.uint64)
        key = _splitmix(seed_key + tl.load(entry + KEY).to(tl.uint64))
        a, b = _random_bits(key, first + (at - begin).to(tl.uint64), first)
        if tl.bfloat16 == PARAM_DTYPE and not SPLIT:
            p = _round_stochastically(p, a & 0xFFFF)
        if tl.bfloat16 == STATE and RULE != PLAIN_SGD:
            s0 = _round_stochastically(s0, a >> 16)
        if tl.bfloat16 == STATE and RULE == ADAMW:
            s1 = _round_stochastically(s1, b & 0xFFFF)

    if RULE != PLAIN_SGD:
        _store_state(entry, scale_place, at, count, s0, 0, STATE, ALIGNED, MASKED)
    if RULE == ADAMW:
        _store_state(entry, scale_place, at, count, s1, 1, STATE, ALIGNED, MASKED)
    if SPLIT:
        high, low = _split(p)
        _store(param, at, count, high, MASKED)
        _store(remainder, at, count, low, MASKED)
    else:
        _store(param, at, count, p.to(PARAM_DTYPE), MASKED)
    if HAS_OUTPUT:
        _store(_address(entry, OUTPUT, OUTPUT_DTYPE, ALIGNED), at, count, p.to(OUTPUT_DTYPE), MASKED)


@triton.jit(do_not_specialize=["num_tensors", "seed", "factor"])
def optimizer_kernel(
    table,
    num_tensors,
    factor,
    grad_factor,
    found_inf,
    corrections,
    seed,
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
):
    """Updates one chunk, BLOCKS * 256 elements of one of the tensors in `table` [num_tensors, FIELDS]."""
    if found_inf is not None:  # noqa: SIM102 (known when the kernel is compiled, unlike the next)
        if tl.load(found_inf) != 0.0:
            return
    if grad_factor is not None:
        factor = tl.load(grad_factor)
    if corrections is not None:
        numbers = numbers[:4] + (tl.load(corrections), numbers[5], tl.load(corrections + 1))  # noqa: RUF005
    chunk = tl.program_id(0).to(tl.int64)
    low = tl.cast(0, tl.int64)
    high = tl.cast(num_tensors, tl.int64)
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(table + middle * FIELDS + FIRST_CHUNK) <= chunk
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle)
    entry = table + low * FIELDS
    count = tl.load(entry + COUNT)
    begin = (chunk - tl.load(entry + FIRST_CHUNK)) * (BLOCKS * STATE_BLOCK)
    seed_key = _splitmix(seed.to(tl.uint64))
    if begin + BLOCKS * STATE_BLOCK <= count:
        _update_chunk(
            entry,
            begin,
            count,
            factor,
            seed_key,
            numbers,
            RULE,
            NESTEROV,
            FIRST,
            STOCHASTIC,
            PARAM_DTYPE,
            SPLIT,
            GRAD_DTYPE,
            STATE,
            OUTPUT_DTYPE,
            HAS_OUTPUT,
            ALIGNED,
            BLOCKS,
            False,
        )
    else:
        _update_chunk(
            entry,
            begin,
            count,
            factor,
            seed_key,
            numbers,
            RULE,
            NESTEROV,
            FIRST,
            STOCHASTIC,
            PARAM_DTYPE,
            SPLIT,
            GRAD_DTYPE,
            STATE,
            OUTPUT_DTYPE,
            HAS_OUTPUT,
            ALIGNED,
            BLOCKS,
            True,
        )
