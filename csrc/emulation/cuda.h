// CUDA's words for g++. The build of the emulation puts this header before every file, in place of the toolkit's.
//
// Functions take the place of the call as default arguments, so that a report can name the line of the kernel.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulation/late_stores.h"
#include "emulation/machine.h"
#include "emulation/types.h"

#define FASTPAR_EMULATION 1

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// A variable of the block cannot be made of g++'s storage classes, and a cluster size that is part of the kernel cannot
// be seen from outside it.
#define __shared__ _Pragma("GCC error \"declare shared memory with a FASTPAR_SHARED macro (csrc/common/device.cuh)\"")
#define __cluster_dims__(...) _Pragma("GCC error \"give the cluster size at launch (LaunchConfig::cluster)\"")

#define threadIdx (::fastpar::emulation::position().thread)
#define blockIdx (::fastpar::emulation::position().block)
#define blockDim (::fastpar::emulation::position().block_dim)
#define gridDim (::fastpar::emulation::position().grid_dim)
constexpr int warpSize = 32;

inline int min(int x, int y) { return x < y ? x : y; }

using cudaStream_t = fastpar::emulation::Stream*;  // null: run at once, and wait

#define FASTPAR_EMULATION_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- barriers and fences --------------------------------------------------------------------------------------------

inline void __syncthreads(FASTPAR_EMULATION_PLACE) { fastpar::emulation::sync_threads({file, line}); }
inline void __nanosleep(unsigned, FASTPAR_EMULATION_PLACE) { fastpar::emulation::sleep({file, line}); }
inline void __threadfence() { fastpar::emulation::land_released(); }
inline void __threadfence_block() {}  // one thread runs at a time, and sees what the others of its block wrote
inline void __threadfence_system() { fastpar::emulation::land_released(); }

inline void __syncwarp(unsigned mask = 0xffffffffu, FASTPAR_EMULATION_PLACE) {
  fastpar::emulation::warp_operation(fastpar::emulation::WarpOperation::kSync, mask, 0, 0, {file, line});
}

// ---- warp-wide operations -------------------------------------------------------------------------------------------

namespace fastpar {
namespace emulation {

inline unsigned lane() {
  const Position& p = position();
  return (p.thread.x + p.block_dim.x * (p.thread.y + p.block_dim.y * p.thread.z)) % kWarpSize;
}

template <typename T>
T shuffle(unsigned mask, T value, unsigned source, Place place) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves up to 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_operation(WarpOperation::kShuffle, mask, bits, source, place);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emulation
}  // namespace fastpar

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, FASTPAR_EMULATION_PLACE) {
  const unsigned lane = fastpar::emulation::lane(), segment = lane - lane % width;
  return fastpar::emulation::shuffle(mask, value, segment + static_cast<unsigned>(source) % width, {file, line});
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, FASTPAR_EMULATION_PLACE) {
  const unsigned lane = fastpar::emulation::lane(), within = lane % width;
  return fastpar::emulation::shuffle(mask, value, within >= distance ? lane - distance : lane, {file, line});
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, FASTPAR_EMULATION_PLACE) {
  const unsigned lane = fastpar::emulation::lane(), within = lane % width;
  const bool is_inside = within + distance < static_cast<unsigned>(width);
  return fastpar::emulation::shuffle(mask, value, is_inside ? lane + distance : lane, {file, line});
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, FASTPAR_EMULATION_PLACE) {
  const unsigned lane = fastpar::emulation::lane(), other = lane ^ static_cast<unsigned>(distance);
  const bool is_inside = other / width <= lane / width;  // lower segments can be read, higher ones cannot
  return fastpar::emulation::shuffle(mask, value, is_inside ? other : lane, {file, line});
}

inline int __reduce_max_sync(unsigned mask, int value, FASTPAR_EMULATION_PLACE) {  // of whole warps only
  for (int distance = 16; distance > 0; distance /= 2) {
    const int other = __shfl_xor_sync(mask, value, distance, 32, file, line);
    value = other > value ? other : value;
  }
  return value;
}

inline unsigned __ballot_sync(unsigned mask, int predicate, FASTPAR_EMULATION_PLACE) {
  using fastpar::emulation::WarpOperation;
  return static_cast<unsigned>(
      fastpar::emulation::warp_operation(WarpOperation::kBallot, mask, predicate != 0, 0, {file, line}));
}

inline int __all_sync(unsigned mask, int predicate, FASTPAR_EMULATION_PLACE) {
  using fastpar::emulation::WarpOperation;
  return static_cast<int>(
      fastpar::emulation::warp_operation(WarpOperation::kAll, mask, predicate != 0, 0, {file, line}));
}

inline int __any_sync(unsigned mask, int predicate, FASTPAR_EMULATION_PLACE) {
  using fastpar::emulation::WarpOperation;
  return static_cast<int>(
      fastpar::emulation::warp_operation(WarpOperation::kAny, mask, predicate != 0, 0, {file, line}));
}

// The device gives the lanes that happen to run together; here these are all that have not ended.
inline unsigned __activemask() { return fastpar::emulation::live_lanes(); }

// ---- memory ---------------------------------------------------------------------------------------------------------

template <typename T>
T __ldg(const T* address) {
  fastpar::emulation::check_alignment(address, alignof(T), "load");
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return __ldg(address);
}
template <typename T>
T __ldcg(const T* address) {
  return __ldg(address);
}
template <typename T>
void __stcs(T* address, T value) {
  fastpar::emulation::check_alignment(address, alignof(T), "store");
  *address = value;
}
template <typename T>
void __stcg(T* address, T value) {
  __stcs(address, value);
}

// One thread runs at a time, and switches only where it waits: these are atomic as they stand.
namespace fastpar {
namespace emulation {

template <typename T>
struct Identity {
  using Type = T;
};
template <typename T>
using SameAs = typename Identity<T>::Type;  // a parameter that the type is not deduced from

}  // namespace emulation
}  // namespace fastpar

template <typename T>
T atomicExch(T* address, fastpar::emulation::SameAs<T> value) {
  const T old = *address;
  *address = value;
  return old;
}
template <typename T>
T atomicAdd(T* address, fastpar::emulation::SameAs<T> value) {
  return atomicExch(address, static_cast<T>(*address + value));
}
template <typename T>
T atomicMax(T* address, fastpar::emulation::SameAs<T> value) {
  return atomicExch(address, *address < value ? value : *address);
}
template <typename T>
T atomicMin(T* address, fastpar::emulation::SameAs<T> value) {
  return atomicExch(address, value < *address ? value : *address);
}
template <typename T>
T atomicCAS(T* address, fastpar::emulation::SameAs<T> expected, fastpar::emulation::SameAs<T> value) {
  return atomicExch(address, *address == expected ? value : *address);
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline float __int_as_float(int bits) { return fastpar::emulation::float_of(static_cast<uint32_t>(bits)); }
inline float __uint_as_float(unsigned bits) { return fastpar::emulation::float_of(bits); }
inline int __float_as_int(float x) { return static_cast<int>(fastpar::emulation::bits_of(x)); }
inline unsigned __float_as_uint(float x) { return fastpar::emulation::bits_of(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
