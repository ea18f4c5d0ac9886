// Floating-point numbers as unsigned integers of the same order: what selects by value works on these.
//
//   -inf < ... < -1 < ... < 0 = -0 < ... < +inf < NaN        every NaN is one number, as it is for torch.topk
//
// An example in bfloat16: -1 (0xbf80) is 0x407f, 0 is 0x8000, 1 (0x3f80) is 0xbf80.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/dtypes.h"
#include "common/simd.h"

namespace fastpar {
namespace {

// The sign is flipped, and for negative numbers all other bits as well.
template <typename U>
inline U ordered_bits(U bits) {
  constexpr U kSign = U(1) << (8 * sizeof(U) - 1);
  return bits & kSign ? static_cast<U>(~bits) : static_cast<U>(bits | kSign);
}

inline uint16_t ordered_key(bfloat16 x) {
  const uint16_t magnitude = x.bits & 0x7fffu;
  if (magnitude > 0x7f80u) return 0xffffu;
  return magnitude == 0 ? 0x8000u : ordered_bits(x.bits);
}

inline uint16_t ordered_key(float16 x) {
  const uint16_t magnitude = x.bits & 0x7fffu;
  if (magnitude > 0x7c00u) return 0xffffu;
  return magnitude == 0 ? 0x8000u : ordered_bits(x.bits);
}

inline uint32_t ordered_key(float x) {
  if (x != x) return 0xffffffffu;
  return x == 0.0f ? 0x80000000u : ordered_bits(float_bits(x));
}

inline uint64_t ordered_key(double x) {
  if (x != x) return ~uint64_t{0};
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return x == 0.0 ? uint64_t{1} << 63 : ordered_bits(bits);
}

inline double to_wide(double x) { return x; }
template <typename T>
double to_wide(T x) {
  return static_cast<double>(to_float(x));
}

}  // namespace
}  // namespace fastpar
