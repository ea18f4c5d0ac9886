// What a thread waits in: barriers of the block and of the cluster, warp-wide operations, sleep.
#include "emulation/state.h"

namespace fastpar {
namespace emulation {

static void wait_for(Wait what) {
  running().wait = what;
  machine().sleeps = 0;
  suspend();
}

// ---- barriers ----

void complete_block_barrier(Block* block) {
  if (block->at_barrier == 0 || block->at_barrier < block->live) return;
  const Thread* first = nullptr;
  for (const Thread& thread : block->threads) {
    if (thread.wait != Wait::kBarrier) continue;
    if (first == nullptr) first = &thread;
    if (thread.place.line != first->place.line || std::strcmp(thread.place.file, first->place.file) != 0) {
      fail("divergent __syncthreads: not all threads are at the same one:", who_waits_where(*block->cluster));
    }
  }
  for (Thread& thread : block->threads) {
    if (thread.wait == Wait::kBarrier) thread.wait = Wait::kNothing;
  }
  block->at_barrier = 0;
  ++block->barriers;
}

void complete_cluster_barrier(Cluster* cluster) {
  if (cluster->arrived == 0 || cluster->arrived < cluster->live) return;
  ++cluster->phase;
  cluster->arrived = 0;
  for (auto& block : cluster->blocks) {
    for (Thread& thread : block->threads) {
      if (thread.wait == Wait::kCluster) thread.wait = Wait::kNothing;
    }
  }
}

// ---- warp-wide operations ----

Thread* lane_of_same_warp(const Thread& thread, unsigned lane) {
  const unsigned index = thread.index / kWarpSize * kWarpSize + lane;
  return index < thread.block->threads.size() ? &thread.block->threads[index] : nullptr;
}

void check_lane_can_come(const Thread& thread, const Thread* other, unsigned lane) {
  if (other == nullptr || other->wait == Wait::kEnded) {
    fail(name_of(thread.operation), " at ", describe(thread.place), ": ", describe(thread), " names lane ", lane,
         ", which ", other == nullptr ? "does not exist" : "has ended");
  }
}

static bool all_lanes_are_here(const Thread& thread) {
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if ((thread.mask >> lane & 1u) == 0) continue;
    const Thread* other = lane_of_same_warp(thread, lane);
    check_lane_can_come(thread, other, lane);
    if (other == &thread) continue;
    if (other->wait != Wait::kWarp || other->mask != thread.mask) return false;
    if (other->operation != thread.operation) {
      fail("lanes of one warp are in different operations: ", describe(thread), " in ", name_of(thread.operation),
           " at ", describe(thread.place), ", ", describe(*other), " in ", name_of(other->operation), " at ",
           describe(other->place));
    }
  }
  return true;
}

static void finish_warp_operation(Thread* last) {
  uint64_t lanes_with_value = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if ((last->mask >> lane & 1u) != 0 && lane_of_same_warp(*last, lane)->value != 0) lanes_with_value |= 1ull << lane;
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if ((last->mask >> lane & 1u) == 0) continue;
    Thread* thread = lane_of_same_warp(*last, lane);
    switch (thread->operation) {
      case WarpOperation::kSync:
        break;
      case WarpOperation::kShuffle:
        if ((last->mask >> thread->source & 1u) == 0) {
          fail("__shfl_sync at ", describe(thread->place), ": ", describe(*thread), " reads lane ", thread->source,
               ", which the mask leaves out");
        }
        thread->result = lane_of_same_warp(*last, thread->source)->value;
        break;
      case WarpOperation::kBallot:
        thread->result = lanes_with_value;
        break;
      case WarpOperation::kAll:
        thread->result = lanes_with_value == last->mask;
        break;
      case WarpOperation::kAny:
        thread->result = lanes_with_value != 0;
        break;
    }
    thread->wait = Wait::kNothing;
  }
}

// ---- what device code calls ----

void sync_threads(Place place) {
  Thread& thread = running();
  thread.place = place;
  thread.wait = Wait::kBarrier;
  ++thread.block->at_barrier;
  complete_block_barrier(thread.block);
  if (thread.wait == Wait::kBarrier) wait_for(Wait::kBarrier);
}

void cluster_arrive(Place place) {
  Thread& thread = running();
  Cluster* cluster = thread.block->cluster;
  if (thread.is_in_cluster_barrier) {
    fail(describe(thread), " arrives at the cluster's barrier twice without waiting, at ", describe(place));
  }
  thread.is_in_cluster_barrier = true;
  thread.cluster_phase = cluster->phase;
  ++cluster->arrived;
  complete_cluster_barrier(cluster);
}

void cluster_wait(Place place) {
  Thread& thread = running();
  if (!thread.is_in_cluster_barrier) {
    fail(describe(thread), " waits for the cluster's barrier without having arrived, at ", describe(place));
  }
  thread.place = place;
  if (thread.cluster_phase == thread.block->cluster->phase) wait_for(Wait::kCluster);
  thread.is_in_cluster_barrier = false;
}

void sleep(Place place) {
  Thread& thread = running();
  thread.place = place;
  if (++machine().sleeps > kSleepLimit) {
    fail("livelock: threads only sleep, ", describe(thread), " at ", describe(place), who_waits_where());
  }
  suspend();
}

void may_pause(Place place) {
  running().place = place;
  if (machine().schedule == Schedule::kRandom && machine().one_in(8)) suspend();
}

uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, unsigned source, Place place) {
  Thread& thread = running();
  if ((mask >> (thread.index % kWarpSize) & 1u) == 0) {
    fail(name_of(operation), " at ", describe(place), ": ", describe(thread), " is not in its own mask 0x", std::hex,
         mask);
  }
  thread.operation = operation;
  thread.mask = mask;
  thread.value = value;
  thread.source = source;
  thread.place = place;
  if (all_lanes_are_here(thread)) {
    finish_warp_operation(&thread);
  } else {
    wait_for(Wait::kWarp);
  }
  return thread.result;
}

unsigned live_lanes() {
  unsigned mask = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const Thread* other = lane_of_same_warp(running(), lane);
    if (other != nullptr && other->wait != Wait::kEnded) mask |= 1u << lane;
  }
  return mask;
}

}  // namespace emulation
}  // namespace fastpar
