// The local half of a reduction over ranks: what World's collectives and the instruction-set versions agree on.
#pragma once

#include <cstdint>

namespace fastpar {

enum class CommType : uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat64,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,  // bool too
};
constexpr int kNumCommTypes = 9;
constexpr int kCommTypeBytes[kNumCommTypes] = {4, 2, 2, 8, 8, 4, 2, 1, 1};

// The wide ones give the sum or average of 16-bit floats as it was accumulated, in float32: reduce_scatter only.
enum class Reduction : uint8_t { kSum, kAvg, kMax, kMin, kWideSum, kWideAvg };

constexpr int kMaxReduceSources = 256;

// target_t[i] = (source_0[i] op source_1[i]) op source_2[i] ... for every target. The sum and average of 16-bit floats
// accumulate in float32 and round once; integers wrap; NaN wins in max and min. A target may be one of the sources.
// `shown` is one target more, or null: memory that other ranks read, aligned to 64 bytes, written past the caches.
struct ReduceArguments {
  const void* const* sources;
  int num_sources;
  void* const* targets;
  int num_targets;
  int64_t count;
  bool average;
  void* shown;
};

using ReduceKernel = void (*)(const ReduceArguments&);

struct ReduceKernels {
  ReduceKernel sum[kNumCommTypes];  // and average
  ReduceKernel max[kNumCommTypes];
  ReduceKernel min[kNumCommTypes];
  ReduceKernel wide_sum[kNumCommTypes];  // and average, to one float32 target; null but for 16-bit floats
  void (*copy_past_caches)(void* target, const void* source, int64_t bytes);
};

extern const ReduceKernels kReducePortable;
#if FASTPAR_X86
extern const ReduceKernels kReduceAvx2;
extern const ReduceKernels kReduceAvx512;
#endif

}  // namespace fastpar
