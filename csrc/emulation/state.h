// What the files of the machine share: the threads, blocks and grids that are there, and how they are reported.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "emulation/fiber.h"
#include "emulation/machine.h"

namespace fastpar {
namespace emulation {

// Turns that threads may spend asleep while no thread gets anywhere, before it is called a livelock.
constexpr int64_t kSleepLimit = 1000000;

// Turns asleep after which late stores land: what nobody releases is seen at some time too.
constexpr int64_t kPatience = 10000;

enum class Wait { kNothing, kBarrier, kWarp, kCluster, kEnded };

struct Block;
struct Cluster;

// What a multiprocessor has left.
struct Room {
  unsigned blocks = kResidentBlocks, threads = kResidentThreads, registers = kRegisters;
  size_t shared_bytes = kSharedBytes;
};

// What a block takes of it.
Room needed_by(const LaunchShape& shape);

// A copy that a thread has asked for and not waited for.
struct PendingCopy {
  void* to;
  const void* from;
  size_t bytes;
  int64_t batch;  // counted over the thread's commits
};

// A bulk copy of a block, of which nobody has waited for the barrier.
struct BulkCopy {
  void* to;
  const void* from;
  size_t bytes;
  const void* barrier;
};

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
  // asynchronous copies, which land when they are waited for and no earlier
  std::deque<PendingCopy> copies;
  int64_t copy_batches = 0;
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
  Room* room;  // of the multiprocessor that it is on
  uint3 index;
  std::deque<Thread> threads;
  unsigned live = 0, at_barrier = 0;
  int64_t grid = 0, number = 0;  // which of all so far
  int64_t barriers = 0;          // that its threads have passed
  unsigned slowness = 1;         // kRandom: gets one turn in so many
  std::vector<BulkCopy> bulk_copies;
  size_t static_bytes = 0;
  std::unique_ptr<SharedMemory> dynamic;
  std::map<const void*, std::unique_ptr<SharedMemory>> statics;

  SharedMemory& static_memory(const void* key, size_t bytes, size_t alignment) {
    auto& memory = statics[key];
    if (!memory) {
      memory = std::make_unique<SharedMemory>(bytes, alignment);
      static_bytes += bytes;
    }
    return *memory;
  }
};

struct Cluster {
  const Launch* launch;
  std::vector<std::unique_ptr<Block>> blocks;
  std::exception_ptr failure;
  unsigned live = 0, arrived = 0;
  int64_t phase = 0;
};

// A launch that has begun.
struct Grid {
  const Launch* launch;
  std::vector<Room>* rooms;  // of the multiprocessors of its device
  std::vector<std::unique_ptr<Cluster>> resident;
  int64_t number;  // which of all so far
  uint64_t num_blocks, next_block = 0;

  Grid(const Launch* launch_, std::vector<Room>* rooms_, int64_t number_)
      : launch(launch_), rooms(rooms_), number(number_) {
    const dim3& grid = launch->shape.grid;
    num_blocks = uint64_t{grid.x} * grid.y * grid.z;
  }
};

struct Machine {
  Thread* running = nullptr;
  Schedule schedule = Schedule::kAscending;
  std::mt19937_64 random;
  Device device;
  std::map<int, std::vector<Room>> rooms;    // of the devices of the streams that run now
  std::vector<std::unique_ptr<Grid>> grids;  // that run now
  int64_t sleeps = 0, rounds = 0, num_grids = 0, num_blocks = 0;

  bool one_in(unsigned count) { return random() % count == 0; }
};

inline Machine& machine() {
  static Machine instance;
  return instance;
}

inline Thread& running() {
  if (machine().running == nullptr) throw Error("device code was called outside a launch");
  return *machine().running;
}

template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream text;
  ((text << args), ...);
  throw Error(text.str());
}

// ---- report.cpp ----

std::string describe(const uint3& index);
std::string describe(const Thread& thread);
std::string describe(const Place& place);
const char* name_of(WarpOperation operation);
std::string who_waits_where(const Cluster& cluster);
std::string who_waits_where();

// ---- waiting.cpp ----

// A barrier is completed by whoever comes last, or by a thread that ends.
void complete_block_barrier(Block* block);
void complete_cluster_barrier(Cluster* cluster);
Thread* lane_of_same_warp(const Thread& thread, unsigned lane);
void check_lane_can_come(const Thread& thread, const Thread* other, unsigned lane);

}  // namespace emulation
}  // namespace fastpar
