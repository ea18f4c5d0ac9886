// z = softcap * tanh(logit_scale * x / softcap), or logit_scale * x without a softcap, and dz/dx.
//
// Note: tanh. With y = |u| and e = exp(-2 y): tanh y = 1 - 2 e / (1 + e), whose relative error grows towards 0, so
// below 0.625 it is y + y^3 P(y^2), P minimax with a relative error of 9e-9 as rounded to float32: z of a large softcap
// is as good as the logit. The derivative, 1 - tanh^2 = 4 e / (1 + e)^2, is good everywhere; an infinite logit has z =
// softcap and a slope of 0. NaN stays NaN.
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

// tanh(u), and its derivative.
inline Vec tanh(Vec u, Vec* derivative) {
  constexpr float kNear[5] = {-0x1.555532p-2f, 0x1.110726p-3f, -0x1.b83c5ap-5f, 0x1.52269ap-6f, -0x1.75e1c4p-8f};
  const ScaledExp2<5> exp2(1.0f);
  const Vec one = Vec::set(1.0f), size = u.abs(), square = size * size;
  const Vec e = exp2(size * Vec::set(-2.0f * kLog2E));
  const Vec inverse = one / (one + e);
  const Vec tail = e * inverse;
  *derivative = Vec::set(4.0f) * (tail * inverse);
  const Vec far = Vec::fma(Vec::set(-2.0f), tail, one);
  Vec p = Vec::set(kNear[4]);
  for (int k = 3; k >= 0; --k) p = Vec::fma(p, square, Vec::set(kNear[k]));
  const Vec near = Vec::fma(size * square, p, size);
  return Vec::select_less(size, Vec::set(0.625f), near, far).with_sign_of(u);
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

  // Rounded, whatever is done with it: of a large row's elements only their distances matter.
  Vec z(Vec x) const {
    if (!kTransform) return x;
    Vec derivative;
    return (is_capped_ ? cap_ * tanh(x * scale_over_cap_, &derivative) : x * scale_).rounded();
  }

  // z, and dz/dx in *slope; not set where there is no transform.
  Vec z_and_slope(Vec x, Vec* slope) const {
    if (!kTransform) return x;
    *slope = scale_;
    if (!is_capped_) return (x * scale_).rounded();
    Vec derivative;
    const Vec z = (cap_ * tanh(x * scale_over_cap_, &derivative)).rounded();
    *slope = scale_ * derivative;
    return z;
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
