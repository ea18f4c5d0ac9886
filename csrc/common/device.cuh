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

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

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

// ---- copies from global to shared memory, behind the back of the thread that asks for them --------------------------
//
// They hold no registers on their way. A thread commits what it has asked for as one batch, and waits until no more
// than its last `kBatches` batches are on their way; it then sees what it has copied itself, without a barrier.

__device__ inline void copy_packet_async(void* shared, const void* global) {
#if defined(FASTPAR_EMULATION)
  emulation::check_alignment(shared, kPacketBytes, "copy");
  emulation::check_alignment(global, kPacketBytes, "copy");
  emulation::copy_async(shared, global, kPacketBytes);
#else
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#endif
}

__device__ inline void commit_copies() {
#if defined(FASTPAR_EMULATION)
  emulation::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kBatches>
__device__ inline void wait_for_copies() {
#if defined(FASTPAR_EMULATION)
  emulation::wait_for_copies(kBatches);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kBatches) : "memory");
#endif
}

// ---- memory that other ranks write and read -------------------------------------------------------------------------
//
// "System" is the scope of the memory model that holds all devices of the host. A weak store to a peer is seen by it
// once it has acquired what this thread, or after a barrier another of its block, has released since.

__device__ inline uint64_t load_acquire_system(const uint64_t* address) {
#if defined(FASTPAR_EMULATION)
  emulation::may_pause({__FILE__, __LINE__});
  return __ldg(address);
#else
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
#endif
}

__device__ inline void store_release_system(uint64_t* address, uint64_t value) {
#if defined(FASTPAR_EMULATION)
  emulation::may_pause({__FILE__, __LINE__});
  emulation::land_released();
  __stcg(address, value);
#else
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
#endif
}

// A weak store of 16 bytes, as of any other memory.
__device__ inline void store_peer_packet(void* address, uint4 packet) {
#if defined(FASTPAR_EMULATION)
  emulation::may_pause({__FILE__, __LINE__});
  emulation::check_alignment(address, sizeof packet, "store");
  emulation::store_late(address, &packet, sizeof packet);
#else
  __stcg(static_cast<uint4*>(address), packet);
#endif
}

// 16 bytes that a peer polls without a flag, as four words: each is seen whole, at some time, in any order.
__device__ inline void store_relaxed_system(void* address, uint4 packet) {
#if defined(FASTPAR_EMULATION)
  emulation::may_pause({__FILE__, __LINE__});
  emulation::check_alignment(address, sizeof packet, "store");
  const unsigned words[] = {packet.x, packet.y, packet.z, packet.w};
  for (int w = 0; w < 4; ++w) emulation::store_late(static_cast<unsigned*>(address) + w, &words[w], sizeof words[w]);
#else
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(packet.x), "r"(packet.y),
               "r"(packet.z), "r"(packet.w)
               : "memory");
#endif
}

__device__ inline uint4 load_relaxed_system(const void* address) {
#if defined(FASTPAR_EMULATION)
  emulation::may_pause({__FILE__, __LINE__});
  return __ldg(static_cast<const uint4*>(address));
#else
  uint4 packet;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
               : "l"(address)
               : "memory");
  return packet;
#endif
}

// Multicast addresses: one stands for the same place in the memory of every rank of a group, behind NVLink's switch.
// multimem_add: the packets there, added by the switch: float32 arithmetic for all types, its own order of the ranks,
// rounded once. The emulation adds in rank order.
#if defined(FASTPAR_EMULATION)
template <typename T>
uint4 multimem_add(const void* address, float (*widen)(T), T (*narrow)(float)) {
  constexpr int kCount = kPacketSize<T>;
  float sum[kCount] = {};
  for (const unsigned char* rank : emulation::multicast_addresses(address)) {
    for (int j = 0; j < kCount; ++j) sum[j] += widen(__ldg(reinterpret_cast<const T*>(rank) + j));
  }
  T rounded[kCount];
  for (int j = 0; j < kCount; ++j) rounded[j] = narrow(sum[j]);
  uint4 packet;
  std::memcpy(&packet, rounded, sizeof packet);
  return packet;
}
inline uint4 multimem_add(const void* address, const float*) {
  return multimem_add<float>(address, [](float x) { return x; }, [](float x) { return x; });
}
inline uint4 multimem_add(const void* address, const __nv_bfloat16*) {
  return multimem_add<__nv_bfloat16>(address, __bfloat162float, __float2bfloat16_rn);
}
inline uint4 multimem_add(const void* address, const __half*) {
  return multimem_add<__half>(address, __half2float, __float2half_rn);
}
inline void multimem_store(void* address, uint4 packet) {
  emulation::may_pause({__FILE__, __LINE__});
  for (unsigned char* rank : emulation::multicast_addresses(address)) {
    emulation::check_alignment(rank, sizeof packet, "store");
    emulation::store_late(rank, &packet, sizeof packet);
  }
}
#else
#define FASTPAR_MULTIMEM_ADD(type, variant)                                                     \
  __device__ inline uint4 multimem_add(const void* address, const type*) {                      \
    uint4 packet;                                                                               \
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add" variant " {%0, %1, %2, %3}, [%4];" \
                 : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)               \
                 : "l"(address)                                                                 \
                 : "memory");                                                                   \
    return packet;                                                                              \
  }
FASTPAR_MULTIMEM_ADD(float, ".v4.f32")
FASTPAR_MULTIMEM_ADD(__nv_bfloat16, ".acc::f32.v4.bf16x2")
FASTPAR_MULTIMEM_ADD(__half, ".acc::f32.v4.f16x2")
#undef FASTPAR_MULTIMEM_ADD
__device__ inline void multimem_store(void* address, uint4 packet) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(packet.x),
               "r"(packet.y), "r"(packet.z), "r"(packet.w)
               : "memory");
}
#endif

// Between two looks at what another thread may have written.
#if defined(FASTPAR_EMULATION)
inline void pause_spinning(FASTPAR_EMULATION_PLACE) { emulation::sleep({file, line}); }
#else
__device__ inline void pause_spinning() {}
#endif

// A clock that all of a device share; it ticks every 32 ns to 1 us.
__device__ inline uint64_t clock_nanoseconds() {
#if defined(FASTPAR_EMULATION)
  return emulation::clock_nanoseconds();
#else
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#endif
}

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

// ---- barriers that count the bytes sent to a block ------------------------------------------------------------------
//
// In shared memory. A phase ends when a thread of the block has said how many bytes it expects and as many have
// arrived; the first is phase 0. What was sent is then seen by those that have waited. The sender passes no fence: a
// release to the cluster would wait for everything the thread has stored, to global memory too.

#if defined(FASTPAR_EMULATION)
struct ByteBarrier {
  int32_t missing;
  bool is_expecting;
  uint8_t phase;  // modulo 2
};

inline void settle(ByteBarrier* barrier) {
  if (!barrier->is_expecting || barrier->missing != 0) return;
  barrier->is_expecting = false;
  barrier->phase ^= 1;
}
inline void init_byte_barrier(ByteBarrier* barrier) { *barrier = {0, false, 0}; }
inline void expect_bytes(ByteBarrier* barrier, uint32_t bytes) {
  if (barrier->is_expecting) throw emulation::Error("a barrier is told twice in one phase how many bytes to expect");
  barrier->missing += static_cast<int32_t>(bytes);
  barrier->is_expecting = true;
  settle(barrier);
}
inline void send_packet(void* to, uint4 packet, ByteBarrier* barrier, unsigned rank) {
  emulation::check_alignment(to, sizeof packet, "store");
  *static_cast<uint4*>(map_to_peer(to, rank)) = packet;
  ByteBarrier* const peer = map_to_peer(barrier, rank);
  peer->missing -= kPacketBytes;
  settle(peer);
}
inline void copy_bytes_async(void* shared, const void* global, uint32_t bytes, ByteBarrier* barrier) {
  emulation::copy_bulk_async(shared, global, bytes, barrier);
}
inline void wait_for_bytes(ByteBarrier* barrier, unsigned phase, FASTPAR_EMULATION_PLACE) {
  while (barrier->phase == phase % 2) {
    const size_t landed = emulation::land_bulk_copies(barrier);
    if (landed > 0 && static_cast<int64_t>(landed) > barrier->missing) {
      throw emulation::Error("bulk copies of " + std::to_string(landed) + " bytes arrive at a barrier that expects " +
                             std::to_string(barrier->missing));
    }
    barrier->missing -= static_cast<int32_t>(landed);
    settle(barrier);
    if (landed == 0) emulation::sleep({file, line});
  }
}
#else
struct ByteBarrier {
  uint64_t state;
};

__device__ inline uint32_t shared_address(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}
__device__ inline uint32_t peer_address(const void* address, unsigned rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared_address(address)), "r"(rank));
  return mapped;
}

// By one thread, before the block meets, or the cluster where its peers send to it.
__device__ inline void init_byte_barrier(ByteBarrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void expect_bytes(ByteBarrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// To the same place in the block of that rank, and counted by its barrier.
__device__ inline void send_packet(void* to, uint4 packet, ByteBarrier* barrier, unsigned rank) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   peer_address(to, rank)),
               "r"(packet.x), "r"(packet.y), "r"(packet.z), "r"(packet.w), "r"(peer_address(barrier, rank))
               : "memory");
}
// From global to shared memory by one instruction of one thread; addresses and `bytes`, below 2^20, are multiples of
// 16. Who read or wrote `shared` before has met the thread at a barrier since.
__device__ inline void copy_bytes_async(void* shared, const void* global, uint32_t bytes, ByteBarrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// Until that phase has ended; the one after it has not.
__device__ inline void wait_for_bytes(ByteBarrier* barrier, unsigned phase) {
  uint32_t has_ended;
  do {
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n"
        "}"
        : "=r"(has_ended)
        : "r"(shared_address(barrier)), "r"(phase % 2)
        : "memory");
  } while (has_ended == 0);
}
#endif

// ---- launch ---------------------------------------------------------------------------------------------------------

// Shared memory of a block, static and dynamic together: at most, and without asking the runtime first (compute
// capability 9.0). Then what the static part of any kernel here may come to, which tests/gpu/test_cuda_build.py checks.
constexpr size_t kMaxSharedBytes = size_t{227} << 10;
constexpr size_t kPlainSharedBytes = size_t{48} << 10;
constexpr size_t kMaxStaticBytes = size_t{6} << 10;
constexpr unsigned kPortableClusterSize = 8;

// What to ask for before a launch with so much dynamic shared memory; 0: nothing. It is one number, not the launch's: a
// kernel keeps what was asked for last, and two host threads may launch the same one with different sizes.
constexpr size_t shared_bytes_to_allow(size_t shared_bytes) {
  return shared_bytes + kMaxStaticBytes > kPlainSharedBytes ? kMaxSharedBytes - kMaxStaticBytes : 0;
}

struct LaunchConfig {
  int64_t blocks;
  unsigned threads;
  size_t shared_bytes = 0;      // dynamic
  unsigned cluster = 1;         // blocks; divides `blocks`
  bool is_cooperative = false;  // its blocks wait for each other: all are resident at once, or the launch fails
};

#if defined(FASTPAR_EMULATION)
inline emulation::LaunchShape shape_of(const LaunchConfig& config) {
  emulation::LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(config.blocks));
  shape.block = dim3(config.threads);
  shape.shared_bytes = config.shared_bytes;
  shape.static_bytes = kMaxStaticBytes;
  shape.allowed_shared_bytes = shared_bytes_to_allow(config.shared_bytes);
  shape.cluster = config.cluster;
  shape.is_cooperative = config.is_cooperative;
  return shape;
}
#else
inline void check_cuda(cudaError_t status, const char* what) {
  FASTPAR_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}
#endif

// How many blocks of `threads` threads the current device has room for at once, if it runs nothing else.
template <typename... Parameters>
int64_t resident_blocks(void (*kernel)(Parameters...), unsigned threads) {
#if defined(FASTPAR_EMULATION)
  return int64_t{emulation::blocks_per_multiprocessor(shape_of({1, threads}))} * emulation::device().multiprocessors;
#else
  int device = 0, multiprocessors = 0, blocks = 0;
  check_cuda(cudaGetDevice(&device), "finding the current device");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "counting multiprocessors");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(threads), 0),
             "finding the occupancy of a kernel");
  return int64_t{blocks} * multiprocessors;
#endif
}

#if !defined(FASTPAR_EMULATION)
// What a launch of more shared memory, or of larger clusters, than every device has needs to be allowed first.
inline void allow(const void* kernel, const LaunchConfig& config) {
  if (const size_t bytes = shared_bytes_to_allow(config.shared_bytes); bytes > 0) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
               "allowing a block more shared memory");
  }
  if (config.cluster > kPortableClusterSize) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "allowing a cluster of 16 blocks");
  }
}

// The attributes of a launch, and the memory that holds them.
struct LaunchAttributes {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};

  LaunchAttributes(const LaunchConfig& launch, cudaStream_t stream) {
    if (launch.cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = launch.cluster;
      attribute.val.clusterDim.y = 1;
      attribute.val.clusterDim.z = 1;
    }
    if (launch.is_cooperative) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    }
    config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
    config.blockDim = dim3(launch.threads);
    config.dynamicSmemBytes = launch.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
  }
  LaunchAttributes(const LaunchAttributes&) = delete;
  LaunchAttributes& operator=(const LaunchAttributes&) = delete;
};
#endif

// How many clusters of such a launch the current device has room for at once, if it runs nothing else; at least 1. The
// runtime takes microseconds to find out, and is asked once a kernel, configuration and device.
template <typename... Parameters>
int64_t resident_clusters(void (*kernel)(Parameters...), const LaunchConfig& config) {
#if defined(FASTPAR_EMULATION)
  const int64_t per_processor = emulation::blocks_per_multiprocessor(shape_of(config));
  return std::max<int64_t>(1, per_processor * emulation::device().multiprocessors / config.cluster);
#else
  using Key = std::tuple<const void*, int, unsigned, unsigned, size_t>;
  static std::mutex mutex;
  static std::map<Key, int64_t> known;
  const void* function = reinterpret_cast<const void*>(kernel);
  int device = 0;
  check_cuda(cudaGetDevice(&device), "finding the current device");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [found, is_new] =
      known.try_emplace({function, device, config.threads, config.cluster, config.shared_bytes}, 1);
  if (is_new) {
    allow(function, config);
    LaunchConfig one = config;
    one.blocks = config.cluster;
    const LaunchAttributes attributes(one, nullptr);
    int clusters = 0;
    if (config.cluster > 1) {
      check_cuda(cudaOccupancyMaxActiveClusters(&clusters, function, &attributes.config),
                 "finding how many clusters are resident");
    } else {  // of which that function says 1
      int multiprocessors = 0;
      check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
                 "counting multiprocessors");
      check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel, static_cast<int>(config.threads),
                                                               config.shared_bytes),
                 "finding the occupancy of a kernel");
      clusters *= multiprocessors;
    }
    found->second = std::max(1, clusters);
  }
  return found->second;
#endif
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const LaunchConfig& config, cudaStream_t stream,
            const Arguments&... arguments) {
  FASTPAR_CHECK(config.blocks > 0 && config.blocks <= 0x7fffffff, "cannot launch ", config.blocks, " blocks");
#if defined(FASTPAR_EMULATION)
  const emulation::LaunchShape shape = shape_of(config);
  if (stream == nullptr) {
    emulation::run_grid(shape, [&] { kernel(arguments...); });
  } else {
    emulation::enqueue(stream, shape, [=] { kernel(arguments...); });
  }
#else
  allow(reinterpret_cast<const void*>(kernel), config);
  const LaunchAttributes attributes(config, stream);
  check_cuda(cudaLaunchKernelEx(&attributes.config, kernel, static_cast<Parameters>(arguments)...),
             "launching a kernel");
#endif
}

}  // namespace device
}  // namespace fastpar
