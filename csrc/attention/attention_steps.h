// What forward and backward share: which pairs of a block are visible, the logits, dropout's factors.
#pragma once

#include "attention/attention_pack.h"

namespace fastpar {
namespace {

// ---- visible pairs ------------------------------------------------------------------------------------------------

// words[key] has a bit for each query that sees the key.
inline void visible_words(const BlockRuns& runs, const BlockPair& pair, uint64_t words[kBlock]) {
  const int64_t query0 = int64_t{pair.queries} * kBlock, key0 = int64_t{pair.keys} * kBlock;
  memset(words, 0, kBlock * sizeof(uint64_t));
  for (int32_t i = 0; i < pair.num_pieces; ++i) {
    const AttentionTile& t = runs.tiles[runs.pieces[pair.first_piece + i]];
    const int64_t shift = int64_t{t.k0} - t.q0, low = t.lo + shift, high = t.hi + shift;
    const int64_t key_begin = t.k0 > key0 ? t.k0 : key0, key_end = t.k1 < key0 + kBlock ? t.k1 : key0 + kBlock;
    const int64_t query_begin = t.q0 > query0 ? t.q0 : query0;
    const int64_t query_end = t.q1 < query0 + kBlock ? t.q1 : query0 + kBlock;
    for (int64_t key = key_begin; key < key_end; ++key) {
      const int64_t begin = (key - high > query_begin ? key - high : query_begin) - query0;
      const int64_t end = (key - low + 1 < query_end ? key - low + 1 : query_end) - query0;
      if (begin >= end) continue;
      words[key - key0] |= ~uint64_t{0} >> (kBlock - (end - begin)) << begin;
    }
  }
}

template <typename Lanes>
inline unsigned lane_bits(uint64_t word, int lane) {
  return static_cast<unsigned>(word >> lane) & ((1u << Lanes::kWidth) - 1u);
}

// ---- logits -------------------------------------------------------------------------------------------------------

// What becomes of s, the product of a key with sign(scale) * query: z = |scale| * s, or softcap * tanh of that over
// softcap. A scale of 0 makes queries 0, and |scale| 1.
struct Logits {
  double sign, size, softcap;

  explicit Logits(const AttentionProblem& p)
      : sign(p.scale > 0.0   ? 1.0
             : p.scale < 0.0 ? -1.0
                             : 0.0),
        size(p.scale == 0.0 ? 1.0 : __builtin_fabs(p.scale)),
        softcap(p.softcap) {}
  bool is_capped() const { return softcap != 0.0; }
  // dk is a product with packed queries, which have the sign already.
  double scale_of_keys() const { return size; }
};

template <typename Lanes, typename Real>
class Softcap {
 public:
  explicit Softcap(const Logits& logits)
      : cap_(Lanes::set(static_cast<Real>(logits.softcap))),
        inverse_(Lanes::set(static_cast<Real>(logits.size / logits.softcap))) {}
  // z, and dz / d(size * s)
  Lanes operator()(Lanes s, Lanes* slope) const { return cap_ * tanh(s * inverse_, slope); }

 private:
  Lanes cap_, inverse_;
};

// ---- dropout ------------------------------------------------------------------------------------------------------

// Note: dropout's hash
//     mix(s, i) = SplitMix64 of s + (i + 1) * gamma, as in csrc/dropout
//     keep      = mix(mix(mix(mix(seed, batch row), head), query's position), key's position) >> 40  >=  p * 2^24
// All four are global numbers, so the mask is the same whoever holds a pair.
constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;

inline uint64_t mix(uint64_t state, uint64_t i) {
  uint64_t z = state + (i + 1) * kGamma;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

template <typename Real>
class Dropout {
 public:
  explicit Dropout(const AttentionProblem& p)
      : problem_(p),
        threshold_(static_cast<uint32_t>(__builtin_nearbyint(p.dropout_p * (1 << 24)))),
        kept_(static_cast<Real>(p.dropout_p < 1.0 ? 1.0 / (1.0 - p.dropout_p) : 0.0)) {}
  bool is_on() const { return problem_.dropout_p != 0.0; }

  void set_queries(int64_t batch, int64_t head, int64_t first) {
    const uint64_t row = mix(mix(problem_.dropout_seed, static_cast<uint64_t>(problem_.first_batch + batch)),
                             static_cast<uint64_t>(problem_.first_head + head));
    for (int64_t i = 0; i < kBlock; ++i) {
      const int64_t query = first + i < problem_.num_queries ? first + i : problem_.num_queries - 1;
      const int64_t position = problem_.query_positions != nullptr ? problem_.query_positions[query] : query;
      rows_[i] = mix(row, static_cast<uint64_t>(position));
    }
  }

  // 0 or 1 / (1 - p) for each query, and one key.
  void factors(int64_t key, Real to[kBlock]) const {
    if (key >= problem_.num_keys) key = problem_.num_keys - 1;
    const int64_t position = problem_.key_positions != nullptr ? problem_.key_positions[key] : key;
    const uint64_t number = static_cast<uint64_t>(position);
    uint32_t high[kBlock];
    for (int i = 0; i < kBlock; ++i) high[i] = static_cast<uint32_t>(mix(rows_[i], number) >> 40);
    for (int i = 0; i < kBlock; ++i) to[i] = high[i] >= threshold_ ? kept_ : Real{0};
  }

 private:
  const AttentionProblem& problem_;
  uint32_t threshold_;
  Real kept_;
  uint64_t rows_[kBlock];
};

// ---- blocks with infinities or NaN behind a mask -----------------------------------------------------------------

// C [m][n] += A [m][k] * B [k][n] where visible(m, k, n), element by element, in order of k.
template <typename Real, typename A, typename B, typename Visible>
void multiply_visible(int64_t rows, int64_t columns, int64_t depth, A&& a, B&& b, Visible&& visible, Real* c) {
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < columns; ++n) {
      Real sum = c[m * columns + n];
      for (int64_t k = 0; k < depth; ++k) {
        if (visible(m, k, n)) sum += a(m, k) * b(k, n);
      }
      c[m * columns + n] = sum;
    }
  }
}

// Element (k, n) of a B operand.
template <int kGroup, typename Element>
inline auto grouped(const Element* b, int64_t columns, int64_t k, int64_t n) {
  return element(b, (k / kGroup * columns + n) * kGroup + k % kGroup);
}

// C [kBlock][kBlock] = A [kBlock][depth] * B, not accumulated; element by element where the engine needs finite numbers
// and these are not.
template <typename Engine, typename Element, typename Real>
inline void multiply_block(const Segment<Element>& s, int64_t depth, bool is_finite, Real* c) {
  if (is_finite || !Engine::kNeedsFinite) {
    Engine::multiply({&s, 1, depth, kBlock, kBlock, depth}, c, false);
    return;
  }
  memset(c, 0, sizeof(Real) * kBlock * kBlock);
  multiply_visible(
      kBlock, kBlock, depth, [&](int64_t m, int64_t k) { return element(s.a, m * depth + k); },
      [&](int64_t k, int64_t n) { return grouped<Engine::kGroup>(s.b, kBlock, k, n); },
      [](int64_t, int64_t, int64_t) { return true; }, c);
}

inline bool is_visible(const uint64_t words[kBlock], int64_t key, int64_t query) {
  return (words[key] >> query & 1u) != 0;
}

// ---- units --------------------------------------------------------------------------------------------------------

struct Unit {
  int64_t batch, key_head;

  Unit(const AttentionProblem& p, int64_t in_chunk)
      : batch((p.first_unit + in_chunk) / p.key_heads), key_head((p.first_unit + in_chunk) % p.key_heads) {}
  const BlockRuns& runs(const AttentionProblem& p) const { return p.runs[p.runs_by_batch ? batch : 0]; }
};

inline int64_t heads_per_unit(const AttentionProblem& p) { return p.query_heads / p.key_heads; }

// `count` elements at the front of scratch, which moves on.
template <typename T>
T* take(char** scratch, int64_t count) {
  T* taken = reinterpret_cast<T*>(*scratch);
  *scratch += (static_cast<int64_t>(sizeof(T)) * count + 63) / 64 * 64;
  return taken;
}

}  // namespace
}  // namespace fastpar
