// What a rank waits with for a word in shared memory to grow: a spin, then sched_yield, then a futex.
//
// The loops are in their places (world.cpp, mailbox.cpp), because they differ in what they look at meanwhile.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace fastpar {

constexpr long kSliceNanoseconds = 5'000'000;  // how long a rank sleeps before it looks around
constexpr double kDeathCheckSeconds = 0.05;
constexpr int kYieldsPerLookAtTheClock = 8;

inline double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// The bounds of the first two stages of waiting. The spin takes some 30 us with a processor for every rank, well under
// one without. Yielding goes on for longer than a chunk of a large collective takes, because a rank that is woken from
// the futex is 50 us or more late. It is bounded by time: a yield returns at once, or after a time slice of somebody
// else's.
struct Patience {
  int spins;
  double yield_seconds;

  static Patience of(int ranks_on_host) {
    cpu_set_t set;
    const int processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return ranks_on_host > processors ? Patience{20, 0.001} : Patience{1000, 0.002};
  }
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A futex is 32 bits: the low half of a counter, which is what changes.
inline uint32_t* futex_word(std::atomic<uint64_t>& counter) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half is taken to come first");
  static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters are shared between processes");
  return reinterpret_cast<uint32_t*>(&counter);
}

inline void futex_wait(std::atomic<uint64_t>& counter, uint64_t seen, long nanoseconds) {
  const timespec limit{0, nanoseconds};
  syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint64_t>& counter) {
  syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace fastpar
