// Statistics of rows: one read of the logits. A row is taken in blocks that stay in the first-level cache: the block's
// maximum, then the sum of exp(z - m) with the running maximum m, the earlier sum being rescaled when m rises.
//
// The sum is divided by what the largest element itself contributes, as computed, which is 1 but for rounding. So where
// one class has all of the probability the sum is exactly 1 and the loss exactly 0, and it is never less.
#pragma once

#include "cross_entropy/cross_entropy_kernel.h"

namespace fastpar {
namespace {

struct RowStats {
  double maximum;       // of z; -inf where there is no finite z
  double sum;           // of exp(z - maximum)
  double weighted_sum;  // of w z
};

// What row_stats leaves behind of the exponentials for a second pass. Both kinds compute them in the same way, so that
// it makes no difference to the bits whether they were kept.
enum class Keep { kNothing, kReferences, kExponentials };

// Columns from `begin` on, whose exponentials were computed as exp(z - maximum) * unit.
struct Run {
  int64_t begin;
  double maximum;
  double unit;
};

// What all elements of a block are compared with: the largest so far.
struct Reference {
  float logit;     // raw
  float u;         // its coordinate
  double maximum;  // its z
};

struct BlockTerms {
  double sum;        // of exp(slope (u - reference)), the largest element contributing exactly 1
  double unit;       // what it contributed before the division
  double deviation;  // of w (u - reference)
  double mass;       // of w
};

// `next` is where the row goes on: its lines are fetched while the exponentials of this block keep the core busy.
template <typename T, bool kSoftcap, Smoothing kSmoothing, Keep kKeep, bool kSubtractFirst>
BlockTerms block_terms(const T* x, int64_t count, const Coordinate<kSoftcap>& coordinate, const Reference& reference,
                       const float* weight, const T* next, float* stored) {
  constexpr int W = Vec::kWidth;
  constexpr bool kIsWeighted = kSmoothing == Smoothing::kWeighted;
  const Exponent<kSubtractFirst> exponent(coordinate.slope(), reference.maximum);
  const Vec r = Vec::set(reference.u), zero = Vec::set(0.0f);
  const ScaledExp2<5> exp2(1.0f);
  Vec sum[kUnroll], deviation[kUnroll], mass[kUnroll];
  for (int u = 0; u < kUnroll; ++u) sum[u] = deviation[u] = mass[u] = zero;
  // Returns the exponential, unless nothing is kept of it.
  const auto add = [&](int u, Vec logits, Vec w) {
    const Vec coordinates = coordinate(logits);
    if (kSmoothing == Smoothing::kUniform) deviation[u] = deviation[u] + (coordinates - r);
    if (kIsWeighted) {
      deviation[u] = Vec::fma(w, coordinates - r, deviation[u]);
      mass[u] = mass[u] + w;
    }
    if (kKeep == Keep::kNothing) {
      sum[u] = exp2.add_to(sum[u], exponent.argument(coordinates));
      return zero;
    }
    const Vec e = exp2(exponent.argument(coordinates)).rounded();
    sum[u] = sum[u] + e;
    return e;
  };
  int64_t i = 0;
  for (; i + kUnroll * W <= count; i += kUnroll * W) {
    constexpr int kLine = 64 / static_cast<int>(sizeof(T));
    for (int j = 0; j < kUnroll * W; j += kLine) prefetch(next + i + j);
    if (kIsWeighted || kKeep == Keep::kExponentials) {
      Vec e[kUnroll];
      for (int u = 0; u < kUnroll; ++u) {
        e[u] = add(u, Vec::load(x + i + u * W), kIsWeighted ? Vec::load(weight + i + u * W) : zero);
      }
      if (kKeep == Keep::kExponentials) {
        for (int u = 0; u < kUnroll; ++u) e[u].store(stored + i + u * W);
      }
    } else {
      for (int u = 0; u < kUnroll; u += 2) {
        Vec a, b;
        Vec::load_pair(x + i + u * W, &a, &b);
        add(u, a, zero);
        add(u + 1, b, zero);
      }
    }
  }
  for (; i + W <= count; i += W) {
    const Vec e = add(0, Vec::load(x + i), kIsWeighted ? Vec::load(weight + i) : zero);
    if (kKeep == Keep::kExponentials) e.store(stored + i);
  }
  const Vec largest = exponent.argument(r);
  const double unit =
      static_cast<double>(first_lane(kKeep == Keep::kNothing ? exp2.add_to(zero, largest) : exp2(largest)));
  BlockTerms terms{0.0, unit, 0.0, static_cast<double>(count)};
  for (int u = 0; u < kUnroll; ++u) terms.sum += reduce_sum(sum[u]);
  if (i < count) {
    const int lanes = static_cast<int>(count - i);
    sum[0] = zero;  // what the padding contributes must not meet small terms in float32
    const Vec logits = Vec::load_first(x + i, lanes, reference.logit);
    const Vec e = add(0, logits, kIsWeighted ? Vec::load_first(weight + i, lanes, 0.0f) : zero);
    if (kKeep == Keep::kExponentials) e.store_first(stored + i, lanes);
    terms.sum += reduce_sum(sum[0]) - static_cast<double>(W - lanes) * unit;
  }
  terms.sum /= unit;
  if (kSmoothing != Smoothing::kNone) {
    for (int u = 0; u < kUnroll; ++u) terms.deviation += reduce_sum(deviation[u]);
  }
  if (kIsWeighted) {
    terms.mass = 0.0;
    for (int u = 0; u < kUnroll; ++u) terms.mass += reduce_sum(mass[u]);
  }
  return terms;
}

// sum of w (u - reference) of a block in double: differences of logits of 1e38 are infinite as floats, and so is the
// sum of a few that are not.
template <typename T, bool kSoftcap>
double wide_deviation(const T* x, int64_t count, const Coordinate<kSoftcap>& coordinate, float reference,
                      const float* weight) {
  double deviation = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const float u = kSoftcap ? static_cast<float>(coordinate.z(to_float(x[i]))) : to_float(x[i]);
    const double w = weight == nullptr ? 1.0 : static_cast<double>(weight[i]);
    deviation += w * (static_cast<double>(u) - static_cast<double>(reference));
  }
  return deviation;
}

// Kept exponentials are left in `stored` [count], which may be the row itself. *num_runs runs, of which there are at
// most as many as blocks, say what they refer to.
template <typename T, bool kSoftcap, Smoothing kSmoothing, Keep kKeep>
RowStats row_stats(const T* x, int64_t count, const Coordinate<kSoftcap>& coordinate, const float* weight,
                   float* stored, Run* runs, int* num_runs) {
  if (count == 0) return {-__builtin_inf(), 0.0, 0.0};
  const bool is_falling = coordinate.is_falling();
  const float nothing = is_falling ? -kNegativeInfinity : kNegativeInfinity;
  float best = nothing;  // the logit whose z is largest
  // A row without a finite maximum so far has nothing to subtract; with 0 its terms are exp(-inf) = 0, and NaN stays.
  Reference reference{0.0f, 0.0f, 0.0};
  if (kSoftcap) reference = {nothing, static_cast<float>(coordinate.z(nothing)), coordinate.z(nothing)};
  RowStats stats{coordinate.z(nothing), 0.0, 0.0};
  if (kKeep != Keep::kNothing) *num_runs = 0;
  constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(T));
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    const T* block = x + begin;
    const float candidate = is_falling ? extremum<false>(block, size) : extremum<true>(block, size);
    const bool has_risen = is_falling ? candidate < best : candidate > best;
    if (has_risen) {
      best = candidate;
      const double maximum = coordinate.z(best);
      if (stats.sum != 0.0) stats.sum *= __builtin_exp(stats.maximum - maximum);
      stats.maximum = maximum;
      reference = {best, kSoftcap ? static_cast<float>(maximum) : best, maximum};
    }
    const float* w = kSmoothing == Smoothing::kWeighted ? weight + begin : nullptr;
    float* e = kKeep == Keep::kExponentials ? stored + begin : nullptr;
    BlockTerms terms =
        must_subtract_first(reference.maximum)
            ? block_terms<T, kSoftcap, kSmoothing, kKeep, true>(block, size, coordinate, reference, w, block + size, e)
            : block_terms<T, kSoftcap, kSmoothing, kKeep, !Vec::kFmaRoundsOnce>(block, size, coordinate, reference, w,
                                                                                block + size, e);
    stats.sum += terms.sum;
    if (kSmoothing != Smoothing::kNone) {
      if (!__builtin_isfinite(terms.deviation)) {
        terms.deviation = wide_deviation(block, size, coordinate, reference.u, w);
      }
      // Around what the maximum is written as, so that nothing but log_sum is left of equal logits.
      stats.weighted_sum += coordinate.slope() * terms.deviation + written(reference.maximum) * terms.mass;
    }
    if (kKeep != Keep::kNothing && (has_risen || begin == 0))
      runs[(*num_runs)++] = {begin, reference.maximum, terms.unit};
  }
  return stats;
}

}  // namespace
}  // namespace fastpar
