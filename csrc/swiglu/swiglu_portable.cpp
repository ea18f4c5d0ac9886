// The version for any processor, and float64, which exists for tests and small checks and uses the C library's exp.
#include "swiglu/swiglu_kernel.h"
#include "swiglu/swiglu_weighted_kernel.h"

namespace fastpar {
namespace {

void swiglu_rows_float64(const SwigluArguments& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double* gate = static_cast<const double*>(a.gate) + row_start(a.gate_rows, row);
    const double* up = static_cast<const double*>(a.up) + row_start(a.up_rows, row);
    double* out = static_cast<double*>(a.out) + row * a.features;
    for (int64_t i = 0; i < a.features; ++i) out[i] = gate[i] / (1.0 + __builtin_exp(-gate[i])) * up[i];
  }
}

void swiglu_backward_rows_float64(const SwigluBackwardArguments& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double* grad_out = static_cast<const double*>(a.grad_out) + row_start(a.grad_out_rows, row);
    const double* gate = static_cast<const double*>(a.gate) + row_start(a.gate_rows, row);
    const double* up = static_cast<const double*>(a.up) + row_start(a.up_rows, row);
    double* grad_gate = static_cast<double*>(a.grad_gate) + row * a.grad_stride;
    double* grad_up = static_cast<double*>(a.grad_up) + row * a.grad_stride;
    for (int64_t i = 0; i < a.features; ++i) {
      const double s = 1.0 / (1.0 + __builtin_exp(-gate[i]));
      grad_gate[i] = grad_out[i] * up[i] * s * (1.0 + gate[i] * (1.0 - s));
      grad_up[i] = grad_out[i] * gate[i] * s;
    }
  }
}

}  // namespace

extern const SwigluKernels kSwigluPortable = {
    {swiglu_rows<float>, swiglu_rows<bfloat16>, swiglu_rows<float16>, swiglu_rows_float64},
    {swiglu_backward_rows<float>, swiglu_backward_rows<bfloat16>, swiglu_backward_rows<float16>,
     swiglu_backward_rows_float64},
    {swiglu_weighted_rows<float>, swiglu_weighted_rows<bfloat16>, swiglu_weighted_rows<float16>},
    {swiglu_weighted_backward_rows<float>, swiglu_weighted_backward_rows<bfloat16>,
     swiglu_weighted_backward_rows<float16>},
};

}  // namespace fastpar
