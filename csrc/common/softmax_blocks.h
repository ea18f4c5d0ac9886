// Maximum, sum of exponentials and entropy of a block of a row, which is meant to fit the first-level cache.
//
// x - m is taken before scaling to base 2: folding the scale in would put the rounding error of m * log2e, 5e-4 at
// |m| = 1e4, on every term. What was measured is in cross_entropy/cross_entropy_kernel.h.
#pragma once

#include "common/simd.h"

namespace fastpar {
namespace {

constexpr int64_t kSoftmaxBlockBytes = 4096;
constexpr int kSoftmaxUnroll = 4;  // independent accumulators

// NaN is passed over.
template <typename T>
float block_max(const T* x, int64_t count) {
  constexpr int W = Vec::kWidth;
  Vec best[kSoftmaxUnroll];
  for (int u = 0; u < kSoftmaxUnroll; ++u) best[u] = Vec::set(kNegativeInfinity);
  int64_t i = 0;
  for (; i + kSoftmaxUnroll * W <= count; i += kSoftmaxUnroll * W) {
    for (int u = 0; u < kSoftmaxUnroll; u += 2) {
      Vec a, b;
      Vec::load_pair(x + i + u * W, &a, &b);
      best[u] = Vec::max(a, best[u]);
      best[u + 1] = Vec::max(b, best[u + 1]);
    }
  }
  for (; i + W <= count; i += W) best[0] = Vec::max(Vec::load(x + i), best[0]);
  if (i < count) best[1] = Vec::max(Vec::load_first(x + i, static_cast<int>(count - i), kNegativeInfinity), best[1]);
  return reduce_max(Vec::max(Vec::max(best[0], best[1]), Vec::max(best[2], best[3])));
}

// Adds sum exp(x - maximum) to *sum and, with kEntropy, sum exp(x - maximum) (x - maximum) to *weighted, where -inf
// counts as 0. `next` is where the row goes on: its lines are fetched while the exponentials keep the core busy.
template <bool kEntropy, typename T>
void block_add_exp(const T* x, int64_t count, float maximum, const T* next, double* sum, double* weighted) {
  constexpr int W = Vec::kWidth;
  const Vec m = Vec::set(maximum), log2e = Vec::set(kLog2E), lowest = Vec::set(-200.0f);
  const ScaledExp2<5> exp2(1.0f);
  Vec sums[kSoftmaxUnroll], products[kSoftmaxUnroll];
  for (int u = 0; u < kSoftmaxUnroll; ++u) sums[u] = products[u] = Vec::set(0.0f);
  const auto add = [&](Vec v, int u) {
    // exp is 0 from -200 on; the bound keeps 0 * inf away, and its operand order lets NaN through.
    const Vec below = kEntropy ? Vec::max(lowest, v - m) : v - m;
    const Vec e = exp2(below * log2e);
    sums[u] = sums[u] + e;
    if (kEntropy) products[u] = Vec::fma(e, below, products[u]);
  };
  int64_t i = 0;
  for (; i + kSoftmaxUnroll * W <= count; i += kSoftmaxUnroll * W) {
    constexpr int kLine = 64 / static_cast<int>(sizeof(T));
    for (int j = 0; j < kSoftmaxUnroll * W; j += kLine) prefetch(next + i + j);
    for (int u = 0; u < kSoftmaxUnroll; u += 2) {
      Vec a, b;
      Vec::load_pair(x + i + u * W, &a, &b);
      add(a, u);
      add(b, u + 1);
    }
  }
  for (; i + W <= count; i += W) add(Vec::load(x + i), 0);
  if (i < count) add(Vec::load_first(x + i, static_cast<int>(count - i), kNegativeInfinity), 1);
  *sum += reduce_sum(sums[0] + sums[1]) + reduce_sum(sums[2] + sums[3]);
  if (kEntropy) *weighted += reduce_sum(products[0] + products[1]) + reduce_sum(products[2] + products[3]);
}

// The running statistics of a row: of what was added so far the maximum m, sum exp(x - m), sum exp(x - m) (x - m).
struct SoftmaxSums {
  float maximum = kNegativeInfinity;
  double sum = 0.0;
  double weighted = 0.0;

  template <bool kEntropy, typename T>
  void add(const T* x, int64_t count, const T* next) {
    const float candidate = block_max(x, count);
    if (candidate > maximum) {
      if (maximum != kNegativeInfinity) {
        const double shift = static_cast<double>(maximum) - static_cast<double>(candidate);
        const double factor = __builtin_exp(shift);
        if (kEntropy) weighted = factor * (weighted + shift * sum);
        sum *= factor;
      }
      maximum = candidate;
    }
    // A row of -inf so far has no finite maximum to subtract; with 0 its terms are exp(-inf) = 0, and NaN stays NaN.
    block_add_exp<kEntropy>(x, count, maximum == kNegativeInfinity ? 0.0f : maximum, next, &sum, &weighted);
  }
};

}  // namespace
}  // namespace fastpar
