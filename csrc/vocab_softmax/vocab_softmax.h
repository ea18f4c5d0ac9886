// What the op layer (vocab_softmax.cpp) and the instruction-set versions (vocab_softmax_<isa>.cpp) agree on. Kernels
// work on one row; the op layer shares rows out.
#pragma once

#include <cstdint>

#include "common/logit_transform.h"

namespace fastpar {

// One row of this rank's logits, and the normaliser of the whole row where it is known.
struct LogitsRow {
  const void* x;
  int64_t vocab;
  LogitTransform transform;
  double lse;  // see Note: far rows in common/far_rows.h
};

// z of one column.
using ElementKernel = double (*)(const LogitsRow& row, int64_t column);
// sums[0..2] = maximum m of z, sum exp(z - m), and sum exp(z - m) (z - m) or 0 without `entropy`.
using SumsRowKernel = void (*)(const LogitsRow& row, bool entropy, double* sums);
// out = exp(z - lse), or z - lse with `log`.
using NormalizeRowKernel = void (*)(const LogitsRow& row, bool log, bool stream, void* out);
// sum p dy, or sum dy with `log`.
using DotRowKernel = double (*)(const LogitsRow& row, const void* grad_out, bool log);
// dx = p (dy - dot) dz/dx, or (dy - p dot) dz/dx with `log`.
using BackwardRowKernel = void (*)(const LogitsRow& row, const void* grad_out, double dot, bool log, bool stream,
                                   void* grad);
// dx = p (base + slope (z - lse)) dz/dx, where p = 0 gives 0.
using LogProbBackwardRowKernel = void (*)(const LogitsRow& row, double base, double slope, bool stream, void* grad);

constexpr int kNumSoftmaxTypes = 4;  // in the order of FloatType

// The second index of `normalize`, `dot` and `backward`: whether the output, or its gradient, is float32 whatever the
// logits are. Entries may be null: float64 exists in the portable table only.
struct SoftmaxKernels {
  ElementKernel element[kNumSoftmaxTypes];
  SumsRowKernel sums[kNumSoftmaxTypes];
  NormalizeRowKernel normalize[kNumSoftmaxTypes][2];
  DotRowKernel dot[kNumSoftmaxTypes][2];
  BackwardRowKernel backward[kNumSoftmaxTypes][2];
  LogProbBackwardRowKernel log_prob_backward[kNumSoftmaxTypes];
};

extern const SoftmaxKernels kSoftmaxPortable;
#if FASTPAR_X86
extern const SoftmaxKernels kSoftmaxAvx2;
extern const SoftmaxKernels kSoftmaxAvx512;
extern const SoftmaxKernels kSoftmaxAvx512Bf16;
#endif

}  // namespace fastpar
