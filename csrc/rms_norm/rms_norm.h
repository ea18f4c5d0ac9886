// What the op layer (rms_norm.cpp) and the instruction-set versions (rms_norm_<isa>.cpp) agree on.
#pragma once

#include <cstdint>

#include "common/strided_rows.h"

namespace fastpar {

struct RmsNormArguments {
  const void* x;
  StridedRows x_rows;
  const void* residual;  // or null
  StridedRows residual_rows;
  const void* weight;  // [hidden] float, or double for float64 rows; the offset is in it
  int64_t hidden;
  double eps;
  void* out;   // contiguous
  void* sum;   // contiguous, x + residual; null without a residual
  void* rstd;  // [rows] float or double: written by `forward`, read by `scale`; `squares` writes sums of squares
  bool stream;
};

// Rows are taken in blocks of `block_rows`, and the gradient of the weight is left as one partial sum per block.
struct RmsNormBackwardArguments {
  const void* grad_out;
  StridedRows grad_out_rows;
  const void* grad_sum;  // the gradient that arrives at x (with a residual: at the sum) from elsewhere, or null
  StridedRows grad_sum_rows;
  const void* x;  // with a residual: the sum
  StridedRows x_rows;
  const void* rstd;
  const void* factor;  // [rows] mean(g * h) * rstd^2, where rows are split over ranks; null: computed from the row
  const void* weight;
  int64_t rows;
  int64_t hidden;
  int64_t block_rows;
  void* grad_x;       // contiguous; null: not wanted
  void* grad_weight;  // [blocks, 2, hidden] float or double, the first of the two is the result; null: not wanted
  void* products;     // [rows] float or double: the sums of g * h; null: not wanted
  bool stream;
};

using RmsNormKernel = void (*)(const RmsNormArguments&, int64_t row_begin, int64_t row_end);
using RmsNormBackwardKernel = void (*)(const RmsNormBackwardArguments&, int64_t block_begin, int64_t block_end);

// By FloatType. Entries may be null: float64 exists in the portable table only.
struct RmsNormKernels {
  RmsNormKernel forward[4];
  RmsNormBackwardKernel backward[4];
  RmsNormKernel squares[4];  // writes the sum and the sums of squares
  RmsNormKernel scale[4];    // out = x * rstd * weight
};

extern const RmsNormKernels kRmsNormPortable;
#if FASTPAR_X86
extern const RmsNormKernels kRmsNormAvx2;
extern const RmsNormKernels kRmsNormAvx512;
extern const RmsNormKernels kRmsNormAvx512Bf16;
#endif

}  // namespace fastpar
