// Operands of attention's products, packed once per block of 64 rows and read by all blocks of the other side. With
// g = kGroup of the engine and P the padded dim:
//
//   rows           [64][P]          A, multiplied along the dim
//   grouped rows   [64 / g][P][g]   B, multiplied along the rows
//   columns        [P][64]          A, multiplied along the rows
//   grouped cols   [P / g][64][g]   B, multiplied along the dim
//
// What lies past the rows or the dim is zero. Packing widens, too, and looks for infinities and NaN: 0 * inf would
// carry them into rows that do not see them, so masked blocks that hold any are multiplied pair by pair.
#pragma once

#include "attention/attention_engine.h"

namespace fastpar {
namespace {

// to = factor * from, `padded` elements; what is not finite makes *check NaN.
template <typename T, typename Element>
void convert_row(const T* from, int64_t count, float factor, Element* to, int64_t padded, Vec* check) {
  const Vec zero = Vec::set(0.0f), scale = Vec::set(factor);
  int64_t i = 0;
  for (; i + Vec::kWidth <= count; i += Vec::kWidth) {
    const Vec x = Vec::load(from + i);
    *check = Vec::fma(x, zero, *check);
    (x * scale).store(to + i);
  }
  for (; i < padded; i += Vec::kWidth) {  // padded is a multiple of the width
    const Vec x = i < count ? Vec::load_first(from + i, static_cast<int>(count - i), 0.0f) : zero;
    *check = Vec::fma(x, zero, *check);
    (x * scale).store(to + i);
  }
}

inline void convert_row(const double* from, int64_t count, double factor, double* to, int64_t padded, Vec* check) {
  for (int64_t i = 0; i < padded; ++i) {
    to[i] = i < count ? from[i] * factor : 0.0;
    if (!(__builtin_fabs(to[i]) <= __DBL_MAX__)) *check = Vec::set(__builtin_nanf(""));
  }
}

// Rows `first` up to first + 64 of one head, into "rows"; whether any is an infinity or NaN.
template <typename T, typename Engine>
bool pack_rows(const AttentionMatrix& x, int64_t batch, int64_t head, int64_t first, int64_t num_rows, int64_t dim,
               int64_t padded, double factor, typename Engine::Element* to) {
  using Real = typename Engine::Real;
  const int64_t start = batch * x.batch_stride + head * x.head_stride;
  Vec check = Vec::set(0.0f);
  for (int64_t i = 0; i < kBlock; ++i, to += padded) {
    const int64_t row = first + i, count = row < num_rows ? dim : 0, at = count != 0 ? start + row * x.row_stride : 0;
    if (x.is_wide) {
      convert_row(static_cast<const Real*>(x.data) + at, count, static_cast<Real>(factor), to, padded, &check);
    } else {
      convert_row(static_cast<const T*>(x.data) + at, count, static_cast<Real>(factor), to, padded, &check);
    }
  }
  return reduce_sum(check) != 0.0;  // NaN: all sums are 0 otherwise
}

// "grouped rows" of "rows"; a copy for groups of one.
template <typename Element>
void group_rows(const Element* rows, int64_t padded, Element* to) {
  memcpy(to, rows, sizeof(Element) * static_cast<size_t>(kBlock * padded));
}

#if defined(__AVX512BF16__)
// 32 elements of two rows in turns: 16 columns of each to `low`, the other 16 to `high`.
inline void interleave(const bfloat16* even_row, const bfloat16* odd_row, bfloat16* low, bfloat16* high) {
  const __m512i turns = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i even = _mm512_loadu_si512(even_row), odd = _mm512_loadu_si512(odd_row);
  _mm512_storeu_si512(low, _mm512_permutex2var_epi16(even, turns, odd));
  _mm512_storeu_si512(high, _mm512_permutex2var_epi16(even, _mm512_add_epi16(turns, _mm512_set1_epi16(16)), odd));
}

inline void group_rows(const bfloat16* rows, int64_t padded, bfloat16* to) {
  for (int64_t pair = 0; pair < kBlock; pair += 2, rows += 2 * padded, to += 2 * padded) {
    for (int64_t i = 0; i < padded; i += 32) interleave(rows + i, rows + padded + i, to + 2 * i, to + 2 * i + 32);
  }
}
#endif

// "grouped cols" of "rows": words of a group, transposed.
inline void group_columns(const double* rows, int64_t padded, double* to) { transpose<kBlock>(rows, padded, to); }
inline void group_columns(const float* rows, int64_t padded, float* to) { transpose<kBlock>(rows, padded, to); }
inline void group_columns(const bfloat16* rows, int64_t padded, bfloat16* to) {
  transpose<kBlock>(reinterpret_cast<const uint32_t*>(rows), padded / 2, reinterpret_cast<uint32_t*>(to));
}

// "columns" of "grouped rows": the same.
inline void ungroup_columns(const double* grouped, int64_t padded, double* to) {
  transpose<kBlock>(grouped, padded, to);
}
inline void ungroup_columns(const float* grouped, int64_t padded, float* to) { transpose<kBlock>(grouped, padded, to); }
inline void ungroup_columns(const bfloat16* grouped, int64_t padded, bfloat16* to) {
  transpose<kBlock / 2>(reinterpret_cast<const uint32_t*>(grouped), padded, reinterpret_cast<uint32_t*>(to));
}

}  // namespace
}  // namespace fastpar
