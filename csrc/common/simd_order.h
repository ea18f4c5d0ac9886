// The largest or smallest of many float32, bfloat16 or float16, found by comparing their bits as integers: that takes
// half of the pipes' time that comparing floats does, and needs no conversion of the 16-bit types, of which twice as
// many fit a register.
//
// Note: floats as integers. Non-negative floats are ordered as their bits are; negative ones the other way round. So
// the largest is the signed maximum of the bits if that is not negative; else all are negative, and it is the unsigned
// minimum. The smallest is the unsigned maximum if that has its sign bit set; else it is the unsigned minimum.
// NaN may be the result, or be passed over.
#pragma once

#include "common/simd.h"

namespace fastpar {
namespace {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using Unsigned = uint16_t;
  using Signed = int16_t;
};
template <>
struct WordOf<4> {
  using Unsigned = uint32_t;
  using Signed = int32_t;
};

enum class Order { kSignedMaximum, kUnsignedMaximum, kUnsignedMinimum };

#if defined(__AVX512F__)

using WordVec = __m512i;
inline WordVec load_words(const void* p) { return _mm512_loadu_si512(p); }
inline void store_words(void* p, WordVec v) { _mm512_storeu_si512(p, v); }
template <int kBytes, Order kOrder>
WordVec best_words(WordVec a, WordVec b) {
  if (kOrder == Order::kSignedMaximum) return kBytes == 2 ? _mm512_max_epi16(a, b) : _mm512_max_epi32(a, b);
  if (kOrder == Order::kUnsignedMaximum) return kBytes == 2 ? _mm512_max_epu16(a, b) : _mm512_max_epu32(a, b);
  return kBytes == 2 ? _mm512_min_epu16(a, b) : _mm512_min_epu32(a, b);
}

#elif defined(__AVX2__)

using WordVec = __m256i;
inline WordVec load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_words(void* p, WordVec v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
template <int kBytes, Order kOrder>
WordVec best_words(WordVec a, WordVec b) {
  if (kOrder == Order::kSignedMaximum) return kBytes == 2 ? _mm256_max_epi16(a, b) : _mm256_max_epi32(a, b);
  if (kOrder == Order::kUnsignedMaximum) return kBytes == 2 ? _mm256_max_epu16(a, b) : _mm256_max_epu32(a, b);
  return kBytes == 2 ? _mm256_min_epu16(a, b) : _mm256_min_epu32(a, b);
}

#endif

template <int kBytes, Order kOrder>
typename WordOf<kBytes>::Unsigned better_word(typename WordOf<kBytes>::Unsigned a,
                                              typename WordOf<kBytes>::Unsigned b) {
  using Signed = typename WordOf<kBytes>::Signed;
  if (kOrder == Order::kSignedMaximum) return static_cast<Signed>(a) > static_cast<Signed>(b) ? a : b;
  if (kOrder == Order::kUnsignedMaximum) return a > b ? a : b;
  return a < b ? a : b;
}

// count > 0
template <Order kOrder, typename T>
typename WordOf<sizeof(T)>::Unsigned best_bits(const T* x, int64_t count) {
  constexpr int kBytes = sizeof(T);
  using Word = typename WordOf<kBytes>::Unsigned;
  Word best;
  memcpy(&best, x, sizeof best);
  int64_t i = 1;
#if defined(__AVX2__)
  constexpr int kLanes = static_cast<int>(sizeof(WordVec)) / kBytes;
  if (count >= kLanes) {
    // The last register overlaps the one before: what is compared twice changes nothing.
    WordVec all[4];
    for (int u = 0; u < 4; ++u) all[u] = load_words(x + count - kLanes);
    for (i = 0; i + 4 * kLanes <= count; i += 4 * kLanes) {
      for (int u = 0; u < 4; ++u) all[u] = best_words<kBytes, kOrder>(all[u], load_words(x + i + u * kLanes));
    }
    for (; i + kLanes <= count; i += kLanes) all[0] = best_words<kBytes, kOrder>(all[0], load_words(x + i));
    all[0] = best_words<kBytes, kOrder>(best_words<kBytes, kOrder>(all[0], all[1]),
                                        best_words<kBytes, kOrder>(all[2], all[3]));
    Word lanes[kLanes];
    store_words(lanes, all[0]);
    for (int k = 0; k < kLanes; ++k) best = better_word<kBytes, kOrder>(best, lanes[k]);
    return best;
  }
#endif
  for (; i < count; ++i) {
    Word word;
    memcpy(&word, x + i, sizeof word);
    best = better_word<kBytes, kOrder>(best, word);
  }
  return best;
}

inline float word_to_float(uint32_t bits, const float*) { return bits_float(bits); }
inline float word_to_float(uint16_t bits, const bfloat16*) { return to_float(bfloat16{bits}); }
inline float word_to_float(uint16_t bits, const float16*) { return to_float(float16{bits}); }

// The largest element, or the smallest; count > 0.
template <bool kLargest, typename T>
float extremum(const T* x, int64_t count) {
  using Word = typename WordOf<sizeof(T)>::Unsigned;
  constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(T) - 1));
  Word best = best_bits<kLargest ? Order::kSignedMaximum : Order::kUnsignedMaximum>(x, count);
  const bool is_negative = (best & kSign) != 0;
  if (kLargest == is_negative) best = best_bits<Order::kUnsignedMinimum>(x, count);
  return word_to_float(best, x);
}

}  // namespace
}  // namespace fastpar
