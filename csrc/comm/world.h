// The ranks of a group that share a host: how they find each other's memory, wait for each other, and fail together.
//
// Note: phases. Every rank owns one segment, which all others map: a control block, two exchange buffers `a` and two
// result buffers `r`. Only its owner writes it. Time is counted in phases 1, 2, 3, ..., the same on every rank and
// never reset:
//
//   publish(p)    "what I have to show for phase p is written": stores p in the own control block
//   wait_all(p)   until every other rank has published p
//
// and a rank that has published p does not publish p + 1 before it has waited for all of p. What belongs to phase p
// lies in the buffers of parity p % 2. A peer reads them between its wait_all(p) and its publish(p + 1); so once
// wait_all(p + 1) has returned nobody reads them any more, and they are written again for p + 2. A rank is never more
// than one phase ahead of a straggler. tests/comm/test_protocol.py explores every interleaving of this.
//
// Note: waiting. First a short spin, then sched_yield, then a futex. Ranks may outnumber the processors, where spinning
// alone is a thousand times slower. In the slow part a rank looks every few milliseconds at its deadline, at whether
// its peers live, and at whether one of them has given up; so a failure of one becomes an error of all.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/failure.h"
#include "comm/reduce.h"
#include "comm/waiting.h"
#include "runtime/shared_segment.h"

namespace fastpar {

enum class CommOp : uint8_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast, kReduce, kBarrier };

// What a rank is about to do. All ranks compare all headers in the first phase of a collective.
struct CallHeader {
  uint64_t sequence;
  CommOp op;
  uint8_t dtype;  // torch's number
  Reduction reduction;
  uint8_t unused;
  int32_t root;
  int64_t count;    // elements of the whole, where every rank knows it
  uint64_t sizes;   // a hash of the sizes of the parts
  uint64_t region;  // where the data lies already, if in a region: which, and where; else 0
  uint64_t offset;
};

struct ControlBlock {
  alignas(64) std::atomic<uint64_t> phase;
  alignas(64) std::atomic<uint32_t> sleepers;  // peers that wait for `phase` in a futex: the one thing that peers write
  alignas(64) std::atomic<uint32_t> failed;    // a CommStatus, when this rank has given up
  std::atomic<uint64_t> left;                  // 1 + the calls it has made, when it has left for good
  uint64_t nonce;
  char failure[232];
  alignas(64) CallHeader header[2];
};

struct WorldOptions {
  int rank;
  int size;
  int ranks_on_host;  // of the whole job: more than there are processors, and spinning is pointless
  size_t slot_bytes;  // of each exchange buffer
};

class World {
 public:
  explicit World(const WorldOptions& options);

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  int64_t slot_bytes() const { return static_cast<int64_t>(options_.slot_bytes); }

  // What messages call the ranks: the numbers that the user's group gives them (array by rank). At first, 0, 1, 2, ...
  void name_ranks(const int64_t* names) { names_.assign(names, names + size()); }
  int64_t name(int rank) const { return names_.empty() ? rank : names_[static_cast<size_t>(rank)]; }

  // Descriptor of the own segment, and what peers find in it if they have opened the right one.
  int descriptor() const { return own_.descriptor(); }
  uint64_t nonce() const { return control(rank()).nonce; }

  // Maps the segments of the others (arrays by rank). Throws where that is not possible.
  void connect(const int64_t* pids, const int64_t* descriptors, const uint64_t* nonces);

  // All ranks are connected: from here on nobody else can open the segment.
  void seal() { own_.close_descriptor(); }

  // ---- phases

  uint64_t next_phase() const { return phase_ + 1; }
  void publish();
  void wait_all(double timeout_seconds);

  // Buffers of the phase that is published next, or was published last.
  char* exchange(int rank, uint64_t phase) const { return base_[rank] + slots_offset_ + (phase & 1) * slot_stride_; }
  char* result(int rank, uint64_t phase) const {
    return base_[rank] + slots_offset_ + (2 + (phase & 1)) * slot_stride_;
  }
  int64_t* size_table(int rank, uint64_t phase) const;
  CallHeader& header(int rank, uint64_t phase) const { return control(rank).header[phase & 1]; }

  // ---- regions: other memory that all ranks have mapped, at addresses of their own

  // From any thread, also while a collective is under way. Who removes a region keeps its memory until the collectives
  // that were launched on it are done.
  uint64_t add_region(std::vector<char*> addresses, size_t bytes);
  void remove_region(uint64_t id);

  struct Region {
    uint64_t id;
    std::vector<char*> addresses;
    size_t bytes;
  };
  // The region that [address, address + bytes) lies in, or null.
  std::shared_ptr<const Region> find_region(const void* address, int64_t bytes) const;

  // ---- failure

  void set_interrupt_check(InterruptCheck check) { interrupt_check_ = check; }
  // What is under way, for messages.
  void set_activity(std::string (*describe)(const void*), const void* call);
  // Makes every wait of this rank, now and later, throw kClosed; from any thread.
  void close() { closed_.store(true, std::memory_order_relaxed); }
  bool is_broken() const { return broken_ != CommStatus::kOk; }
  // Says to all that this rank takes part in nothing any more, after so many calls.
  void leave(uint64_t calls) { control(rank()).left.store(calls + 1, std::memory_order_release); }
  // That this process ends, and how; before leave().
  void note_exit(const char* text);
  // Says to all that this rank has given up, and throws.
  [[noreturn]] void fail(CommStatus status, const std::string& text);
  void check_usable() const;

 private:
  ControlBlock& control(int rank) const { return *reinterpret_cast<ControlBlock*>(base_[rank]); }
  void wait_for(int peer, uint64_t phase, double timeout_seconds);
  void wait_for_long(int peer, uint64_t phase, double timeout_seconds);
  void look_for_trouble(int peer, uint64_t phase, double started, double timeout_seconds);
  std::string missing(uint64_t phase) const;

  WorldOptions options_;
  size_t table_offset_, slots_offset_, slot_stride_;
  SharedSegment own_;
  std::vector<SharedSegment> peers_;
  std::vector<ProcessWatch> watches_;
  std::vector<int64_t> pids_;
  std::vector<int64_t> names_;
  std::vector<char*> base_;
  uint64_t phase_ = 0;
  Patience patience_;
  double first_wait_ = 0.0;  // when the collective under way first had to wait for long; 0: not yet
  mutable std::mutex regions_mutex_;
  std::vector<std::shared_ptr<const Region>> regions_;
  uint64_t num_regions_ = 0;
  InterruptCheck interrupt_check_ = nullptr;
  std::string (*describe_)(const void*) = nullptr;
  const void* call_ = nullptr;
  std::atomic<bool> closed_{false};
  CommStatus broken_ = CommStatus::kOk;  // what broke it, which later calls repeat
  std::string broken_by_;
};

}  // namespace fastpar
