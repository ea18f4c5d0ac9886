// Symmetric quantisation of blocks to 8-bit codes, and sums of what was quantised, written once over Vec and compiled
// per instruction set. fastpar/comm/block_codes.py has the same in PyTorch, bit for bit.
//
//   v       = x + residual                             (residual: 0 where there is none)
//   scale   = max(largest |v| / L, 2^-126)             L = 127 for int8, 448 for float8_e4m3fn, 57344 for float8_e5m2;
//                                                      NaN if any v is not finite
//   code    = round(clamp(v * (1 / scale), -L, L))     0 where scale is NaN
//   value   = code * scale
//   residual = v - value                               0 where scale is NaN
//   sum     = (value_0 + value_1) + value_2 ...        every product and sum rounded to float32; divided last
//
// Rounding is to nearest even, or stochastic: up with the probability of what would be dropped, to 2^-16 of a step. The
// random numbers are a hash of (seed, block, element in the block), so they do not depend on the number of threads.
//
// Worked example, int8: the block [1, -0.5, 0.25, 127] has scale 1 and codes [1, 0, 0, 127] (-0.5 and 0.25 round to
// 0); its residual is [0, -0.5, 0.25, 0]. float8_e4m3fn: scale 127/448; 1 is 3.5276 steps, of which there is 3.5:
// codes [0x46, 0xbe, 0x36, 0x7e].
//
// A block is read once from memory: it stays in the first-level cache between the search for the largest and the
// rounding. Products are kept apart from sums (`rounded`), since an FMA would round once, and only where there is one.
#pragma once

#include "common/dtypes.h"
#include "common/vec_loop.h"
#include "quantize/integer_vec.h"
#include "quantize/quantize.h"

namespace fastpar {
namespace {

// ---- random numbers -------------------------------------------------------------------------------------------------

// splitmix64 of (seed, block).
inline uint32_t block_key(uint64_t seed, int64_t block) {
  uint64_t z = seed + (static_cast<uint64_t>(block) + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
}

// 16 random bits a lane, for the elements from `first` on.
inline IntegerVec random_bits(uint32_t key, int64_t first) {
  IntegerVec h = IntegerVec::count_from(key + static_cast<uint32_t>(first));
  h = (h ^ h.shifted_right<16>()) * IntegerVec::set(0x7feb352du);
  h = (h ^ h.shifted_right<15>()) * IntegerVec::set(0x846ca68bu);
  return h.shifted_right<16>();
}

// In (0, 1), never so close to 1 that a whole number would go up.
inline Vec fraction(IntegerVec bits) { return ((bits.to_float() + Vec::set(0.5f)) * Vec::set(0x1p-16f)).rounded(); }

// ---- formats: |q| <= kLargest ---------------------------------------------------------------------------------------

struct Int8 {
  static constexpr float kLargest = 127.0f;
  static constexpr float kSaturates = 127.5f;

  static IntegerVec nearest(Vec q) { return IntegerVec::nearest(q); }
  static IntegerVec stochastic(Vec q, IntegerVec bits) { return IntegerVec::floor(q + fraction(bits)); }
  static Vec value_of(IntegerVec code) { return code.to_float(); }
  static Vec load(const uint8_t* codes) { return IntegerVec::load_signed(codes).to_float(); }
  static Vec load_any(const uint8_t* codes) { return load(codes); }
};

// 1 sign, 7 - kMantissa exponent and kMantissa significand bits; kMost is the code of the largest finite number.
template <int kMantissa, int kBias, int kMost>
struct Float8 {
  static constexpr int kDropped = 23 - kMantissa;          // bits of float32's significand that normal numbers lose
  static constexpr int kUnitLog2 = 1 - kBias - kMantissa;  // subnormal numbers are multiples of 2^kUnitLog2

  static constexpr float power_of_two(int exponent) {
    float value = 1.0f;
    for (int i = 0; i < exponent; ++i) value *= 2.0f;
    for (int i = 0; i > exponent; --i) value *= 0.5f;
    return value;
  }
  static constexpr float kLargest = static_cast<float>((1 << kMantissa) + kMost % (1 << kMantissa)) *
                                    power_of_two((kMost >> kMantissa) - kBias - kMantissa);
  // What is beyond this rounds to more than the largest code: half a step above it.
  static constexpr float kSaturates = kLargest + power_of_two((kMost >> kMantissa) - kBias - kMantissa - 1);
  static constexpr float kSmallestNormal = power_of_two(1 - kBias);

  static IntegerVec nearest(Vec q) {
    const Vec size = q.abs();
    const IntegerVec bits = IntegerVec::bits_of(size);
    const IntegerVec odd = bits.template shifted_right<kDropped>() & IntegerVec::set(1);
    const IntegerVec half = IntegerVec::set((1u << (kDropped - 1)) - 1u);
    const IntegerVec normal = (bits + half + odd).template shifted_right<kDropped>() - rebias();
    // The last bit of this sum is worth 2^kUnitLog2.
    const Vec shift = Vec::set(power_of_two(23 + kUnitLog2));
    const IntegerVec small = IntegerVec::bits_of(size + shift) - IntegerVec::bits_of(shift);
    return join(q, size, small, normal);
  }
  static IntegerVec stochastic(Vec q, IntegerVec bits) {
    const Vec size = q.abs();
    const IntegerVec dropped = bits.template shifted_left<kDropped - 16>() + IntegerVec::set(1u << (kDropped - 17));
    const IntegerVec normal = (IntegerVec::bits_of(size) + dropped).template shifted_right<kDropped>() - rebias();
    const IntegerVec small = IntegerVec::floor((size * Vec::set(power_of_two(-kUnitLog2))).rounded() + fraction(bits));
    return join(q, size, small, normal);
  }
  static Vec value_of(IntegerVec code) {
    const IntegerVec size = code & IntegerVec::set(0x7f);
    const Vec normal =
        (size.template shifted_left<kDropped>() + rebias().template shifted_left<kDropped>()).as_float_bits();
    const Vec small = size.to_float() * Vec::set(power_of_two(kUnitLog2));
    const Vec value = Vec::select_less(size.to_float(), Vec::set(static_cast<float>(1 << kMantissa)), small, normal);
    return value.with_sign_of((code & IntegerVec::set(0x80)).template shifted_left<24>().as_float_bits());
  }
  static Vec load(const uint8_t* codes) { return value_of(IntegerVec::load_unsigned(codes)); }
  // Codes that `nearest` and `stochastic` never give, too: infinity and NaN.
  static Vec load_any(const uint8_t* codes) {
    const IntegerVec code = IntegerVec::load_unsigned(codes);
    const Vec value = value_of(code);
    // A format without infinity has NaN alone beyond its largest.
    const IntegerVec special = IntegerVec::set(kHasInfinity ? kInfinityBits : kInfinityBits | 0x400000u);
    const Vec not_finite = (IntegerVec::bits_of(value) | special).as_float_bits();
    return Vec::select_less((code & IntegerVec::set(0x7f)).to_float(), Vec::set(static_cast<float>(kMost + 1)), value,
                            not_finite);
  }

 private:
  static constexpr bool kHasInfinity = (kMost + 1) % (1 << kMantissa) == 0;
  static IntegerVec rebias() { return IntegerVec::set((127 - kBias) << kMantissa); }
  static IntegerVec join(Vec q, Vec size, IntegerVec small, IntegerVec normal) {
    const IntegerVec sign = IntegerVec::bits_of(q).template shifted_right<31>().template shifted_left<7>();
    return select_less(size, Vec::set(kSmallestNormal), small, normal) | sign;
  }
};

using Float8E4M3 = Float8<3, 7, 0x7e>;   // up to 448
using Float8E5M2 = Float8<2, 15, 0x7b>;  // up to 57344
static_assert(Float8E4M3::kLargest == 448.0f && Float8E5M2::kLargest == 57344.0f, "kMost");

// ---- quantise -------------------------------------------------------------------------------------------------------

// The scale of one block. v goes into `values`, with zeros up to a whole register, where that is not null.
template <typename T, typename Format>
float scale_of_block(const T* x, const float* residual, int64_t count, float* values) {
  constexpr int W = Vec::kWidth;
  // Without their sign, float32's bits are ordered as the numbers are, and infinity and NaN come last.
  IntegerVec largest[4];
  for (int u = 0; u < 4; ++u) largest[u] = IntegerVec::set(0);
  if (count % W != 0) Vec::set(0.0f).store(values + count / W * W);
  for_each_vec(count, [&](int64_t i, auto access, int u) __attribute__((always_inline)) {
    Vec v = access.load(x + i);
    if (residual != nullptr) v = v + access.load(residual + i);
    if (values != nullptr) access.store(v, values + i);
    largest[u] = IntegerVec::max(largest[u], IntegerVec::bits_of(v.abs()));
  });
  const uint32_t bits =
      IntegerVec::max(IntegerVec::max(largest[0], largest[1]), IntegerVec::max(largest[2], largest[3])).largest();
  if (bits >= kInfinityBits) return __builtin_nanf("");
  const float scale = bits_float(bits) / Format::kLargest;
  return scale > kSmallestScale ? scale : kSmallestScale;
}

// Whole registers: of `values`, to `codes` and, where that is not null, `residual`.
template <typename Format, bool kStochastic, bool kResidual>
void encode_block(const float* values, int64_t count, float scale, uint32_t key, uint8_t* codes, float* residual) {
  const Vec step = Vec::set(scale), inverse = Vec::set(1.0f / scale);
  const Vec most = Vec::set(Format::kLargest), least = Vec::set(-Format::kLargest);
  for (int64_t i = 0; i < count; i += Vec::kWidth) {
    const Vec v = Vec::load(values + i);
    Vec q = (v * inverse).rounded();
    // Two roundings may leave q a little beyond the largest; only what goes up cannot have that.
    if (kStochastic) q = Vec::max(least, Vec::min(most, q));
    const IntegerVec code = kStochastic ? Format::stochastic(q, random_bits(key, i)) : Format::nearest(q);
    code.store_bytes(codes + i);
    if (kResidual) (v - (Format::value_of(code) * step).rounded()).store(residual + i);
  }
}

template <typename Format>
void encode(bool stochastic, const float* values, int64_t count, float scale, uint32_t key, uint8_t* codes,
            float* residual) {
  if (stochastic) {
    if (residual != nullptr) return encode_block<Format, true, true>(values, count, scale, key, codes, residual);
    return encode_block<Format, true, false>(values, count, scale, key, codes, nullptr);
  }
  if (residual != nullptr) return encode_block<Format, false, true>(values, count, scale, key, codes, residual);
  return encode_block<Format, false, false>(values, count, scale, key, codes, nullptr);
}

inline const float* as_floats(const float* x) { return x; }
template <typename T>
const float* as_floats(const T*) {
  return nullptr;
}

template <typename T, typename Format>
void quantize_blocks(const QuantizeArguments& a, int64_t begin, int64_t end) {
  alignas(64) float values[kMaxBlock], rest[kMaxBlock];
  alignas(64) uint8_t tail[kMaxBlock];  // the last block's codes, which may not end with a register; so with `rest`
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * a.block, count = a.block < a.count - first ? a.block : a.count - first;
    const bool is_whole = count == a.block;
    const T* const x = static_cast<const T*>(a.x) + first;
    float* const residual = a.residual == nullptr ? nullptr : a.residual + first;
    const float* const as_they_are = is_whole && residual == nullptr ? as_floats(x) : nullptr;
    const float scale = scale_of_block<T, Format>(x, residual, count, as_they_are == nullptr ? values : nullptr);
    a.scales[block] = scale;
    if (scale != scale) {
      memset(a.codes + first, 0, static_cast<size_t>(count));
      if (residual != nullptr) memset(residual, 0, sizeof(float) * static_cast<size_t>(count));
      continue;
    }
    const uint32_t key = block_key(a.seed, a.seed_offset + block);
    const float* const from = as_they_are == nullptr ? values : as_they_are;
    if (is_whole) {
      encode<Format>(a.stochastic, from, count, scale, key, a.codes + first, residual);
    } else {
      encode<Format>(a.stochastic, from, count, scale, key, tail, residual == nullptr ? nullptr : rest);
      memcpy(a.codes + first, tail, static_cast<size_t>(count));
      if (residual != nullptr) memcpy(residual, rest, sizeof(float) * static_cast<size_t>(count));
    }
  }
}

// ---- quantise with a scale that is given ----------------------------------------------------------------------------

template <typename T>
uint32_t largest_bits(const void* data, int64_t count) {
  const T* const x = static_cast<const T*>(data);
  IntegerVec largest[4];
  for (int u = 0; u < 4; ++u) largest[u] = IntegerVec::set(0);
  for_each_vec(count, [&](int64_t i, auto access, int u) __attribute__((always_inline)) {
    largest[u] = IntegerVec::max(largest[u], IntegerVec::bits_of(access.load(x + i).abs()));
  });
  return IntegerVec::max(IntegerVec::max(largest[0], largest[1]), IntegerVec::max(largest[2], largest[3])).largest();
}

// One read of x: what its largest is becomes known while it is rounded, and serves a later scale.
template <typename T, typename Format>
void quantize_scaled(const ScaledArguments& a, int64_t begin, int64_t end) {
  constexpr int W = Vec::kWidth;
  const Vec inverse = Vec::set(1.0f / a.scale), saturates = Vec::set(Format::kSaturates);
  const Vec most = Vec::set(Format::kLargest), least = Vec::set(-Format::kLargest);
  const IntegerVec one = IntegerVec::set(1), none = IntegerVec::set(0);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = chunk * kMaxBlock, rest = a.count - first, count = rest < kMaxBlock ? rest : kMaxBlock;
    const T* const x = static_cast<const T*>(a.x) + first;
    uint8_t* const codes = a.codes + first;
    IntegerVec largest = none, beyond = none;
    const auto encode_vec = [&](Vec v) __attribute__((always_inline)) {
      largest = IntegerVec::max(largest, IntegerVec::bits_of(v.abs()));
      const Vec q = (v * inverse).rounded();
      beyond = beyond + select_less(saturates, q.abs(), one, none);
      return Format::nearest(Vec::max(least, Vec::min(most, q)));
    };
    int64_t i = 0;
    for (; i + W <= count; i += W) encode_vec(Vec::load(x + i)).store_bytes(codes + i);
    if (i < count) {
      uint8_t tail[W];
      encode_vec(Vec::load_first(x + i, static_cast<int>(count - i), 0.0f)).store_bytes(tail);
      memcpy(codes + i, tail, static_cast<size_t>(count - i));
    }
    float lanes[W];
    beyond.to_float().store(lanes);
    int32_t saturated = 0;
    for (int lane = 0; lane < W; ++lane) saturated += static_cast<int32_t>(lanes[lane]);
    a.largest[chunk] = largest.largest();
    a.saturated[chunk] = saturated;
  }
}

// ---- sum ------------------------------------------------------------------------------------------------------------

template <typename Format, bool kAverage>
void sum_block(const DequantizeArguments& a, int64_t block, const uint8_t* const* codes, int64_t count, float* out) {
  const Vec divisor = Vec::set(static_cast<float>(a.num_sources));
  for (int64_t i = 0; i < count; i += Vec::kWidth) {
    Vec total = (Format::load(codes[0] + i) * Vec::set(a.scales[0][block])).rounded();
    for (int s = 1; s < a.num_sources; ++s) {
      total = total + (Format::load(codes[s] + i) * Vec::set(a.scales[s][block])).rounded();
    }
    if (kAverage) total = total / divisor;
    total.store(out + i);
  }
}

template <typename Format, bool kAverage>
void sum_blocks_as(const DequantizeArguments& a, int64_t begin, int64_t end) {
  constexpr int W = Vec::kWidth;
  const uint8_t* codes[kMaxParts];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * a.block, count = a.block < a.count - first ? a.block : a.count - first;
    const int64_t whole = count / W * W;
    for (int s = 0; s < a.num_sources; ++s) codes[s] = a.codes[s] + first;
    sum_block<Format, kAverage>(a, block, codes, whole, a.out + first);
    for (int64_t i = first + whole; i < first + count; ++i) {
      // One lane of a register that has the element in all.
      float lanes[W];
      uint8_t copies[W];
      Vec total = Vec::set(0.0f);
      for (int s = 0; s < a.num_sources; ++s) {
        memset(copies, a.codes[s][i], sizeof copies);
        const Vec value = (Format::load(copies) * Vec::set(a.scales[s][block])).rounded();
        total = s == 0 ? value : total + value;
      }
      if (kAverage) total = total / Vec::set(static_cast<float>(a.num_sources));
      total.store(lanes);
      a.out[i] = lanes[0];
    }
  }
}

template <typename Format>
void sum_blocks(const DequantizeArguments& a, int64_t begin, int64_t end) {
  if (a.average) {
    sum_blocks_as<Format, true>(a, begin, end);
  } else {
    sum_blocks_as<Format, false>(a, begin, end);
  }
}

// ---- decode
// -----------------------------------------------------------------------------------------------------------

// Values of one source, in the type that is wanted.
template <typename T, typename Format>
void decode_blocks(const DecodeArguments& a, int64_t begin, int64_t end) {
  constexpr int W = Vec::kWidth;
  T* const out = static_cast<T*>(a.out);
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * a.block, last = a.block < a.count - first ? first + a.block : a.count;
    const Vec scale = Vec::set(a.scales[block]);
    int64_t i = first;
    for (; i + W <= last; i += W) (Format::load_any(a.codes + i) * scale).store(out + i);
    if (i < last) {
      uint8_t rest[W] = {};
      memcpy(rest, a.codes + i, static_cast<size_t>(last - i));
      (Format::load_any(rest) * scale).store_first(out + i, static_cast<int>(last - i));
    }
  }
}

#define FASTPAR_BY_TYPE(function, Format) \
  {function<float, Format>, function<bfloat16, Format>, function<float16, Format>}

#define FASTPAR_QUANTIZE_KERNELS                                                             \
  {                                                                                          \
      {FASTPAR_BY_TYPE(quantize_blocks, Int8), FASTPAR_BY_TYPE(quantize_blocks, Float8E4M3), \
       FASTPAR_BY_TYPE(quantize_blocks, Float8E5M2)},                                        \
      {sum_blocks<Int8>, sum_blocks<Float8E4M3>, sum_blocks<Float8E5M2>},                    \
      {FASTPAR_BY_TYPE(decode_blocks, Int8), FASTPAR_BY_TYPE(decode_blocks, Float8E4M3),     \
       FASTPAR_BY_TYPE(decode_blocks, Float8E5M2)},                                          \
      {FASTPAR_BY_TYPE(quantize_scaled, Int8), FASTPAR_BY_TYPE(quantize_scaled, Float8E4M3), \
       FASTPAR_BY_TYPE(quantize_scaled, Float8E5M2)},                                        \
      {largest_bits<float>, largest_bits<bfloat16>, largest_bits<float16>},                  \
  }

}  // namespace
}  // namespace fastpar
