// Statistics of rows: one read of the logits. A row is taken in blocks that stay in the first-level cache: the block's
// maximum, then the sum of exp(z - m) with the running maximum m, the earlier sum being rescaled when m rises.
//
// z - m is taken before scaling to base 2, so that the largest element contributes exactly 1: where one class has all
// of the probability, the loss is exactly 0 and never negative.
#pragma once

#include "cross_entropy/cross_entropy_kernel.h"

namespace fastpar {
namespace {

struct BlockTerms {
  double sum;        // of exp(slope (u - reference))
  double deviation;  // of w (u - reference)
  double mass;       // of w
};

// `next` is where the row goes on: its lines are fetched while the exponentials of this block keep the core busy.
// `neutral` is a logit whose u is `reference`: it contributes exactly 1 to the sum and nothing to the deviation.
template <typename T, bool kSoftcap, Smoothing kSmoothing>
BlockTerms block_terms(const T* x, int64_t count, const Coordinate<kSoftcap>& coordinate, float reference,
                       float neutral, const float* weight, const T* next) {
  constexpr int W = Vec::kWidth;
  const Vec r = Vec::set(reference), slope = Vec::set(coordinate.slope_log2e()), zero = Vec::set(0.0f);
  const ScaledExp2<5> exp2(1.0f);
  Vec sum[kUnroll], deviation[kUnroll], mass[kUnroll];
  for (int u = 0; u < kUnroll; ++u) sum[u] = deviation[u] = mass[u] = zero;
  const auto add = [&](int u, Vec logits, Vec w) {
    const Vec difference = coordinate(logits) - r;
    sum[u] = sum[u] + exp2(difference * slope);
    if (kSmoothing == Smoothing::kUniform) deviation[u] = deviation[u] + difference;
    if (kSmoothing == Smoothing::kWeighted) {
      deviation[u] = Vec::fma(w, difference, deviation[u]);
      mass[u] = mass[u] + w;
    }
  };
  constexpr bool kIsWeighted = kSmoothing == Smoothing::kWeighted;
  int64_t i = 0;
  for (; i + kUnroll * W <= count; i += kUnroll * W) {
    constexpr int kLine = 64 / static_cast<int>(sizeof(T));
    for (int j = 0; j < kUnroll * W; j += kLine) prefetch(next + i + j);
    if (kIsWeighted) {
      for (int u = 0; u < kUnroll; ++u) add(u, Vec::load(x + i + u * W), Vec::load(weight + i + u * W));
    } else {
      for (int u = 0; u < kUnroll; u += 2) {
        Vec a, b;
        Vec::load_pair(x + i + u * W, &a, &b);
        add(u, a, zero);
        add(u + 1, b, zero);
      }
    }
  }
  for (; i + W <= count; i += W) add(0, Vec::load(x + i), kIsWeighted ? Vec::load(weight + i) : zero);
  int padding = 0;
  if (i < count) {
    const int lanes = static_cast<int>(count - i);
    padding = W - lanes;
    add(1, Vec::load_first(x + i, lanes, neutral), kIsWeighted ? Vec::load_first(weight + i, lanes, 0.0f) : zero);
  }
  BlockTerms terms{-static_cast<double>(padding), 0.0, static_cast<double>(count)};
  for (int u = 0; u < kUnroll; ++u) terms.sum += reduce_sum(sum[u]);
  if (kSmoothing != Smoothing::kNone) {
    for (int u = 0; u < kUnroll; ++u) terms.deviation += reduce_sum(deviation[u]);
  }
  if (kIsWeighted) {
    terms.mass = 0.0;
    for (int u = 0; u < kUnroll; ++u) terms.mass += reduce_sum(mass[u]);
  }
  return terms;
}

struct RowStats {
  double maximum;       // of z; -inf where there is no finite z
  double sum;           // of exp(z - maximum)
  double weighted_sum;  // of w z
};

template <typename T, bool kSoftcap, Smoothing kSmoothing>
RowStats row_stats(const T* x, int64_t count, const Coordinate<kSoftcap>& coordinate, const float* weight) {
  if (count == 0) return {-__builtin_inf(), 0.0, 0.0};
  const bool is_falling = coordinate.is_falling();
  const float nothing = is_falling ? -kNegativeInfinity : kNegativeInfinity;
  float best = nothing;  // the logit whose z is largest
  double sum = 0.0, weighted_sum = 0.0;
  constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(T));
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    const T* block = x + begin;
    const float candidate = is_falling ? block_extremum<false>(block, size) : block_extremum<true>(block, size);
    if (is_falling ? candidate < best : candidate > best) {
      if (sum != 0.0) sum *= __builtin_exp(coordinate.z(best) - coordinate.z(candidate));
      best = candidate;
    }
    // A row without a finite maximum so far has nothing to subtract; with 0 its terms are exp(-inf) = 0, and NaN stays.
    const float neutral = !kSoftcap && best == nothing ? 0.0f : best;
    const float reference = kSoftcap ? static_cast<float>(coordinate.z(best)) : neutral;
    const BlockTerms terms = block_terms<T, kSoftcap, kSmoothing>(
        block, size, coordinate, reference, neutral, kSmoothing == Smoothing::kWeighted ? weight + begin : nullptr,
        block + size);
    sum += terms.sum;
    if (kSmoothing != Smoothing::kNone) {
      weighted_sum += coordinate.slope() * (terms.deviation + static_cast<double>(reference) * terms.mass);
    }
  }
  return {coordinate.z(best), sum, weighted_sum};
}

}  // namespace
}  // namespace fastpar
