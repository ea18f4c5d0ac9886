// What makes threads of one process pass for ranks of a host, for programs of one source file under ThreadSanitizer.
//
// csrc/runtime/shared_segment.cpp is replaced by the class below: peers get the owner's address instead of a mapping of
// their own, because ThreadSanitizer tells locations apart by address and would see neither the races nor the
// synchronisation between two mappings of one page.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>

#include "common/checks.h"
#include "runtime/shared_segment.h"

namespace fastpar {
namespace {

// Addresses by made-up descriptor, and how many segments share each.
struct Registry {
  std::mutex mutex;
  std::map<int, void*> addresses;
  std::map<void*, int> uses;
};
Registry& registry() {
  static Registry* const made = new Registry;
  return *made;
}

}  // namespace

SharedSegment::SharedSegment(SharedSegment&& other) noexcept { *this = std::move(other); }

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SharedSegment::~SharedSegment() {
  if (address_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  if (--registry().uses[address_] == 0) munmap(address_, bytes_);
}

SharedSegment SharedSegment::create(size_t bytes) {
  SharedSegment segment;
  segment.address_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  segment.bytes_ = bytes;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  segment.descriptor_ = static_cast<int>(registry().addresses.size());
  registry().addresses[segment.descriptor_] = segment.address_;
  registry().uses[segment.address_] = 1;
  return segment;
}

SharedSegment SharedSegment::open(pid_t, int fd, size_t bytes) {
  SharedSegment segment;
  segment.bytes_ = bytes;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  segment.address_ = registry().addresses.at(fd);
  ++registry().uses[segment.address_];
  return segment;
}

void SharedSegment::close_descriptor() { descriptor_ = -1; }

ProcessWatch::ProcessWatch(pid_t) {}
ProcessWatch::ProcessWatch(ProcessWatch&&) noexcept {}
ProcessWatch& ProcessWatch::operator=(ProcessWatch&&) noexcept { return *this; }
ProcessWatch::~ProcessWatch() = default;
bool ProcessWatch::has_ended() const { return false; }

namespace {

#define EXPECT(condition, ...)                                                                      \
  do {                                                                                              \
    if (!(condition)) {                                                                             \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, ::fastpar::concatenate(__VA_ARGS__).c_str()); \
      std::abort();                                                                                 \
    }                                                                                               \
  } while (0)

class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int turn = turn_;
    if (++waiting_ == size_) {
      waiting_ = 0;
      ++turn_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return turn != turn_; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int size_, waiting_ = 0, turn_ = 0;
};

int pick(std::minstd_rand& random, int choices) { return static_cast<int>(random() / 7 % choices); }

}  // namespace
}  // namespace fastpar
