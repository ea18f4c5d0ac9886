// What the op layer (swiglu.cpp) and the instruction-set versions (swiglu_<isa>.cpp) agree on.
#pragma once

#include <cstdint>

#include "common/strided_rows.h"

namespace fastpar {

// Rows of `features` elements; a packed tensor is a gate and an up whose rows are twice as far apart.
struct SwigluArguments {
  const void* gate;
  StridedRows gate_rows;
  const void* up;
  StridedRows up_rows;
  int64_t features;
  void* out;  // contiguous
  bool stream;
};

struct SwigluBackwardArguments {
  const void* grad_out;
  StridedRows grad_out_rows;
  const void* gate;
  StridedRows gate_rows;
  const void* up;
  StridedRows up_rows;
  int64_t features;
  void* grad_gate;
  void* grad_up;
  int64_t grad_stride;  // between the rows of either
  bool stream;
};

// Matrices [rows, ..], strides between their rows in elements; gate_up and grad_gate_up have 2 * features columns.
struct SwigluWeightedArguments {
  const void* gate_up;
  int64_t gate_up_stride;
  const float* weights;  // by row; null: 1
  int64_t features;
  void* out;
  int64_t out_stride;
  // backward only
  const void* grad_out;
  int64_t grad_out_stride;
  void* grad_gate_up;
  int64_t grad_gate_up_stride;
  float* dots;  // by row; null: not wanted
};

using SwigluKernel = void (*)(const SwigluArguments&, int64_t row_begin, int64_t row_end);
using SwigluBackwardKernel = void (*)(const SwigluBackwardArguments&, int64_t row_begin, int64_t row_end);
using SwigluWeightedKernel = void (*)(const SwigluWeightedArguments&, int64_t row_begin, int64_t row_end);

// By FloatType. Entries may be null: float64 exists in the portable table only, and not with weights.
struct SwigluKernels {
  SwigluKernel forward[4];
  SwigluBackwardKernel backward[4];
  SwigluWeightedKernel weighted[3];
  SwigluWeightedKernel weighted_backward[3];
};

const SwigluKernels& swiglu_kernels(int float_type);

extern const SwigluKernels kSwigluPortable;
#if FASTPAR_X86
extern const SwigluKernels kSwigluAvx2;
extern const SwigluKernels kSwigluAvx512;
extern const SwigluKernels kSwigluAvx512Bf16;
#endif

}  // namespace fastpar
