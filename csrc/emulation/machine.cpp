#include "emulation/machine.h"

#include <algorithm>
#include <utility>

#include "emulation/late_stores.h"
#include "emulation/state.h"

namespace fastpar {
namespace emulation {
namespace {

void end_thread(Thread* thread) {
  Block* block = thread->block;
  Cluster* cluster = block->cluster;
  thread->wait = Wait::kEnded;
  machine().sleeps = 0;
  --block->live;
  --cluster->live;
  if (thread->is_in_cluster_barrier && thread->cluster_phase == cluster->phase) --cluster->arrived;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const Thread* other = lane_of_same_warp(*thread, lane);
    if (other != nullptr && other->wait == Wait::kWarp && (other->mask >> (thread->index % kWarpSize) & 1u) != 0) {
      check_lane_can_come(*other, thread, thread->index % kWarpSize);
    }
  }
  complete_block_barrier(block);
  complete_cluster_barrier(cluster);
  if (block->live == 0) {  // a peer that still reads it reads freed memory
    block->dynamic.reset();
    block->statics.clear();
  }
}

void thread_main(void* argument) {
  auto* thread = static_cast<Thread*>(argument);
  Cluster* cluster = thread->block->cluster;
  try {
    (*cluster->body)();
    end_thread(thread);
  } catch (...) {
    cluster->failure = std::current_exception();
  }
}

void add_block(Cluster* cluster, const Grid& grid, uint3 index, unsigned rank) {
  const LaunchShape& shape = grid.launch->shape;
  cluster->blocks.push_back(std::make_unique<Block>());
  Block* block = cluster->blocks.back().get();
  block->cluster = cluster;
  block->index = index;
  block->grid = grid.number;
  block->number = machine().num_blocks++;
  if (machine().schedule == Schedule::kRandom && machine().one_in(4)) block->slowness = 1u << machine().random() % 7;
  block->dynamic = std::make_unique<SharedMemory>(shape.shared_bytes, 1024);
  block->live = shape.block.x * shape.block.y * shape.block.z;
  cluster->live += block->live;
  for (unsigned i = 0; i < block->live; ++i) {
    Thread& thread = block->threads.emplace_back();
    thread.block = block;
    thread.index = i;
    const uint3 thread_index{i % shape.block.x, i / shape.block.x % shape.block.y, i / shape.block.x / shape.block.y};
    thread.position = {thread_index, index, shape.block, shape.grid, rank, shape.cluster};
    prepare(&thread.fiber, &thread_main, &thread);
  }
}

// One turn for every thread of the block that can run; false if there was none.
bool run_block(Block* block) {
  const Schedule schedule = machine().schedule;
  const size_t num_threads = block->threads.size();
  const size_t first = schedule == Schedule::kRandom ? machine().random() % num_threads : 0;
  bool any = false;
  for (size_t t = 0; t < num_threads; ++t) {
    Thread& thread =
        block->threads[schedule == Schedule::kDescending ? num_threads - 1 - t : (first + t) % num_threads];
    if (thread.wait != Wait::kNothing) continue;
    any = true;
    block->has_started = true;
    machine().running = &thread;
    resume(&thread.fiber);
    machine().running = nullptr;
    if (block->cluster->failure) std::rethrow_exception(block->cluster->failure);
  }
  return any;
}

bool has_thread_that_can_run(const Block& block) {
  for (const Thread& thread : block.threads) {
    if (thread.wait == Wait::kNothing) return true;
  }
  return false;
}

// A turn for every block of every grid, but under kRandom only for some; false if no thread can run.
bool run_round() {
  std::vector<Block*> blocks;
  for (const auto& grid : machine().grids) {
    if (!grid) continue;
    for (const auto& cluster : grid->resident) {
      for (const auto& block : cluster->blocks) blocks.push_back(block.get());
    }
  }
  if (machine().schedule == Schedule::kDescending) std::reverse(blocks.begin(), blocks.end());
  if (machine().schedule == Schedule::kRandom) std::shuffle(blocks.begin(), blocks.end(), machine().random);
  bool any = false;
  for (Block* block : blocks) {
    const bool is_skipped = block->slowness > 1 && !machine().one_in(block->slowness);
    any |= is_skipped ? has_thread_that_can_run(*block) : run_block(block);
  }
  ++machine().rounds;
  if (machine().schedule == Schedule::kRandom) land_some(machine().random);
  if (machine().sleeps > kPatience) land_all();
  return any;
}

void release_fibers(Cluster* cluster, bool abandoned) {
  for (auto& block : cluster->blocks) {
    for (Thread& thread : block->threads) release(&thread.fiber, abandoned);
  }
}

// Gives the grid the clusters that come next; false when all have ended.
bool keep_resident(Grid* grid) {
  auto& resident = grid->resident;
  for (size_t i = resident.size(); i-- > 0;) {
    if (resident[i]->live > 0) continue;
    release_fibers(resident[i].get(), false);
    resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(i));
  }
  const LaunchShape& shape = grid->launch->shape;
  while (grid->next_block < grid->num_blocks && (resident.empty() || shape.is_cooperative)) {
    resident.push_back(std::make_unique<Cluster>());
    resident.back()->body = &grid->launch->body;
    for (unsigned rank = 0; rank < shape.cluster; ++rank, ++grid->next_block) {
      const uint64_t block = grid->next_block;
      add_block(
          resident.back().get(), *grid,
          {static_cast<unsigned>(block % shape.grid.x), static_cast<unsigned>(block / shape.grid.x % shape.grid.y),
           static_cast<unsigned>(block / shape.grid.x / shape.grid.y)},
          rank);
    }
  }
  return !resident.empty();
}

// Begins the next launch of every stream whose last one has ended; false when all streams are empty.
bool begin_launches(const std::vector<Stream*>& streams) {
  bool any = false;
  auto& grids = machine().grids;
  grids.resize(streams.size());
  for (size_t s = 0; s < streams.size(); ++s) {
    while (!streams[s]->launches.empty()) {
      if (!grids[s]) grids[s] = std::make_unique<Grid>(&streams[s]->launches.front(), machine().num_grids++);
      if (keep_resident(grids[s].get())) break;
      land_grid(grids[s]->number);
      grids[s].reset();
      streams[s]->launches.pop_front();
    }
    any |= !streams[s]->launches.empty();
  }
  return any;
}

void check_shape(const LaunchShape& shape) {
  const uint64_t threads = uint64_t{shape.block.x} * shape.block.y * shape.block.z;
  if (threads == 0 || threads > kMaxThreads) fail("a block has 1 to ", kMaxThreads, " threads, not ", threads);
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) fail("the grid has no blocks");
  if (shape.shared_bytes > kMaxSharedBytes) {
    fail("a block has at most ", kMaxSharedBytes, " bytes of shared memory, not ", shape.shared_bytes);
  }
  if (shape.cluster == 0 || shape.cluster > kMaxClusterSize || shape.grid.x % shape.cluster != 0) {
    fail("a cluster has 1 to ", kMaxClusterSize, " blocks and divides the grid: ", shape.cluster, " blocks, grid of ",
         shape.grid.x);
  }
}

}  // namespace

void synchronize(const std::vector<Stream*>& streams) {
  auto& grids = machine().grids;
  const auto stop = [&](bool abandoned) {
    for (const auto& grid : grids) {
      if (!grid) continue;
      for (const auto& cluster : grid->resident) release_fibers(cluster.get(), abandoned);
    }
    grids.clear();
    for (Stream* stream : streams) stream->launches.clear();
    land_all();
  };
  machine().sleeps = 0;
  try {
    while (begin_launches(streams)) {
      if (!run_round()) fail("deadlock: no thread can run", who_waits_where());
    }
  } catch (...) {
    stop(true);
    throw;
  }
  stop(false);
}

void run_grid(const LaunchShape& shape, const std::function<void()>& body) {
  check_shape(shape);
  Stream stream;
  stream.launches.push_back({shape, body});
  synchronize({&stream});
}

void enqueue(Stream* stream, const LaunchShape& shape, std::function<void()> body) {
  check_shape(shape);
  stream->launches.push_back({shape, std::move(body)});
}

void set_schedule(Schedule schedule, uint64_t seed) {
  machine().schedule = schedule;
  machine().random.seed(seed);
}

Schedule schedule() { return machine().schedule; }

uint64_t clock_nanoseconds() { return 1000 * static_cast<uint64_t>(machine().rounds); }

Writer writer() {
  const Thread& thread = running();
  return {thread.block->grid, thread.block->number, thread.index, thread.block->barriers};
}

const Position& position() { return running().position; }

// ---- shared memory ----

void* static_shared(const void* key, size_t bytes, size_t alignment) {
  return running().block->static_memory(key, bytes, alignment).data();
}

unsigned char* dynamic_shared() { return running().block->dynamic->data(); }

void* map_to_peer(const void* address, unsigned rank) {
  const Thread& thread = running();
  const Block& own = *thread.block;
  if (rank >= own.cluster->blocks.size()) {
    fail(describe(thread), " maps an address to rank ", rank, " of a cluster of ", own.cluster->blocks.size());
  }
  Block& peer = *own.cluster->blocks[rank];
  if (!peer.has_started || peer.live == 0) {
    fail(describe(thread), " maps an address to block ", describe(peer.index), ", which ",
         peer.has_started ? "has ended" : "may not have started: the cluster has to meet first");
  }
  const auto* byte = static_cast<const unsigned char*>(address);
  if (own.dynamic->holds(address)) return peer.dynamic->data() + (byte - own.dynamic->data());
  for (const auto& [key, memory] : own.statics) {
    if (!memory->holds(address)) continue;
    return peer.static_memory(key, memory->bytes(), memory->alignment()).data() + (byte - memory->data());
  }
  fail(describe(thread), " maps an address that is not in its shared memory");
}

void check_alignment(const void* address, size_t alignment, const char* what) {
  const auto misaligned = reinterpret_cast<uintptr_t>(address) % alignment;
  if (misaligned == 0) return;
  fail("misaligned ", what, ": ", describe(running()), " accesses an address that is ", misaligned,
       " bytes past a multiple of ", alignment);
}

}  // namespace emulation
}  // namespace fastpar
