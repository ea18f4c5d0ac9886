// Host twins of CUDA's built-in types: vectors with the device's alignment, and the two 16-bit floats with its
// rounding.
#pragma once

#include <cstdint>
#include <cstring>

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(16) longlong2 {
  long long x, y;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

namespace fastpar {
namespace emulation {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace emulation
}  // namespace fastpar

inline float __bfloat162float(__nv_bfloat16 x) { return fastpar::emulation::float_of(uint32_t{x.bits} << 16); }

// To nearest, ties to even; every NaN becomes the one that the device makes.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = fastpar::emulation::bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline float __half2float(__half x) {
  const uint32_t sign = (uint32_t{x.bits} & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 0x3ffu;
  if (exponent == 31) return fastpar::emulation::float_of(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return fastpar::emulation::float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -tiny : tiny;
}

inline __half __float2half_rn(float x) {
  const uint32_t bits = fastpar::emulation::bits_of(x);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the multiples of 2^-24 in the lowest bits, rounded
    const uint32_t rounded = fastpar::emulation::bits_of(fastpar::emulation::float_of(magnitude) + 0.5f) - 0x3f000000u;
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {__bfloat162float(x.x), __bfloat162float(x.y)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
