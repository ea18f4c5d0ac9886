// What the op layer (cross_entropy.cpp) and the instruction-set versions (cross_entropy_<isa>.cpp) agree on.
#pragma once

#include <cstdint>

namespace fastpar {

// Index into the kernel tables.
enum class LogitsType { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };
constexpr int kNumLogitsTypes = 4;

constexpr int kMaxLeadingDims = 8;

// Where row r of logits with any leading dims begins, in elements; the last dim is contiguous.
struct RowLayout {
  int num_dims;
  int64_t sizes[kMaxLeadingDims];
  int64_t strides[kMaxLeadingDims];
};

struct StatsArguments {
  const void* logits;
  RowLayout rows;
  int64_t vocab;          // columns held here
  const int64_t* target;  // one global id per row
  int64_t vocab_start;    // global id of column 0
  int64_t ignore_index;
  void* stats;  // [rows, 3] float, or double for float64 logits
};

struct BackwardArguments {
  const void* logits;
  RowLayout rows;
  int64_t vocab;
  const double* lse;  // one per row
  const int64_t* target;
  const void* grad_loss;  // float, or double for float64 logits
  int64_t grad_loss_stride;
  int64_t vocab_start;
  int64_t ignore_index;
  void* grad;  // may be the logits themselves
  RowLayout grad_rows;
  bool stream;  // store past the caches
};

using StatsKernel = void (*)(const StatsArguments&, int64_t row_begin, int64_t row_end);
using BackwardKernel = void (*)(const BackwardArguments&, int64_t row_begin, int64_t row_end);

// Entries may be null: float64 exists in the portable table only.
struct CrossEntropyKernels {
  StatsKernel stats[kNumLogitsTypes];
  BackwardKernel backward[kNumLogitsTypes];
};

extern const CrossEntropyKernels kCrossEntropyPortable;
#if FASTPAR_X86
extern const CrossEntropyKernels kCrossEntropyAvx2;
extern const CrossEntropyKernels kCrossEntropyAvx512;
extern const CrossEntropyKernels kCrossEntropyAvx512Bf16;
#endif

}  // namespace fastpar
