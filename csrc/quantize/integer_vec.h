// IntegerVec: as many 32-bit integers as Vec has floats. Arithmetic wraps.
#pragma once

#include "common/simd.h"

namespace fastpar {
namespace {

#if defined(__AVX512F__)

struct IntegerVec {
  __m512i v;

  static IntegerVec set(uint32_t value) { return {_mm512_set1_epi32(static_cast<int>(value))}; }
  static IntegerVec bits_of(Vec x) { return {_mm512_castps_si512(x.v)}; }
  Vec as_float_bits() const { return {_mm512_castsi512_ps(v)}; }
  Vec to_float() const { return {_mm512_cvtepi32_ps(v)}; }
  static IntegerVec nearest(Vec x) {
    return {_mm512_cvt_roundps_epi32(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  static IntegerVec floor(Vec x) { return {_mm512_cvt_roundps_epi32(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }

  static IntegerVec load_unsigned(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static IntegerVec load_signed(const uint8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  // The low byte of each.
  void store_bytes(uint8_t* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
  // first, first + 1, ...
  static IntegerVec count_from(uint32_t first) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return {_mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(first)))};
  }

  IntegerVec operator+(IntegerVec o) const { return {_mm512_add_epi32(v, o.v)}; }
  IntegerVec operator-(IntegerVec o) const { return {_mm512_sub_epi32(v, o.v)}; }
  IntegerVec operator*(IntegerVec o) const { return {_mm512_mullo_epi32(v, o.v)}; }
  IntegerVec operator&(IntegerVec o) const { return {_mm512_and_si512(v, o.v)}; }
  IntegerVec operator|(IntegerVec o) const { return {_mm512_or_si512(v, o.v)}; }
  IntegerVec operator^(IntegerVec o) const { return {_mm512_xor_si512(v, o.v)}; }
  // As signed integers.
  static IntegerVec max(IntegerVec a, IntegerVec b) { return {_mm512_max_epi32(a.v, b.v)}; }
  uint32_t largest() const { return static_cast<uint32_t>(_mm512_reduce_max_epi32(v)); }
  template <int kBits>
  IntegerVec shifted_left() const {
    return {_mm512_slli_epi32(v, kBits)};
  }
  template <int kBits>
  IntegerVec shifted_right() const {  // zeros come in
    return {_mm512_srli_epi32(v, kBits)};
  }
};

#elif defined(__AVX2__)

struct IntegerVec {
  __m256i v;

  static IntegerVec set(uint32_t value) { return {_mm256_set1_epi32(static_cast<int>(value))}; }
  static IntegerVec bits_of(Vec x) { return {_mm256_castps_si256(x.v)}; }
  Vec as_float_bits() const { return {_mm256_castsi256_ps(v)}; }
  Vec to_float() const { return {_mm256_cvtepi32_ps(v)}; }
  static IntegerVec nearest(Vec x) {
    return {_mm256_cvtps_epi32(_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
  }
  static IntegerVec floor(Vec x) { return {_mm256_cvtps_epi32(_mm256_floor_ps(x.v))}; }

  static IntegerVec load_unsigned(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
  }
  static IntegerVec load_signed(const uint8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
  }
  // The low byte of each.
  void store_bytes(uint8_t* p) const {
    const __m256i bytes = _mm256_and_si256(v, _mm256_set1_epi32(0xff));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  // first, first + 1, ...
  static IntegerVec count_from(uint32_t first) {
    const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return {_mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(first)))};
  }

  IntegerVec operator+(IntegerVec o) const { return {_mm256_add_epi32(v, o.v)}; }
  IntegerVec operator-(IntegerVec o) const { return {_mm256_sub_epi32(v, o.v)}; }
  IntegerVec operator*(IntegerVec o) const { return {_mm256_mullo_epi32(v, o.v)}; }
  IntegerVec operator&(IntegerVec o) const { return {_mm256_and_si256(v, o.v)}; }
  IntegerVec operator|(IntegerVec o) const { return {_mm256_or_si256(v, o.v)}; }
  IntegerVec operator^(IntegerVec o) const { return {_mm256_xor_si256(v, o.v)}; }
  // As signed integers.
  static IntegerVec max(IntegerVec a, IntegerVec b) { return {_mm256_max_epi32(a.v, b.v)}; }
  uint32_t largest() const {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1))));
  }
  template <int kBits>
  IntegerVec shifted_left() const {
    return {_mm256_slli_epi32(v, kBits)};
  }
  template <int kBits>
  IntegerVec shifted_right() const {  // zeros come in
    return {_mm256_srli_epi32(v, kBits)};
  }
};

#else

struct IntegerVec {
  uint32_t v[Vec::kWidth];

  template <typename F>
  static IntegerVec make(F&& element) {
    IntegerVec out;
    for (int i = 0; i < Vec::kWidth; ++i) out.v[i] = static_cast<uint32_t>(element(i));
    return out;
  }

  static IntegerVec set(uint32_t value) {
    return make([&](int) { return value; });
  }
  static IntegerVec bits_of(Vec x) {
    return make([&](int i) { return float_bits(x.v[i]); });
  }
  Vec as_float_bits() const {
    return Vec::make([&](int i) { return bits_float(v[i]); });
  }
  Vec to_float() const {
    return Vec::make([&](int i) { return static_cast<float>(static_cast<int32_t>(v[i])); });
  }
  static IntegerVec nearest(Vec x) {
    // Adding 1.5 * 2^23 leaves no bits for a fraction: rounding without an instruction for it.
    return make([&](int i) { return static_cast<int32_t>((x.v[i] + 0x1.8p23f) - 0x1.8p23f); });
  }
  static IntegerVec floor(Vec x) {
    return make([&](int i) {
      const int32_t cut = static_cast<int32_t>(x.v[i]);
      return static_cast<float>(cut) > x.v[i] ? cut - 1 : cut;
    });
  }

  static IntegerVec load_unsigned(const uint8_t* p) {
    return make([&](int i) { return p[i]; });
  }
  static IntegerVec load_signed(const uint8_t* p) {
    return make([&](int i) { return static_cast<int8_t>(p[i]); });
  }
  // The low byte of each.
  void store_bytes(uint8_t* p) const {
    for (int i = 0; i < Vec::kWidth; ++i) p[i] = static_cast<uint8_t>(v[i]);
  }
  // first, first + 1, ...
  static IntegerVec count_from(uint32_t first) {
    return make([&](int i) { return first + static_cast<uint32_t>(i); });
  }

  IntegerVec operator+(IntegerVec o) const {
    return make([&](int i) { return v[i] + o.v[i]; });
  }
  IntegerVec operator-(IntegerVec o) const {
    return make([&](int i) { return v[i] - o.v[i]; });
  }
  IntegerVec operator*(IntegerVec o) const {
    return make([&](int i) { return v[i] * o.v[i]; });
  }
  IntegerVec operator&(IntegerVec o) const {
    return make([&](int i) { return v[i] & o.v[i]; });
  }
  IntegerVec operator|(IntegerVec o) const {
    return make([&](int i) { return v[i] | o.v[i]; });
  }
  IntegerVec operator^(IntegerVec o) const {
    return make([&](int i) { return v[i] ^ o.v[i]; });
  }
  // As signed integers.
  static IntegerVec max(IntegerVec a, IntegerVec b) {
    return make([&](int i) { return static_cast<int32_t>(a.v[i]) > static_cast<int32_t>(b.v[i]) ? a.v[i] : b.v[i]; });
  }
  uint32_t largest() const {
    int32_t most = static_cast<int32_t>(v[0]);
    for (int i = 1; i < Vec::kWidth; ++i) most = static_cast<int32_t>(v[i]) > most ? static_cast<int32_t>(v[i]) : most;
    return static_cast<uint32_t>(most);
  }
  template <int kBits>
  IntegerVec shifted_left() const {
    return make([&](int i) { return v[i] << kBits; });
  }
  template <int kBits>
  IntegerVec shifted_right() const {  // zeros come in
    return make([&](int i) { return v[i] >> kBits; });
  }
};

#endif

// Where a < b the one, elsewhere the other.
inline IntegerVec select_less(Vec a, Vec b, IntegerVec then, IntegerVec otherwise) {
  return IntegerVec::bits_of(Vec::select_less(a, b, then.as_float_bits(), otherwise.as_float_bits()));
}

}  // namespace
}  // namespace fastpar
