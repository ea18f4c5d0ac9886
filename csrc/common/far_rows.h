// Note: far rows. The normaliser of a row is kept as one double, lse = maximum + log_sum. Beside a maximum of 1e12 a
// double has no room for log_sum, and beside 1e17 none at all: equal logits would have probability 1 each. But the
// maximum of float32 logits, as all kernels use it, is a float, and leaves the lower 29 bits of a double free. So from
// |maximum| = 2^30 on log_sum is stored in these bits: multiplied by 2^(k - 30), where 2^k <= |maximum| < 2^(k + 1).
// It is at most 32, so that less than half of a float's last place is added, and rounding to float gives the maximum
// back, which is what the true lse rounds to as well. Below 2^30 nothing changes, and the error of log_sum is at most
// 2^-23 everywhere. float64 logits have no bits to spare and no far rows. The same in
// fastpar/contracts/cross_entropy.py, in cross_entropy/row.cuh and in kernels/triton/cross_entropy_row.py.
//
// In an anonymous namespace, and in plain arithmetic, for the reason given in simd.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace fastpar {
namespace {

constexpr double kFarMaximum = 0x1p30;

inline bool is_far(double maximum) {
  const double size = __builtin_fabs(maximum);
  return size >= kFarMaximum && size < __builtin_inf();
}

// 2^(k - 30) for 2^k <= |maximum| < 2^(k + 1).
inline double far_unit(double maximum) {
  uint64_t bits;
  memcpy(&bits, &maximum, sizeof bits);
  bits = (bits & 0x7ff0000000000000u) - (uint64_t{30} << 52);
  double unit;
  memcpy(&unit, &bits, sizeof unit);
  return unit;
}

// `maximum` has to be a float where it is far.
inline double join_lse(double maximum, double log_sum) {
  return is_far(maximum) ? maximum + log_sum * far_unit(maximum) : maximum + log_sum;
}

// lse = high + low, high being a float.
struct SplitLse {
  double high, low;

  explicit SplitLse(double lse) : high(static_cast<double>(static_cast<float>(lse))), low(lse - high) {
    if (is_far(high)) low /= far_unit(high);
  }
  double below(double z) const { return (z - high) - low; }
};

}  // namespace
}  // namespace fastpar
