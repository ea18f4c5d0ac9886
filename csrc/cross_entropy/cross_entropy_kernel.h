// The CPU kernels of cross-entropy, written once over Vec and compiled per instruction set: what stats, backward and
// the two together share, which is the way of a raw logit x to z, the block maximum, and the options.
//
// Note: the coordinate. All exponentials are exp(z - r) for some r, with z = logit_scale x, or softcap
// tanh(logit_scale x / softcap). The kernels work in a coordinate u with z = slope u: u = x and slope = logit_scale
// without a softcap, so that the scale costs nothing (it is part of the factor that leads to base 2), and u = z and
// slope = 1 with one. Maxima are taken of x, or minima where logit_scale is negative, since tanh costs more than all
// the rest.
#pragma once

#include "common/simd.h"
#include "cross_entropy/cross_entropy.h"
#include "cross_entropy/row_terms.h"

namespace fastpar {
namespace {

constexpr int64_t kBlockBytes = 4096;  // 8192 and up, and 2048, measured 10 to 20% slower
constexpr int kUnroll = 4;             // independent accumulators
constexpr double kLog2EDouble = 1.4426950408889634074;
constexpr float kLargestFloat = 0x1.fffffep127f;

enum class Smoothing { kNone, kUniform, kWeighted };

inline int64_t row_offset(const RowLayout& rows, int64_t row) {
  int64_t offset = 0;
  for (int d = rows.num_dims - 1; d > 0; --d) {
    offset += (row % rows.sizes[d]) * rows.strides[d];
    row /= rows.sizes[d];
  }
  return rows.num_dims > 0 ? offset + row * rows.strides[0] : 0;
}

// The largest element, or the smallest; NaN is passed over, and nothing but NaN gives what no element gives, -inf or
// inf.
template <bool kLargest, typename T>
float block_extremum(const T* x, int64_t count) {
  constexpr int W = Vec::kWidth;
  constexpr float kNothing = kLargest ? kNegativeInfinity : -kNegativeInfinity;
  const auto better = [](Vec a, Vec b) { return kLargest ? Vec::max(a, b) : Vec::min(a, b); };
  Vec best[kUnroll];
  for (int u = 0; u < kUnroll; ++u) best[u] = Vec::set(kNothing);
  int64_t i = 0;
  for (; i + kUnroll * W <= count; i += kUnroll * W) {
    for (int u = 0; u < kUnroll; u += 2) {
      Vec a, b;
      Vec::load_pair(x + i + u * W, &a, &b);
      best[u] = better(a, best[u]);
      best[u + 1] = better(b, best[u + 1]);
    }
  }
  for (; i + W <= count; i += W) best[0] = better(Vec::load(x + i), best[0]);
  if (i < count) best[1] = better(Vec::load_first(x + i, static_cast<int>(count - i), kNothing), best[1]);
  const Vec all = better(better(best[0], best[1]), better(best[2], best[3]));
  return kLargest ? reduce_max(all) : reduce_min(all);
}

// exp(z - reference) = scale * 2^(slope_log2e * u - offset). The rounding of `offset` is a factor that all elements
// have in common, and is put right in `scale`.
struct Exponent {
  float offset;
  double scale;
};

// The way of x to z; see the note above.
template <bool kSoftcap>
class Coordinate;

template <>
class Coordinate<false> {
 public:
  explicit Coordinate(const LossTerms& terms)
      : slope_(terms.logit_scale), slope_log2e_(static_cast<float>(terms.logit_scale * kLog2EDouble)) {}

  Vec operator()(Vec x) const { return x; }
  // du/dx / logit_scale is 1.
  Vec operator()(Vec x, Vec*) const { return x; }

  double z(float x) const { return slope_ * static_cast<double>(x); }
  // dz/dx / logit_scale
  double derivative(float) const { return 1.0; }
  float slope_log2e() const { return slope_log2e_; }
  double slope() const { return slope_; }
  bool is_falling() const { return slope_ < 0.0; }

  Exponent exponent(double reference) const {
    // slope_log2e is rounded: of u = reference / slope, the product with it differs from reference * log2(e).
    const double rounded = static_cast<double>(slope_log2e_);
    const double target = slope_ == 0.0 ? reference * kLog2EDouble : reference * (rounded / slope_);
    float offset = static_cast<float>(target);
    if (target > static_cast<double>(kLargestFloat)) offset = kLargestFloat;
    if (target < -static_cast<double>(kLargestFloat)) offset = -kLargestFloat;
    const double correction = static_cast<double>(offset) - target;
    // Logits of 1e38 have no digits left for a correction; an infinite reference has to make everything NaN.
    if (__builtin_fabs(correction) > 1e30) return {offset, __builtin_isinf(target) ? __builtin_nan("") : 1.0};
    return {offset, __builtin_exp2(correction)};
  }

 private:
  double slope_;
  float slope_log2e_;
};

// Note: tanh. With y = |logit_scale x / softcap| and e = exp(-2 y): tanh y = 1 - 2 e / (1 + e), whose relative error
// grows towards 0, so below 0.625 it is y + y^3 P(y^2), P minimax with a relative error of 9e-9 as rounded to float32.
// The derivative, 1 - tanh^2 = 4 e / (1 + e)^2, is good everywhere and 0 for an infinite logit.
template <>
class Coordinate<true> {
 public:
  explicit Coordinate(const LossTerms& terms)
      : ratio_(Vec::set(static_cast<float>(terms.logit_scale / terms.softcap))),
        softcap_(Vec::set(static_cast<float>(terms.softcap))),
        is_falling_(terms.logit_scale < 0.0) {}

  Vec operator()(Vec x) const {
    Vec derivative;
    return (*this)(x, &derivative);
  }
  // Also du/dx / logit_scale = 1 - (z / softcap)^2.
  Vec operator()(Vec x, Vec* derivative) const {
    const Vec one = Vec::set(1.0f), y = x * ratio_, size = y.abs(), square = size * size;
    const Vec e = exp2_(size * Vec::set(-2.0f * kLog2E));
    const Vec inverse = one / (one + e);
    const Vec tail = e * inverse;
    *derivative = Vec::set(4.0f) * (tail * inverse);
    const Vec far = Vec::fma(Vec::set(-2.0f), tail, one);
    Vec p = Vec::set(kNear[4]);
    for (int k = 3; k >= 0; --k) p = Vec::fma(p, square, Vec::set(kNear[k]));
    const Vec near = Vec::fma(size * square, p, size);
    return Vec::select_less(size, Vec::set(0.625f), near, far).with_sign_of(y) * softcap_;
  }

  // The same bits as the element has in its row.
  double z(float x) const { return first_lane((*this)(Vec::set(x))); }
  double derivative(float x) const {
    Vec derivative;
    (*this)(Vec::set(x), &derivative);
    return first_lane(derivative);
  }
  float slope_log2e() const { return kLog2E; }
  double slope() const { return 1.0; }
  bool is_falling() const { return is_falling_; }

  Exponent exponent(double reference) const {
    const double target = reference * static_cast<double>(kLog2E);
    const float offset = static_cast<float>(target);
    return {offset, __builtin_exp2(static_cast<double>(offset) - target)};
  }

 private:
  static double first_lane(Vec v) {
    float lanes[Vec::kWidth];
    v.store(lanes);
    return static_cast<double>(lanes[0]);
  }

  static constexpr float kNear[5] = {-0x1.555532p-2f, 0x1.110726p-3f, -0x1.b83c5ap-5f, 0x1.52269ap-6f, -0x1.75e1c4p-8f};

  ScaledExp2<5> exp2_{1.0f};
  Vec ratio_;
  Vec softcap_;
  bool is_falling_;
};

template <typename T>
void fill_zero(T* out, int64_t count) {
  memset(static_cast<void*>(out), 0, sizeof(T) * static_cast<size_t>(count));
}

// Calls body.template run<kSoftcap, kSmoothing>() for the options at hand.
template <typename Body>
void dispatch_options(const LossTerms& terms, bool smoothing, const Body& body) {
  const bool softcap = terms.softcap != 0.0;
  if (!smoothing) {
    if (softcap) {
      body.template run<true, Smoothing::kNone>();
    } else {
      body.template run<false, Smoothing::kNone>();
    }
  } else if (terms.weight == nullptr) {
    if (softcap) {
      body.template run<true, Smoothing::kUniform>();
    } else {
      body.template run<false, Smoothing::kUniform>();
    }
  } else if (softcap) {
    body.template run<true, Smoothing::kWeighted>();
  } else {
    body.template run<false, Smoothing::kWeighted>();
  }
}

}  // namespace
}  // namespace fastpar
