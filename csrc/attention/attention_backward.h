// Backward of attention from a given lse and delta = rowsum(dout * out), in blocks as in forward.
//
//   p = exp(z - lse),  dp = dout v^T,  ds = p (dp - delta) dz/d(scale s)
//   dv = p^T dout,  dk = scale ds^T q,  dq = scale ds k            with dropout: p Z for p in dv, and dp Z for dp
//
// A task owns a part of the key blocks of one key head (a split) and goes through the queries of all its query heads:
// every element of dk and dv is summed by one task, in one order. dq is summed by each split apart, and the parts are
// added in order. How many splits there are depends on shapes only, so bits do not depend on the number of threads.
//
// Blocks are worked on in groups (kQueryGroup x kKeyGroup), so that sums of products are long enough for accumulators
// to be worth loading.
#pragma once

#include "attention/attention_steps.h"

namespace fastpar {
namespace {

template <typename Engine>
int64_t backward_scratch(const AttentionProblem& p) {
  using Element = typename Engine::Element;
  using Real = typename Engine::Real;
  constexpr int64_t kArea = kBlock * kBlock, kPairs = Engine::kQueryGroup * Engine::kKeyGroup;
  const int64_t dims = p.padded_dim + p.padded_value_dim;
  const int64_t blocks =
      2 * kArea * static_cast<int64_t>(sizeof(Real)) + 3 * kPairs * kArea * static_cast<int64_t>(sizeof(Element));
  const int64_t sums = (Engine::kKeyGroup + 1) * kBlock * dims * static_cast<int64_t>(sizeof(Real));
  return blocks + sums + 2 * kBlock * dims * static_cast<int64_t>(sizeof(Element)) + (int64_t{1} << 15);
}

// Keys as rows and columns, values as rows.
template <typename Engine, typename T>
void pack_keys(const AttentionBackwardArguments& a, void* memory, int64_t begin, int64_t end) {
  using Element = typename Engine::Element;
  const AttentionProblem& p = a.problem;
  char* scratch = static_cast<char*>(memory);
  Element* grouped_rows = take<Element>(&scratch, kBlock * p.padded_dim);
  for (int64_t i = begin; i < end; ++i) {
    const Unit unit(p, i / p.key_blocks);
    const int64_t first = i % p.key_blocks * kBlock, keys = i * kBlock * p.padded_dim;
    Element* rows = static_cast<Element*>(a.key_rows) + keys;
    a.key_flags[i] =
        pack_rows<T, Engine>(a.k, unit.batch, unit.key_head, first, p.num_keys, p.dim, p.padded_dim, 1.0, rows);
    group_rows(rows, p.padded_dim, grouped_rows);
    ungroup_columns(grouped_rows, p.padded_dim, static_cast<Element*>(a.key_columns) + keys);
    a.value_flags[i] =
        pack_rows<T, Engine>(a.v, unit.batch, unit.key_head, first, p.num_keys, p.value_dim, p.padded_value_dim, 1.0,
                             static_cast<Element*>(a.value_rows) + i * kBlock * p.padded_value_dim);
  }
}

// Queries and dout, each in both forms of B.
template <typename Engine, typename T>
void pack_queries(const AttentionBackwardArguments& a, void* memory, int64_t begin, int64_t end) {
  using Element = typename Engine::Element;
  const AttentionProblem& p = a.problem;
  const Logits logits(p);
  const int64_t heads = heads_per_unit(p);
  char* scratch = static_cast<char*>(memory);
  Element* query = take<Element>(&scratch, kBlock * p.padded_dim);
  Element* grad_out = take<Element>(&scratch, kBlock * p.padded_value_dim);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t head_in_chunk = i / p.query_blocks, first = i % p.query_blocks * kBlock;
    const Unit unit(p, head_in_chunk / heads);
    const int64_t head = unit.key_head * heads + head_in_chunk % heads;
    a.query_flags[i] =
        pack_rows<T, Engine>(a.q, unit.batch, head, first, p.num_queries, p.dim, p.padded_dim, logits.sign, query);
    a.grad_out_flags[i] = pack_rows<T, Engine>(a.grad_out, unit.batch, head, first, p.num_queries, p.value_dim,
                                               p.padded_value_dim, 1.0, grad_out);
    const int64_t q = i * kBlock * p.padded_dim, o = i * kBlock * p.padded_value_dim;
    group_columns(query, p.padded_dim, static_cast<Element*>(a.query_columns) + q);
    group_rows(query, p.padded_dim, static_cast<Element*>(a.query_rows) + q);
    group_columns(grad_out, p.padded_value_dim, static_cast<Element*>(a.grad_out_columns) + o);
    group_rows(grad_out, p.padded_value_dim, static_cast<Element*>(a.grad_out_rows) + o);
  }
}

// The key blocks of one split of one unit.
template <typename Engine, typename T>
class BackwardSplit {
  using Element = typename Engine::Element;
  using Real = typename Engine::Real;
  using Lanes = typename Engine::Lanes;
  static constexpr int kArea = kBlock * kBlock, kKeys = Engine::kKeyGroup, kQueries = Engine::kQueryGroup;
  static constexpr int kPairs = kKeys * kQueries;

 public:
  BackwardSplit(const AttentionBackwardArguments& a, void* memory)
      : a_(a), p_(a.problem), logits_(p_), dropout_(p_), heads_(heads_per_unit(p_)) {
    char* scratch = static_cast<char*>(memory);
    s_ = take<Real>(&scratch, kArea);
    dp_ = take<Real>(&scratch, kArea);
    weights_ = take<Element>(&scratch, kPairs * kArea);
    ds_ = take<Element>(&scratch, kPairs * kArea);
    ds_grouped_ = Engine::kGroup == 1 ? ds_ : take<Element>(&scratch, kPairs * kArea);
    grad_k_ = take<Real>(&scratch, kKeys * kBlock * p_.padded_dim);
    grad_v_ = take<Real>(&scratch, kKeys * kBlock * p_.padded_value_dim);
    words_ = take<uint64_t>(&scratch, kPairs * kBlock);
  }

  void run(int64_t in_chunk, int64_t split) {
    in_chunk_ = in_chunk;
    partial_ = static_cast<Real*>(a_.partial_grad_q) +
               (split * units() + in_chunk) * heads_ * p_.query_blocks * kBlock * p_.padded_dim;
    memset(partial_, 0, sizeof(Real) * static_cast<size_t>(heads_ * p_.query_blocks * kBlock * p_.padded_dim));
    const int64_t groups = (p_.key_blocks + kKeys - 1) / kKeys;
    for (int64_t group = 0; group < groups; ++group) {
      // Dealt out to and fro: under a causal mask splits are about the same work.
      const int64_t turn = group % (2 * a_.splits);
      if ((turn < a_.splits ? turn : 2 * a_.splits - 1 - turn) == split) run_group(group);
    }
  }

 private:
  int64_t units() const { return a_.num_units; }

  void run_group(int64_t group) {
    const Unit unit(p_, in_chunk_);
    const BlockRuns& runs = unit.runs(p_);
    memset(grad_k_, 0, sizeof(Real) * static_cast<size_t>(kKeys * kBlock * p_.padded_dim));
    memset(grad_v_, 0, sizeof(Real) * static_cast<size_t>(kKeys * kBlock * p_.padded_value_dim));
    for (int64_t head = 0; head < heads_; ++head) {
      head_ = head;
      for (int64_t i = runs.offsets[group], stop = i; i < runs.offsets[group + 1]; i = stop) {
        // Up to kQueries blocks of queries, each with up to kKeys pairs.
        int num_blocks = 0;
        while (stop < runs.offsets[group + 1]) {
          const bool is_new = stop == i || runs.pairs[stop].queries != runs.pairs[stop - 1].queries;
          if (is_new && num_blocks == kQueries) break;
          num_blocks += is_new;
          ++stop;
        }
        add_pairs(runs, runs.pairs + i, static_cast<int>(stop - i), unit);
      }
    }
    for (int64_t block = group * kKeys; block < (group + 1) * kKeys && block < p_.key_blocks; ++block) {
      const int64_t first = block * kBlock, at = block % kKeys * kBlock;
      const int64_t count = p_.num_keys - first < kBlock ? p_.num_keys - first : kBlock;
      const int64_t row = (unit.batch * p_.key_heads + unit.key_head) * p_.num_keys + first;
      write(grad_k_ + at * p_.padded_dim, p_.padded_dim, p_.dim, count, logits_.scale_of_keys(),
            static_cast<Real*>(a_.grad_k) + row * p_.dim);
      write(grad_v_ + at * p_.padded_value_dim, p_.padded_value_dim, p_.value_dim, count, 1.0,
            static_cast<Real*>(a_.grad_v) + row * p_.value_dim);
    }
  }

  static void write(const Real* from, int64_t padded, int64_t dim, int64_t rows, double factor, Real* to) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t d = 0; d < dim; ++d) to[i * dim + d] = from[i * padded + d] * static_cast<Real>(factor);
    }
  }

  int64_t key_index(const BlockPair& pair) const { return in_chunk_ * p_.key_blocks + pair.keys; }
  int64_t query_index(const BlockPair& pair) const {
    return (in_chunk_ * heads_ + head_) * p_.query_blocks + pair.queries;
  }
  static const Element* block_of(const void* packed, int64_t index, int64_t padded) {
    return static_cast<const Element*>(packed) + index * kBlock * padded;
  }

  void add_pairs(const BlockRuns& runs, const BlockPair* pairs, int count, const Unit& unit) {
    for (int g = 0; g < count; ++g) {
      if (g == 0 || pairs[g].queries != pairs[g - 1].queries) set_queries(pairs[g], unit);
      differentiate(runs, pairs[g], g);
    }
    Segment<Element> dv[kPairs] = {}, dk[kPairs] = {}, dq[kPairs] = {};
    for (int key = 0; key < kKeys; ++key) {
      int num_dv = 0, num_dk = 0;
      for (int g = 0; g < count; ++g) {
        if (pairs[g].keys % kKeys != key) continue;
        const int64_t query = query_index(pairs[g]);
        if (!is_careful(pairs[g], a_.grad_out_flags[query])) {
          dv[num_dv++] = {weights_ + g * kArea, block_of(a_.grad_out_rows, query, p_.padded_value_dim)};
        }
        if (!is_careful(pairs[g], a_.query_flags[query])) {
          dk[num_dk++] = {ds_ + g * kArea, block_of(a_.query_rows, query, p_.padded_dim)};
        }
      }
      if (num_dv > 0) {
        Engine::multiply({dv, num_dv, kBlock, kBlock, p_.padded_value_dim, kBlock},
                         grad_v_ + key * kBlock * p_.padded_value_dim, true);
      }
      if (num_dk > 0) {
        Engine::multiply({dk, num_dk, kBlock, kBlock, p_.padded_dim, kBlock}, grad_k_ + key * kBlock * p_.padded_dim,
                         true);
      }
    }
    for (int g = 0, stop = 0; g < count; g = stop) {
      int num_dq = 0;
      for (stop = g; stop < count && pairs[stop].queries == pairs[g].queries; ++stop) {
        if (is_careful(pairs[stop], a_.key_flags[key_index(pairs[stop])])) continue;
        dq[num_dq++] = {block_of(a_.key_columns, key_index(pairs[stop]), p_.padded_dim), ds_grouped_ + stop * kArea};
      }
      if (num_dq == 0) continue;
      Engine::multiply({dq, num_dq, kBlock, p_.padded_dim, kBlock, kBlock}, partial_grad_q(pairs[g]), true);
    }
    for (int g = 0; g < count; ++g) add_visible(pairs[g], g);
  }

  Real* partial_grad_q(const BlockPair& pair) const {
    return partial_ + (head_ * p_.query_blocks + pair.queries) * kBlock * p_.padded_dim;
  }

  static bool is_careful(const BlockPair& pair, uint8_t flag) {
    return (pair.num_pieces > 0 || Engine::kNeedsFinite) && flag != 0;
  }

  // lse and delta of a block of queries. Rows that see nothing, and those past the end: exp(z - inf) is 0.
  void set_queries(const BlockPair& pair, const Unit& unit) {
    const int64_t head = unit.key_head * heads_ + head_, first = int64_t{pair.queries} * kBlock;
    const int64_t start = (unit.batch * p_.query_heads + head) * p_.num_queries + first;
    const int64_t count = p_.num_queries - first < kBlock ? p_.num_queries - first : kBlock;
    for (int64_t i = 0; i < kBlock; ++i) {
      const Real lse = i < count ? static_cast<const Real*>(a_.lse)[start + i] : static_cast<Real>(kNegativeInfinity);
      lse_[i] = lse == static_cast<Real>(kNegativeInfinity) ? -static_cast<Real>(kNegativeInfinity) : lse;
      delta_[i] = i < count ? static_cast<const Real*>(a_.delta)[start + i] : Real{0};
    }
    if (dropout_.is_on()) dropout_.set_queries(unit.batch, head, first);
  }

  // Weights and ds of a pair of blocks, at place g.
  void differentiate(const BlockRuns& runs, const BlockPair& pair, int g) {
    const int64_t key = key_index(pair), query = query_index(pair);
    const Segment<Element> s{block_of(a_.key_rows, key, p_.padded_dim),
                             block_of(a_.query_columns, query, p_.padded_dim)};
    multiply_block<Engine>(s, p_.padded_dim, a_.key_flags[key] == 0 && a_.query_flags[query] == 0, s_);
    const Segment<Element> dp{block_of(a_.value_rows, key, p_.padded_value_dim),
                              block_of(a_.grad_out_columns, query, p_.padded_value_dim)};
    multiply_block<Engine>(dp, p_.padded_value_dim, a_.value_flags[key] == 0 && a_.grad_out_flags[query] == 0, dp_);
    if (pair.num_pieces > 0) {
      visible_words(runs, pair, words_ + g * kBlock);
    } else if (Engine::kNeedsFinite) {
      memset(words_ + g * kBlock, 0xff, kBlock * sizeof(uint64_t));
    }
    if (logits_.is_capped()) {
      exponentials<true>(pair, g);
    } else {
      exponentials<false>(pair, g);
    }
  }

  template <bool kCapped>
  void exponentials(const BlockPair& pair, int g) {
    if (pair.num_pieces > 0) {
      dropout_.is_on() ? exponentials<kCapped, true, true>(pair, g) : exponentials<kCapped, true, false>(pair, g);
    } else {
      dropout_.is_on() ? exponentials<kCapped, false, true>(pair, g) : exponentials<kCapped, false, false>(pair, g);
    }
  }

  template <bool kCapped, bool kMasked, bool kDropout>
  void exponentials(const BlockPair& pair, int g) {
    const typename Engine::Exp2Backward exp2;
    const Softcap<Lanes, Real> softcap(logits_);
    const Lanes scale = Lanes::set(static_cast<Real>(logits_.size)), zero = Lanes::set(0);
    const Lanes log2e = Lanes::set(static_cast<Real>(1.44269504088896340736));
    const uint64_t* words = words_ + g * kBlock;
    Element *weights = weights_ + g * kArea, *ds_rows = ds_ + g * kArea, *ds_grouped = ds_grouped_ + g * kArea;
    alignas(64) Real factors[2][kBlock];
    for (int key = 0; key < kBlock; key += 2) {
      if (kDropout) {
        dropout_.factors(int64_t{pair.keys} * kBlock + key, factors[0]);
        dropout_.factors(int64_t{pair.keys} * kBlock + key + 1, factors[1]);
      }
      for (int u = 0; u < kBlock; u += 2 * Lanes::kWidth) {
        Lanes p[2][2], ds[2][2];  // [key][register]
        for (int j = 0; j < 2; ++j) {
          const int query = u + j * Lanes::kWidth;
          const Lanes lse = Lanes::load(lse_ + query), delta = Lanes::load(delta_ + query);
          for (int i = 0; i < 2; ++i) {
            const int at = (key + i) * kBlock + query;
            Lanes slope, z, dp = Lanes::load(dp_ + at);
            if (kCapped) {
              z = softcap(Lanes::load(s_ + at), &slope);
            } else {
              z = (Lanes::load(s_ + at) * scale).rounded();
            }
            // Rounded, as lse is: the largest of huge logits less its lse is 0, not the error of one of the two.
            p[i][j] = exp2(Lanes::min(zero, (z - lse) * log2e));
            if (kDropout) dp = dp * Lanes::load(factors[i] + query);
            ds[i][j] = p[i][j] * (dp - delta);
            if (kCapped) ds[i][j] = ds[i][j] * slope;
            if (kDropout) p[i][j] = p[i][j] * Lanes::load(factors[i] + query);
            if (kMasked) {
              const unsigned bits = lane_bits<Lanes>(words[key + i], query);
              p[i][j] = select_bits(bits, p[i][j], zero);
              ds[i][j] = select_bits(bits, ds[i][j], zero);
            }
          }
        }
        const int at = key * kBlock + u;
        for (int i = 0; i < 2; ++i) Engine::store_row(p[i][0], p[i][1], weights + at + i * kBlock);
        Engine::store_both(ds, ds_rows + at, ds_grouped + key * kBlock + u * Engine::kGroup);
      }
    }
  }

  // What add_pairs left out.
  void add_visible(const BlockPair& pair, int g) {
    if (pair.num_pieces == 0 && !Engine::kNeedsFinite) return;
    const int64_t key = key_index(pair), query = query_index(pair), place = pair.keys % kKeys;
    const uint64_t* words = words_ + g * kBlock;
    const Element *weights = weights_ + g * kArea, *ds = ds_ + g * kArea;
    const auto sees = [&](int64_t k, int64_t q, int64_t) { return is_visible(words, k, q); };
    if (a_.grad_out_flags[query] != 0) {
      const Element* rows = block_of(a_.grad_out_rows, query, p_.padded_value_dim);
      multiply_visible(
          kBlock, p_.padded_value_dim, kBlock, [&](int64_t k, int64_t q) { return element(weights, k * kBlock + q); },
          [&](int64_t q, int64_t d) { return grouped<Engine::kGroup>(rows, p_.padded_value_dim, q, d); }, sees,
          grad_v_ + place * kBlock * p_.padded_value_dim);
    }
    if (a_.query_flags[query] != 0) {
      const Element* rows = block_of(a_.query_rows, query, p_.padded_dim);
      multiply_visible(
          kBlock, p_.padded_dim, kBlock, [&](int64_t k, int64_t q) { return element(ds, k * kBlock + q); },
          [&](int64_t q, int64_t d) { return grouped<Engine::kGroup>(rows, p_.padded_dim, q, d); }, sees,
          grad_k_ + place * kBlock * p_.padded_dim);
    }
    if (a_.key_flags[key] != 0) {
      const Element* columns = block_of(a_.key_columns, key, p_.padded_dim);
      multiply_visible(
          p_.padded_dim, kBlock, kBlock, [&](int64_t d, int64_t k) { return element(columns, d * kBlock + k); },
          [&](int64_t k, int64_t q) { return element(ds, k * kBlock + q); },
          [&](int64_t, int64_t k, int64_t q) { return is_visible(words, k, q); }, partial_grad_q(pair));
    }
  }

  const AttentionBackwardArguments& a_;
  const AttentionProblem& p_;
  const Logits logits_;
  Dropout<Real> dropout_;
  const int64_t heads_;
  int64_t in_chunk_ = 0, head_ = 0;
  Real *s_, *dp_, *grad_k_, *grad_v_, *partial_ = nullptr;
  Element *weights_, *ds_, *ds_grouped_;
  uint64_t* words_;
  alignas(64) Real lse_[kBlock], delta_[kBlock];
};

template <typename Engine, typename T>
void backward(const AttentionBackwardArguments& a, void* scratch, int64_t begin, int64_t end) {
  Engine::begin();
  BackwardSplit<Engine, T> split(a, scratch);
  for (int64_t i = begin; i < end; ++i) split.run(i / a.splits, i % a.splits);
  Engine::end();
}

// dq: the splits' parts added in order, scaled, and turned back.
template <typename Engine, typename T>
void finish(const AttentionBackwardArguments& a, void* memory, int64_t begin, int64_t end) {
  using Real = typename Engine::Real;
  using Lanes = typename Engine::Lanes;
  const AttentionProblem& p = a.problem;
  const int64_t heads = heads_per_unit(p), area = kBlock * p.padded_dim;
  const Lanes scale = Lanes::set(static_cast<Real>(p.scale));
  char* scratch = static_cast<char*>(memory);
  Real* sum = take<Real>(&scratch, area);
  Real* rows = take<Real>(&scratch, area);
  for (int64_t i = begin; i < end; ++i) {
    const Real* part = static_cast<const Real*>(a.partial_grad_q) + i * area;
    const int64_t stride = a.num_units * heads * p.query_blocks * area;
    for (int64_t at = 0; at < area; at += Lanes::kWidth) {
      Lanes total = Lanes::load(part + at);
      for (int64_t s = 1; s < a.splits; ++s) total = total + Lanes::load(part + s * stride + at);
      (total * scale).store(sum + at);
    }
    transpose_back<kBlock>(sum, p.padded_dim, rows);
    const int64_t head_in_chunk = i / p.query_blocks, first = i % p.query_blocks * kBlock;
    const Unit unit(p, head_in_chunk / heads);
    const int64_t head = unit.batch * p.query_heads + unit.key_head * heads + head_in_chunk % heads;
    const int64_t count = p.num_queries - first < kBlock ? p.num_queries - first : kBlock;
    Real* to = static_cast<Real*>(a.grad_q) + (head * p.num_queries + first) * p.dim;
    for (int64_t r = 0; r < count; ++r)
      memcpy(to + r * p.dim, rows + r * p.padded_dim, sizeof(Real) * static_cast<size_t>(p.dim));
  }
}

}  // namespace
}  // namespace fastpar
