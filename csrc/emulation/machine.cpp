#include "emulation/machine.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "emulation/fiber.h"
#include "emulation/late_stores.h"

namespace fastpar {
namespace emulation {
namespace {

// Turns that threads may spend asleep while no thread gets anywhere, before it is called a livelock.
constexpr int64_t kSleepLimit = 1000000;

// Turns asleep after which late stores land: what nobody releases is seen at some time too.
constexpr int64_t kPatience = 10000;

enum class Wait { kNothing, kBarrier, kWarp, kCluster, kEnded };

struct Block;
struct Cluster;

struct Thread {
  Position position;
  Block* block;
  unsigned index;  // in the block, x fastest
  Fiber fiber;
  Wait wait = Wait::kNothing;
  Place place{"", 0};
  // the warp-wide operation that it waits in
  WarpOperation operation = WarpOperation::kSync;
  unsigned mask = 0, source = 0;
  uint64_t value = 0, result = 0;
  // between arriving at the cluster's barrier and having waited for it
  bool is_in_cluster_barrier = false;
  int64_t cluster_phase = 0;
};

// Memory of exactly the size asked for, so that AddressSanitizer sees the first byte beyond it; full of poison.
class SharedMemory {
 public:
  SharedMemory(size_t bytes, size_t alignment) : bytes_(bytes), alignment_(alignment) {
    data_ = static_cast<unsigned char*>(::operator new(bytes, std::align_val_t(alignment)));
    std::memset(data_, kPoison, bytes);
  }
  ~SharedMemory() { ::operator delete(data_, std::align_val_t(alignment_)); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  unsigned char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  size_t alignment() const { return alignment_; }
  bool holds(const void* address) const {
    return address >= data_ && static_cast<const unsigned char*>(address) < data_ + bytes_;
  }

 private:
  unsigned char* data_;
  size_t bytes_, alignment_;
};

struct Block {
  Cluster* cluster;
  uint3 index;
  std::deque<Thread> threads;
  unsigned live = 0, at_barrier = 0;
  int64_t grid = 0, number = 0;  // which of all so far
  int64_t barriers = 0;          // that its threads have passed
  unsigned slowness = 1;         // kRandom: gets one turn in so many
  bool has_started = false;
  std::unique_ptr<SharedMemory> dynamic;
  std::map<const void*, std::unique_ptr<SharedMemory>> statics;

  SharedMemory& static_memory(const void* key, size_t bytes, size_t alignment) {
    auto& memory = statics[key];
    if (!memory) memory = std::make_unique<SharedMemory>(bytes, alignment);
    return *memory;
  }
};

struct Cluster {
  const std::function<void()>* body;
  std::vector<std::unique_ptr<Block>> blocks;
  std::exception_ptr failure;
  unsigned live = 0, arrived = 0;
  int64_t phase = 0;
};

// A launch that has begun.
struct Grid {
  const Launch* launch;
  std::vector<std::unique_ptr<Cluster>> resident;
  int64_t number;  // which of all so far
  uint64_t num_blocks, next_block = 0;

  Grid(const Launch* launch_, int64_t number_) : launch(launch_), number(number_) {
    const dim3& grid = launch->shape.grid;
    num_blocks = uint64_t{grid.x} * grid.y * grid.z;
  }
};

struct Machine {
  Thread* running = nullptr;
  Schedule schedule = Schedule::kAscending;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Grid>> grids;  // that run now
  int64_t sleeps = 0, rounds = 0, num_grids = 0, num_blocks = 0;

  bool one_in(unsigned count) { return random() % count == 0; }
};

Machine& machine() {
  static Machine instance;
  return instance;
}

Thread& running() {
  if (machine().running == nullptr) throw Error("device code was called outside a launch");
  return *machine().running;
}

template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream text;
  ((text << args), ...);
  throw Error(text.str());
}

std::string describe(const uint3& index) {
  std::ostringstream text;
  text << "(" << index.x << ", " << index.y << ", " << index.z << ")";
  return text.str();
}

std::string describe(const Thread& thread) {
  std::ostringstream text;
  text << "thread " << thread.index << " of block " << describe(thread.block->index);
  return text.str();
}

std::string describe(const Place& place) {
  const char* name = std::strrchr(place.file, '/');
  std::ostringstream text;
  text << (name != nullptr ? name + 1 : place.file) << ":" << place.line;
  return text.str();
}

const char* name_of(WarpOperation operation) {
  switch (operation) {
    case WarpOperation::kSync:
      return "__syncwarp";
    case WarpOperation::kShuffle:
      return "__shfl_sync";
    case WarpOperation::kBallot:
      return "__ballot_sync";
    case WarpOperation::kAll:
      return "__all_sync";
    case WarpOperation::kAny:
      return "__any_sync";
  }
  return "";
}

std::string state_of(const Thread& thread) {
  std::ostringstream text;
  switch (thread.wait) {
    case Wait::kNothing:
      text << "can run";
      break;
    case Wait::kBarrier:
      text << "wait in __syncthreads at " << describe(thread.place);
      break;
    case Wait::kWarp:
      text << "wait in " << name_of(thread.operation) << " with mask 0x" << std::hex << thread.mask << std::dec
           << " at " << describe(thread.place);
      break;
    case Wait::kCluster:
      text << "wait for the cluster at " << describe(thread.place);
      break;
    case Wait::kEnded:
      text << "have ended";
      break;
  }
  return text.str();
}

// "threads 0-3, 5 wait in ...; threads 4 have ended", for every block of the cluster.
std::string who_waits_where(const Cluster& cluster) {
  std::ostringstream text;
  for (const auto& block : cluster.blocks) {
    std::map<std::string, std::vector<unsigned>> groups;
    for (const Thread& thread : block->threads) groups[state_of(thread)].push_back(thread.index);
    text << "\n  block " << describe(block->index) << ":";
    for (const auto& [state, threads] : groups) {
      text << "\n    threads ";
      for (size_t i = 0; i < threads.size(); ++i) {
        size_t last = i;
        while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) ++last;
        text << (i > 0 ? ", " : "") << threads[i];
        if (last > i) text << "-" << threads[last];
        i = last;
      }
      text << " " << state;
    }
  }
  return text.str();
}

std::string who_waits_where() {
  std::string text;
  for (const auto& grid : machine().grids) {
    if (!grid) continue;
    if (machine().grids.size() > 1) text += "\n stream " + std::to_string(&grid - machine().grids.data()) + ":";
    for (const auto& cluster : grid->resident) text += who_waits_where(*cluster);
  }
  return text;
}

void wait_for(Wait what) {
  running().wait = what;
  machine().sleeps = 0;
  suspend();
}

// ---- barriers: completed by whoever comes last, or by a thread that ends ----

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

bool all_lanes_are_here(const Thread& thread) {
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

void finish_warp_operation(Thread* last) {
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

// ---- running ----

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
