// Loops over a row, one register of elements at a time.
//
// The body is called as body(i, access): it reads with access.load(p + i) and writes with access.store(value, p + i),
// and never sees whether it has a whole register, the first elements of one, or stores that bypass the caches.
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
};

// Elements before the first address that is aligned to a register's width in memory.
template <typename T>
int64_t elements_to_alignment(const T* p) {
  constexpr uintptr_t kBytes = sizeof(T) * Vec::kWidth;
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(p) % kBytes;
  return misaligned == 0 ? 0 : static_cast<int64_t>((kBytes - misaligned) / sizeof(T));
}

template <typename Body>
inline void for_each_vec(int64_t count, const Body& body) {
  constexpr int W = Vec::kWidth;
  int64_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W) {
    for (int u = 0; u < 4; ++u) body(i + u * W, WholeVec<false>{});
  }
  for (; i + W <= count; i += W) body(i, WholeVec<false>{});
  if (i < count) body(i, PartVec{static_cast<int>(count - i)});
}

// With stores past the caches. `head` elements come first, after which every address that the body stores to is
// aligned to a register's width in memory.
template <typename Body>
inline void for_each_streamed_vec(int64_t head, int64_t count, const Body& body) {
  constexpr int W = Vec::kWidth;
  int64_t i = head < count ? head : count;
  if (i > 0) body(int64_t{0}, PartVec{static_cast<int>(i)});
  for (; i + 4 * W <= count; i += 4 * W) {
    for (int u = 0; u < 4; ++u) body(i + u * W, WholeVec<true>{});
  }
  for (; i + W <= count; i += W) body(i, WholeVec<true>{});
  if (i < count) body(i, PartVec{static_cast<int>(count - i)});
}

}  // namespace
}  // namespace fastpar
