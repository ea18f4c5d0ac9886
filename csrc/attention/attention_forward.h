// Forward of attention, written once over an engine and an input dtype, compiled per instruction set.
//
//   s = k q^T,  z = scale s (or softcap * tanh(scale s / softcap)),  over groups of key blocks, keys ascending:
//   m' = max(m, max z),  p = exp(z - m'),  l = l exp(m - m') + sum p,  o^T = o^T exp(m - m') + v^T p
//   out = o / l,  lse = m + log l;  a query that sees no key: 0 and -inf
//
// Everything is transposed: lanes are queries, so that maxima, sums and rescaling need nothing across lanes, and p is
// where the second product reads it as soon as it is computed. m is kept in units of s: (s - m) * (scale log2 e) is
// exact near the maximum, where scale log2 e s - scale log2 e m would lose bits of large logits.
#pragma once

#include "attention/attention_steps.h"

namespace fastpar {
namespace {

template <typename Engine>
int64_t forward_scratch(const AttentionProblem& p) {
  using Element = typename Engine::Element;
  using Real = typename Engine::Real;
  const int64_t queries = p.padded_dim * kBlock * static_cast<int64_t>(sizeof(Element));
  const int64_t out = p.padded_value_dim * kBlock * static_cast<int64_t>(sizeof(Real));
  const int64_t group = Engine::kForwardGroup * kBlock * kBlock * static_cast<int64_t>(sizeof(Real) + sizeof(Element));
  const int64_t packing = 2 * p.padded_value_dim * kBlock * static_cast<int64_t>(sizeof(Element));
  const int64_t states = kMostQueryBlocks * (queries + out + 4096);
  return states + queries + out + group + packing + (int64_t{1} << 14);
}

// Keys as rows, values as columns.
template <typename Engine, typename T>
void pack_forward(const AttentionForwardArguments& a, void* memory, int64_t begin, int64_t end) {
  using Element = typename Engine::Element;
  const AttentionProblem& p = a.problem;
  char* scratch = static_cast<char*>(memory);
  Element* rows = take<Element>(&scratch, kBlock * p.padded_value_dim);
  Element* grouped_rows = take<Element>(&scratch, kBlock * p.padded_value_dim);
  for (int64_t i = begin; i < end; ++i) {
    const Unit unit(p, i / p.key_blocks);
    const int64_t first = i % p.key_blocks * kBlock;
    Element* keys = static_cast<Element*>(a.packed_keys) + i * kBlock * p.padded_dim;
    Element* values = static_cast<Element*>(a.packed_values) + i * kBlock * p.padded_value_dim;
    a.key_flags[i] =
        pack_rows<T, Engine>(a.k, unit.batch, unit.key_head, first, p.num_keys, p.dim, p.padded_dim, 1.0, keys);
    a.value_flags[i] = pack_rows<T, Engine>(a.v, unit.batch, unit.key_head, first, p.num_keys, p.value_dim,
                                            p.padded_value_dim, 1.0, rows);
    group_rows(rows, p.padded_value_dim, grouped_rows);
    ungroup_columns(grouped_rows, p.padded_value_dim, values);
  }
}

// What one block of queries works with at a time.
template <typename Engine>
struct ForwardScratch {
  typename Engine::Element *query_rows, *weights;
  typename Engine::Real *products, *out_rows;
  uint64_t* words;

  ForwardScratch(const AttentionProblem& p, char** scratch) {
    constexpr int kArea = Engine::kForwardGroup * kBlock * kBlock;
    query_rows = take<typename Engine::Element>(scratch, kBlock * p.padded_dim);
    products = take<typename Engine::Real>(scratch, kArea);
    place(products, &weights, scratch);
    out_rows = take<typename Engine::Real>(scratch, kBlock * p.padded_value_dim);
    words = take<uint64_t>(scratch, Engine::kForwardGroup * kBlock);
  }

 private:
  // Weights of the products' type take their place, so that both stay in the first cache.
  template <typename Real>
  static void place(Real* products, Real** weights, char**) {
    *weights = products;
  }
  template <typename Real, typename Other>
  static void place(Real*, Other** weights, char** scratch) {
    *weights = take<Other>(scratch, Engine::kForwardGroup * kBlock * kBlock);
  }
};

// One block of queries of one head, and its state.
template <typename Engine, typename T>
class ForwardBlock {
  using Element = typename Engine::Element;
  using Real = typename Engine::Real;
  using Lanes = typename Engine::Lanes;
  static constexpr int kGroup = Engine::kForwardGroup, kArea = kBlock * kBlock;
  static constexpr int kStrip = Engine::kStrip;  // registers across a row that are worked on together

 public:
  ForwardBlock(const AttentionForwardArguments& a, const ForwardScratch<Engine>& shared, char** scratch)
      : a_(a),
        p_(a.problem),
        logits_(p_),
        dropout_(p_),
        query_rows_(shared.query_rows),
        weights_(shared.weights),
        products_(shared.products),
        out_rows_(shared.out_rows),
        words_(shared.words) {
    queries_ = take<Element>(scratch, kBlock * p_.padded_dim);
    out_ = take<Real>(scratch, kBlock * p_.padded_value_dim);
  }

  // `in_chunk`: the unit, whose packed keys and values are there; `head` is one of its query heads.
  void begin(int64_t in_chunk, int64_t head, int64_t block) {
    const Unit unit(p_, in_chunk);
    runs_ = &unit.runs(p_);
    in_chunk_ = in_chunk;
    head_ = unit.batch * p_.query_heads + unit.key_head * heads_per_unit(p_) + head;
    block_ = block;
    next_ = first_ = runs_->offsets[block];
    stop_ = runs_->offsets[block + 1];
    if (next_ < stop_) {
      const int64_t query_head = unit.key_head * heads_per_unit(p_) + head;
      query_flag_ = pack_rows<T, Engine>(a_.q, unit.batch, query_head, block * kBlock, p_.num_queries, p_.dim,
                                         p_.padded_dim, logits_.sign, query_rows_);
      group_columns(query_rows_, p_.padded_dim, queries_);
      if (dropout_.is_on()) dropout_.set_queries(unit.batch, query_head, block * kBlock);
    }
    for (int i = 0; i < kBlock; ++i) {
      maximum_[i] = static_cast<Real>(kNegativeInfinity);
      sum_[i] = 0;
    }
  }

  // The key block that comes next; a large number behind the last one.
  int64_t next_keys() const { return next_ < stop_ ? runs_->pairs[next_].keys : INT64_MAX; }

  void add_next() {
    const int64_t left = stop_ - next_;
    const int count = left < kGroup ? static_cast<int>(left) : kGroup;
    add_group(*runs_, runs_->pairs + next_, count, next_ == first_);
    next_ += count;
  }

  void finish() { write(head_, block_ * kBlock, first_ == stop_); }

 private:
  int64_t key_index(const BlockPair& pair) const { return in_chunk_ * p_.key_blocks + pair.keys; }
  const Element* packed_keys(const BlockPair& pair) const {
    return static_cast<const Element*>(a_.packed_keys) + key_index(pair) * kBlock * p_.padded_dim;
  }
  const Element* packed_values(const BlockPair& pair) const {
    return static_cast<const Element*>(a_.packed_values) + key_index(pair) * kBlock * p_.padded_value_dim;
  }

  void add_group(const BlockRuns& runs, const BlockPair* pairs, int count, bool is_first) {
    for (int g = 0; g < count; ++g) {
      Real* s = products_ + g * kArea;
      const Segment<Element> segment{packed_keys(pairs[g]), queries_};
      const bool is_finite = !query_flag_ && a_.key_flags[key_index(pairs[g])] == 0;
      multiply_block<Engine>(segment, p_.padded_dim, is_finite, s);
      if (logits_.is_capped()) cap(s);
      if (pairs[g].num_pieces > 0) {
        visible_words(runs, pairs[g], words_ + g * kBlock);
        hide(words_ + g * kBlock, s);
      } else if (Engine::kNeedsFinite) {
        memset(words_ + g * kBlock, 0xff, kBlock * sizeof(uint64_t));
      }
    }
    const bool is_rescaled = softmax(count);
    if (dropout_.is_on()) drop(pairs, count);
    if (is_rescaled && !is_first) rescale();

    Segment<Element> segments[kGroup] = {};
    int num_segments = 0;
    for (int g = 0; g < count; ++g) {
      if (!is_careful(pairs[g])) segments[num_segments++] = {packed_values(pairs[g]), weights_ + g * kArea};
    }
    Engine::multiply({segments, num_segments, kBlock, p_.padded_value_dim, kBlock, kBlock}, out_, !is_first);
    for (int g = 0; g < count; ++g) {
      if (is_careful(pairs[g])) add_visible(pairs[g], words_ + g * kBlock, weights_ + g * kArea);
    }
  }

  bool is_careful(const BlockPair& pair) const {
    return (pair.num_pieces > 0 || Engine::kNeedsFinite) && a_.value_flags[key_index(pair)] != 0;
  }

  void cap(Real* s) const {
    const Softcap<Lanes, Real> softcap(logits_);
    Lanes slope;
    for (int i = 0; i < kArea; i += Lanes::kWidth) softcap(Lanes::load(s + i), &slope).store(s + i);
  }

  void hide(const uint64_t* words, Real* s) const {
    const Lanes hidden = Lanes::set(static_cast<Real>(kNegativeInfinity));
    for (int key = 0; key < kBlock; ++key) {
      if (words[key] == ~uint64_t{0}) continue;
      for (int u = 0; u < kBlock; u += Lanes::kWidth) {
        Real* at = s + key * kBlock + u;
        select_bits(lane_bits<Lanes>(words[key], u), Lanes::load(at), hidden).store(at);
      }
    }
  }

  // Weights of `count` blocks; the state moves on. Whether any maximum of earlier groups has changed.
  bool softmax(int count) {
    const typename Engine::Exp2Forward exp2;
    const Lanes factor =
        Lanes::set(static_cast<Real>(1.44269504088896340736 * (logits_.is_capped() ? 1.0 : logits_.size)));
    const int keys = count * kBlock;
    bool is_rescaled = false;
    for (int u = 0; u < kBlock; u += kStrip * Lanes::kWidth) {
      const Real* s = products_ + u;
      Lanes maximum[kStrip], sum[kStrip];
      for (int j = 0; j < kStrip; ++j) maximum[j] = Lanes::load(maximum_ + u + j * Lanes::kWidth);
      for (int key = 0; key < keys; ++key) {
        for (int j = 0; j < kStrip; ++j) {
          maximum[j] = Lanes::max(Lanes::load(s + key * kBlock + j * Lanes::kWidth), maximum[j]);
        }
      }
      for (int j = 0; j < kStrip; ++j) {
        const int lane = u + j * Lanes::kWidth;
        const Lanes before = Lanes::load(maximum_ + lane);
        Real now[Lanes::kWidth];
        maximum[j].store(now);
        for (int i = 0; i < Lanes::kWidth; ++i) {
          is_rescaled |= now[i] != maximum_[lane + i];
          maximum_[lane + i] = now[i];
          // Nothing seen yet: -inf - 0 instead of -inf + inf.
          if (now[i] == static_cast<Real>(kNegativeInfinity)) now[i] = 0;
        }
        maximum[j] = Lanes::load(now);
        const Lanes scale = exp2((before - maximum[j]) * factor);
        scale.store(scale_ + lane);
        sum[j] = Lanes::load(sum_ + lane) * scale;
      }
      for (int key = 0; key < keys; key += 2) {
        for (int j = 0; j < kStrip; ++j) {
          const int at = key * kBlock + j * Lanes::kWidth;
          const Lanes even = exp2((Lanes::load(s + at) - maximum[j]) * factor);
          const Lanes odd = exp2((Lanes::load(s + at + kBlock) - maximum[j]) * factor);
          sum[j] = sum[j] + (even + odd);
          Engine::store_rows(even, odd, weights_ + key * kBlock + (u + j * Lanes::kWidth) * Engine::kGroup, kBlock);
        }
      }
      for (int j = 0; j < kStrip; ++j) sum[j].store(sum_ + u + j * Lanes::kWidth);
    }
    return is_rescaled;
  }

  void drop(const BlockPair* pairs, int count) {
    Real factors[kBlock];
    for (int g = 0; g < count; ++g) {
      for (int64_t key = 0; key < kBlock; ++key) {
        dropout_.factors(int64_t{pairs[g].keys} * kBlock + key, factors);
        Element* weights = weights_ + g * kArea;
        const int64_t first = key / Engine::kGroup * Engine::kGroup * kBlock + key % Engine::kGroup;
        for (int i = 0; i < kBlock; ++i) {
          const int64_t at = first + i * Engine::kGroup;
          set_element(weights, at, element(weights, at) * factors[i]);
        }
      }
    }
  }

  void rescale() {
    for (int u = 0; u < kBlock; u += Lanes::kWidth) {
      const Lanes scale = Lanes::load(scale_ + u);
      for (int64_t d = 0; d < p_.padded_value_dim; ++d) {
        Real* at = out_ + d * kBlock + u;
        (Lanes::load(at) * scale).store(at);
      }
    }
  }

  void add_visible(const BlockPair& pair, const uint64_t* words, const Element* weights) {
    const Element* values = packed_values(pair);
    multiply_visible(
        p_.padded_value_dim, kBlock, kBlock, [&](int64_t d, int64_t key) { return element(values, d * kBlock + key); },
        [&](int64_t key, int64_t query) { return grouped<Engine::kGroup>(weights, kBlock, key, query); },
        [&](int64_t, int64_t key, int64_t query) { return is_visible(words, key, query); }, out_);
  }

  void write(int64_t head, int64_t first, bool is_empty) {
    const int64_t count = p_.num_queries - first < kBlock ? p_.num_queries - first : kBlock;
    const double unit = logits_.is_capped() ? 1.0 : static_cast<Real>(logits_.size);  // as backward has it
    if (!is_empty) transpose_back<kBlock>(out_, p_.padded_value_dim, out_rows_);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = head * p_.num_queries + first + i;
      // The maximum leaves out NaN. A row all of whose scores are NaN sees keys, and has their sum: NaN.
      const bool sees_none = is_empty || (maximum_[i] == static_cast<Real>(kNegativeInfinity) && sum_[i] == 0);
      const double lse = static_cast<double>(maximum_[i]) * unit + __builtin_log(static_cast<double>(sum_[i]));
      static_cast<Real*>(a_.lse)[row] = static_cast<Real>(sees_none ? kNegativeInfinity : lse);
      Real* from = out_rows_ + i * p_.padded_value_dim;
      if (sees_none) memset(from, 0, sizeof(Real) * static_cast<size_t>(p_.value_dim));
      const Real inverse = sees_none ? Real{0} : 1 / sum_[i];
      if (a_.out_is_wide) {
        write_row(from, inverse, static_cast<Real*>(a_.out) + row * p_.value_dim);
      } else {
        write_row(from, inverse, static_cast<T*>(a_.out) + row * p_.value_dim);
      }
    }
  }

  template <typename Out>
  void write_row(const Real* from, Real inverse, Out* to) const {
    for (int64_t d = 0; d < p_.value_dim; ++d) from_real(from[d] * inverse, to + d);
  }

  const AttentionForwardArguments& a_;
  const AttentionProblem& p_;
  const Logits logits_;
  Dropout<Real> dropout_;
  const BlockRuns* runs_ = nullptr;
  int64_t in_chunk_ = 0, head_ = 0, block_ = 0, first_ = 0, next_ = 0, stop_ = 0;  // pairs up to next_ are done
  bool query_flag_ = false;
  Element *query_rows_, *weights_, *queries_;
  Real *products_, *out_rows_, *out_;
  uint64_t* words_;
  alignas(64) Real maximum_[kBlock], sum_[kBlock], scale_[kBlock];
};

// Groups of adjacent blocks of queries: a block of keys is read for all of them while it is in the second cache.
template <typename Engine, typename T>
void forward(const AttentionForwardArguments& a, void* memory, int64_t begin, int64_t end) {
  using Block = ForwardBlock<Engine, T>;
  const AttentionProblem& p = a.problem;
  const int64_t groups = (p.query_blocks + p.query_group - 1) / p.query_group, heads = heads_per_unit(p);
  char* scratch = static_cast<char*>(memory);
  const ForwardScratch<Engine> shared(p, &scratch);
  static_assert(kMostQueryBlocks == 4);
  Block blocks[] = {{a, shared, &scratch}, {a, shared, &scratch}, {a, shared, &scratch}, {a, shared, &scratch}};
  Engine::begin();
  for (int64_t i = begin; i < end; ++i) {
    const int64_t turn = i % groups, head = i / groups;
    // From both ends in turns: under a causal mask any stretch is about the same work.
    const int64_t first = (turn % 2 == 0 ? turn / 2 : groups - 1 - turn / 2) * p.query_group;
    const int64_t count = p.query_blocks - first < p.query_group ? p.query_blocks - first : p.query_group;
    for (int64_t b = 0; b < count; ++b) blocks[b].begin(head / heads, head % heads, first + b);
    for (;;) {
      int64_t keys = INT64_MAX;
      for (int64_t b = 0; b < count; ++b) keys = blocks[b].next_keys() < keys ? blocks[b].next_keys() : keys;
      if (keys == INT64_MAX) break;
      for (int64_t b = 0; b < count; ++b) {
        if (blocks[b].next_keys() == keys) blocks[b].add_next();
      }
    }
    for (int64_t b = 0; b < count; ++b) blocks[b].finish();
  }
  Engine::end();
}

}  // namespace
}  // namespace fastpar
