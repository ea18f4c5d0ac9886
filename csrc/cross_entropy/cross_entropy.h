// What the op layers (cross_entropy.cpp, cross_entropy.cu) and the kernels (cross_entropy_<isa>.cpp,
// cross_entropy.cuh) agree on.
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

// The options that change the loss of a row; the algebra is in row_terms.h.
struct LossTerms {
  double label_smoothing;
  double z_loss;
  double softcap;  // 0: none
  double logit_scale;
  const void* weight;        // [vocab_total] float, or double for float64 logits; may be null
  const double* weight_sum;  // [1], or null where weight is
  int64_t vocab_total;
};

struct StatsArguments {
  const void* logits;
  RowLayout rows;
  int64_t num_rows;
  int64_t vocab;          // columns held here
  const int64_t* target;  // one global id per row
  int64_t vocab_start;    // global id of column 0
  int64_t ignore_index;
  LossTerms terms;
  bool smoothing;   // the weighted sum of the logits is wanted too
  void* stats;      // [num_rows, columns] float, or double for float64 logits; the header rows are the op layer's
  int64_t columns;  // 3, or 5 with smoothing
  void* exp_out;    // null, or the logits themselves, to be overwritten with exp(z - m)
  RowLayout exp_rows;
};

struct BackwardArguments {
  const void* logits;
  RowLayout rows;
  int64_t vocab;
  const double* lse;  // one per row
  const int64_t* target;
  const void* grad_loss;  // float, or double for float64 logits
  int64_t grad_loss_stride;
  const void* grad_lse;  // the same type, or null
  int64_t grad_lse_stride;
  int64_t vocab_start;
  int64_t ignore_index;
  LossTerms terms;
  void* grad;  // may be the logits themselves
  RowLayout grad_rows;
  bool stream;  // store past the caches
};

// Loss and gradient of rows that hold the whole vocabulary.
struct FusedArguments {
  const void* logits;
  RowLayout rows;
  int64_t vocab;
  const int64_t* target;
  const void* grad_loss;
  int64_t grad_loss_stride;
  int64_t ignore_index;
  LossTerms terms;
  void* loss;  // float, or double for float64 logits
  double* lse;
  void* grad;  // may be the logits themselves
  RowLayout grad_rows;
  bool stream;
};

using StatsKernel = void (*)(const StatsArguments&, int64_t row_begin, int64_t row_end);
using BackwardKernel = void (*)(const BackwardArguments&, int64_t row_begin, int64_t row_end);
using FusedKernel = void (*)(const FusedArguments&, int64_t row_begin, int64_t row_end);

// Entries may be null: float64 exists in the portable table only.
struct CrossEntropyKernels {
  StatsKernel stats[kNumLogitsTypes];
  BackwardKernel backward[kNumLogitsTypes];
  FusedKernel fused[kNumLogitsTypes];
};

extern const CrossEntropyKernels kCrossEntropyPortable;
#if FASTPAR_X86
extern const CrossEntropyKernels kCrossEntropyAvx2;
extern const CrossEntropyKernels kCrossEntropyAvx512;
extern const CrossEntropyKernels kCrossEntropyAvx512Bf16;
#endif

}  // namespace fastpar
