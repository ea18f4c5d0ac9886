// What every .cuh includes: CUDA's words, and the few that need PTX or differ between the device and its emulation.
//
// Compiled by nvcc this is the device. The emulation (csrc/emulation) compiles the same kernels with g++ and runs them
// on the CPU, one fiber per thread; every function below then has a twin with the same result. Its build puts the
// header that defines FASTPAR_EMULATION before every file, as nvcc does with its own. PTX appears in this file only.
#pragma once

#if !defined(FASTPAR_EMULATION)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include <cstddef>
#include <cstdint>

#include "common/checks.h"

// ---- shared memory --------------------------------------------------------------------------------------------------

// One variable, or an array, per block; and the block's dynamic shared memory.
#if defined(FASTPAR_EMULATION)
#define FASTPAR_SHARED(type, name)  \
  static const char name##_key = 0; \
  auto& name = *static_cast<type*>(::fastpar::emulation::static_shared(&name##_key, sizeof(type), alignof(type)))
#define FASTPAR_SHARED_ARRAY(type, name, count) \
  static const char name##_key = 0;             \
  auto& name = *static_cast<type(*)[count]>(    \
      ::fastpar::emulation::static_shared(&name##_key, sizeof(type[count]), alignof(type)))
#define FASTPAR_DYNAMIC_SHARED(name) unsigned char* const name = ::fastpar::emulation::dynamic_shared()
#else
#define FASTPAR_SHARED(type, name) __shared__ type name
#define FASTPAR_SHARED_ARRAY(type, name, count) __shared__ type name[count]
#define FASTPAR_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

namespace fastpar {
namespace device {

// ---- arithmetic -----------------------------------------------------------------------------------------------------

// 2^x to 2 units in the last place; results below the smallest normal number are 0.
__device__ inline float exp2_approx(float x) {
#if defined(FASTPAR_EMULATION)
  const float result = exp2f(x);
  return result < 0x1p-126f ? 0.0f : result;  // false for NaN
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// ---- 16 bytes at a time ---------------------------------------------------------------------------------------------

// A packet is what one memory instruction moves: 4 floats, 8 bfloat16 or float16, 2 doubles.
constexpr int kPacketBytes = 16;

template <typename T>
constexpr int kPacketSize = kPacketBytes / static_cast<int>(sizeof(T));

// Of memory that is used once, or by this thread alone: past the first-level cache.
__device__ inline uint4 load_packet(const void* address) {
#if defined(FASTPAR_EMULATION)
  return __ldg(static_cast<const uint4*>(address));
#else
  uint4 packet;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
               : "l"(address)
               : "memory");
  return packet;
#endif
}

__device__ inline void store_packet(void* address, uint4 packet) { __stcs(static_cast<uint4*>(address), packet); }

// ---- thread block clusters ------------------------------------------------------------------------------------------

__device__ inline unsigned cluster_rank() {
#if defined(FASTPAR_EMULATION)
  return emulation::position().cluster_rank;
#else
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#endif
}

__device__ inline unsigned cluster_size() {
#if defined(FASTPAR_EMULATION)
  return emulation::position().cluster_size;
#else
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#endif
}

// The barrier of all threads of the cluster, in its two halves: what a thread wrote before it arrives is seen by those
// that have waited. The memory of a peer may be touched once the cluster has met, and until the peer has ended.
#if defined(FASTPAR_EMULATION)
inline void cluster_arrive(FASTPAR_EMULATION_PLACE) { emulation::cluster_arrive({file, line}); }
inline void cluster_wait(FASTPAR_EMULATION_PLACE) { emulation::cluster_wait({file, line}); }
#else
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
#endif

// Where `address`, in the shared memory of this block, is in the block of that rank.
template <typename T>
__device__ inline T* map_to_peer(T* address, unsigned rank) {
#if defined(FASTPAR_EMULATION)
  return static_cast<T*>(emulation::map_to_peer(address, rank));
#else
  uint64_t mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(reinterpret_cast<uint64_t>(address)), "r"(rank));
  return reinterpret_cast<T*>(mapped);
#endif
}

// ---- launch ---------------------------------------------------------------------------------------------------------

// What a block may have, and what it may have without asking the runtime first (compute capability 9.0).
constexpr size_t kMaxSharedBytes = size_t{227} << 10;
constexpr size_t kPlainSharedBytes = size_t{48} << 10;
constexpr unsigned kPortableClusterSize = 8;

struct LaunchConfig {
  int64_t blocks;
  unsigned threads;
  size_t shared_bytes = 0;  // dynamic
  unsigned cluster = 1;     // blocks; divides `blocks`
};

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const LaunchConfig& config, cudaStream_t stream,
            const Arguments&... arguments) {
  FASTPAR_CHECK(config.blocks > 0 && config.blocks <= 0x7fffffff, "cannot launch ", config.blocks, " blocks");
#if defined(FASTPAR_EMULATION)
  (void)stream;
  emulation::LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(config.blocks));
  shape.block = dim3(config.threads);
  shape.shared_bytes = config.shared_bytes;
  shape.cluster = config.cluster;
  emulation::run_grid(shape, [&] { kernel(arguments...); });
#else
  const auto check = [](cudaError_t status, const char* what) {
    FASTPAR_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
  };
  const void* function = reinterpret_cast<const void*>(kernel);
  if (config.shared_bytes > kPlainSharedBytes) {
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(config.shared_bytes)),
          "allowing a block more shared memory");
  }
  if (config.cluster > kPortableClusterSize) {
    check(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "allowing a cluster of 16 blocks");
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = config.cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t launch_config{};
  launch_config.gridDim = dim3(static_cast<unsigned>(config.blocks));
  launch_config.blockDim = dim3(config.threads);
  launch_config.dynamicSmemBytes = config.shared_bytes;
  launch_config.stream = stream;
  launch_config.attrs = &attribute;
  launch_config.numAttrs = config.cluster > 1 ? 1 : 0;
  check(cudaLaunchKernelEx(&launch_config, kernel, static_cast<Parameters>(arguments)...), "launching a kernel");
#endif
}

}  // namespace device
}  // namespace fastpar
