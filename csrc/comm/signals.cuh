// How the blocks of several ranks meet: which rank a block works for, where its peers' memory is, signal and wait.
// The protocol is in peer_group.h.
#pragma once

#include "comm/peer_group.h"
#include "common/device.cuh"

namespace fastpar {
namespace device {

constexpr int kCollectiveThreads = 512;        // of a block, at most
constexpr unsigned kPoisonWord = 0xffffffffu;  // NaN in every float type

// ---- waiting --------------------------------------------------------------------------------------------------------

// is_there() until it is, or until the time is up. The clock is read now and then: it is slower than memory.
template <typename F>
__device__ inline bool wait_until(const F& is_there, uint64_t timeout_nanoseconds) {
  constexpr int kLooks = 64;
  if (is_there()) return true;
  const uint64_t start = clock_nanoseconds();
  do {
    for (int look = 0; look < kLooks; ++look) {
      pause_spinning();
      if (is_there()) return true;
    }
  } while (clock_nanoseconds() - start < timeout_nanoseconds);
  return false;
}

// ---- the block and its rank -----------------------------------------------------------------------------------------

// What a block knows of its rank and of its peers. Every thread of the block makes one, first of all.
struct Block {
  const PeerGroup& group;
  Collective collective;
  int num_blocks;   // of this rank
  int index;        // among them
  int local, rank;  // which of the launch's ranks, of the group's
  RankState* state;
  uint64_t epoch;
  int* timed_out;  // in shared memory
  bool is_broken;  // the group has timed out before

  __device__ Block(const PeerGroup& group_, Collective collective_) : group(group_), collective(collective_) {
    FASTPAR_SHARED(int, timed_out_of_block);
    timed_out = &timed_out_of_block;
    if (threadIdx.x == 0) timed_out_of_block = 0;
    num_blocks = static_cast<int>(gridDim.x) / group.local_ranks;
    index = static_cast<int>(blockIdx.x) % num_blocks;
    local = static_cast<int>(blockIdx.x) / num_blocks;
    rank = group.first_rank + local;
    state = group.states + local;
    epoch = state->epoch + 1;
    is_broken = state->failed != 0;
  }

  // The packets of a part that this thread takes: body(packet).
  template <typename F>
  __device__ void for_each(int64_t packets, const F& body) const {
    const int64_t stride = int64_t{num_blocks} * blockDim.x;
    for (int64_t packet = int64_t{index} * blockDim.x + threadIdx.x; packet < packets; packet += stride) body(packet);
  }

  // body(peer), for all but this rank, beginning with the next one: so that not all send to the same rank at once.
  template <typename F>
  __device__ void for_each_peer(const F& body) const {
    for (int step = 1; step < group.size; ++step) {
      const int peer = rank + step;
      body(peer < group.size ? peer : peer - group.size);
    }
  }

  // ---- memory ----

  __device__ unsigned char* buffer(int of_rank) const {
    return reinterpret_cast<unsigned char*>(group.buffers[of_rank]);
  }

  // From the start of a buffer: where `source` writes in this epoch.
  __device__ int64_t inbox_offset(int phase, int source) const {
    const int64_t parity = static_cast<int64_t>(epoch & 1);
    return ((parity * kNumPhases + phase) * group.size + source) * group.region_bytes;
  }
  __device__ unsigned char* inbox(int of_rank, int phase, int source) const {
    return buffer(of_rank) + inbox_offset(phase, source);
  }

  __device__ uint64_t* flag(int of_rank, int phase, int source) const {
    auto* flags = reinterpret_cast<uint64_t*>(group.signals[of_rank]);
    return flags + (int64_t{phase} * kMaxBlocks + index) * group.size + source;
  }

  // ---- meeting ----

  // Returns when this block of all peers is here as well: what they pushed before can be read. False: the time is up.
  // Every thread of the block calls it.
  __device__ bool meet(int phase) const {
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < group.size && peer != rank) {
      store_release_system(flag(peer, phase, rank), epoch);
      uint64_t seen = 0;
      const uint64_t* raised = flag(rank, phase, peer);
      const auto is_there = [&] { return (seen = load_acquire_system(raised)) >= epoch; };
      if (!wait_until(is_there, group.timeout_nanoseconds)) {
        atomicExch(timed_out, 1);  // by several threads
        give_up(peer, phase, epoch, seen);
      }
    }
    __syncthreads();
    return *timed_out == 0;
  }

  // Breaks the group: what later collectives give here is poison, at once.
  __device__ void give_up(int peer, int phase, uint64_t waited_for, uint64_t seen) const {
    const bool is_first = atomicCAS(&group.states->failed, 0ull, 1ull) == 0;
    if (local > 0) atomicExch(&state->failed, 1ull);
    if (!is_first) return;
    TimeoutReport* report = group.report;
    report->rank = static_cast<uint64_t>(rank);
    report->peer = static_cast<uint64_t>(peer);
    report->block = static_cast<uint64_t>(index);
    report->phase = static_cast<uint64_t>(phase);
    report->epoch = waited_for;
    report->seen = seen;
    report->waited_nanoseconds = group.timeout_nanoseconds;
    store_release_system(&report->collective, 1 + static_cast<uint64_t>(collective));
  }

  // Every thread of the block calls it, last of all. The last block of the rank calls advance(state).
  template <typename F>
  __device__ void finish(const F& advance) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();  // what was read of the state was read before it changes
    if (atomicAdd(&state->ticket, 1ull) + 1 < static_cast<unsigned long long>(num_blocks)) return;
    state->ticket = 0;
    advance(state);
  }
  __device__ void finish() const {
    finish([&](RankState* state) { state->epoch = epoch; });
  }
};

}  // namespace device
}  // namespace fastpar
