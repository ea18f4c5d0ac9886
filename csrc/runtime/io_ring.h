// io_uring by its system calls: reads and writes of one thread, submitted and reaped in batches.
//
// Sandboxes (seccomp, gVisor) and the sysctl kernel.io_uring_disabled refuse it, and kernels before 5.6 lack plain
// reads and writes; create() then throws std::system_error with the reason, and callers take threads instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fastpar {

class IoRing {
 public:
  // Room for `entries` operations in flight; the caller never has more.
  static std::unique_ptr<IoRing> create(unsigned entries);
  ~IoRing();
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  struct Operation {
    bool is_write;
    int descriptor;
    void* address;
    uint32_t bytes;
    int64_t offset;
    uint64_t tag;
  };
  // Takes effect with the next submit().
  void push(const Operation& operation);

  // Hands over what was pushed, and returns when at least `completions` operations have ended.
  void submit(unsigned completions);

  // The next operation that has ended, and its result: bytes, or a negative errno. False: there is none.
  bool pop(uint64_t* tag, int32_t* result);

 private:
  IoRing() = default;

  struct Mapping {
    void* address = nullptr;
    size_t bytes = 0;
  };
  static Mapping map(int descriptor, size_t bytes, int64_t what);

  int descriptor_ = -1;
  Mapping submissions_, completions_, entries_;
  unsigned *submission_head_ = nullptr, *submission_tail_ = nullptr, *submission_index_ = nullptr;
  unsigned *completion_head_ = nullptr, *completion_tail_ = nullptr;
  void* completed_ = nullptr;
  unsigned submission_mask_ = 0, completion_mask_ = 0;
  unsigned pushed_ = 0;
};

}  // namespace fastpar
