// Vec: a register of floats for the instruction set that the including file is compiled for, with loads and stores that
// convert from and to float32, bfloat16 and float16, and exp2.
//
// Everything is in an anonymous namespace on purpose: each *_<isa>.cpp gets its own copy, and the linker can never
// replace the portable one with an AVX-512 one. For the same reason nothing here uses inline functions of the standard
// library.
//
// Note: exp2. 2^t = 2^n * 2^f. With AVX-512, n = floor(t) and f comes from one instruction (vreduceps), 2^n is applied
// by another that takes the floor itself (vscalefps), and degree 5 is replaced by 2^(k/32), k the first five bits of f,
// from a table in two registers, times a polynomial of degree 2 in what is left. Elsewhere n = round(t), and 2^n is
// made of integers.
//
//   ScaledExp2<5>   1.3 ulp of float32
//   ScaledExp2<4>   2.9e-6 relative: for results that are rounded to float16, of which it is 0.6% of an ulp
//   ScaledExp2<3>   7.5e-5 relative: for results that are rounded to bfloat16, of which it is 2% of an ulp
//
// The first two are exactly 1 at t = 0, since their polynomials are 1 at f = 0.
//
// Coefficients are minimax for the relative error. A constant factor is free: it is multiplied into the coefficients or
// the table. -inf gives 0, NaN gives NaN; results below 2^-126 may be flushed to 0. Above t = 127 only AVX-512 gives
// infinity; callers that can get there bound t.
//
// Measured on Zen 4 at 3.7 GHz, exponentials per nanosecond summed / written, in the first-level cache: round,
// subtract, degree 5, scalef 8.6 / 8.9; vreduceps instead of the first two 8.6 / 9.0; the table 9.1 / 10.0, and 10
// summed where 2^n (2^(k/32)) is multiplied into the sum by the last FMA; degree 4 9.8 / 10.4; degree 3 11.0 / 12.3.
// vreduceps and vscalefps take two slots each of the pipes that add, and so do not take turns with the FMAs. Building
// 2^n with integer instructions (7.3 / 8.1; 7.9 / 8.7 with the table) was slower.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/dtypes.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fastpar {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kNegativeInfinity = -__builtin_inff();

// ---- scalar conversions -------------------------------------------------------------------------------------------

inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) { return bits_float(static_cast<uint32_t>(value.bits) << 16); }

inline float to_float(float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  // Re-bias by a multiplication, which also normalises subnormals; infinities and NaN keep a full exponent.
  const float scaled = bits_float(magnitude << 13) * 0x1p112f;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return bits_float(sign | float_bits(scaled) | special);
}

inline void from_float(float value, float* out) { *out = value; }

inline void from_float(float value, bfloat16* out) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // to nearest even
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<uint16_t>((is_nan ? bits | 0x400000u : rounded) >> 16);
}

inline void from_float(float value, float16* out) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal half: adding 0.5 aligns the last bit of the result with the last bit of the float mantissa, which
    // rounds.
    half = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

// ---- one register -------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

struct Vec {
  static constexpr int kWidth = 16;
  static constexpr bool kFmaRoundsOnce = true;
  __m512 v;

  static Vec set(float value) { return {_mm512_set1_ps(value)}; }
  static __mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1u); }

  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bfloat16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const float16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }

  // 2 * kWidth elements in any order, for reductions: even and odd bfloat16 are one instruction each.
  static void load_pair(const bfloat16* p, Vec* a, Vec* b) {
    const __m512i both = _mm512_loadu_si512(p);
    a->v = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    b->v = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  template <typename T>
  static void load_pair(const T* p, Vec* a, Vec* b) {
    *a = load(p);
    *b = load(p + kWidth);
  }

  // The first `count` elements (0 < count < kWidth); the others are `fill`, and their memory is not touched.
  static Vec load_first(const float* p, int count, float fill) {
    return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first(count), p)};
  }
  static Vec load_first(const bfloat16* p, int count, float fill) {
    const Vec all = widen(_mm256_maskz_loadu_epi16(first(count), p));
    return {_mm512_mask_blend_ps(first(count), _mm512_set1_ps(fill), all.v)};
  }
  static Vec load_first(const float16* p, int count, float fill) {
    const __m512 all = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p));
    return {_mm512_mask_blend_ps(first(count), _mm512_set1_ps(fill), all)};
  }

  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bfloat16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16()); }
  void store(float16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16()); }
  void store_first(float* p, int count) const { _mm512_mask_storeu_ps(p, first(count), v); }
  void store_first(bfloat16* p, int count) const { _mm256_mask_storeu_epi16(p, first(count), narrow_bf16()); }
  void store_first(float16* p, int count) const { _mm256_mask_storeu_epi16(p, first(count), narrow_f16()); }
  // Past the caches; `p` is aligned to the register's width in memory.
  void stream(float* p) const { _mm512_stream_ps(p, v); }
  void stream(bfloat16* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow_bf16()); }
  void stream(float16* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow_f16()); }
  // 2 * kWidth elements, a first.
  template <typename T>
  static void store_pair(Vec a, Vec b, T* p) {
    a.store(p);
    b.store(p + kWidth);
  }
  template <typename T>
  static void stream_pair(Vec a, Vec b, T* p) {
    a.stream(p);
    b.stream(p + kWidth);
  }
#if defined(__AVX512BF16__)
  static void store_pair(Vec a, Vec b, bfloat16* p) { _mm512_storeu_si512(p, narrow_pair(a, b)); }
  static void stream_pair(Vec a, Vec b, bfloat16* p) {  // `p` is aligned to 64 bytes
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow_pair(a, b));
  }
#endif

  Vec operator+(Vec o) const { return {_mm512_add_ps(v, o.v)}; }
  Vec operator-(Vec o) const { return {_mm512_sub_ps(v, o.v)}; }
  Vec operator*(Vec o) const { return {_mm512_mul_ps(v, o.v)}; }
  // 1 / d to an ulp, in a fifth of a division's time; 0 for infinity.
  static Vec reciprocal(Vec d) {
    const __m512 one = _mm512_set1_ps(1.0f), r = _mm512_rcp14_ps(d.v);
    const __m512 error = _mm512_min_ps(_mm512_fnmadd_ps(d.v, r, one), one);  // 1 where d * r is inf * 0
    return {_mm512_fmadd_ps(r, error, r)};
  }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  Vec operator/(Vec o) const { return {_mm512_div_ps(v, o.v)}; }
  // The same value, which the compiler cannot make part of an FMA.
  Vec rounded() const {
    Vec out = *this;
    __asm__("" : "+v"(out.v));
    return out;
  }
  // Where one is NaN, max and min give the second.
  static Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
  Vec abs() const { return {_mm512_abs_ps(v)}; }
  Vec with_sign_of(Vec o) const { return {_mm512_or_ps(v, _mm512_and_ps(o.v, _mm512_set1_ps(-0.0f)))}; }  // *this >= 0
  static Vec select_less(Vec a, Vec b, Vec then, Vec otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), otherwise.v, then.v)};
  }

 private:
  static Vec widen(__m256i bits) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))}; }
#if defined(__AVX512BF16__)
  __m256i narrow_bf16() const { return (__m256i)_mm512_cvtneps_pbh(v); }
  static __m512i narrow_pair(Vec a, Vec b) { return (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v); }
#else
  __m256i narrow_bf16() const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
#endif
  __m256i narrow_f16() const { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

#elif defined(__AVX2__)

struct Vec {
  static constexpr int kWidth = 8;
  static constexpr bool kFmaRoundsOnce = true;
  __m256 v;

  static Vec set(float value) { return {_mm256_set1_ps(value)}; }

  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const bfloat16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Vec load(const float16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }

  // 2 * kWidth elements in any order, for reductions: even and odd bfloat16 are one instruction each.
  static void load_pair(const bfloat16* p, Vec* a, Vec* b) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    a->v = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    b->v = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  template <typename T>
  static void load_pair(const T* p, Vec* a, Vec* b) {
    *a = load(p);
    *b = load(p + kWidth);
  }

  // The first `count` elements (0 < count < kWidth); the others are `fill`, and their memory is not touched.
  template <typename T>
  static Vec load_first(const T* p, int count, float fill) {
    alignas(32) float copy[kWidth];
    for (int i = 0; i < kWidth; ++i) copy[i] = i < count ? to_float(p[i]) : fill;
    return load(copy);
  }

  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(bfloat16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16()); }
  void store(float16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_f16()); }
  template <typename T>
  void store_first(T* p, int count) const {
    alignas(32) T copy[kWidth];
    store(copy);
    memcpy(p, copy, sizeof(T) * static_cast<size_t>(count));
  }
  // Past the caches; `p` is aligned to the register's width in memory.
  void stream(float* p) const { _mm256_stream_ps(p, v); }
  void stream(bfloat16* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow_bf16()); }
  void stream(float16* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow_f16()); }
  // 2 * kWidth elements, a first.
  template <typename T>
  static void store_pair(Vec a, Vec b, T* p) {
    a.store(p);
    b.store(p + kWidth);
  }
  template <typename T>
  static void stream_pair(Vec a, Vec b, T* p) {
    a.stream(p);
    b.stream(p + kWidth);
  }

  Vec operator+(Vec o) const { return {_mm256_add_ps(v, o.v)}; }
  Vec operator-(Vec o) const { return {_mm256_sub_ps(v, o.v)}; }
  Vec operator*(Vec o) const { return {_mm256_mul_ps(v, o.v)}; }
  static Vec reciprocal(Vec d) { return {_mm256_div_ps(_mm256_set1_ps(1.0f), d.v)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  Vec operator/(Vec o) const { return {_mm256_div_ps(v, o.v)}; }
  // The same value, which the compiler cannot make part of an FMA.
  Vec rounded() const {
    Vec out = *this;
    __asm__("" : "+x"(out.v));
    return out;
  }
  // Where one is NaN, max and min give the second.
  static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
  static Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
  Vec abs() const { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v)}; }
  Vec with_sign_of(Vec o) const { return {_mm256_or_ps(v, _mm256_and_ps(o.v, _mm256_set1_ps(-0.0f)))}; }  // *this >= 0
  static Vec select_less(Vec a, Vec b, Vec then, Vec otherwise) {
    return {_mm256_blendv_ps(otherwise.v, then.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
  }

  // n = round(t) and f = t - n, with t clamped to where 2^n is 0.
  static void split(Vec t, Vec* n, Vec* f) {
    const __m256 clamped = _mm256_max_ps(_mm256_set1_ps(-127.0f), t.v);  // this operand order lets NaN through
    n->v = _mm256_round_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    f->v = _mm256_sub_ps(clamped, n->v);
  }
  // this * 2^n
  Vec scaled_by_power(Vec n) const {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
  }

 private:
  __m128i narrow_bf16() const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
    const __m256i high = _mm256_srli_epi32(kept, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xd8);
    return _mm256_castsi256_si128(packed);
  }
  __m128i narrow_f16() const { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

#else

struct Vec {
  static constexpr int kWidth = 8;
  static constexpr bool kFmaRoundsOnce = false;
  float v[kWidth];

  template <typename F>
  static Vec make(F&& element) {
    Vec out;
    for (int i = 0; i < kWidth; ++i) out.v[i] = element(i);
    return out;
  }

  static Vec set(float value) {
    return make([&](int) { return value; });
  }
  template <typename T>
  static Vec load(const T* p) {
    return make([&](int i) { return to_float(p[i]); });
  }
  // 2 * kWidth elements in any order, for reductions.
  template <typename T>
  static void load_pair(const T* p, Vec* a, Vec* b) {
    *a = load(p);
    *b = load(p + kWidth);
  }
  // The first `count` elements (0 < count < kWidth); the others are `fill`, and their memory is not touched.
  template <typename T>
  static Vec load_first(const T* p, int count, float fill) {
    return make([&](int i) { return i < count ? to_float(p[i]) : fill; });
  }
  template <typename T>
  void store(T* p) const {
    for (int i = 0; i < kWidth; ++i) from_float(v[i], p + i);
  }
  template <typename T>
  void store_first(T* p, int count) const {
    for (int i = 0; i < count; ++i) from_float(v[i], p + i);
  }
  template <typename T>
  void stream(T* p) const {
    store(p);
  }
  // 2 * kWidth elements, a first.
  template <typename T>
  static void store_pair(Vec a, Vec b, T* p) {
    a.store(p);
    b.store(p + kWidth);
  }
  template <typename T>
  static void stream_pair(Vec a, Vec b, T* p) {
    a.stream(p);
    b.stream(p + kWidth);
  }

  Vec operator+(Vec o) const {
    return make([&](int i) { return v[i] + o.v[i]; });
  }
  Vec operator-(Vec o) const {
    return make([&](int i) { return v[i] - o.v[i]; });
  }
  Vec operator*(Vec o) const {
    return make([&](int i) { return v[i] * o.v[i]; });
  }
  Vec operator/(Vec o) const {
    return make([&](int i) { return v[i] / o.v[i]; });
  }
  static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  static Vec reciprocal(Vec d) {
    return make([&](int i) { return 1.0f / d.v[i]; });
  }
  // The same value, which the compiler cannot make part of an FMA.
  Vec rounded() const {
    Vec out = *this;
    __asm__("" : "+m"(out.v));
    return out;
  }
  // Where one is NaN, max and min give the second.
  static Vec max(Vec a, Vec b) {
    return make([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static Vec min(Vec a, Vec b) {
    return make([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  Vec abs() const {
    return make([&](int i) { return __builtin_fabsf(v[i]); });
  }
  Vec with_sign_of(Vec o) const {  // *this >= 0
    return make([&](int i) { return __builtin_copysignf(v[i], o.v[i]); });
  }
  static Vec select_less(Vec a, Vec b, Vec then, Vec otherwise) {
    return make([&](int i) { return a.v[i] < b.v[i] ? then.v[i] : otherwise.v[i]; });
  }

  // n = round(t) and f = t - n, with t clamped to where 2^n is 0; NaN goes through.
  static void split(Vec t, Vec* n, Vec* f) {
    const Vec clamped = make([&](int i) { return t.v[i] < -127.0f ? -127.0f : t.v[i]; });
    // Adding 1.5 * 2^23 leaves no bits for a fraction: rounding without an instruction for it.
    *n = make([&](int i) { return (clamped.v[i] + 0x1.8p23f) - 0x1.8p23f; });
    *f = clamped - *n;
  }
  // this * 2^n
  Vec scaled_by_power(Vec n) const {
    // The same sum holds n in its low bits: conversion without an instruction for it.
    return make([&](int i) {
      return v[i] * bits_float((float_bits(n.v[i] + 0x1.8p23f) - float_bits(0x1.8p23f) + 127u) << 23);
    });
  }
};

#endif

// t -> scale * 2^t; see the note above.
#if defined(__AVX512F__)

template <int kDegree>
class ScaledExp2 {
 public:
  explicit ScaledExp2(float scale) {
    for (int k = 0; k <= kDegree; ++k) coefficients_[k] = Vec::set(scale * kCoefficients[k]);
  }

  Vec operator()(Vec t) const {
    const Vec f{_mm512_reduce_ps(t.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
    Vec p = coefficients_[kDegree];
    for (int k = kDegree - 1; k >= 0; --k) p = Vec::fma(p, f, coefficients_[k]);
    return {_mm512_scalef_ps(p.v, t.v)};
  }

 private:
  static_assert(kDegree == 3 || kDegree == 4, "no coefficients for this degree");
  static constexpr float kCoefficients[5] = {
      kDegree == 3 ? 0x1.fff632p-1f : 1.0f,           kDegree == 3 ? 0x1.64444cp-1f : 0x1.62d6c6p-1f,
      kDegree == 3 ? 0x1.cefc4cp-3f : 0x1.ee2450p-3f, kDegree == 3 ? 0x1.3f96a4p-4f : 0x1.abf868p-5f,
      kDegree == 3 ? 0.0f : 0x1.b7f732p-7f,
  };
  Vec coefficients_[kDegree + 1];
};

template <>
class ScaledExp2<5> {
 public:
  explicit ScaledExp2(float scale) {
    const Vec factor = Vec::set(scale);
    low_ = Vec::load(kPowers) * factor;
    high_ = Vec::load(kPowers + Vec::kWidth) * factor;
  }

  Vec operator()(Vec t) const {
    Vec power, f;
    split(t, &power, &f);
    // Scaled last: where 2^t is infinite, the other order would multiply it by 0.
    return {_mm512_scalef_ps(Vec::fma(power, Vec::fma(kC2(), f, kC1()) * f, power).v, t.v)};
  }
  // sum + scale * 2^t, with one instruction less
  Vec add_to(Vec sum, Vec t) const {
    Vec power, f;
    split(t, &power, &f);
    power.v = _mm512_scalef_ps(power.v, t.v);
    return Vec::fma(power, Vec::fma(Vec::fma(kC2(), f, kC1()), f, Vec::set(1.0f)), sum);
  }

 private:
  // power = scale * 2^(k/32) with k the first five bits of the fraction of t, f in [0, 1/32) what is left of it
  void split(Vec t, Vec* power, Vec* f) const {
    constexpr int kFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    // The last five bits of this sum are k.
    const __m512i index = _mm512_castps_si512(_mm512_add_round_ps(t.v, _mm512_set1_ps(0x1.8p18f), kFloor));
    power->v = _mm512_permutex2var_ps(low_.v, index, high_.v);
    f->v = _mm512_reduce_ps(t.v, kFloor | (5 << 4));
  }
  static Vec kC1() { return Vec::set(0x1.62e11ep-1f); }
  static Vec kC2() { return Vec::set(0x1.f0f3e6p-3f); }

  static constexpr float kPowers[32] = {
      0x1.000000p+0f, 0x1.059b0ep+0f, 0x1.0b5586p+0f, 0x1.11301ep+0f, 0x1.172b84p+0f, 0x1.1d4874p+0f, 0x1.2387a6p+0f,
      0x1.29e9e0p+0f, 0x1.306fe0p+0f, 0x1.371a74p+0f, 0x1.3dea64p+0f, 0x1.44e086p+0f, 0x1.4bfdaep+0f, 0x1.5342b6p+0f,
      0x1.5ab07ep+0f, 0x1.6247ecp+0f, 0x1.6a09e6p+0f, 0x1.71f75ep+0f, 0x1.7a1148p+0f, 0x1.82589ap+0f, 0x1.8ace54p+0f,
      0x1.93737cp+0f, 0x1.9c4918p+0f, 0x1.a5503cp+0f, 0x1.ae89fap+0f, 0x1.b7f770p+0f, 0x1.c199bep+0f, 0x1.cb720ep+0f,
      0x1.d5818ep+0f, 0x1.dfc974p+0f, 0x1.ea4afap+0f, 0x1.f50766p+0f,
  };
  Vec low_, high_;
};

#else

template <int kDegree>
class ScaledExp2 {
 public:
  explicit ScaledExp2(float scale) {
    for (int k = 0; k <= kDegree; ++k) coefficients_[k] = Vec::set(scale * kCoefficients[k]);
  }

  Vec operator()(Vec t) const {
    Vec n, f;
    Vec::split(t, &n, &f);
    Vec p = coefficients_[kDegree];
    for (int k = kDegree - 1; k >= 0; --k) p = Vec::fma(p, f, coefficients_[k]);
    return p.scaled_by_power(n);
  }
  Vec add_to(Vec sum, Vec t) const { return sum + (*this)(t); }

 private:
  static_assert(kDegree >= 3 && kDegree <= 5, "no coefficients for this degree");
  static constexpr float choose(float three, float four, float five) {
    return kDegree == 3 ? three : kDegree == 4 ? four : five;
  }
  static constexpr float kCoefficients[6] = {
      choose(0x1.fff692p-1f, 1.0f, 1.0f),
      choose(0x1.62f31ap-1f, 0x1.62e12cp-1f, 0x1.62e42ap-1f),
      choose(0x1.f0de1ap-3f, 0x1.ec0378p-3f, 0x1.ebf9bcp-3f),
      choose(0x1.c3f760p-5f, 0x1.c9fc46p-5f, 0x1.c6b752p-5f),
      choose(0.0f, 0x1.3a02ccp-7f, 0x1.3cea88p-7f),
      choose(0.0f, 0.0f, 0x1.5bba14p-10f),
  };
  Vec coefficients_[kDegree + 1];
};

#endif

// Lanes are combined in a fixed order, so a result depends on the data and the instruction set only.
inline float reduce_max(Vec x) {
  float lanes[Vec::kWidth];
  x.store(lanes);
  float result = lanes[0];
  for (int i = 1; i < Vec::kWidth; ++i) result = lanes[i] > result ? lanes[i] : result;
  return result;
}

inline float reduce_min(Vec x) {
  float lanes[Vec::kWidth];
  x.store(lanes);
  float result = lanes[0];
  for (int i = 1; i < Vec::kWidth; ++i) result = lanes[i] < result ? lanes[i] : result;
  return result;
}

inline double reduce_sum(Vec x) {
  float lanes[Vec::kWidth];
  x.store(lanes);
  double result = 0.0;
  for (int i = 0; i < Vec::kWidth; ++i) result += static_cast<double>(lanes[i]);
  return result;
}

// Every lane rounded to T and back: what a load finds after a store.
template <typename T>
Vec rounded_to(Vec x) {
  T lanes[Vec::kWidth];
  x.store(lanes);
  return Vec::load(lanes);
}

// Brings the cache line at `p` closer; any address will do.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

inline void fence_streamed_stores() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace fastpar
