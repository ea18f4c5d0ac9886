// Gradients of rows: one read, one write. With E = exp(z - lse): dx = ((gamma + delta) E - beta w) dz/dx; see
// row_terms.h for the factors, and for the entry of the target, which is written afterwards.
#pragma once

#include "cross_entropy/cross_entropy_kernel.h"

namespace fastpar {
namespace {

// Degree of the exponential whose result is rounded to T at once; see common/simd.h.
template <typename T>
constexpr int kDegreeFor = 5;
template <>
constexpr int kDegreeFor<float16> = 4;
template <>
constexpr int kDegreeFor<bfloat16> = 3;

// out[i] = full(i) for a register from element i on, and part(i, lanes) for the first lanes of one. A register is
// computed before what it is stored over is read for another.
template <typename T, typename Full, typename Part>
void write_row(T* out, int64_t count, bool stream, const Full& full, const Part& part) {
  constexpr int W = Vec::kWidth;
  int64_t i = 0;
  if (stream) {
    constexpr uintptr_t kBytes = 2 * sizeof(T) * W;
    const uintptr_t misaligned = reinterpret_cast<uintptr_t>(out) % kBytes;
    int64_t head = misaligned == 0 ? 0 : static_cast<int64_t>((kBytes - misaligned) / sizeof(T));
    if (head > count) head = count;
    for (; i + W <= head; i += W) full(i).store(out + i);
    if (i < head) part(i, static_cast<int>(head - i)).store_first(out + i, static_cast<int>(head - i));
    i = head;
  }
  for (; i + kUnroll * W <= count; i += kUnroll * W) {
    Vec result[kUnroll];
    for (int u = 0; u < kUnroll; ++u) result[u] = full(i + u * W);
    if (stream) {
      for (int u = 0; u < kUnroll; u += 2) Vec::stream_pair(result[u], result[u + 1], out + i + u * W);
    } else {
      for (int u = 0; u < kUnroll; u += 2) Vec::store_pair(result[u], result[u + 1], out + i + u * W);
    }
  }
  for (; i + W <= count; i += W) full(i).store(out + i);
  if (i < count) part(i, static_cast<int>(count - i)).store_first(out + i, static_cast<int>(count - i));
}

template <typename T, bool kSoftcap, Smoothing kSmoothing, bool kSubtractFirst>
void gradient_row_as(const T* x, T* out, int64_t count, const Coordinate<kSoftcap>& coordinate,
                     const Exponent<kSubtractFirst>& exponent, double factor, double beta, const float* weight,
                     bool stream) {
  constexpr bool kIsWeighted = kSmoothing == Smoothing::kWeighted;
  const Vec minus_beta = Vec::set(-static_cast<float>(beta)), none = Vec::set(0.0f);
  const ScaledExp2<kDegreeFor<T>> scaled_exp2(static_cast<float>(factor * exponent.scale()));
  const auto value = [&](Vec logits, Vec w) {
    Vec derivative;
    Vec result = scaled_exp2(exponent.argument(coordinate(logits, &derivative)));
    if (kSmoothing == Smoothing::kUniform) result = result + minus_beta;
    if (kIsWeighted) result = Vec::fma(w, minus_beta, result);
    return kSoftcap ? result * derivative : result;
  };
  write_row(
      out, count, stream,
      [&](int64_t i) { return value(Vec::load(x + i), kIsWeighted ? Vec::load(weight + i) : none); },
      [&](int64_t i, int lanes) {
        return value(Vec::load_first(x + i, lanes, 0.0f),
                     kIsWeighted ? Vec::load_first(weight + i, lanes, 0.0f) : none);
      });
}

// out = (factor exp(z - reference) - beta w) * (1 - (z / softcap)^2) for one row; x and out may be the same row. The
// reference is an lse, or a maximum, which is an lse without log_sum; see Note: far rows.
template <typename T, bool kSoftcap, Smoothing kSmoothing>
void gradient_row(const T* x, T* out, int64_t count, const Coordinate<kSoftcap>& coordinate, double reference,
                  double factor, double beta, const float* weight, bool stream) {
  const double slope = coordinate.slope();
  if (must_subtract_first(reference)) {
    const SplitLse split(reference);
    const Exponent<true> exponent =
        is_far(split.high) ? Exponent<true>::at(slope, far_coordinate(x, count, coordinate, split.high), split.low)
                           : Exponent<true>(slope, reference);
    gradient_row_as<T, kSoftcap, kSmoothing, true>(x, out, count, coordinate, exponent, factor, beta, weight, stream);
  } else {
    gradient_row_as<T, kSoftcap, kSmoothing, !Vec::kFmaRoundsOnce>(
        x, out, count, coordinate, Exponent<!Vec::kFmaRoundsOnce>(slope, reference), factor, beta, weight, stream);
  }
}

// out = factor e - beta w for the columns of a run of row_stats, with e its exponentials: read from the row if they
// were kept there, else computed again.
template <typename T, Smoothing kSmoothing, bool kIsKept, bool kSubtractFirst>
void run_gradient_as(const T* x, T* out, int64_t count, const Coordinate<false>& coordinate, double maximum,
                     double factor, double beta, const float* weight, bool stream) {
  constexpr bool kIsWeighted = kSmoothing == Smoothing::kWeighted;
  const Exponent<kSubtractFirst> exponent(coordinate.slope(), maximum);
  const ScaledExp2<5> exp2(1.0f);
  const Vec f = Vec::set(static_cast<float>(factor)), minus_beta = Vec::set(-static_cast<float>(beta));
  const Vec none = Vec::set(0.0f);
  const auto value = [&](Vec v, Vec w) {
    const Vec e = kIsKept ? v : exp2(exponent.argument(v)).rounded();
    if (kSmoothing == Smoothing::kUniform) return Vec::fma(e, f, minus_beta);
    if (kIsWeighted) return Vec::fma(e, f, (w * minus_beta).rounded());
    return e * f;
  };
  write_row(
      out, count, stream,
      [&](int64_t i) { return value(Vec::load(x + i), kIsWeighted ? Vec::load(weight + i) : none); },
      [&](int64_t i, int lanes) {
        return value(Vec::load_first(x + i, lanes, 0.0f),
                     kIsWeighted ? Vec::load_first(weight + i, lanes, 0.0f) : none);
      });
}

template <typename T, Smoothing kSmoothing>
void run_gradient(bool is_kept, const T* x, T* out, int64_t count, const Coordinate<false>& coordinate, double maximum,
                  double factor, double beta, const float* weight, bool stream) {
  constexpr bool kUsual = !Vec::kFmaRoundsOnce;
  if (is_kept) {
    run_gradient_as<T, kSmoothing, true, kUsual>(x, out, count, coordinate, maximum, factor, beta, weight, stream);
  } else if (must_subtract_first(maximum)) {
    run_gradient_as<T, kSmoothing, false, true>(x, out, count, coordinate, maximum, factor, beta, weight, stream);
  } else {
    run_gradient_as<T, kSmoothing, false, kUsual>(x, out, count, coordinate, maximum, factor, beta, weight, stream);
  }
}

}  // namespace
}  // namespace fastpar
