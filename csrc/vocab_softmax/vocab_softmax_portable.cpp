// The version for any processor, and float64, which exists for tests and small checks and uses the C library's exp.
#include "vocab_softmax/vocab_softmax_kernel.h"

namespace fastpar {
namespace {

double element_z_float64(const LogitsRow& row, int64_t column) {
  return transformed(static_cast<const double*>(row.x)[column], row.transform);
}

void sums_row_float64(const LogitsRow& row, bool entropy, double* out) {
  const double* x = static_cast<const double*>(row.x);
  double maximum = -__builtin_inf();
  for (int64_t i = 0; i < row.vocab; ++i) {
    const double z = transformed(x[i], row.transform);
    maximum = z > maximum ? z : maximum;
  }
  const double reference = maximum == -__builtin_inf() ? 0.0 : maximum;
  double sum = 0.0, weighted = 0.0;
  for (int64_t i = 0; i < row.vocab; ++i) {
    const double below = transformed(x[i], row.transform) - reference, e = __builtin_exp(below);
    sum += e;
    if (entropy && e != 0.0) weighted += e * below;
  }
  out[0] = maximum;
  out[1] = sum;
  out[2] = weighted;
}

void normalize_row_float64(const LogitsRow& row, bool log, bool, void* out) {
  const double* x = static_cast<const double*>(row.x);
  double* y = static_cast<double*>(out);
  for (int64_t i = 0; i < row.vocab; ++i) {
    const double below = transformed(x[i], row.transform) - row.lse;
    y[i] = log ? below : __builtin_exp(below);
  }
}

double dot_row_float64(const LogitsRow& row, const void* grad_out, bool log) {
  const double* x = static_cast<const double*>(row.x);
  const double* dy = static_cast<const double*>(grad_out);
  double total = 0.0;
  for (int64_t i = 0; i < row.vocab; ++i) {
    total += log ? dy[i] : __builtin_exp(transformed(x[i], row.transform) - row.lse) * dy[i];
  }
  return total;
}

void backward_row_float64(const LogitsRow& row, const void* grad_out, double dot, bool log, bool, void* out) {
  const double* x = static_cast<const double*>(row.x);
  const double* dy = static_cast<const double*>(grad_out);
  double* dx = static_cast<double*>(out);
  for (int64_t i = 0; i < row.vocab; ++i) {
    const double z = transformed(x[i], row.transform), p = __builtin_exp(z - row.lse);
    dx[i] = (log ? dy[i] - p * dot : p * (dy[i] - dot)) * transform_slope(z, row.transform);
  }
}

void log_prob_backward_row_float64(const LogitsRow& row, double base, double slope, bool, void* out) {
  const double* x = static_cast<const double*>(row.x);
  double* dx = static_cast<double*>(out);
  for (int64_t i = 0; i < row.vocab; ++i) {
    const double z = transformed(x[i], row.transform), below = z - row.lse, p = __builtin_exp(below);
    dx[i] = p == 0.0 ? 0.0 : p * (base + slope * below) * transform_slope(z, row.transform);
  }
}

}  // namespace

extern const SoftmaxKernels kSoftmaxPortable =
    FASTPAR_SOFTMAX_KERNELS(element_z_float64, sums_row_float64, normalize_row_float64, dot_row_float64,
                            backward_row_float64, log_prob_backward_row_float64);

}  // namespace fastpar
