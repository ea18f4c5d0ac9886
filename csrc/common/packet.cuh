// The elements of a packet: 16 bytes of float32, bfloat16, float16 or float64, as the floats they are computed in.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/device.cuh"

namespace fastpar {
namespace device {

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline double widen(double x) { return x; }

__device__ inline void narrow(float x, float* out) { *out = x; }
__device__ inline void narrow(float x, __nv_bfloat16* out) { *out = __float2bfloat16_rn(x); }
__device__ inline void narrow(float x, __half* out) { *out = __float2half_rn(x); }
__device__ inline void narrow(double x, double* out) { *out = x; }

// C: the dtype that T is computed in.
template <typename T>
struct ComputeOf {
  using Type = float;
};
template <>
struct ComputeOf<double> {
  using Type = double;
};
template <typename T>
using Compute = typename ComputeOf<T>::Type;

__device__ inline void widen_pair(uint32_t word, const __nv_bfloat16*, float* out) {
  out[0] = __uint_as_float(word << 16);
  out[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ inline void widen_pair(uint32_t word, const __half*, float* out) {
  __half2 pair;
  memcpy(&pair, &word, sizeof word);
  const float2 both = __half22float2(pair);
  out[0] = both.x;
  out[1] = both.y;
}
__device__ inline uint32_t narrow_pair(float x, float y, const __nv_bfloat16*) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}
__device__ inline uint32_t narrow_pair(float x, float y, const __half*) {
  const __half2 pair = __floats2half2_rn(x, y);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

template <typename T, typename C>
__device__ inline void unpack(const uint4& packet, C* out) {
  if constexpr (sizeof(T) == 2) {
    const T* tag = nullptr;
    widen_pair(packet.x, tag, out);
    widen_pair(packet.y, tag, out + 2);
    widen_pair(packet.z, tag, out + 4);
    widen_pair(packet.w, tag, out + 6);
  } else {
    memcpy(out, &packet, sizeof packet);
  }
}

template <typename T, typename C>
__device__ inline uint4 pack(const C* values) {
  uint4 packet;
  if constexpr (sizeof(T) == 2) {
    const T* tag = nullptr;
    packet.x = narrow_pair(values[0], values[1], tag);
    packet.y = narrow_pair(values[2], values[3], tag);
    packet.z = narrow_pair(values[4], values[5], tag);
    packet.w = narrow_pair(values[6], values[7], tag);
  } else {
    memcpy(&packet, values, sizeof packet);
  }
  return packet;
}

}  // namespace device
}  // namespace fastpar
