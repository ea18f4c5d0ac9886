#include "emulation/machine.h"

#include <algorithm>
#include <utility>

#include "emulation/late_stores.h"
#include "emulation/state.h"

namespace fastpar {
namespace emulation {
namespace {

// ---- room on multiprocessors ----

bool holds(const Room& room, const Room& needed) {
  return room.blocks >= needed.blocks && room.threads >= needed.threads && room.registers >= needed.registers &&
         room.shared_bytes >= needed.shared_bytes;
}

void take(Room* room, const Room& needed) {
  room->blocks -= needed.blocks;
  room->threads -= needed.threads;
  room->registers -= needed.registers;
  room->shared_bytes -= needed.shared_bytes;
}

void give_back(Room* room, const Room& needed) {
  room->blocks += needed.blocks;
  room->threads += needed.threads;
  room->registers += needed.registers;
  room->shared_bytes += needed.shared_bytes;
}

// Room for `count` more blocks, which is then taken; empty where there is none for all of them.
std::vector<Room*> find_room(std::vector<Room>* rooms, const LaunchShape& shape, uint64_t count) {
  const Room needed = needed_by(shape);
  std::vector<Room*> found;
  for (Room& room : *rooms) {
    for (; found.size() < count && holds(room, needed); take(&room, needed)) found.push_back(&room);
  }
  if (found.size() == count) return found;
  for (Room* room : found) give_back(room, needed);
  return {};
}

// ---- threads and blocks ----

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
    give_back(block->room, needed_by(cluster->launch->shape));
  }
}

void thread_main(void* argument) {
  auto* thread = static_cast<Thread*>(argument);
  Cluster* cluster = thread->block->cluster;
  try {
    cluster->launch->body();
    if (thread->block->live == 1 && !thread->block->bulk_copies.empty()) {
      fail(describe(*thread), " is the last of its block and ends before a bulk copy has landed");
    }
    end_thread(thread);
  } catch (...) {
    cluster->failure = std::current_exception();
  }
}

void add_block(Cluster* cluster, const Grid& grid, Room* room, uint3 index, unsigned rank) {
  const LaunchShape& shape = grid.launch->shape;
  cluster->blocks.push_back(std::make_unique<Block>());
  Block* block = cluster->blocks.back().get();
  block->cluster = cluster;
  block->room = room;
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

void add_cluster(Grid* grid, Room* const* rooms) {
  const LaunchShape& shape = grid->launch->shape;
  grid->resident.push_back(std::make_unique<Cluster>());
  Cluster* cluster = grid->resident.back().get();
  cluster->launch = grid->launch;
  for (unsigned rank = 0; rank < shape.cluster; ++rank, ++grid->next_block) {
    const uint64_t block = grid->next_block;
    const uint3 index{static_cast<unsigned>(block % shape.grid.x),
                      static_cast<unsigned>(block / shape.grid.x % shape.grid.y),
                      static_cast<unsigned>(block / shape.grid.x / shape.grid.y)};
    add_block(cluster, *grid, rooms[rank], index, rank);
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
  const bool is_alone = !shape.is_cooperative && machine().device.residency == Residency::kOneCluster;
  const uint64_t together = shape.is_cooperative ? grid->num_blocks : shape.cluster;  // blocks that come or wait
  while (grid->next_block < grid->num_blocks && (resident.empty() || !is_alone)) {
    const std::vector<Room*> rooms = find_room(grid->rooms, shape, together);
    if (rooms.empty()) break;
    for (uint64_t first = 0; first < together; first += shape.cluster) add_cluster(grid, rooms.data() + first);
  }
  return !resident.empty() || grid->next_block < grid->num_blocks;
}

// Of the multiprocessors of a stream's device.
std::vector<Room>* rooms_of(const Stream& stream, int number) {
  auto& rooms = machine().rooms[stream.device >= 0 ? stream.device : -1 - number];
  if (rooms.empty()) rooms.resize(machine().device.multiprocessors);
  return &rooms;
}

// Begins the next launch of every stream whose last one has ended; false when all streams are empty.
bool begin_launches(const std::vector<Stream*>& streams) {
  bool any = false;
  auto& grids = machine().grids;
  grids.resize(streams.size());
  for (size_t s = 0; s < streams.size(); ++s) {
    while (!streams[s]->launches.empty()) {
      if (!grids[s]) {
        std::vector<Room>* rooms = rooms_of(*streams[s], static_cast<int>(s));
        grids[s] = std::make_unique<Grid>(&streams[s]->launches.front(), rooms, machine().num_grids++);
      }
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
  if (shape.allowed_shared_bytes + shape.static_bytes > kMaxSharedBytes) {
    fail("a kernel with up to ", shape.static_bytes, " bytes of static shared memory cannot be allowed ",
         shape.allowed_shared_bytes, " more: a block has at most ", kMaxSharedBytes);
  }
  const size_t allowed =
      shape.allowed_shared_bytes > 0 ? shape.allowed_shared_bytes : kPlainSharedBytes - shape.static_bytes;
  if (shape.shared_bytes > allowed) {
    fail(shape.shared_bytes, " bytes of dynamic shared memory beside up to ", shape.static_bytes,
         " of static have to be allowed first (cudaFuncSetAttribute); allowed are ", allowed);
  }
  if (shape.cluster == 0 || shape.cluster > kMaxClusterSize || shape.grid.x % shape.cluster != 0) {
    fail("a cluster has 1 to ", kMaxClusterSize, " blocks and divides the grid: ", shape.cluster, " blocks, grid of ",
         shape.grid.x);
  }
  const uint64_t blocks = uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  const uint64_t most = uint64_t{blocks_per_multiprocessor(shape)} * machine().device.multiprocessors;
  const uint64_t together = shape.is_cooperative ? blocks : shape.cluster;
  if (together > most) {
    fail("too many blocks in ", shape.is_cooperative ? "a cooperative launch: " : "a cluster: ", together,
         " that have to be resident at once, and the device has room for ", most);
  }
}

}  // namespace

void set_device(const Device& device) {
  if (device.multiprocessors == 0 || device.registers > kMaxRegisters) {
    fail("a device has a multiprocessor at least, and a thread at most ", kMaxRegisters, " registers; got ",
         device.multiprocessors, " and ", device.registers);
  }
  machine().device = device;
}

const Device& device() { return machine().device; }

Room needed_by(const LaunchShape& shape) {
  const unsigned threads = shape.block.x * shape.block.y * shape.block.z;
  const unsigned warps = (threads + kWarpSize - 1) / kWarpSize;
  const unsigned most = std::min(kMaxRegisters + 1, kRegisters / (warps * kWarpSize) / 8 * 8);
  const unsigned registers = machine().device.registers == 0 ? most : (machine().device.registers + 7) / 8 * 8;
  return {1, warps * kWarpSize, registers * warps * kWarpSize,
          shape.shared_bytes + shape.static_bytes + kReservedSharedBytes};
}

unsigned blocks_per_multiprocessor(const LaunchShape& shape) {
  const Room needed = needed_by(shape);
  unsigned blocks = 0;
  for (Room room; holds(room, needed); take(&room, needed)) ++blocks;
  return blocks;
}

void synchronize(const std::vector<Stream*>& streams) {
  auto& grids = machine().grids;
  const auto stop = [&](bool abandoned) {
    for (const auto& grid : grids) {
      if (!grid) continue;
      for (const auto& cluster : grid->resident) release_fibers(cluster.get(), abandoned);
    }
    grids.clear();
    machine().rooms.clear();
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
  Block* block = running().block;
  unsigned char* const data = block->static_memory(key, bytes, alignment).data();
  const size_t most = block->cluster->launch->shape.static_bytes;
  if (block->static_bytes > most) {
    fail("a kernel with ", block->static_bytes, " bytes of static shared memory was launched as one with up to ", most);
  }
  return data;
}

unsigned char* dynamic_shared() { return running().block->dynamic->data(); }

void* map_to_peer(const void* address, unsigned rank) {
  const Thread& thread = running();
  const Block& own = *thread.block;
  if (rank >= own.cluster->blocks.size()) {
    fail(describe(thread), " maps an address to rank ", rank, " of a cluster of ", own.cluster->blocks.size());
  }
  Block& peer = *own.cluster->blocks[rank];
  const bool has_met = own.cluster->phase != 0 || &peer == &own;  // else it is by chance if the peer has started
  if (!has_met || peer.live == 0) {
    fail(describe(thread), " maps an address to block ", describe(peer.index), ", which ",
         has_met ? "has ended" : "may not have started: the cluster has to meet first");
  }
  const auto* byte = static_cast<const unsigned char*>(address);
  if (own.dynamic->holds(address)) return peer.dynamic->data() + (byte - own.dynamic->data());
  for (const auto& [key, memory] : own.statics) {
    if (!memory->holds(address)) continue;
    return peer.static_memory(key, memory->bytes(), memory->alignment()).data() + (byte - memory->data());
  }
  fail(describe(thread), " maps an address that is not in its shared memory");
}

void copy_async(void* to, const void* from, size_t bytes) {
  Thread& thread = running();
  thread.copies.push_back({to, from, bytes, thread.copy_batches});
}

void commit_copies() { ++running().copy_batches; }

void wait_for_copies(int64_t batches) {
  Thread& thread = running();
  while (!thread.copies.empty() && thread.copies.front().batch < thread.copy_batches - batches) {
    const PendingCopy& copy = thread.copies.front();
    std::memcpy(copy.to, copy.from, copy.bytes);
    thread.copies.pop_front();
  }
}

void copy_bulk_async(void* to, const void* from, size_t bytes, const void* barrier) {
  check_alignment(to, 16, "bulk copy");
  check_alignment(from, 16, "bulk copy");
  if (bytes == 0 || bytes % 16 != 0 || bytes >= size_t{1} << 20) {
    fail("a bulk copy of ", bytes, " bytes: allowed are multiples of 16 from 16 to below 2^20");
  }
  running().block->bulk_copies.push_back({to, from, bytes, barrier});
}

size_t land_bulk_copies(const void* barrier) {
  std::vector<BulkCopy> later;
  size_t landed = 0;
  for (const BulkCopy& copy : running().block->bulk_copies) {
    if (copy.barrier != barrier) {
      later.push_back(copy);
    } else {
      std::memcpy(copy.to, copy.from, copy.bytes);
      landed += copy.bytes;
    }
  }
  running().block->bulk_copies.swap(later);
  return landed;
}

void check_alignment(const void* address, size_t alignment, const char* what) {
  const auto misaligned = reinterpret_cast<uintptr_t>(address) % alignment;
  if (misaligned == 0) return;
  fail("misaligned ", what, ": ", describe(running()), " accesses an address that is ", misaligned,
       " bytes past a multiple of ", alignment);
}

}  // namespace emulation
}  // namespace fastpar
