// How numbers are stored in fewer bits, on the device; fastpar/contracts/optimizer_formats.py defines and explains it.
#pragma once

#include "optimizer/optimizer.h"
#include "optimizer/tile.cuh"

namespace fastpar {
namespace device {

// ---- random bits for stochastic rounding ----------------------------------------------------------------------------

// splitmix64 of optimizer.h, which is a function of the host.
__device__ inline uint64_t splitmix(uint64_t z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

__device__ inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Of the elements whose index has the same upper half; `key` is OptimizerTensor::rounding_key.
struct RoundingKeys {
  uint32_t index_high, k0, k1, k2;

  __device__ static inline RoundingKeys of(uint64_t key, uint32_t index_high) {
    const uint64_t k = splitmix(key + index_high);
    return {index_high, static_cast<uint32_t>(k), static_cast<uint32_t>(k >> 32), static_cast<uint32_t>(splitmix(k))};
  }
};

// 16 random bits each for the parameter (.x), the first (.y) and the second state (.z) of an element.
__device__ inline uint3 random_bits(uint64_t key, const RoundingKeys& near, uint64_t index) {
  const uint32_t high = static_cast<uint32_t>(index >> 32);
  const RoundingKeys keys = high == near.index_high ? near : RoundingKeys::of(key, high);
  const uint32_t a = mix(mix(static_cast<uint32_t>(index) ^ keys.k0) + keys.k1);
  return {a & 0xffffu, a >> 16, mix(a ^ keys.k2) & 0xffffu};
}

// A float that bfloat16 holds.
__device__ inline float round_stochastically(float x, uint32_t random) {
  const uint32_t bits = __float_as_uint(x);
  return (bits & 0x7fffffffu) > 0x7f800000u ? x : __uint_as_float((bits + random) & 0xffff0000u);
}

// ---- bfloat16 and a remainder ---------------------------------------------------------------------------------------

__device__ inline float join_master(uint32_t param, uint32_t remainder) {
  const int32_t low = static_cast<int16_t>(remainder);  // its sign counts
  return __uint_as_float((param << 16) + static_cast<uint32_t>(low));
}

__device__ inline void split_master(float master, uint32_t* param, uint32_t* remainder) {
  uint32_t bits = __float_as_uint(master);
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
  *param = (bits + 0x8000u) >> 16;
  *remainder = bits & 0xffffu;
}

// ---- 8-bit blocks ---------------------------------------------------------------------------------------------------

static_assert(kTileElements == kOptimizerBlock, "a tile is one block of 8-bit states");

// A code is exponent and 3 bits of mantissa, less this, so that 1 has the largest code.
__device__ inline uint32_t largest_code(bool is_signed) { return is_signed ? 127u : 255u; }
__device__ inline uint32_t lowest_code(bool is_signed) { return 1016u - largest_code(is_signed); }

__device__ inline float decode_block(uint32_t code, float scale, bool is_signed) {
  const uint32_t size = is_signed ? code & 127u : code;
  const float magnitude = size == 0u ? 0.0f : __uint_as_float((size + lowest_code(is_signed)) << 20);
  return __fmul_rn(is_signed && code >= 128u ? -magnitude : magnitude, scale);
}

__device__ inline uint32_t encode_block(float x, float inverse_scale, bool is_signed) {
  const uint32_t ratio = __float_as_uint(__fmul_rn(fabsf(x), inverse_scale)) & 0x7fffffffu;  // NaN has no sign here
  const uint32_t rounded = (ratio + 0x7ffffu + ((ratio >> 20) & 1u)) >> 20;
  const uint32_t lowest = lowest_code(is_signed), most = largest_code(is_signed);
  const uint32_t above = rounded > lowest ? rounded - lowest : 0u;
  const uint32_t code = above < most ? above : most;
  if (is_signed) return code | __float_as_uint(x) >> 31 << 7;
  return ratio != 0u && code == 0u ? 1u : code;
}

// Of the largest magnitude in the block, as bits, of which NaN has the most.
__device__ inline float scale_of_block(uint32_t largest) {
  if (largest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  return fmaxf(__uint_as_float(largest), 0x1p-126f);
}

// The largest of the warp, on every lane.
__device__ inline uint32_t warp_maximum(uint32_t x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, x, distance);
    x = x > other ? x : other;
  }
  return x;
}

}  // namespace device
}  // namespace fastpar
