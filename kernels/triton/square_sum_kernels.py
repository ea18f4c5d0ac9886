# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (parameters of Triton kernels have no Python types)
"""The kernels of the exact sum of squares in Triton; fastpar.kernels.square_sum launches them.

Integers only, so they run at one speed on every device, and nothing depends on how elements are spread over programs.

Note: windows. A magnitude is m * 2^place units, m an integer of 24 bits (float32), 8 (bfloat16) or 11 (float16) and
place its exponent, counted from the smallest. A program takes a chunk of one tensor and looks at 32 places: those up to
2 above the highest in its first tile, which is all there is in ordinary gradients (2^-29 of the largest is the smallest
that fits). m^2 is cut into parts of up to 28 bits; a part is shifted by twice the distance to the start of its half of
the window, 30 bits at most, and added to the 64-bit accumulator of that half: one multiply-add of 32-bit numbers, whose
other factor is the power of 2, or 0 where the element is in the other half. What the window misses (other magnitudes,
NaN, infinities) raises a flag; then the chunk is read again, once for each aligned window of 32 places that has
anything in it. At the end accumulators are cut into digits of 32 bits, added over the threads and, with an atomic, into
the sum.

Accumulators do not overflow: ITERATIONS values of at most 28 + 30 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What the table holds of a tensor.
ADDRESS, COUNT, FIRST_CHUNK = (tl.constexpr(i) for i in range(3))
FIELDS = tl.constexpr(4)  # and one that keeps every row at a multiple of 16 bytes

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = (tl.constexpr(i) for i in range(4))
ITERATIONS = tl.constexpr(16)  # tiles in a chunk; at most 32
WINDOW = tl.constexpr(32)  # places, in two halves
MARGIN = tl.constexpr(2)  # places above the first tile's highest that the window has
NOT_FINITE = tl.constexpr(254)  # the place of NaN and infinities; those of others are below
EMPTY_BASE = tl.constexpr(96)  # of the window where the first tile is zero: magnitudes of 2^-53 and more in float32

NUM_COUNTS = tl.constexpr(2)
NUM_DIGITS = tl.constexpr(19)
LANES = tl.constexpr(32)  # counts and digits, in one vector
DIGIT = tl.constexpr(0xFFFFFFFF)
ROOT_DIGITS = tl.constexpr(59)


# ---- elements --------------------------------------------------------------------------------------------------------


@triton.jit
def _places(bits, KIND: tl.constexpr):
    """(m, place) of the magnitudes whose bits these are."""
    if KIND == FLOAT64:  # cut to multiples of 2^-149, the unit of float32; infinite from 2^128
        exponent = ((bits >> 52) & 0x7FF).to(tl.int32)
        m = bits & 0xFFFFFFFFFFFFF
        m = tl.where(exponent > 0, m | 0x10000000000000, m)
        place = tl.maximum(exponent, 1) - 926
        m = m >> tl.minimum(tl.maximum(-place, 0), 63).to(tl.int64)
        return m, tl.where(exponent > 1150, NOT_FINITE, tl.maximum(place, 0))
    elif KIND == FLOAT32:
        exponent = (bits >> 23) & 0xFF
        m = bits & 0x7FFFFF
        m = tl.where(exponent > 0, m | 0x800000, m)
        return m, tl.maximum(exponent, 1) - 1
    elif KIND == BFLOAT16:
        exponent = (bits >> 7) & 0xFF
        m = bits & 0x7F
        m = tl.where(exponent > 0, m | 0x80, m)
        return m, tl.maximum(exponent, 1) - 1
    else:
        exponent = (bits >> 10) & 0x1F
        m = bits & 0x3FF
        m = tl.where(exponent > 0, m | 0x400, m)
        return m, tl.where(exponent == 31, NOT_FINITE, tl.maximum(exponent, 1) - 1)


@triton.jit
def _is_nan(bits, KIND: tl.constexpr):
    if KIND == FLOAT64:
        return (bits & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000
    elif KIND == FLOAT32:
        return (bits & 0x7FFFFFFF) > 0x7F800000
    elif KIND == BFLOAT16:
        return (bits & 0x7FFF) > 0x7F80
    else:
        return (bits & 0x7FFF) > 0x7C00


@triton.jit
def _bits_at(address, at, count, KIND: tl.constexpr, MASKED: tl.constexpr):
    """int64 of float64, else int32."""
    if MASKED:  # noqa: SIM108 (no branch that Triton compiles)
        bits = tl.load(address + at, mask=at < count, other=0)
    else:
        bits = tl.load(address + at)
    if KIND == FLOAT64:
        return bits
    else:
        return bits.to(tl.int32)


@triton.jit
def _float64_part(m, part):
    """Of the four parts of m^2 that program_id(1) sums, 27 bits apart: m = 2^27 a + b."""
    low: tl.constexpr = 0x7FFFFFF
    a = m >> 27
    b = m & low
    bb = b * b
    ab = 2 * a * b
    aa = a * a
    first = tl.where(part == 0, bb & low, (bb >> 27) + (ab & low))
    last = tl.where(part == 2, (ab >> 27) + (aa & low), aa >> 27)
    return tl.where(part < 2, first, last)


@triton.jit
def _add(bits, base, taken, sums, part, KIND: tl.constexpr, AGAIN: tl.constexpr):
    """Adds what is in the window from `base` on, AGAIN: and not in the one from `taken` on; marks what it misses.

    sums  (lower half, upper half, the same of the parts 24 bits higher, missed), one accumulator for each thread's
          element
    """
    low0, low1, high0, high1, missed = sums
    m, place = _places(bits, KIND)
    distance = place - base
    power = tl.full(distance.shape, 1, tl.int32) << ((distance & 15) * 2)
    if AGAIN:
        is_new = ((place - taken) >> 5 != 0) & (place < NOT_FINITE)
        power = tl.where(is_new, power, 0)
    else:
        missed = missed | tl.where(((distance >> 5) != 0) & (m != 0), 1, 0)
    power0 = tl.where((distance >> 4) == 0, power, 0).to(tl.int64)
    power1 = tl.where((distance >> 4) == 1, power, 0).to(tl.int64)
    if KIND == FLOAT32:
        square = m.to(tl.int64) * m.to(tl.int64)
        low = (square & 0xFFFFFF).to(tl.int32).to(tl.int64)
        high = (square >> 24).to(tl.int32).to(tl.int64)
        high0 += high * power0
        high1 += high * power1
    elif KIND == FLOAT64:
        low = _float64_part(m, part)
    else:
        low = (m * m).to(tl.int64)
    low0 += low * power0
    low1 += low * power1
    return low0, low1, high0, high1, missed


# ---- sums ------------------------------------------------------------------------------------------------------------


@triton.jit
def _zeros(TILE: tl.constexpr, KIND: tl.constexpr):
    zero = tl.zeros([TILE], tl.int64)
    return zero, zero, zero, zero, tl.zeros([TILE], tl.int32)


@triton.jit
def _put(digits, total, at):
    """digits + total * 2^at units; total below 2^63."""
    lane = tl.arange(0, LANES)
    first = NUM_COUNTS + (at >> 5)
    shift = (at & 31).to(tl.int64)
    low = (total & DIGIT) << shift
    high = (low >> 32) + ((total >> 32) << shift)  # below 2^63: totals are below 2^44 where the shift is not 0
    return digits + tl.where(lane == first, low & DIGIT, 0) + tl.where(lane == first + 1, high, 0)


@triton.jit
def _flush(digits, sums, base, part, KIND: tl.constexpr):
    """Adds the accumulators of a window from `base` on to the digits."""
    low0, low1, high0, high1, _ = sums
    if KIND == FLOAT32:
        at = 2 * base
    elif KIND == BFLOAT16:
        at = 2 * base + 32  # 2^-133, its unit, squared
    elif KIND == FLOAT16:
        at = 2 * base + 250
    else:
        at = 2 * base + 27 * part
    # by thread: digits of 32 bits, so that sums over threads do not overflow
    first = low0 & DIGIT
    carry = (low0 >> 32) + low1
    if KIND == FLOAT32:
        first += (high0 & 0xFF) << 24
        carry += high0 >> 8
        third = (carry >> 32) + (high1 >> 8)
        second = (carry & DIGIT) + ((high1 & 0xFF) << 24)
    else:
        second = carry & DIGIT
        third = carry >> 32
    digits = _put(digits, tl.sum(first), at)
    digits = _put(digits, tl.sum(second), at + 32)
    digits = _put(digits, tl.sum(third & DIGIT), at + 64)
    if KIND == FLOAT32:
        digits = _put(digits, tl.sum(third >> 32), at + 96)
    return digits


@triton.jit
def _add_the_rest(digits, address, begin, count, taken, part, KIND: tl.constexpr, TILE: tl.constexpr):
    """Adds what the window from `taken` on has missed, one aligned window of 32 places after the other."""
    present = tl.zeros([TILE], tl.int32)
    nans = tl.zeros([TILE], tl.int64)
    infinities = tl.zeros([TILE], tl.int64)
    end = tl.minimum(begin + TILE * ITERATIONS, count)
    for tile in range(begin, end, TILE):
        bits = _bits_at(address, tile + tl.arange(0, TILE), end, KIND, True)
        m, place = _places(bits, KIND)
        is_finite = place < NOT_FINITE
        is_new = ((place - taken) >> 5 != 0) & is_finite & (m != 0)
        present = present | tl.where(is_new, tl.full(place.shape, 1, tl.int32) << (place >> 5), 0)
        nan = _is_nan(bits, KIND)
        nans += tl.where(nan, 1, 0)
        infinities += tl.where(is_finite | nan, 0, 1)
    lane = tl.arange(0, LANES)
    if part == 0:
        digits += tl.where(lane == 0, tl.sum(nans), 0) + tl.where(lane == 1, tl.sum(infinities), 0)
    for window in range(0, 8):
        if tl.max((present >> window) & 1) > 0:
            sums = _zeros(TILE, KIND)
            for tile in range(begin, end, TILE):
                bits = _bits_at(address, tile + tl.arange(0, TILE), end, KIND, True)
                sums = _add(bits, window * WINDOW, taken, sums, part, KIND, True)
            digits = _flush(digits, sums, window * WINDOW, part, KIND)
    return digits


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["row", "address", "count", "first_chunk"])
def write_row_kernel(table, row, address, count, first_chunk):
    """table[row] = [address, count, first_chunk, 0]. One program."""
    entry = table + row * FIELDS
    tl.store(entry + ADDRESS, tl.cast(address, tl.int64))
    tl.store(entry + COUNT, tl.cast(count, tl.int64))
    tl.store(entry + FIRST_CHUNK, tl.cast(first_chunk, tl.int64))


@triton.jit(do_not_specialize=["num_tensors"])
def square_sum_kernel(
    table, num_tensors, sums, ELEMENT: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    """Adds the squares of a chunk, ITERATIONS * TILE elements of one of the tensors in `table` [num_tensors, FIELDS],
    to `sums` [21]; of float64, the part program_id(1) of the squares.

    3 and 4 in float32: m = 3 * 2^22 and 2^23, places 127 and 128. The window is [99, 131), its upper half begins at
    115: 9 * 2^44 = 9 * 2^20 * 2^24 times 2^24, and 2^46 = 2^22 * 2^24 times 2^26, are 25 * 2^44 * 2^24 in units of
    2^(2 * 115 - 298), which is 25 = 25600 * 2^(9 * 32 - 298).
    """
    chunk = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    low = tl.cast(0, tl.int64)
    high = tl.cast(num_tensors, tl.int64)
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(table + middle * FIELDS + FIRST_CHUNK) <= chunk
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle)
    entry = table + low * FIELDS
    count = tl.load(entry + COUNT)
    begin = (chunk - tl.load(entry + FIRST_CHUNK)) * (ITERATIONS * TILE)
    address = tl.load(entry + ADDRESS).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        address = tl.multiple_of(address, 16)

    at = tl.arange(0, TILE)
    end = tl.minimum(begin + ITERATIONS * TILE, count)
    full_end = begin + (end - begin) // TILE * TILE
    if begin < full_end:
        bits = _bits_at(address, begin + at, end, KIND, False)
    else:
        bits = _bits_at(address, begin + at, end, KIND, True)
    if KIND == FLOAT16:
        base = tl.cast(0, tl.int32)  # its 30 places are one window
    else:
        m, place = _places(bits, KIND)
        highest = tl.max(tl.where((m != 0) & (place < NOT_FINITE), place, -1))
        base = tl.maximum(tl.minimum(highest + MARGIN, NOT_FINITE - 1) - (WINDOW - 1), 0)
        base = tl.where(highest < 0, EMPTY_BASE, base)
    accumulators = _zeros(TILE, KIND)
    for tile in range(begin, full_end, TILE):
        # the next tile is on its way while this one is added; one mask for all, or loads would not be wide
        following = tile + TILE
        next_bits = tl.load(address + following + at, mask=tl.full([TILE], 1, tl.int32) * (full_end - following) > 0)
        accumulators = _add(bits, base, base, accumulators, part, KIND, False)
        bits = next_bits.to(bits.dtype)
    if full_end < end:
        bits = _bits_at(address, full_end + at, end, KIND, True)
        accumulators = _add(bits, base, base, accumulators, part, KIND, False)
    digits = _flush(tl.zeros([LANES], tl.int64), accumulators, base, part, KIND)
    if tl.max(accumulators[4]) > 0:
        digits = _add_the_rest(digits, address, begin, count, base, part, KIND, TILE)
    lane = tl.arange(0, LANES)
    tl.atomic_add(sums + lane, digits, mask=(lane < NUM_COUNTS + NUM_DIGITS) & (digits != 0), sem="relaxed")


@triton.jit
def carry_kernel(sums):
    """Leaves 32 bits in every digit but the last: one form for one value. One program."""
    carry = tl.cast(0, tl.int64)
    for i in tl.static_range(NUM_DIGITS - 1):
        digit = tl.load(sums + NUM_COUNTS + i) + carry
        carry = digit >> 32
        tl.store(sums + NUM_COUNTS + i, digit & DIGIT)
    last = sums + NUM_COUNTS + NUM_DIGITS - 1
    tl.store(last, tl.load(last) + carry)


@triton.jit
def norm_kernel(sums, out, DIGITS: tl.constexpr, LOWEST: tl.constexpr, INFINITY: tl.constexpr):
    """The square root of `sums` [21], rounded once to nearest even. One program.

    out       the bits of the float, int32 or int64
    DIGITS    binary digits of the float, 24 or 53; LOWEST the exponent of its smallest, -149 or -1074
    INFINITY  its bits of infinity

    Two bits of the sum give one of the root, from the highest digit on, until the root has ROOT_DIGITS: enough for any
    rounding to be the only one, with a last bit that says whether more follows. What is left of the bits used never
    exceeds twice the root, so 64 bits hold everything.

    The digit 25600 at 2^-10, the sum 25: the pairs of 25600 are 01 10 01 00 00 00 00 00, which give the root 160; with
    51 more pairs of zeros it is 160 * 2^51, in units of 2^-56: 5.
    """
    lane = tl.arange(0, LANES)
    digits = tl.zeros([LANES], tl.int64)
    carry = tl.cast(0, tl.int64)
    for i in tl.static_range(NUM_DIGITS):
        digit = tl.load(sums + NUM_COUNTS + i) + carry
        carry = digit >> 32
        digits += tl.where(lane == i, digit & DIGIT, 0)
    digits += tl.where(lane == NUM_DIGITS, carry, 0)
    top = tl.max(tl.where(digits != 0, lane, 0))

    root = tl.cast(0, tl.int64)
    rest = tl.cast(0, tl.int64)
    more = tl.sum(tl.where(lane < top - 4, digits, 0)) != 0
    pairs = tl.cast(0, tl.int32)  # that have been used
    for step in range(5):  # of 80 pairs, at most 15 are leading zeros
        digit = tl.sum(tl.where(lane == top - step, digits, 0))
        for pair in range(16):
            two = (digit >> tl.cast(30 - 2 * pair, tl.int64)) & 3
            is_used = (root >> (ROOT_DIGITS - 1)) == 0
            with_two = (rest << 2) | two
            trial = (root << 2) | 1
            fits = with_two >= trial
            more = more | ((two != 0) & (is_used == 0))
            rest = tl.where(is_used, tl.where(fits, with_two - trial, with_two), rest)
            root = tl.where(is_used, (root << 1) | fits.to(tl.int64), root)
            pairs += is_used.to(tl.int32)
    root = root | (more | (rest != 0)).to(tl.int64)

    exponent = 16 * (top + 1) - pairs - 149
    drop = tl.maximum(ROOT_DIGITS - DIGITS, LOWEST - exponent)
    one = tl.cast(1, tl.int64) << drop.to(tl.int64)
    dropped = root & (one - 1)
    kept = root >> drop.to(tl.int64)
    is_up = (dropped > (one >> 1)) | ((dropped == (one >> 1)) & ((kept & 1) != 0))
    kept += is_up.to(tl.int64)
    bits = ((exponent + drop - LOWEST).to(tl.int64) << (DIGITS - 1)) + kept
    bits = tl.where(root == 0, 0, tl.minimum(bits, INFINITY))
    bits = tl.where(tl.load(sums + 1) != 0, INFINITY, bits)
    bits = tl.where(tl.load(sums) != 0, INFINITY | (1 << (DIGITS - 2)), bits)
    tl.store(out, bits.to(out.dtype.element_ty))
