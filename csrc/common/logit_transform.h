// z = softcap * tanh(logit_scale * x / softcap), or logit_scale * x without a softcap, and dz/dx.
//
// tanh(u) = 1 - 2 / (exp(2u) + 1), which is within 1.2e-7 of it, and exactly 1 or -1 from |u| = 10 on: an infinite
// logit has z = softcap and a slope of 0. NaN stays NaN.
//
// In an anonymous namespace for the reason given in simd.h.
#pragma once

#include "common/simd.h"

namespace fastpar {

struct LogitTransform {
  double softcap;  // 0: none
  double logit_scale;
};

namespace {

inline bool is_identity(const LogitTransform& transform) {
  return transform.softcap == 0.0 && transform.logit_scale == 1.0;
}

inline Vec tanh(Vec u) {
  const Vec limit = Vec::set(10.0f), zero = Vec::set(0.0f), one = Vec::set(1.0f);
  // -max(-limit, -u) is min(limit, u); this operand order lets NaN through.
  const Vec above = Vec::max(Vec::set(-10.0f), u);
  const Vec clamped = zero - Vec::max(zero - limit, zero - above);
  const ScaledExp2<5> exp2(1.0f);
  return one - Vec::set(2.0f) / (exp2(clamped * Vec::set(2.0f * kLog2E)) + one);
}

// With kTransform false, nothing: z is x.
template <bool kTransform>
class VecTransform {
 public:
  explicit VecTransform(const LogitTransform& transform)
      : scale_(Vec::set(static_cast<float>(transform.logit_scale))),
        cap_(Vec::set(static_cast<float>(transform.softcap))),
        scale_over_cap_(Vec::set(static_cast<float>(transform.logit_scale / transform.softcap))),
        is_capped_(transform.softcap != 0.0) {}

  Vec z(Vec x) const {
    if (!kTransform) return x;
    return is_capped_ ? cap_ * tanh(x * scale_over_cap_) : x * scale_;
  }

  // z, and dz/dx in *slope; not set where there is no transform.
  Vec z_and_slope(Vec x, Vec* slope) const {
    if (!kTransform) return x;
    *slope = scale_;
    if (!is_capped_) return x * scale_;
    const Vec t = tanh(x * scale_over_cap_);
    *slope = scale_ * (Vec::set(1.0f) - t * t);
    return cap_ * t;
  }

 private:
  Vec scale_, cap_, scale_over_cap_;
  bool is_capped_;
};

inline double transformed(double x, const LogitTransform& transform) {
  if (transform.softcap == 0.0) return x * transform.logit_scale;
  return transform.softcap * __builtin_tanh(x * transform.logit_scale / transform.softcap);
}

// dz/dx where z is what `transformed` gave.
inline double transform_slope(double z, const LogitTransform& transform) {
  if (transform.softcap == 0.0) return transform.logit_scale;
  const double t = z / transform.softcap;
  return transform.logit_scale * (1.0 - t * t);
}

}  // namespace
}  // namespace fastpar
