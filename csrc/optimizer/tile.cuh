// A tile: 256 adjacent elements of one tensor, eight for each lane of a warp, read and written as float.
//
// Which lane has which element does not matter to an update, so the layout is the one that memory likes. Packed, a lane
// has four adjacent elements at each of two places: 16 bytes of float32, 8 bytes of a 16-bit dtype, 4 bytes of codes,
// and the warp's accesses are adjacent. Scattered, for addresses that are not aligned and for the end of a tensor, a
// lane has every 32nd element, and accesses are adjacent too.
//
//   packed      (lane, j) -> j / 4 * 128 + lane * 4 + j % 4
//   scattered   (lane, j) -> j * 32 + lane, where that is below `count`
#pragma once

#include "common/packet.cuh"

namespace fastpar {
namespace device {

constexpr int kWarp = 32;
constexpr int kLaneElements = 8;
constexpr int kTileElements = kWarp * kLaneElements;
constexpr int kHalfTile = kTileElements / 2;

enum class Storage { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// What a lane has loaded, as it lies in memory: the loads of all operands are under way before the first is decoded.
using Words = uint32_t[kLaneElements];

template <bool kPacked>
__device__ inline int element_of(int lane, int j) {
  return kPacked ? j / 4 * kHalfTile + lane * 4 + j % 4 : j * kWarp + lane;
}

// ---- words ----------------------------------------------------------------------------------------------------------

template <bool kPacked>
__device__ inline void load_words4(const void* data, int64_t base, int lane, int count, Words& words) {
  const uint32_t* p = static_cast<const uint32_t*>(data) + base;
  if constexpr (kPacked) {
    const uint4 low = load_packet(p + lane * 4), high = load_packet(p + kHalfTile + lane * 4);
    words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
    words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
  } else {
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) words[j] = j * kWarp + lane < count ? __ldcs(p + j * kWarp + lane) : 0u;
  }
}

template <bool kPacked>
__device__ inline void store_words4(void* data, int64_t base, int lane, int count, const Words& words) {
  uint32_t* p = static_cast<uint32_t*>(data) + base;
  if constexpr (kPacked) {
    store_packet(p + lane * 4, make_uint4(words[0], words[1], words[2], words[3]));
    store_packet(p + kHalfTile + lane * 4, make_uint4(words[4], words[5], words[6], words[7]));
  } else {
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) {
      if (j * kWarp + lane < count) __stcs(p + j * kWarp + lane, words[j]);
    }
  }
}

// 16-bit elements: packed, two in each of words[0 .. 4); scattered, one in each word.
template <bool kPacked>
__device__ inline void load_words2(const void* data, int64_t base, int lane, int count, Words& words) {
  const uint16_t* p = static_cast<const uint16_t*>(data) + base;
  if constexpr (kPacked) {
    const uint2 low = __ldcs(reinterpret_cast<const uint2*>(p + lane * 4));
    const uint2 high = __ldcs(reinterpret_cast<const uint2*>(p + kHalfTile + lane * 4));
    words[0] = low.x, words[1] = low.y, words[2] = high.x, words[3] = high.y;
  } else {
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) words[j] = j * kWarp + lane < count ? __ldcs(p + j * kWarp + lane) : 0u;
  }
}

// `bits`: one element each, in the low half; the high half is 0.
template <bool kPacked>
__device__ inline void store_words2(void* data, int64_t base, int lane, int count, const Words& bits) {
  uint16_t* p = static_cast<uint16_t*>(data) + base;
  if constexpr (kPacked) {
    const uint2 low = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    const uint2 high = make_uint2(bits[4] | bits[5] << 16, bits[6] | bits[7] << 16);
    __stcs(reinterpret_cast<uint2*>(p + lane * 4), low);
    __stcs(reinterpret_cast<uint2*>(p + kHalfTile + lane * 4), high);
  } else {
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) {
      if (j * kWarp + lane < count) __stcs(p + j * kWarp + lane, static_cast<uint16_t>(bits[j]));
    }
  }
}

// One element of `kBits` in each word, from either layout of load_words2 (16) and load_words1 (8).
template <bool kPacked, int kBits>
__device__ inline void separate(const Words& words, Words& elements) {
  constexpr int kPerWord = 32 / kBits;
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) {
    elements[j] = kPacked ? words[j / kPerWord] >> (j % kPerWord * kBits) & ((1u << kBits) - 1u) : words[j];
  }
}

// 8-bit codes: packed, four in each of words[0] and words[1]; scattered, one in each word.
template <bool kPacked>
__device__ inline void load_words1(const void* data, int64_t base, int lane, int count, Words& words) {
  const uint8_t* p = static_cast<const uint8_t*>(data) + base;
  if constexpr (kPacked) {
    words[0] = __ldcs(reinterpret_cast<const uint32_t*>(p + lane * 4));
    words[1] = __ldcs(reinterpret_cast<const uint32_t*>(p + kHalfTile + lane * 4));
  } else {
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) words[j] = j * kWarp + lane < count ? __ldcs(p + j * kWarp + lane) : 0u;
  }
}

template <bool kPacked>
__device__ inline void store_words1(void* data, int64_t base, int lane, int count, const Words& codes) {
  uint8_t* p = static_cast<uint8_t*>(data) + base;
  if constexpr (kPacked) {
    const uint32_t low = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
    const uint32_t high = codes[4] | codes[5] << 8 | codes[6] << 16 | codes[7] << 24;
    __stcs(reinterpret_cast<uint32_t*>(p + lane * 4), low);
    __stcs(reinterpret_cast<uint32_t*>(p + kHalfTile + lane * 4), high);
  } else {
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) {
      if (j * kWarp + lane < count) __stcs(p + j * kWarp + lane, static_cast<uint8_t>(codes[j]));
    }
  }
}

// ---- floats ---------------------------------------------------------------------------------------------------------

template <bool kPacked>
__device__ inline void load_words(const void* data, Storage storage, int64_t base, int lane, int count, Words& words) {
  if (storage == Storage::kFloat32) {
    load_words4<kPacked>(data, base, lane, count, words);
  } else {
    load_words2<kPacked>(data, base, lane, count, words);
  }
}

__device__ inline float half_bits_to_float(uint32_t bits) {
  const uint16_t low = static_cast<uint16_t>(bits);
  __half half;
  memcpy(&half, &low, sizeof half);
  return __half2float(half);
}

template <bool kPacked>
__device__ inline void decode(const Words& words, Storage storage, float (&values)[kLaneElements]) {
  if (storage == Storage::kFloat32) {
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) values[j] = __uint_as_float(words[j]);
    return;
  }
  Words bits;
  separate<kPacked, 16>(words, bits);
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) {
    values[j] = storage == Storage::kBFloat16 ? __uint_as_float(bits[j] << 16) : half_bits_to_float(bits[j]);
  }
}

template <typename T>
__device__ inline uint32_t nearest_bits(float value) {
  T narrowed;
  narrow(value, &narrowed);
  uint16_t bits;
  memcpy(&bits, &narrowed, sizeof bits);
  return bits;
}

// Ties to even.
__device__ inline void round_to_nearest(Storage storage, const float (&values)[kLaneElements], Words& bits) {
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) {
    bits[j] = storage == Storage::kFloat32    ? __float_as_uint(values[j])
              : storage == Storage::kBFloat16 ? nearest_bits<__nv_bfloat16>(values[j])
                                              : nearest_bits<__half>(values[j]);
  }
}

template <bool kPacked>
__device__ inline void store_bits(void* data, Storage storage, int64_t base, int lane, int count, const Words& bits) {
  if (storage == Storage::kFloat32) {
    store_words4<kPacked>(data, base, lane, count, bits);
  } else {
    store_words2<kPacked>(data, base, lane, count, bits);
  }
}

}  // namespace device
}  // namespace fastpar
