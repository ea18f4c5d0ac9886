// Engines: what an element of a packed operand is, and how blocks of them are multiplied.
//
//   C[m, n] (+)= sum over segments s, over k of A_s[m, k] * B_s[k, n]
//
// A is row-major, B in rows of groups of kGroup consecutive k: B[k / kGroup][n][k % kGroup], which is what instructions
// that multiply pairs take ("VNNI"). C is float32, or float64 for float64. m, n and k are multiples of kMultiple (which
// 64 is). Sums run over k in order, segment by segment: an element of C is always summed in the same order.
//
//   Float32Engine     FMAs; 16-bit inputs are widened when they are packed
//   Float64Engine     portable
//   BFloat16Engine    vdpbf16ps: two products a lane, summed in float32
//   AmxEngine         tiles of 16 x 32 by 32 x 16; the same layouts
//   AmxSplitEngine    tiles, of float32 in three parts (attention_split.h)
//
// In an anonymous namespace for the reason given in simd.h.
#pragma once

#include "attention/attention.h"
#include "attention/attention_lanes.h"

namespace fastpar {
namespace {

template <typename Element>
struct Segment {
  const Element *a, *b;
};

// Segments of one product: `depth` is k of each.
template <typename Element>
struct Product {
  const Segment<Element>* segments;
  int64_t num_segments, depth;
  int64_t rows, columns, a_stride;  // B is dense: its rows have `columns` groups
};

// kRows x kVecs registers of C at a time. Ops: broadcast a group of A, load groups of B, multiply and add.
template <typename Ops, int kRows, int kVecs>
inline void multiply_registers(const Product<typename Ops::Element>& p, int64_t row, int64_t column,
                               typename Ops::Real* c, bool accumulate) {
  using Lanes = typename Ops::Lanes;
  constexpr int kWidth = Lanes::kWidth, kGroup = Ops::kGroup;
  Lanes sum[kRows][kVecs];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) {
      sum[i][j] = accumulate ? Lanes::load(c + (row + i) * p.columns + column + j * kWidth) : Lanes::set(0);
    }
  }
  for (int64_t s = 0; s < p.num_segments; ++s) {
    const typename Ops::Element* a = p.segments[s].a + row * p.a_stride;
    const typename Ops::Element* b = p.segments[s].b + column * kGroup;
    for (int64_t k = 0; k < p.depth; k += kGroup, a += kGroup, b += p.columns * kGroup) {
      typename Ops::Operand right[kVecs];
      for (int j = 0; j < kVecs; ++j) right[j] = Ops::load(b + j * kWidth * kGroup);
      for (int i = 0; i < kRows; ++i) {
        const typename Ops::Operand left = Ops::broadcast(a + i * p.a_stride);
        for (int j = 0; j < kVecs; ++j) sum[i][j] = Ops::fma(left, right[j], sum[i][j]);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) sum[i][j].store(c + (row + i) * p.columns + column + j * kWidth);
  }
}

template <typename Ops, int kRows, int kVecs>
inline void multiply_blocked(const Product<typename Ops::Element>& p, typename Ops::Real* c, bool accumulate) {
  constexpr int kStep = kVecs * Ops::Lanes::kWidth;
  int64_t column = 0;
  for (; column + kStep <= p.columns; column += kStep) {
    for (int64_t row = 0; row < p.rows; row += kRows) {
      multiply_registers<Ops, kRows, kVecs>(p, row, column, c, accumulate);
    }
  }
  for (; column < p.columns; column += Ops::Lanes::kWidth) {
    for (int64_t row = 0; row < p.rows; row += kRows) {
      multiply_registers<Ops, kRows, 1>(p, row, column, c, accumulate);
    }
  }
}

#if defined(__AVX512F__)
constexpr int kFloatRows = 8, kFloatVecs = 2, kFloatStrip = 4;
#elif defined(__AVX2__)
constexpr int kFloatRows = 4, kFloatVecs = 2, kFloatStrip = 2;
#else
constexpr int kFloatRows = 4, kFloatVecs = 1, kFloatStrip = 1;
#endif

struct Float32Engine {
  using Element = float;
  using Real = float;
  using Lanes = Vec;
  using Operand = Vec;
  using Exp2Forward = Exp2<5>;
  using Exp2Backward = Exp2<5>;
  static constexpr int kGroup = 1, kMultiple = 16;
  static constexpr bool kNeedsFinite = false;
  static constexpr int kStrip = kFloatStrip;
  static constexpr int kForwardGroup = 1, kQueryGroup = 1, kKeyGroup = 4;

  static Operand load(const float* p) { return Vec::load(p); }
  static Operand broadcast(const float* p) { return Vec::set(*p); }
  static Vec fma(Operand a, Operand b, Vec c) { return Vec::fma(a, b, c); }

  static void begin() {}
  static void end() {}
  static void multiply(const Product<float>& p, float* c, bool accumulate) {
    multiply_blocked<Float32Engine, kFloatRows, kFloatVecs>(p, c, accumulate);
  }
  // Rows k and k + 1 of B, `columns` groups wide, at one place.
  static void store_rows(Vec even, Vec odd, float* b, int64_t columns) {
    even.store(b);
    odd.store(b + columns);
  }
  // Elements of a row of A, one register after the other.
  static void store_row(Vec first, Vec second, float* a) {
    first.store(a);
    second.store(a + Vec::kWidth);
  }
  // [row][register] of rows k and k + 1, which are kBlock wide: as rows of A, and as B.
  static void store_both(const Vec (&x)[2][2], float*, float* b) {
    for (int i = 0; i < 2; ++i) store_row(x[i][0], x[i][1], b + i * kBlock);  // the same
  }
};

struct Float64Engine {
  using Element = double;
  using Real = double;
  using Lanes = Vec64;
  using Operand = Vec64;
  using Exp2Forward = Exp2Of64;
  using Exp2Backward = Exp2Of64;
  static constexpr int kGroup = 1, kMultiple = 16;
  static constexpr bool kNeedsFinite = false;
  static constexpr int kStrip = 1, kForwardGroup = 1, kQueryGroup = 1, kKeyGroup = 1;

  static Operand load(const double* p) { return Vec64::load(p); }
  static Operand broadcast(const double* p) { return Vec64::set(*p); }
  static Vec64 fma(Operand a, Operand b, Vec64 c) { return Vec64::fma(a, b, c); }

  static void begin() {}
  static void end() {}
  static void multiply(const Product<double>& p, double* c, bool accumulate) {
    multiply_blocked<Float64Engine, 2, 2>(p, c, accumulate);
  }
  static void store_rows(Vec64 even, Vec64 odd, double* b, int64_t columns) {
    even.store(b);
    odd.store(b + columns);
  }
  static void store_row(Vec64 first, Vec64 second, double* a) {
    first.store(a);
    second.store(a + Vec64::kWidth);
  }
  static void store_both(const Vec64 (&x)[2][2], double*, double* b) {
    for (int i = 0; i < 2; ++i) store_row(x[i][0], x[i][1], b + i * kBlock);
  }
};

#if defined(__AVX512BF16__)

struct BFloat16Engine {
  using Element = bfloat16;
  using Real = float;
  using Lanes = Vec;
  using Operand = __m512bh;
  using Exp2Forward = Exp2<4>;   // lse is float32
  using Exp2Backward = Exp2<3>;  // rounded to bfloat16
  static constexpr int kGroup = 2, kMultiple = 32;
  static constexpr bool kNeedsFinite = false;
  static constexpr int kStrip = 4, kForwardGroup = 4, kQueryGroup = 2, kKeyGroup = 2;

  static Operand load(const bfloat16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Operand broadcast(const bfloat16* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Vec fma(Operand a, Operand b, Vec c) { return {_mm512_dpbf16_ps(c.v, a, b)}; }

  static void begin() {}
  static void end() {}
  static void multiply(const Product<bfloat16>& p, float* c, bool accumulate) {
    multiply_blocked<BFloat16Engine, 8, 2>(p, c, accumulate);
  }
  static void store_rows(Vec even, Vec odd, bfloat16* b, int64_t) {
    const __m512i turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(b, _mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v)));
  }
  static void store_row(Vec first, Vec second, bfloat16* a) {
    _mm512_storeu_si512(a, (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v));
  }
  static void store_both(const Vec (&x)[2][2], bfloat16* a, bfloat16* b) {
    for (int i = 0; i < 2; ++i) store_row(x[i][0], x[i][1], a + i * kBlock);
    for (int j = 0; j < 2; ++j) store_rows(x[0][j], x[1][j], b + j * 2 * Vec::kWidth, kBlock);
  }
};

#endif

#if defined(__AMX_BF16__)

struct AmxEngine : BFloat16Engine {
  static constexpr int kForwardGroup = 4, kQueryGroup = 2, kKeyGroup = 4;

  // Eight tiles of 16 rows of 64 bytes. Whoever used tiles before has to configure them again: the state is volatile.
  static void begin() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    __asm__ volatile("" : : "r"(&configuration) : "memory");  // the intrinsic does not say that it reads
    _tile_loadconfig(&configuration);
  }
  static void end() { _tile_release(); }

  // 2 x 2 tiles of C at a time: every load of A or B serves two products.
  static void multiply(const Product<bfloat16>& p, float* c, bool accumulate) {
    constexpr int kTile = 16, kDepth = 32;
    const int64_t c_bytes = p.columns * 4, a_bytes = p.a_stride * 2, b_bytes = p.columns * 4;
    __asm__ volatile("" : : : "memory");  // nor do these: what is stored before and read after stays there
    for (int64_t row = 0; row < p.rows; row += 2 * kTile) {
      for (int64_t column = 0; column < p.columns; column += 2 * kTile) {
        float* top = c + row * p.columns + column;
        float* bottom = top + kTile * p.columns;
        if (accumulate) {
          _tile_loadd(0, top, c_bytes);
          _tile_loadd(1, top + kTile, c_bytes);
          _tile_loadd(2, bottom, c_bytes);
          _tile_loadd(3, bottom + kTile, c_bytes);
        } else {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
        }
        for (int64_t s = 0; s < p.num_segments; ++s) {
          const bfloat16* a = p.segments[s].a + row * p.a_stride;
          const bfloat16* b = p.segments[s].b + column * 2;
          for (int64_t k = 0; k < p.depth; k += kDepth, a += kDepth, b += kDepth * p.columns) {
            _tile_loadd(4, a, a_bytes);
            _tile_loadd(6, b, b_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + 2 * kTile, b_bytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a + kTile * p.a_stride, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
        _tile_stored(0, top, c_bytes);
        _tile_stored(1, top + kTile, c_bytes);
        _tile_stored(2, bottom, c_bytes);
        _tile_stored(3, bottom + kTile, c_bytes);
      }
    }
    __asm__ volatile("" : : : "memory");
  }
};

#endif

}  // namespace
}  // namespace fastpar
