// Float32 products on tiles of bfloat16 (AMX): every number is the sum of three bfloat16, and a product six of the
// nine.
//
//   x = high + middle + low, exactly: a float32 has 24 significant bits, a bfloat16 has 8, and each part is what is
//   left, cut off (not rounded: the high part of the largest float32 would be infinite)
//
//   a b = ah bh + ah bm + am bh + ah bl + am bm + al bh          left out: am bl + al bm + al bl <= 2^-22.9 |a b|,
//                                                                2^-25 on average, less than a sum's rounding
//
// Each of the six is exact; tiles sum in float32. So errors are those of float32 FMAs, at six products of tiles, which
// are sixteen times as fast. Tiles take numbers below 2^-126 for 0: a number below 2^-110 loses low bits.
//
// SplitFloat is an element of a packed operand. Runs of 32 elements (32 k's of A, or two k's of 16 columns of B) lie as
// 32 high parts, 32 middle and 32 low ones, so that addresses of runs are those of elements.
//
// Measured on a busy Xeon core with AMX (causal, dims 64 and 128, CPU time of forward + backward): 1.65 times as fast
// as torch's float32 attention at 4096 tokens, where FMAs were 1.1 to 1.2 times at 2048. Expected were 3 times, from
// products alone. But tiles of numbers take 1.17 times as long as tiles of zeros, exponentials and splitting take a
// sixth of the time, and what they store pushes the products' operands out of the first cache: products take 1.5 times
// as long as alone. Prefetching, operands in contiguous tiles and other groups of blocks in backward did not help;
// exponentials in between the tiles' products would save another 4 % of backward.
//
// An infinity times a part that is 0 is NaN, so blocks that hold any are multiplied element by element (kNeedsFinite).
#pragma once

#include "attention/attention_pack.h"

#if defined(__AMX_BF16__)

namespace fastpar {
namespace {

constexpr int kParts = 3, kRun = 32;  // parts of an element, elements of a run

struct SplitFloat {
  bfloat16 parts[kParts];
};
static_assert(sizeof(SplitFloat) == kParts * sizeof(bfloat16));

// Part `part` of the run that begins at an element.
inline const bfloat16* part_of(const SplitFloat* run, int part) {
  return reinterpret_cast<const bfloat16*>(run) + part * kRun;
}
inline bfloat16* part_of(SplitFloat* run, int part) { return reinterpret_cast<bfloat16*>(run) + part * kRun; }

// ---- splitting ----------------------------------------------------------------------------------------------------

// A part is the upper half of a word; the lower half of `low` is 0 already.
struct Parts {
  __m512i words[kParts];

  explicit Parts(Vec number) {
    const Vec x = number.rounded();  // no part of an FMA with what follows: parts would be of more bits than fit
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    words[0] = _mm512_and_si512(_mm512_castps_si512(x.v), upper);
    const __m512 rest = _mm512_sub_ps(x.v, _mm512_castsi512_ps(words[0]));
    words[1] = _mm512_and_si512(_mm512_castps_si512(rest), upper);
    words[2] = _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(words[1])));
  }
};

// 32 elements of a row.
inline void store_run(const Parts& a, const Parts& b, SplitFloat* to) {
  const __m512i upper_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29,
                                                27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  for (int part = 0; part < kParts; ++part) {
    _mm512_storeu_si512(part_of(to, part), _mm512_permutex2var_epi16(a.words[part], upper_halves, b.words[part]));
  }
}

// 16 columns of rows k and k + 1 of B.
inline void store_interleaved(const Parts& a, const Parts& b, SplitFloat* to) {
  for (int part = 0; part < kParts; ++part) {
    _mm512_storeu_si512(part_of(to, part), _mm512_or_si512(_mm512_srli_epi32(a.words[part], 16), b.words[part]));
  }
}

inline float element(const SplitFloat* base, int64_t i) {
  const SplitFloat* run = base + i / kRun * kRun;
  float sum = 0.0f;
  for (int part = kParts - 1; part >= 0; --part) {
    const float x = to_float(part_of(run, part)[i % kRun]);
    if (x == x || part == 0) sum += x;  // an infinity less itself: the lower parts are NaN
  }
  return sum;
}

inline void set_element(SplitFloat* base, int64_t i, float x) {
  SplitFloat* run = base + i / kRun * kRun;
  for (int part = 0; part < kParts; ++part) {
    const float high = bits_float(float_bits(x) & 0xffff0000u);
    from_float(high, part_of(run, part) + i % kRun);
    x -= high;
  }
}

// ---- packing (the forms of attention_pack.h) ------------------------------------------------------------------------

template <typename T>
void convert_row(const T* from, int64_t count, float factor, SplitFloat* to, int64_t padded, Vec* check) {
  const Vec zero = Vec::set(0.0f), scale = Vec::set(factor);
  for (int64_t i = 0; i < padded; i += kRun) {
    Vec half[2];
    for (int j = 0; j < 2; ++j) {
      const int64_t at = i + j * Vec::kWidth, left = count - at;
      half[j] = left >= Vec::kWidth ? Vec::load(from + at)
                : left > 0          ? Vec::load_first(from + at, static_cast<int>(left), 0.0f)
                                    : zero;
      *check = Vec::fma(half[j], zero, *check);
    }
    store_run(Parts(half[0] * scale), Parts(half[1] * scale), to + i);
  }
}

inline void group_rows(const SplitFloat* rows, int64_t padded, SplitFloat* to) {
  for (int64_t pair = 0; pair < kBlock; pair += 2, rows += 2 * padded, to += 2 * padded) {
    for (int64_t i = 0; i < padded; i += kRun) {
      for (int part = 0; part < kParts; ++part) {
        interleave(part_of(rows + i, part), part_of(rows + padded + i, part), part_of(to + 2 * i, part),
                   part_of(to + 2 * i + kRun, part));
      }
    }
  }
}

// Words of two elements: [kRows][columns] transposed, part by part. A run has 16 words of each.
inline void transpose_runs(const SplitFloat* from, int64_t rows, int64_t columns, SplitFloat* to) {
  constexpr int64_t kStep = kRun / 2;
  for (int64_t row = 0; row < rows; row += kStep) {
    for (int64_t column = 0; column < columns; column += kStep) {
      for (int part = 0; part < kParts; ++part) {
        transpose_words(reinterpret_cast<const uint32_t*>(part_of(from + 2 * (row * columns + column), part)),
                        columns * kParts, reinterpret_cast<uint32_t*>(part_of(to + 2 * (column * rows + row), part)),
                        rows * kParts);
      }
    }
  }
}
inline void group_columns(const SplitFloat* rows, int64_t padded, SplitFloat* to) {
  transpose_runs(rows, kBlock, padded / 2, to);
}
inline void ungroup_columns(const SplitFloat* grouped, int64_t padded, SplitFloat* to) {
  transpose_runs(grouped, kBlock / 2, padded, to);
}

// ---- engine -------------------------------------------------------------------------------------------------------

struct AmxSplitEngine {
  using Element = SplitFloat;
  using Real = float;
  using Lanes = Vec;
  using Exp2Forward = Exp2<5>;
  using Exp2Backward = Exp2<5>;
  static constexpr int kGroup = 2, kMultiple = 32;
  static constexpr bool kNeedsFinite = true;
  static constexpr int kStrip = 4, kForwardGroup = 1, kQueryGroup = 1, kKeyGroup = 4;

  static void begin() { AmxEngine::begin(); }
  static void end() { AmxEngine::end(); }

  // 2 x 2 tiles of C at a time, tiles 4 and 5 of A and 6 and 7 of B.
  static void multiply(const Product<SplitFloat>& p, float* c, bool accumulate) {
    constexpr int kTile = 16;
    const int64_t c_bytes = p.columns * 4, a_bytes = p.a_stride * static_cast<int64_t>(sizeof(SplitFloat));
    const int64_t b_bytes = p.columns * 2 * static_cast<int64_t>(sizeof(SplitFloat));
    __asm__ volatile("" : : : "memory");  // as in AmxEngine
    for (int64_t row = 0; row < p.rows; row += 2 * kTile) {
      for (int64_t turn = 0; turn < p.columns; turn += 2 * kTile) {
        // To and fro: the columns of B that were read last are read first.
        const int64_t column = row / (2 * kTile) % 2 == 0 ? turn : p.columns - 2 * kTile - turn;
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
          const SplitFloat* a = p.segments[s].a + row * p.a_stride;
          const SplitFloat* b = p.segments[s].b + column * 2;
          for (int64_t k = 0; k < p.depth; k += kRun, a += kRun, b += kRun * p.columns) {
            const SplitFloat *below = a + kTile * p.a_stride, *right = b + 2 * kTile;
            // Small products first; each differs from the one before in one operand.
            load_a(a, below, 2, a_bytes);
            load_b(b, right, 0, b_bytes);
            multiply_tiles();
            load_a(a, below, 1, a_bytes);
            multiply_tiles();
            load_b(b, right, 1, b_bytes);
            multiply_tiles();
            load_a(a, below, 0, a_bytes);
            multiply_tiles();
            load_b(b, right, 2, b_bytes);
            multiply_tiles();
            load_b(b, right, 0, b_bytes);
            multiply_tiles();
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

  static void store_rows(Vec even, Vec odd, SplitFloat* b, int64_t) { store_interleaved(Parts(even), Parts(odd), b); }
  static void store_row(Vec first, Vec second, SplitFloat* a) { store_run(Parts(first), Parts(second), a); }
  static void store_both(const Vec (&x)[2][2], SplitFloat* a, SplitFloat* b) {
    const Parts parts[2][2] = {{Parts(x[0][0]), Parts(x[0][1])}, {Parts(x[1][0]), Parts(x[1][1])}};
    for (int i = 0; i < 2; ++i) store_run(parts[i][0], parts[i][1], a + i * kBlock);
    for (int j = 0; j < 2; ++j) store_interleaved(parts[0][j], parts[1][j], b + j * kRun);
  }

 private:
  static void load_a(const SplitFloat* top, const SplitFloat* bottom, int part, int64_t stride) {
    _tile_loadd(4, part_of(top, part), stride);
    _tile_loadd(5, part_of(bottom, part), stride);
  }
  static void load_b(const SplitFloat* left, const SplitFloat* right, int part, int64_t stride) {
    _tile_loadd(6, part_of(left, part), stride);
    _tile_loadd(7, part_of(right, part), stride);
  }
  static void multiply_tiles() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

}  // namespace
}  // namespace fastpar

#endif
