#include "comm/world.h"

#include <sched.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "common/checks.h"

namespace fastpar {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;

size_t rounded_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

World::World(const WorldOptions& options) : options_(options), base_(static_cast<size_t>(options.size), nullptr) {
  FASTPAR_CHECK(options.size >= 1 && options.rank >= 0 && options.rank < options.size, "rank ", options.rank, " of ",
                options.size);
  FASTPAR_CHECK(options.size <= kMaxReduceSources, "at most ", kMaxReduceSources, " ranks share a host, got ",
                options.size);
  const size_t ranks = static_cast<size_t>(options.size);
  options_.slot_bytes = rounded_up(std::max(options.slot_bytes, ranks * kLine), kPage);
  table_offset_ = rounded_up(sizeof(ControlBlock), kLine);
  slots_offset_ = rounded_up(table_offset_ + 2 * (2 * ranks * sizeof(int64_t)), kPage);
  // A line apart from a multiple of the page, so that the four buffers do not fall on the same cache sets.
  slot_stride_ = options_.slot_bytes + kPage + kLine;
  own_ = SharedSegment::create(rounded_up(slots_offset_ + 4 * slot_stride_, kPage));
  new (own_.address()) ControlBlock();
  base_[static_cast<size_t>(rank())] = own_.address();
  uint64_t nonce = 0;
  FASTPAR_CHECK(getrandom(&nonce, sizeof nonce, 0) == sizeof nonce, "no random numbers");
  control(rank()).nonce = nonce;
  patience_ = Patience::of(options.ranks_on_host);
}

void World::connect(const int64_t* pids, const int64_t* descriptors, const uint64_t* nonces) {
  peers_.resize(base_.size());
  watches_.resize(base_.size());
  pids_.assign(pids, pids + size());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const pid_t pid = static_cast<pid_t>(pids[peer]);
    SharedSegment segment = SharedSegment::open(pid, static_cast<int>(descriptors[peer]), own_.bytes());
    base_[static_cast<size_t>(peer)] = segment.address();
    peers_[static_cast<size_t>(peer)] = std::move(segment);
    FASTPAR_CHECK(control(peer).nonce == nonces[peer], "process ", pid, " is not rank ", name(peer),
                  " (another process namespace?)");
    watches_[static_cast<size_t>(peer)] = ProcessWatch(pid);
  }
}

int64_t* World::size_table(int rank, uint64_t phase) const {
  char* table = base_[rank] + table_offset_ + (phase & 1) * (2 * base_.size() * sizeof(int64_t));
  return reinterpret_cast<int64_t*>(table);
}

// ---- phases

void World::publish() {
  ControlBlock& own = control(rank());
  ++phase_;
  // Sequentially consistent, as is the other side: either the sleeper sees the phase or we see the sleeper.
  own.phase.store(phase_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(own.phase);
}

void World::wait_all(double timeout_seconds) {
  for (int step = 1; step < size(); ++step) wait_for((rank() + step) % size(), phase_, timeout_seconds);
}

inline void World::wait_for(int peer, uint64_t phase, double timeout_seconds) {
  const std::atomic<uint64_t>& theirs = control(peer).phase;
  for (int spin = 0; spin < patience_.spins; ++spin) {
    if (theirs.load(std::memory_order_acquire) >= phase) return;
    pause();
  }
  wait_for_long(peer, phase, timeout_seconds);
}

void World::wait_for_long(int peer, uint64_t phase, double timeout_seconds) {
  ControlBlock& theirs = control(peer);
  const double started = now();
  for (int i = 1; i % kYieldsPerLookAtTheClock != 0 || now() - started < patience_.yield_seconds; ++i) {
    if (theirs.phase.load(std::memory_order_acquire) >= phase) return;
    sched_yield();
  }
  if (first_wait_ == 0.0) first_wait_ = started;
  theirs.sleepers.fetch_add(1, std::memory_order_seq_cst);
  try {
    for (;;) {
      const uint64_t seen = theirs.phase.load(std::memory_order_seq_cst);
      if (seen >= phase) break;
      futex_wait(theirs.phase, seen, kSliceNanoseconds);
      if (theirs.phase.load(std::memory_order_acquire) >= phase) break;
      look_for_trouble(peer, phase, started, timeout_seconds);
    }
  } catch (...) {
    theirs.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    throw;
  }
  theirs.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// Throws if there is no point in waiting on. A peer that has published and then failed or ended is no trouble: its
// part of this phase is there.
void World::look_for_trouble(int peer, uint64_t phase, double started, double timeout_seconds) {
  if (closed_.load(std::memory_order_relaxed)) fail(CommStatus::kClosed, "the communicator was closed");
  if (interrupt_check_ != nullptr && interrupt_check_()) fail(CommStatus::kInterrupted, "interrupted");
  const auto arrived = [&](int other) { return control(other).phase.load(std::memory_order_acquire) >= phase; };
  for (int other = 0; other < size(); ++other) {
    if (other == rank()) continue;
    const uint32_t status = control(other).failed.load(std::memory_order_acquire);
    if (status != 0 && !arrived(other)) {
      const char* text = control(other).failure;
      fail(static_cast<CommStatus>(status),
           concatenate("rank ", name(other),
                       " gave up: ", std::string(text, strnlen(text, sizeof control(other).failure))));
    }
  }
  for (int other = 0; other < size(); ++other) {  // whether its process has ended meanwhile is all the same
    const uint64_t left = control(other).left.load(std::memory_order_acquire);
    if (other == rank() || left == 0 || arrived(other)) continue;
    const char* text = control(other).failure;
    const std::string said(text, strnlen(text, sizeof control(other).failure));
    fail(CommStatus::kPeerLost,
         concatenate("rank ", name(other), " (pid ", pids_[static_cast<size_t>(other)], ") has ",
                     said.empty() ? std::string("closed the group") : concatenate("ended ", said),
                     ", after its last collective",
                     left == 1 ? std::string(" (none)") : concatenate(" (call #", left - 2, ")")));
  }
  const double time = now();
  if (time - started > kDeathCheckSeconds) {
    for (int other = 0; other < size(); ++other) {
      if (other != rank() && watches_[static_cast<size_t>(other)].has_ended() && !arrived(other)) {
        fail(CommStatus::kPeerLost, concatenate("the process of rank ", name(other), " (pid ",
                                                pids_[static_cast<size_t>(other)], ") has ended"));
      }
    }
  }
  late_reporter().report_if_due(time - first_wait_, [&] {
    return concatenate(describe_ == nullptr ? "" : describe_(call_), ": rank ", name(rank()), " has waited ",
                       static_cast<int64_t>(time - first_wait_), " s of ", timeout_seconds, " s for rank(s) ",
                       missing(phase));
  });
  if (time - first_wait_ > timeout_seconds) {
    const std::string absent = missing(phase);
    fail(CommStatus::kTimeout, concatenate("rank ", name(rank()), " waited ", timeout_seconds, " s for rank(s) ",
                                           absent.empty() ? std::to_string(name(peer)) : absent));
  }
}

// The ranks that have not published this phase.
std::string World::missing(uint64_t phase) const {
  std::string text;
  for (int other = 0; other < size(); ++other) {
    const bool arrived = control(other).phase.load(std::memory_order_acquire) >= phase;
    if (other != rank() && !arrived) text += concatenate(text.empty() ? "" : ", ", name(other));
  }
  return text;
}

// ---- regions

uint64_t World::add_region(std::vector<char*> addresses, size_t bytes) {
  const std::lock_guard<std::mutex> lock(regions_mutex_);
  regions_.push_back(std::make_shared<const Region>(Region{++num_regions_, std::move(addresses), bytes}));
  return num_regions_;
}

void World::remove_region(uint64_t id) {
  const std::lock_guard<std::mutex> lock(regions_mutex_);
  regions_.erase(std::remove_if(regions_.begin(), regions_.end(),
                                [id](const std::shared_ptr<const Region>& region) { return region->id == id; }),
                 regions_.end());
}

std::shared_ptr<const World::Region> World::find_region(const void* address, int64_t bytes) const {
  const char* start = static_cast<const char*>(address);
  const std::lock_guard<std::mutex> lock(regions_mutex_);
  for (const std::shared_ptr<const Region>& region : regions_) {
    const char* own = region->addresses[static_cast<size_t>(rank())];
    if (start >= own && start + bytes <= own + region->bytes) return region;
  }
  return nullptr;
}

// ---- failure

void World::set_activity(std::string (*describe)(const void*), const void* call) {
  describe_ = describe;
  call_ = call;
  first_wait_ = 0.0;
}

void World::fail(CommStatus status, const std::string& text) {
  const std::string what = describe_ == nullptr ? text : concatenate(describe_(call_), ": ", text);
  broken_ = status;
  broken_by_ = what;
  ControlBlock& own = control(rank());
  strncpy(own.failure, what.c_str(), sizeof own.failure - 1);
  own.failed.store(static_cast<uint32_t>(status), std::memory_order_release);
  throw CommFailure(status, what);
}

void World::note_exit(const char* text) {
  ControlBlock& own = control(rank());
  if (own.failure[0] == 0) strncpy(own.failure, text, sizeof own.failure - 1);
}

void World::check_usable() const {
  if (closed_.load(std::memory_order_relaxed)) throw CommFailure(CommStatus::kClosed, "the communicator was closed");
  if (is_broken()) {
    throw CommFailure(broken_,
                      concatenate("an earlier collective of this group failed (", broken_by_, "): make a new group, ",
                                  "as fastpar.init_mesh does when all ranks call it again"));
  }
}

}  // namespace fastpar
