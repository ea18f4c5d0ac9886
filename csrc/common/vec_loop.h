// Loops over a row, one register of elements at a time.
//
// The body is called as body(i, access, u): it reads with access.load(p + i) and writes with access.store(value, p +
// i), and never sees whether it has a whole register, the first elements of one, or stores that bypass the caches; with
// access.stream a single store bypasses them, where the address is aligned to a register's width in memory. u in [0, 4)
// tells the copies of the body in an unrolled loop apart, for sums that should not wait for each other.
#pragma once

#include "common/simd.h"

namespace fastpar {
namespace {

template <bool kStream>
struct WholeVec {
  template <typename T>
  static Vec load(const T* p) {
    return Vec::load(p);
  }
  template <typename T>
  static void store(Vec value, T* p) {
    if (kStream) {
      value.stream(p);
    } else {
      value.store(p);
    }
  }
  template <typename T>
  static void stream(Vec value, T* p) {
    value.stream(p);
  }
};

// The first `count` elements; the others read as 0.
struct PartVec {
  int count;

  template <typename T>
  Vec load(const T* p) const {
    return Vec::load_first(p, count, 0.0f);
  }
  template <typename T>
  void store(Vec value, T* p) const {
    value.store_first(p, count);
  }
  template <typename T>
  void stream(Vec value, T* p) const {
    value.store_first(p, count);
  }
};

// Elements before the first address that is aligned to a register's width in memory.
template <typename T>
int64_t elements_to_alignment(const T* p) {
  constexpr uintptr_t kBytes = sizeof(T) * Vec::kWidth;
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(p) % kBytes;
  return misaligned == 0 ? 0 : static_cast<int64_t>((kBytes - misaligned) / sizeof(T));
}

template <bool kStream, typename Body>
inline void for_each_vec_from(int64_t i, int64_t count, const Body& body) {
  constexpr int W = Vec::kWidth;
  const WholeVec<kStream> whole;
  for (; i + 4 * W <= count; i += 4 * W) {
    body(i, whole, 0);
    body(i + W, whole, 1);
    body(i + 2 * W, whole, 2);
    body(i + 3 * W, whole, 3);
  }
  for (; i + W <= count; i += W) body(i, whole, 0);
  if (i < count) body(i, PartVec{static_cast<int>(count - i)}, 1);
}

template <typename Body>
inline void for_each_vec(int64_t count, const Body& body) {
  for_each_vec_from<false>(0, count, body);
}

// With stores past the caches. `head` elements come first, after which every address that the body stores to is
// aligned to a register's width in memory.
template <typename Body>
inline void for_each_streamed_vec(int64_t head, int64_t count, const Body& body) {
  if (head > count) head = count;
  if (head > 0) body(int64_t{0}, PartVec{static_cast<int>(head)}, 0);
  for_each_vec_from<true>(head, count, body);
}

}  // namespace
}  // namespace fastpar
