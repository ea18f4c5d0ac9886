// What attention's kernels need of a register besides simd.h: selection by bits, transposed blocks, and the same
// operations on float64.
//
// In an anonymous namespace for the reason given in simd.h.
#pragma once

#include "common/logit_transform.h"
#include "common/simd.h"

namespace fastpar {
namespace {

// ---- float32 ------------------------------------------------------------------------------------------------------

// x where the lane's bit is set, else `otherwise`.
inline Vec select_bits(unsigned bits, Vec x, Vec otherwise) {
#if defined(__AVX512F__)
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), otherwise.v, x.v)};
#elif defined(__AVX2__)
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane), lane);
  return {_mm256_blendv_ps(otherwise.v, x.v, _mm256_castsi256_ps(chosen))};
#else
  return Vec::make([&](int i) { return (bits >> i & 1u) != 0 ? x.v[i] : otherwise.v[i]; });
#endif
}

// 2^t for t <= 0, NaN or -inf; kDegree as in simd.h.
template <int kDegree>
struct Exp2 {
  ScaledExp2<kDegree> exp2{1.0f};
  Vec operator()(Vec t) const { return exp2(t); }
};

// ---- float64: two lanes, which is what the baseline of x86-64 has ---------------------------------------------------

struct Vec64 {
  static constexpr int kWidth = 2;
  double v[kWidth];

  static Vec64 set(double value) { return {{value, value}}; }
  static Vec64 load(const double* p) { return {{p[0], p[1]}}; }
  void store(double* p) const {
    p[0] = v[0];
    p[1] = v[1];
  }
  Vec64 operator+(Vec64 o) const { return {{v[0] + o.v[0], v[1] + o.v[1]}}; }
  Vec64 operator-(Vec64 o) const { return {{v[0] - o.v[0], v[1] - o.v[1]}}; }
  Vec64 operator*(Vec64 o) const { return {{v[0] * o.v[0], v[1] * o.v[1]}}; }
  static Vec64 fma(Vec64 a, Vec64 b, Vec64 c) { return a * b + c; }
  Vec64 rounded() const { return *this; }  // portable code has no FMA to become a part of
  // Where one is NaN, max and min give the second.
  static Vec64 max(Vec64 a, Vec64 b) {
    return {{a.v[0] > b.v[0] ? a.v[0] : b.v[0], a.v[1] > b.v[1] ? a.v[1] : b.v[1]}};
  }
  static Vec64 min(Vec64 a, Vec64 b) {
    return {{a.v[0] < b.v[0] ? a.v[0] : b.v[0], a.v[1] < b.v[1] ? a.v[1] : b.v[1]}};
  }
};

inline Vec64 select_bits(unsigned bits, Vec64 x, Vec64 otherwise) {
  return {{(bits & 1u) != 0 ? x.v[0] : otherwise.v[0], (bits & 2u) != 0 ? x.v[1] : otherwise.v[1]}};
}

struct Exp2Of64 {
  Vec64 operator()(Vec64 t) const { return {{__builtin_exp2(t.v[0]), __builtin_exp2(t.v[1])}}; }
};

inline Vec64 tanh(Vec64 u, Vec64* derivative) {
  Vec64 t;
  for (int i = 0; i < Vec64::kWidth; ++i) {
    t.v[i] = __builtin_tanh(u.v[i]);
    derivative->v[i] = (1.0 - t.v[i]) * (1.0 + t.v[i]);
  }
  return t;
}

// ---- conversions of stored elements
// -----------------------------------------------------------------------------------

inline double to_real(double x) { return x; }
inline float to_real(float x) { return x; }
inline float to_real(bfloat16 x) { return to_float(x); }
inline float to_real(float16 x) { return to_float(x); }

inline void from_real(double x, double* out) { *out = x; }
template <typename T>
void from_real(float x, T* out) {
  from_float(x, out);
}

// Element i of a packed operand.
template <typename Element>
auto element(const Element* base, int64_t i) {
  return to_real(base[i]);
}
template <typename Element, typename Real>
void set_element(Element* base, int64_t i, Real x) {
  from_real(x, base + i);
}

// ---- transposed blocks
// -------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

// to[j * to_stride + i] = from[i * from_stride + j] for 16 x 16 words of 32 bits, strides in words.
template <typename Word>
void transpose_words(const Word* from, int64_t from_stride, Word* to, int64_t to_stride) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * from_stride);
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {  // r[4 i + c]: column c of every quarter, rows 4 i up to 4 i + 3
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);           // quarters 0 and 2 of rows 0..3, 4..7
    t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);       // quarters 1 and 3
    t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);  // the same of rows 8..11, 12..15
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
  }
  for (int c = 0; c < 4; ++c) {
    _mm512_storeu_si512(to + c * to_stride, _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88));
    _mm512_storeu_si512(to + (8 + c) * to_stride, _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd));
    _mm512_storeu_si512(to + (4 + c) * to_stride, _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88));
    _mm512_storeu_si512(to + (12 + c) * to_stride, _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd));
  }
}

#endif

// to [columns, kRows] = from [kRows, columns] transposed; both are multiples of 16.
template <int kRows, typename Word>
void transpose(const Word* from, int64_t columns, Word* to) {
  constexpr int kStep = 16;
  for (int64_t row = 0; row < kRows; row += kStep) {
    for (int64_t column = 0; column < columns; column += kStep) {
      const Word* f = from + row * columns + column;
      Word* t = to + column * kRows + row;
#if defined(__AVX512F__)
      if (sizeof(Word) == 4) {
        transpose_words(f, columns, t, kRows);
        continue;
      }
#endif
      for (int j = 0; j < kStep; ++j) {
        for (int i = 0; i < kStep; ++i) t[j * kRows + i] = f[i * columns + j];
      }
    }
  }
}

// to [kColumns, rows] = from [rows, kColumns] transposed.
template <int kColumns, typename Word>
void transpose_back(const Word* from, int64_t rows, Word* to) {
  constexpr int kStep = 16;
  for (int64_t row = 0; row < rows; row += kStep) {
    for (int64_t column = 0; column < kColumns; column += kStep) {
      const Word* f = from + row * kColumns + column;
      Word* t = to + column * rows + row;
#if defined(__AVX512F__)
      if (sizeof(Word) == 4) {
        transpose_words(f, kColumns, t, rows);
        continue;
      }
#endif
      for (int j = 0; j < kStep; ++j) {
        for (int i = 0; i < kStep; ++i) t[j * rows + i] = f[i * kColumns + j];
      }
    }
  }
}

}  // namespace
}  // namespace fastpar
