// Gradients of rows: one read, one write. With E = exp(z - lse): dx = ((gamma + delta) E - beta w) dz/dx; see
// row_terms.h for the factors, and for the entry of the target, which is written afterwards.
#pragma once

#include "cross_entropy/cross_entropy_kernel.h"

namespace fastpar {
namespace {

// out = (factor exp(z - reference) - beta w) * (1 - (z / softcap)^2) for one row; x and out may be the same row.
template <typename T, bool kSoftcap, Smoothing kSmoothing>
void gradient_row(const T* x, T* out, int64_t count, const Coordinate<kSoftcap>& coordinate, double reference,
                  double factor, double beta, const float* weight, bool stream) {
  constexpr int W = Vec::kWidth;
  const Exponent exponent = coordinate.exponent(reference);
  const Vec slope = Vec::set(coordinate.slope_log2e()), offset = Vec::set(-exponent.offset);
  const Vec minus_beta = Vec::set(-static_cast<float>(beta)), none = Vec::set(0.0f);
  const ScaledExp2<sizeof(T) == 2 ? 4 : 5> scaled_exp2(static_cast<float>(factor * exponent.scale));
  const auto value = [&](Vec logits, Vec w) {
    Vec derivative;
    Vec result = scaled_exp2(Vec::fma(coordinate(logits, &derivative), slope, offset));
    if (kSmoothing == Smoothing::kUniform) result = result + minus_beta;
    if (kSmoothing == Smoothing::kWeighted) result = Vec::fma(w, minus_beta, result);
    return kSoftcap ? result * derivative : result;
  };
  const auto weights = [&](int64_t i) { return kSmoothing == Smoothing::kWeighted ? Vec::load(weight + i) : none; };
  const auto some = [&](int64_t i, int lanes) {
    const Vec w = kSmoothing == Smoothing::kWeighted ? Vec::load_first(weight + i, lanes, 0.0f) : none;
    value(Vec::load_first(x + i, lanes, 0.0f), w).store_first(out + i, lanes);
  };
  int64_t i = 0;
  if (stream) {
    constexpr uintptr_t kBytes = sizeof(T) * W;
    const uintptr_t misaligned = reinterpret_cast<uintptr_t>(out) % kBytes;
    const int64_t to_aligned = misaligned == 0 ? 0 : static_cast<int64_t>((kBytes - misaligned) / sizeof(T));
    i = to_aligned < count ? to_aligned : count;
    if (i > 0) some(0, static_cast<int>(i));
  }
  for (; i + kUnroll * W <= count; i += kUnroll * W) {
    Vec result[kUnroll];
    for (int u = 0; u < kUnroll; ++u) result[u] = value(Vec::load(x + i + u * W), weights(i + u * W));
    if (stream) {
      for (int u = 0; u < kUnroll; ++u) result[u].stream(out + i + u * W);
    } else {
      for (int u = 0; u < kUnroll; ++u) result[u].store(out + i + u * W);
    }
  }
  for (; i + W <= count; i += W) value(Vec::load(x + i), weights(i)).store(out + i);
  if (i < count) some(i, static_cast<int>(count - i));
}

}  // namespace
}  // namespace fastpar
