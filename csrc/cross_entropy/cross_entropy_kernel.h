// The CPU kernels of cross-entropy, written once over Vec and compiled per instruction set: what stats, backward and
// the two together share, which is the way of a raw logit x to z, the block maximum, and the options.
//
// Note: the coordinate. All exponentials are exp(z - r) for some r, with z = logit_scale x, or softcap
// tanh(logit_scale x / softcap). The kernels work in a coordinate u with z = slope u: u = x and slope = logit_scale
// without a softcap, so that the scale costs nothing (it is part of the factor that leads to base 2), and u = z and
// slope = 1 with one. Maxima are taken of x, or minima where logit_scale is negative, since tanh costs more than all
// the rest.
//
// Measured on Zen 4 with other work on both cores, so only comparisons within a line mean something; one thread, CPU
// time, the least of 16 interleaved runs, milliseconds, 256 x 131072:
//   bfloat16 stats     6.3 with degree 5 and a float maximum, 5.3 with the table and an integer maximum
//   bfloat16 backward  5.4 with degree 4 and a subtraction, 4.3 with degree 3, one FMA, and two registers to a store
//   forward_backward   float32 in place 9.7 with the exponentials kept in the row, 11.4 computed twice (stats and
//                      backward 15.0); into new memory 12.5 computed twice, 16 to 20 kept in a scratch row of a
//                      megabyte and less, which pushes the logits out of the second-level cache (stats and
//                      backward 15.7); bfloat16 9.4 computed twice, 9.5 to 10.6 kept (stats and backward 9.6)
// Before, with 256 MiB of float32 on an idle machine: stats 15.3 plain, 13.2 with the next block prefetched while this
// one is summed, 11.5 with blocks of 4 KiB instead of 8 (12.8 with 2 KiB, 13.6 with 32 KiB); backward 9.7 in place, 15
// into other memory, 12 with stores past the caches.
#pragma once

#include "common/logit_transform.h"
#include "common/simd.h"
#include "common/simd_order.h"
#include "cross_entropy/cross_entropy.h"
#include "cross_entropy/row_terms.h"

namespace fastpar {
namespace {

constexpr int64_t kBlockBytes = 4096;  // 8192 and up, and 2048, measured 10 to 20% slower
constexpr int kUnroll = 4;             // independent accumulators
constexpr double kLog2EDouble = 1.4426950408889634074;

enum class Smoothing { kNone, kUniform, kWeighted };

inline float first_lane(Vec v) {
  float lanes[Vec::kWidth];
  v.store(lanes);
  return lanes[0];
}

inline int64_t row_offset(const RowLayout& rows, int64_t row) {
  int64_t offset = 0;
  for (int d = rows.num_dims - 1; d > 0; --d) {
    offset += (row % rows.sizes[d]) * rows.strides[d];
    row /= rows.sizes[d];
  }
  return rows.num_dims > 0 ? offset + row * rows.strides[0] : 0;
}

// exp(slope u - reference) = scale() * 2^argument(u).
//
// The argument is u * L - offset, one FMA, with L = slope * log2(e) and offset = reference * log2(e). Rounding the
// offset to float32 puts an error of 5e-4 on it at 1e4, but it is a factor that all elements have in common, and
// scale() has it in double, as it has the rounding of L at u = reference / slope. Where multiplication and addition
// round apart, and where the reference is large, the subtraction comes first.
template <bool kSubtractFirst>
class Exponent {
 public:
  Exponent(double slope, double reference) : reference_(reference) {
    const float factor = static_cast<float>(slope * kLog2EDouble);
    slope_ = Vec::set(factor);
    if (kSubtractFirst) {
      const float offset = slope == 0.0 ? 0.0f : static_cast<float>(reference / slope);
      offset_ = Vec::set(offset);
      correction_ = (static_cast<double>(offset) * slope - reference) * kLog2EDouble;
    } else {
      const double wanted = reference * (slope == 0.0 ? kLog2EDouble : static_cast<double>(factor) / slope);
      const float offset = static_cast<float>(wanted);
      offset_ = Vec::set(-offset);
      correction_ = static_cast<double>(offset) - wanted;
    }
  }

  // exp(slope (u - maximum) - log_sum), `maximum` being the coordinate of a far row's largest element.
  static Exponent at(double slope, float maximum, double log_sum) {
    static_assert(kSubtractFirst, "an FMA has no room for log_sum");
    Exponent exponent(slope, 0.0);
    exponent.offset_ = Vec::set(maximum);
    exponent.correction_ = -log_sum * kLog2EDouble;
    return exponent;
  }

  Vec argument(Vec u) const { return kSubtractFirst ? (u - offset_) * slope_ : Vec::fma(u, slope_, offset_); }
  double scale() const { return __builtin_isinf(reference_) ? __builtin_nan("") : __builtin_exp2(correction_); }

 private:
  Vec slope_, offset_;
  double correction_, reference_;
};

// References from here on are not for the FMA: the rounding of their offset, half of its last place, would leave the
// exponentials' range from 2^31 on.
constexpr double kLargeReference = 0x1p24;

inline bool must_subtract_first(double reference) {
  return !Vec::kFmaRoundsOnce || __builtin_fabs(reference) >= kLargeReference;
}

// The way of x to z; see the note above.
template <bool kSoftcap>
class Coordinate;

template <>
class Coordinate<false> {
 public:
  explicit Coordinate(const LossTerms& terms) : slope_(terms.logit_scale) {}

  Vec operator()(Vec x) const { return x; }
  // du/dx / logit_scale is 1.
  Vec operator()(Vec x, Vec*) const { return x; }

  double z(float x) const { return slope_ * static_cast<double>(x); }
  // dz/dx / logit_scale
  double derivative(float) const { return 1.0; }
  double slope() const { return slope_; }
  bool is_falling() const { return slope_ < 0.0; }

 private:
  double slope_;
};

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
  Vec operator()(Vec x, Vec* derivative) const { return (tanh(x * ratio_, derivative) * softcap_).rounded(); }

  // The same bits as the element has in its row.
  double z(float x) const { return static_cast<double>(first_lane((*this)(Vec::set(x)))); }
  double derivative(float x) const {
    Vec derivative;
    (*this)(Vec::set(x), &derivative);
    return static_cast<double>(first_lane(derivative));
  }
  double slope() const { return 1.0; }
  bool is_falling() const { return is_falling_; }

 private:
  Vec ratio_;
  Vec softcap_;
  bool is_falling_;
};

// The coordinate of the largest element of a far row, whose z is `maximum` as a float. With a logit_scale several
// coordinates may have that z, so it is looked for: the row's own largest element, if that is the one.
template <typename T, bool kSoftcap>
float far_coordinate(const T* x, int64_t count, const Coordinate<kSoftcap>& coordinate, double maximum) {
  const double slope = coordinate.slope();
  if (slope != 1.0 && slope != -1.0 && count > 0) {
    const float best = coordinate.is_falling() ? extremum<false>(x, count) : extremum<true>(x, count);
    if (static_cast<double>(static_cast<float>(coordinate.z(best))) == maximum) return best;
  }
  return static_cast<float>(maximum / slope);
}

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
