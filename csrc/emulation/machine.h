// The emulated device: runs grids with one fiber per thread, on one core.
//
// A thread runs until it has to wait (a barrier, a warp-wide operation, a cluster barrier) or ends. What it then waits
// for is known exactly, so when no thread can run and some have not ended, that is a deadlock, and the report says who
// waits where. Nothing depends on time: the same launch always runs in the same order. Two such orders are ascending
// and descending; a kernel that lacks a barrier rarely survives both. The third is drawn from a seed: for kernels that
// wait for each other through memory (see late_stores.h).
//
// A grid runs cluster by cluster, one at a time: nothing else is certain on a device either. All clusters of a
// cooperative launch are there at once, and so are the grids at the heads of several streams. Or (Residency::kWhatFits)
// a grid has as many clusters at a time as its device has room for, and the next stream of that device what is left.
//
// Stricter than the device on purpose: a warp-wide operation may only name lanes that exist and have not ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <stdexcept>
#include <vector>

#include "emulation/types.h"

namespace fastpar {
namespace emulation {

// What would be a fault, a hang or an undefined result on the device.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxClusterSize = 16;
constexpr unsigned char kPoison = 0xff;  // NaN in every float type, -1 in every integer

// Of compute capability 9.0: what a block may have, without being allowed more (cudaFuncSetAttribute) and at most, and
// what a multiprocessor has for all of its blocks.
constexpr size_t kPlainSharedBytes = 48 << 10;  // static and dynamic together
constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr unsigned kMaxRegisters = 255;  // of a thread
constexpr unsigned kResidentThreads = 2048, kResidentBlocks = 32, kRegisters = 65536;
constexpr size_t kSharedBytes = 228 << 10, kReservedSharedBytes = 1 << 10;  // all, and of each block for the system

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;          // dynamic
  size_t static_bytes = 0;          // of shared memory, at most
  size_t allowed_shared_bytes = 0;  // dynamic, as cudaFuncSetAttribute has it; 0: has not been called
  unsigned cluster = 1;             // blocks along x
  bool is_cooperative = false;      // all blocks are resident at once
};

// kOneCluster: of a grid that is not cooperative, as on a device that is busy. kWhatFits: as on one that is not.
enum class Residency { kOneCluster, kWhatFits };

struct Device {
  unsigned multiprocessors = 132;
  unsigned registers = 0;  // that a thread has; 0: as many as one block of the launch leaves room for
  Residency residency = Residency::kOneCluster;
};

// Of all devices.
void set_device(const Device& device);
const Device& device();

// How many blocks of such a launch a multiprocessor has room for.
unsigned blocks_per_multiprocessor(const LaunchShape& shape);

struct Launch {
  LaunchShape shape;
  std::function<void()> body;  // run once per thread
};

// Launches that run one after the other, on a device of their own unless another stream names the same one.
struct Stream {
  int device = -1;
  std::deque<Launch> launches;
};

// kAscending, kDescending: in this order of blocks and threads, each as far as it gets. kRandom: in any order, with
// some blocks much slower than others, and threads that stop between two steps of a protocol.
enum class Schedule { kAscending, kDescending, kRandom };

void set_schedule(Schedule schedule, uint64_t seed = 0);
Schedule schedule();

void run_grid(const LaunchShape& shape, const std::function<void()>& body);  // throws Error
void enqueue(Stream* stream, const LaunchShape& shape, std::function<void()> body);

// Runs what is in the streams, their grids side by side, until they are empty. Throws Error, with the streams emptied.
void synchronize(const std::vector<Stream*>& streams);

struct Place {
  const char* file;
  int line;
};

struct Position {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
  unsigned cluster_rank, cluster_size;
};

// Of the thread that runs now.
const Position& position();

// ---- waiting ----

void sync_threads(Place place);
void cluster_arrive(Place place);
void cluster_wait(Place place);
void sleep(Place place);      // lets the others run; an Error when all that is left to run keeps sleeping
void may_pause(Place place);  // a point where kRandom may let others run first

// A clock for time-outs: a microsecond for each time that every thread could have had a turn.
uint64_t clock_nanoseconds();

enum class WarpOperation { kSync, kShuffle, kBallot, kAll, kAny };

// The value that `source` passed (kShuffle), or the lanes whose value is not zero (kBallot), or 0 / 1 (kAll, kAny).
uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, unsigned source, Place place);
unsigned live_lanes();

// ---- shared memory ----

// The block's own instance of a variable; `key` tells variables apart. It holds poison when first asked for.
void* static_shared(const void* key, size_t bytes, size_t alignment);
unsigned char* dynamic_shared();

// The address, in the block of that rank in the cluster, of what `address` is in this block.
void* map_to_peer(const void* address, unsigned rank);

// The device faults on a misaligned access; so does this.
void check_alignment(const void* address, size_t alignment, const char* what);

// Copies of the running thread from global to shared memory, behind its back: they land in `wait_for_copies`, which
// leaves the last `batches` commits on their way. So what is read without waiting for it is poison.
void copy_async(void* to, const void* from, size_t bytes);
void commit_copies();
void wait_for_copies(int64_t batches);

// Copies of any number of bytes that a barrier of the block counts: they land when one of its threads waits for that
// barrier, and not before; land_bulk_copies returns how many bytes. A block must not end while one is on its way.
void copy_bulk_async(void* to, const void* from, size_t bytes, const void* barrier);
size_t land_bulk_copies(const void* barrier);

}  // namespace emulation
}  // namespace fastpar
