// Reductions over the buffers of ranks, written once and compiled per instruction set.
//
// Sums of floats go through Vec, a register of every source at a time, so that a value is read once, kept in a
// register and written once to each target. Everything else goes block by block through the first-level cache, in
// loops that the compiler vectorises.
//
// Worked example: sources [1, 2], [10, 20], [100, 200]: sum [111, 222], average [37, 74], max [100, 200], min [1, 2].
#pragma once

#include "comm/reduce.h"
#include "common/dtypes.h"
#include "common/vec_loop.h"

namespace fastpar {
namespace {

// ---- sums of 32- and 16-bit floats ----------------------------------------------------------------------------------

// The numbers of sources and targets are template arguments where they are small (0: read from `a`).
template <typename T, typename Out, int kSources, int kTargets, bool kShown>
void sum_vec_as(const ReduceArguments& a) {
  const int num_sources = kSources > 0 ? kSources : a.num_sources,
            num_targets = kTargets > 0 ? kTargets : a.num_targets;
  const T* sources[kSources > 0 ? kSources : kMaxReduceSources];
  Out* targets[kTargets > 0 ? kTargets : kMaxReduceSources];
  for (int s = 0; s < num_sources; ++s) sources[s] = static_cast<const T*>(a.sources[s]);
  for (int t = 0; t < num_targets; ++t) targets[t] = static_cast<Out*>(a.targets[t]);
  Out* const shown = static_cast<Out*>(a.shown);
  const bool average = a.average;
  const Vec divisor = Vec::set(static_cast<float>(num_sources));
  for_each_vec(a.count, [&](int64_t i, auto access, int) __attribute__((always_inline)) {
    Vec total = access.load(sources[0] + i);
    for (int s = 1; s < num_sources; ++s) total = total + access.load(sources[s] + i);
    if (average) total = total / divisor;
    for (int t = 0; t < num_targets; ++t) access.store(total, targets[t] + i);
    if (kShown) access.stream(total, shown + i);
  });
  if (kShown) fence_streamed_stores();
}

template <typename T, int kSources>
void sum_vec_from(const ReduceArguments& a) {
  if (a.shown != nullptr) {
    if (a.num_targets == 1) {
      sum_vec_as<T, T, kSources, 1, true>(a);
    } else {
      sum_vec_as<T, T, kSources, 0, true>(a);
    }
  } else if (a.num_targets == 1) {
    sum_vec_as<T, T, kSources, 1, false>(a);
  } else if (a.num_targets == 2) {
    sum_vec_as<T, T, kSources, 2, false>(a);
  } else {
    sum_vec_as<T, T, kSources, 0, false>(a);
  }
}

template <typename T>
void sum_vec(const ReduceArguments& a) {
  if (a.num_sources == 2) {
    sum_vec_from<T, 2>(a);
  } else if (a.num_sources == 4) {
    sum_vec_from<T, 4>(a);
  } else {
    sum_vec_from<T, 0>(a);
  }
}

template <typename T>
void wide_sum(const ReduceArguments& a) {
  if (a.num_sources == 2) {
    sum_vec_as<T, float, 2, 1, false>(a);
  } else if (a.num_sources == 4) {
    sum_vec_as<T, float, 4, 1, false>(a);
  } else {
    sum_vec_as<T, float, 0, 1, false>(a);
  }
}

// ---- copies ---------------------------------------------------------------------------------------------------------

// For memory that is not read again soon, or not by this rank: stores past the caches do not fetch the lines that they
// overwrite. The caller fences.
void copy_streamed(void* target, const void* source, int64_t bytes) {
  char* to = static_cast<char*>(target);
  const char* from = static_cast<const char*>(source);
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % 64);
  const int64_t head = misaligned == 0 ? 0 : (64 - misaligned < bytes ? 64 - misaligned : bytes);
  memcpy(to, from, static_cast<size_t>(head));
  int64_t i = head;
#if defined(__AVX512F__)
  for (; i + 256 <= bytes; i += 256) {
    for (int part = 0; part < 256; part += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + part), _mm512_loadu_si512(from + i + part));
    }
  }
#elif defined(__AVX2__)
  for (; i + 128 <= bytes; i += 128) {
    for (int part = 0; part < 128; part += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + part),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + part)));
    }
  }
#endif
  memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

void copy_past_caches(void* target, const void* source, int64_t bytes) {
  copy_streamed(target, source, bytes);
  fence_streamed_stores();
}

// ---- everything else ------------------------------------------------------------------------------------------------

inline double widened(double value) { return value; }
inline int64_t widened(int64_t value) { return value; }
inline int32_t widened(int32_t value) { return value; }
inline int16_t widened(int16_t value) { return value; }
inline int8_t widened(int8_t value) { return value; }
inline uint8_t widened(uint8_t value) { return value; }
inline float widened(float value) { return value; }
inline float widened(bfloat16 value) { return to_float(value); }
inline float widened(float16 value) { return to_float(value); }

template <typename T>
void narrowed(T value, T* out) {
  *out = value;
}
inline void narrowed(float value, bfloat16* out) { from_float(value, out); }
inline void narrowed(float value, float16* out) { from_float(value, out); }

struct Sum {
  static float apply(float a, float b) { return a + b; }
  static double apply(double a, double b) { return a + b; }
  template <typename T>
  static T apply(T a, T b) {  // unsigned, because signed integers must not overflow
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};

// `a != a` is true of NaN only.
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};

inline double divided(double total, int parts) { return total / parts; }
template <typename T>
T divided(T total, int) {  // never asked for: an average of integers is refused, and of floats is above
  return total;
}

template <typename T, typename Op>
void reduce_blocks(const ReduceArguments& a) {
  using Wide = decltype(widened(T{}));
  constexpr int64_t kBlock = 512;
  Wide block[kBlock];
  for (int64_t begin = 0; begin < a.count; begin += kBlock) {
    const int64_t count = a.count - begin < kBlock ? a.count - begin : kBlock;
    const T* first = static_cast<const T*>(a.sources[0]) + begin;
    for (int64_t i = 0; i < count; ++i) block[i] = widened(first[i]);
    for (int s = 1; s < a.num_sources; ++s) {
      const T* source = static_cast<const T*>(a.sources[s]) + begin;
      for (int64_t i = 0; i < count; ++i) block[i] = Op::apply(block[i], widened(source[i]));
    }
    if (a.average) {
      for (int64_t i = 0; i < count; ++i) block[i] = divided(block[i], a.num_sources);
    }
    for (int t = 0; t < a.num_targets; ++t) {
      T* target = static_cast<T*>(a.targets[t]) + begin;
      for (int64_t i = 0; i < count; ++i) narrowed(block[i], target + i);
    }
    if (a.shown != nullptr) {
      T rounded[kBlock];
      for (int64_t i = 0; i < count; ++i) narrowed(block[i], rounded + i);
      copy_streamed(static_cast<T*>(a.shown) + begin, rounded, count * static_cast<int64_t>(sizeof(T)));
    }
  }
  if (a.shown != nullptr) fence_streamed_stores();
}

// By CommType.
#define FASTPAR_REDUCE_BLOCKS(Op)                                                                                \
  reduce_blocks<double, Op>, reduce_blocks<int64_t, Op>, reduce_blocks<int32_t, Op>, reduce_blocks<int16_t, Op>, \
      reduce_blocks<int8_t, Op>, reduce_blocks<uint8_t, Op>
#define FASTPAR_REDUCE_KERNELS                                                                                         \
  {{sum_vec<float>, sum_vec<bfloat16>, sum_vec<float16>, FASTPAR_REDUCE_BLOCKS(Sum)},                                  \
   {reduce_blocks<float, Max>, reduce_blocks<bfloat16, Max>, reduce_blocks<float16, Max>, FASTPAR_REDUCE_BLOCKS(Max)}, \
   {reduce_blocks<float, Min>, reduce_blocks<bfloat16, Min>, reduce_blocks<float16, Min>, FASTPAR_REDUCE_BLOCKS(Min)}, \
   {nullptr, wide_sum<bfloat16>, wide_sum<float16>},                                                                   \
   copy_past_caches}

}  // namespace
}  // namespace fastpar
