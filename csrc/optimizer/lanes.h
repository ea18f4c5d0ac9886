// Lanes: a register of unsigned 32-bit integers beside Vec, for the formats that are defined on the bits of floats.
//
// In an anonymous namespace, for the reason given in common/simd.h.
#pragma once

#include "common/simd.h"

namespace fastpar {
namespace {

#if defined(__AVX512F__)

struct Lanes {
  static constexpr int kWidth = Vec::kWidth;
  __m512i v;

  static Lanes set(uint32_t value) { return {_mm512_set1_epi32(static_cast<int>(value))}; }
  // first, first + 1, ...
  static Lanes count_from(uint32_t first) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return {_mm512_add_epi32(set(first).v, lane)};
  }
  static Lanes bits_of(Vec x) { return {_mm512_castps_si512(x.v)}; }
  Vec as_floats() const { return {_mm512_castsi512_ps(v)}; }

  static Lanes load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
  static Lanes load(const uint16_t* p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Lanes load(const int16_t* p) {
    return {_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Lanes load(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  // The low bits of each.
  void store(uint32_t* p) const { _mm512_storeu_si512(p, v); }
  void store(uint16_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v)); }
  void store(uint8_t* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }

  Lanes operator+(Lanes o) const { return {_mm512_add_epi32(v, o.v)}; }
  Lanes operator-(Lanes o) const { return {_mm512_sub_epi32(v, o.v)}; }
  Lanes operator*(Lanes o) const { return {_mm512_mullo_epi32(v, o.v)}; }
  Lanes operator&(Lanes o) const { return {_mm512_and_si512(v, o.v)}; }
  Lanes operator|(Lanes o) const { return {_mm512_or_si512(v, o.v)}; }
  Lanes operator^(Lanes o) const { return {_mm512_xor_si512(v, o.v)}; }
  template <int kBits>
  Lanes right() const {
    return {_mm512_srli_epi32(v, kBits)};
  }
  template <int kBits>
  Lanes left() const {
    return {_mm512_slli_epi32(v, kBits)};
  }
  // As signed integers.
  static Lanes max(Lanes a, Lanes b) { return {_mm512_max_epi32(a.v, b.v)}; }
  static Lanes min(Lanes a, Lanes b) { return {_mm512_min_epi32(a.v, b.v)}; }
  static Lanes select_greater(Lanes a, Lanes b, Lanes then, Lanes otherwise) {
    return {_mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a.v, b.v), otherwise.v, then.v)};
  }
};

inline Vec square_root(Vec x) { return {_mm512_sqrt_ps(x.v)}; }

#elif defined(__AVX2__)

struct Lanes {
  static constexpr int kWidth = Vec::kWidth;
  __m256i v;

  static Lanes set(uint32_t value) { return {_mm256_set1_epi32(static_cast<int>(value))}; }
  // first, first + 1, ...
  static Lanes count_from(uint32_t first) {
    return {_mm256_add_epi32(set(first).v, _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0))};
  }
  static Lanes bits_of(Vec x) { return {_mm256_castps_si256(x.v)}; }
  Vec as_floats() const { return {_mm256_castsi256_ps(v)}; }

  static Lanes load(const uint32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  static Lanes load(const uint16_t* p) {
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static Lanes load(const int16_t* p) {
    return {_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static Lanes load(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
  }
  // The low bits of each.
  void store(uint32_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  void store(uint16_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed_16((*this & set(0xffffu)).v));
  }
  void store(uint8_t* p) const {
    const __m128i low = packed_16((*this & set(0xffu)).v);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(low, low));
  }

  Lanes operator+(Lanes o) const { return {_mm256_add_epi32(v, o.v)}; }
  Lanes operator-(Lanes o) const { return {_mm256_sub_epi32(v, o.v)}; }
  Lanes operator*(Lanes o) const { return {_mm256_mullo_epi32(v, o.v)}; }
  Lanes operator&(Lanes o) const { return {_mm256_and_si256(v, o.v)}; }
  Lanes operator|(Lanes o) const { return {_mm256_or_si256(v, o.v)}; }
  Lanes operator^(Lanes o) const { return {_mm256_xor_si256(v, o.v)}; }
  template <int kBits>
  Lanes right() const {
    return {_mm256_srli_epi32(v, kBits)};
  }
  template <int kBits>
  Lanes left() const {
    return {_mm256_slli_epi32(v, kBits)};
  }
  // As signed integers.
  static Lanes max(Lanes a, Lanes b) { return {_mm256_max_epi32(a.v, b.v)}; }
  static Lanes min(Lanes a, Lanes b) { return {_mm256_min_epi32(a.v, b.v)}; }
  static Lanes select_greater(Lanes a, Lanes b, Lanes then, Lanes otherwise) {
    return {_mm256_blendv_epi8(otherwise.v, then.v, _mm256_cmpgt_epi32(a.v, b.v))};
  }

 private:
  static __m128i packed_16(__m256i words) {
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8));
  }
};

inline Vec square_root(Vec x) { return {_mm256_sqrt_ps(x.v)}; }

#else

struct Lanes {
  static constexpr int kWidth = Vec::kWidth;
  uint32_t v[kWidth];

  template <typename F>
  static Lanes make(F&& element) {
    Lanes out;
    for (int i = 0; i < kWidth; ++i) out.v[i] = static_cast<uint32_t>(element(i));
    return out;
  }

  static Lanes set(uint32_t value) {
    return make([&](int) { return value; });
  }
  // first, first + 1, ...
  static Lanes count_from(uint32_t first) {
    return make([&](int i) { return first + static_cast<uint32_t>(i); });
  }
  static Lanes bits_of(Vec x) {
    return make([&](int i) { return float_bits(x.v[i]); });
  }
  Vec as_floats() const {
    return Vec::make([&](int i) { return bits_float(v[i]); });
  }

  template <typename T>
  static Lanes load(const T* p) {
    return make([&](int i) { return static_cast<int32_t>(p[i]); });
  }
  // The low bits of each.
  template <typename T>
  void store(T* p) const {
    for (int i = 0; i < kWidth; ++i) p[i] = static_cast<T>(v[i]);
  }

  Lanes operator+(Lanes o) const {
    return make([&](int i) { return v[i] + o.v[i]; });
  }
  Lanes operator-(Lanes o) const {
    return make([&](int i) { return v[i] - o.v[i]; });
  }
  Lanes operator*(Lanes o) const {
    return make([&](int i) { return v[i] * o.v[i]; });
  }
  Lanes operator&(Lanes o) const {
    return make([&](int i) { return v[i] & o.v[i]; });
  }
  Lanes operator|(Lanes o) const {
    return make([&](int i) { return v[i] | o.v[i]; });
  }
  Lanes operator^(Lanes o) const {
    return make([&](int i) { return v[i] ^ o.v[i]; });
  }
  template <int kBits>
  Lanes right() const {
    return make([&](int i) { return v[i] >> kBits; });
  }
  template <int kBits>
  Lanes left() const {
    return make([&](int i) { return v[i] << kBits; });
  }
  // As signed integers.
  static Lanes max(Lanes a, Lanes b) { return select_greater(a, b, a, b); }
  static Lanes min(Lanes a, Lanes b) { return select_greater(a, b, b, a); }
  static Lanes select_greater(Lanes a, Lanes b, Lanes then, Lanes otherwise) {
    return make([&](int i) {
      return static_cast<int32_t>(a.v[i]) > static_cast<int32_t>(b.v[i]) ? then.v[i] : otherwise.v[i];
    });
  }
};

inline Vec square_root(Vec x) {
  return Vec::make([&](int i) { return __builtin_sqrtf(x.v[i]); });
}

#endif

}  // namespace
}  // namespace fastpar
