// Kernels that test the emulation itself. Each does one thing, right or wrong.
#pragma once

#include "common/device.cuh"

namespace fastpar {
namespace self_test {

using device::cluster_arrive;
using device::cluster_rank;
using device::cluster_size;
using device::cluster_wait;
using device::load_acquire_system;
using device::load_packet;
using device::load_relaxed_system;
using device::map_to_peer;
using device::pause_spinning;
using device::store_packet;
using device::store_peer_packet;
using device::store_relaxed_system;
using device::store_release_system;

constexpr unsigned kUntouched = 0xffffffffu;

// out[i] = sum of in over the block: shuffles within warps, then shared memory across them.
__global__ void block_sum(const float* in, float* out) {
  FASTPAR_SHARED_ARRAY(float, warps, 32);
  float value = in[threadIdx.x];
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += warps[warp];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Reads its neighbour's value without a barrier in between; up to 64 threads.
__global__ void missing_barrier(const int* in, int* out) {
  FASTPAR_SHARED_ARRAY(int, values, 64);
  values[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

// Copies two packets behind its back, in a batch each, and reads both when it has waited for all but `kLeft` batches.
template <int kLeft>
__global__ void copies(const uint4* in, uint4* out) {
  FASTPAR_SHARED_ARRAY(uint4, kept, 64);
  const unsigned i = threadIdx.x;
  for (unsigned batch = 0; batch < 2; ++batch) {
    device::copy_packet_async(&kept[32 * batch + i], in + 32 * batch + i);
    device::commit_copies();
  }
  device::wait_for_copies<kLeft>();
  for (unsigned batch = 0; batch < 2; ++batch) out[32 * batch + i] = kept[32 * batch + i];
}

// Every thread reads its packet of one bulk copy: of `bytes`, where the barrier expects as many as `expected` says, and
// with or without waiting for them. Twice, the second time from the next packets of `in`.
__global__ void bulk_copy(const unsigned char* in, uint4* out, int bytes, int expected, int offset, bool waits) {
  FASTPAR_SHARED_ARRAY(uint4, kept, 65);
  FASTPAR_SHARED(device::ByteBarrier, barrier);
  if (threadIdx.x == 0) device::init_byte_barrier(&barrier);
  for (unsigned turn = 0; turn < 2; ++turn) {
    __syncthreads();
    if (threadIdx.x == 0) {
      device::expect_bytes(&barrier, static_cast<uint32_t>(expected));
      device::copy_bytes_async(kept, in + turn * 16 * blockDim.x + offset, static_cast<uint32_t>(bytes), &barrier);
    }
    if (waits) device::wait_for_bytes(&barrier, turn);
    out[turn * blockDim.x + threadIdx.x] = kept[threadIdx.x];
  }
}

__global__ void shuffles(const int* in, int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const int value = in[lane];
  int* row = out + 9 * lane;
  row[0] = __shfl_sync(0xffffffffu, value, 5);
  row[1] = __shfl_up_sync(0xffffffffu, value, 3);
  row[2] = __shfl_down_sync(0xffffffffu, value, 3);
  row[3] = __shfl_xor_sync(0xffffffffu, value, 6);
  row[4] = __shfl_sync(0xffffffffu, value, 9, 8);
  row[5] = __shfl_down_sync(0xffffffffu, value, 3, 8);
  row[6] = static_cast<int>(__ballot_sync(0xffffffffu, value % 3 == 0));
  row[7] = __all_sync(0xffffffffu, value >= 0);
  row[8] = lane < 4 ? __any_sync(0x0000000fu, value == 2) : __any_sync(0xfffffff0u, value == 2);
}

__global__ void atomics(const int* in, int* sum, int* highest, unsigned* lowest, float* float_sum, int* winner) {
  const int value = in[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(sum, value);
  atomicMax(highest, value);
  atomicMin(lowest, static_cast<unsigned>(value));
  atomicAdd(float_sum, static_cast<float>(value));
  atomicCAS(winner, -1, value);
}

// out[rank] = what every block's number, read from its memory by all others, adds up to.
__global__ void cluster_sum(const int* in, int* out) {
  FASTPAR_SHARED(int, mine);
  FASTPAR_DYNAMIC_SHARED(dynamic);
  int* from_peers = reinterpret_cast<int*>(dynamic);
  cluster_arrive();
  if (threadIdx.x == 0) mine = in[blockIdx.x];
  __syncthreads();
  cluster_wait();
  if (threadIdx.x < cluster_size()) map_to_peer(from_peers, threadIdx.x)[cluster_rank()] = mine;
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (unsigned rank = 0; rank < cluster_size(); ++rank) sum += from_peers[rank] + *map_to_peer(&mine, rank);
    out[blockIdx.x] = sum;
  }
  cluster_arrive();  // nobody ends while a peer may read it
  cluster_wait();
}

__global__ void read_dynamic(float* out, int index) {
  FASTPAR_DYNAMIC_SHARED(dynamic);
  if (threadIdx.x == 0) out[0] = reinterpret_cast<const float*>(dynamic)[index];
}

__global__ void read_static(float* out, int index) {
  FASTPAR_SHARED_ARRAY(float, values, 8);
  const float* first = values;
  if (threadIdx.x == 0) out[0] = first[index];
}

// 48 bytes of static shared memory and any number of dynamic ones.
__global__ void both_kinds(float* out, int index) {
  FASTPAR_SHARED_ARRAY(float, values, 12);
  FASTPAR_DYNAMIC_SHARED(dynamic);
  if (threadIdx.x != 0) return;
  values[0] = 1.0f;
  reinterpret_cast<float*>(dynamic)[index] = 2.0f;
  out[0] = values[0] + reinterpret_cast<float*>(dynamic)[index];
}

// More static shared memory than launch() expects of any kernel.
__global__ void much_static(float* out) {
  FASTPAR_SHARED_ARRAY(float, values, 2048);
  values[threadIdx.x] = 1.0f;
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void copy_packets(const unsigned char* in, unsigned char* out) {
  store_packet(out + 16 * threadIdx.x, load_packet(in + 16 * threadIdx.x));
}

// Two blocks, or two grids of one: each raises its own flag and waits for the other's.
__global__ void meet(uint64_t* flags, int first) {
  const int me = first + static_cast<int>(blockIdx.x);
  if (threadIdx.x != 0) return;
  store_release_system(flags + me, 1);
  while (load_acquire_system(flags + 1 - me) == 0) pause_spinning();
}

// Grids of two ranks: the blocks of each raise the rank's flag, and wait for the other rank's.
__global__ void meet_rank(uint64_t* flags, int rank) {
  if (threadIdx.x != 0) return;
  store_release_system(flags + rank, 1);
  while (load_acquire_system(flags + 1 - rank) == 0) pause_spinning();
}

// Block 0 gives block 1 a packet a thread, and a flag. out: what block 1 finds. Only with the barrier and the release
// is that what was given.
__global__ void hand_over(const unsigned char* in, unsigned char* memory, uint64_t* flag, unsigned char* out,
                          bool has_barrier, bool has_release) {
  const unsigned offset = 16 * threadIdx.x;
  if (blockIdx.x == 0) {
    store_peer_packet(memory + offset, load_packet(in + offset));
    if (has_barrier) __syncthreads();
    if (threadIdx.x != blockDim.x - 1) return;
    if (has_release) {
      store_release_system(flag, 1);
    } else {
      atomicExch(flag, 1);
    }
  } else {
    if (threadIdx.x == 0) {
      while (load_acquire_system(flag) == 0) pause_spinning();
    }
    __syncthreads();
    store_packet(out + offset, load_packet(memory + offset));
  }
}

// Block 0 gives block 1 a packet without a flag: block 1 waits until no word of it is what the memory held before.
// out: the number of times it had to look.
__global__ void hand_over_words(unsigned char* memory, int* out) {
  if (blockIdx.x == 0) {
    store_relaxed_system(memory, make_uint4(1, 2, 3, 4));
    return;
  }
  for (out[1] = 0;; ++out[1]) {
    const uint4 packet = load_relaxed_system(memory);
    const int arrived =
        (packet.x != kUntouched) + (packet.y != kUntouched) + (packet.z != kUntouched) + (packet.w != kUntouched);
    if (arrived > 0 && arrived < 4) out[0] = arrived;
    if (arrived == 4) return;
    pause_spinning();
  }
}

// ---- wrong on purpose -----------------------------------------------------------------------------------------------

// Half of the threads never come: they wait for something else.
__global__ void barrier_and_shuffle(int* out) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
  }
}

__global__ void divergent_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void early_exit_then_barrier(int* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();  // of those that are left, as on the device
  out[threadIdx.x] = 1;
}

__global__ void shuffle_with_ended_lane(int* out) {
  if (threadIdx.x == 7) return;
  out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
}

__global__ void shuffle_from_outside_the_mask(int* out) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_sync(0x000000ffu, 1, 9);
}

__global__ void shuffle_without_itself() { __shfl_sync(0x0000ffffu, 1, 0); }

__global__ void different_operations(int* out) {
  out[threadIdx.x] = threadIdx.x < 16 ? __any_sync(0xffffffffu, 1) : __all_sync(0xffffffffu, 1);
}

// The first block of the cluster looks into the second, or, where it waits, is looked into.
__global__ void map_before_meeting(int* out, bool waits) {
  FASTPAR_SHARED(int, mine);
  mine = 1;
  if (waits && cluster_rank() == 0) __nanosleep(1);
  out[0] = *map_to_peer(&mine, 1 - cluster_rank());
}

// The first block of the cluster ends, and the second looks into it.
__global__ void read_ended_peer(int* out) {
  FASTPAR_SHARED(int, mine);
  mine = 1;
  cluster_arrive();
  cluster_wait();
  const int* peer = map_to_peer(&mine, 0);
  if (cluster_rank() == 0) return;
  __nanosleep(1);
  out[0] = *peer;
}

// Two threads a block; those of block 1 wait for each other in different ways.
__global__ void one_block_never_comes() {
  if (cluster_rank() == 1) {
    if (threadIdx.x == 0) {
      __syncwarp(3u);
    } else {
      __syncthreads();
    }
  }
  cluster_arrive();
  cluster_wait();
}

__global__ void bulk_copy_without_end(const uint4* in) {
  FASTPAR_SHARED(uint4, kept);
  FASTPAR_SHARED(device::ByteBarrier, barrier);
  if (threadIdx.x != 0) return;
  device::init_byte_barrier(&barrier);
  device::expect_bytes(&barrier, 16);
  device::copy_bytes_async(&kept, in, 16, &barrier);
}

__global__ void sleep_until_set(const int* flag) {
  while (*static_cast<const volatile int*>(flag) == 0) __nanosleep(20);
}

}  // namespace self_test
}  // namespace fastpar
