// Runs the collectives of one World in the order in which they are called: on the caller's thread, or behind it.
//
// A blocking call that finds nothing under way runs where it is. A call that is begun runs in two halves on the threads
// of those who begin and finish it; whatever is called in between finishes it first. A call that is submitted is run by
// a thread of its own, which exists from the first such call on, so that it makes progress while the caller computes or
// waits for something else. Ranks that interleave two groups in different orders therefore do not wait for each other
// for ever.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/collectives.h"
#include "comm/world.h"

namespace fastpar {

class Progress {
 public:
  explicit Progress(const WorldOptions& options) : world_(options) {}
  ~Progress();
  Progress(const Progress&) = delete;

  // While a call is under way, for its regions only.
  World& world() { return world_; }

  // Returns when the call is done; throws CommFailure. `check` is asked now and then whether to give up.
  void run(const Call& call, InterruptCheck check);

  // The first half of the call, on this thread; its ticket is for finish(). Between the two the caller must not wait
  // for other ranks by other means. What is queued already goes first, and the call then runs behind it.
  uint64_t begin(const Call& call);
  // The second half. Throws CommFailure.
  void finish(uint64_t ticket, InterruptCheck check);

  // Queues the call and gives its ticket; the call's buffers must live until it is done, its sizes are copied.
  uint64_t submit(const Call& call);

  // Whether the ticket's call is done within so many seconds. Throws its CommFailure, if it has one.
  bool wait(uint64_t ticket, double seconds);
  bool done(uint64_t ticket) const { return finished_.load(std::memory_order_acquire) >= ticket; }

 private:
  struct Job {
    Call call;
    std::vector<int64_t> sizes, output_sizes;
    uint64_t ticket;
  };

  uint64_t enqueue(const Call& call);
  void finish_begun(std::unique_lock<std::mutex>& lock, InterruptCheck check);
  void wait_for(uint64_t ticket, InterruptCheck check);
  void throw_failure_of(uint64_t ticket);
  void work();

  World world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  bool busy_ = false;                   // a call is under way
  std::unique_ptr<StartedCall> begun_;  // it has been begun, and is this one
  uint64_t begun_ticket_ = 0;
  bool stopping_ = false;
  uint64_t sequence_ = 0;  // calls so far
  uint64_t submitted_ = 0;
  std::atomic<uint64_t> finished_{0};  // tickets end in order
  std::map<uint64_t, CommFailure> failures_;
  std::thread thread_;
};

}  // namespace fastpar
