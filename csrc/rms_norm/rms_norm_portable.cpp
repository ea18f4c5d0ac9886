// The version for any processor, and float64, which exists for tests and small checks.
#include "rms_norm/rms_norm_kernel.h"
#include "rms_norm/rms_norm_split_kernel.h"

namespace fastpar {
namespace {

void rms_norm_rows_float64(const RmsNormArguments& a, int64_t row_begin, int64_t row_end) {
  const double* weight = static_cast<const double*>(a.weight);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double* x = static_cast<const double*>(a.x) + row_start(a.x_rows, row);
    const bool adds = a.residual != nullptr;
    const double* residual = adds ? static_cast<const double*>(a.residual) + row_start(a.residual_rows, row) : nullptr;
    double* out = static_cast<double*>(a.out) + row * a.hidden;
    double* sum = adds ? static_cast<double*>(a.sum) + row * a.hidden : nullptr;
    double squares = 0.0;
    for (int64_t i = 0; i < a.hidden; ++i) {
      const double h = adds ? x[i] + residual[i] : x[i];
      if (adds) sum[i] = h;
      squares += h * h;
    }
    const double rstd = 1.0 / __builtin_sqrt(squares / static_cast<double>(a.hidden) + a.eps);
    static_cast<double*>(a.rstd)[row] = rstd;
    for (int64_t i = 0; i < a.hidden; ++i) out[i] = (adds ? sum[i] : x[i]) * rstd * weight[i];
  }
}

void rms_norm_backward_row_float64(const RmsNormBackwardArguments& a, int64_t row, double* grad_weight) {
  const double* weight = static_cast<const double*>(a.weight);
  const double* grad_out = static_cast<const double*>(a.grad_out) + row_start(a.grad_out_rows, row);
  const double* x = static_cast<const double*>(a.x) + row_start(a.x_rows, row);
  const double rstd = static_cast<const double*>(a.rstd)[row];
  double products = 0.0;
  for (int64_t i = 0; i < a.hidden; ++i) {
    products += grad_out[i] * weight[i] * x[i];
    if (grad_weight != nullptr) grad_weight[i] += grad_out[i] * x[i] * rstd;
  }
  if (a.products != nullptr) static_cast<double*>(a.products)[row] = products;
  if (a.grad_x == nullptr) return;
  const double c = a.factor != nullptr ? static_cast<const double*>(a.factor)[row]
                                       : products / static_cast<double>(a.hidden) * rstd * rstd;
  double* out = static_cast<double*>(a.grad_x) + row * a.hidden;
  for (int64_t i = 0; i < a.hidden; ++i) out[i] = rstd * (grad_out[i] * weight[i] - x[i] * c);
  if (a.grad_sum == nullptr) return;
  const double* grad_sum = static_cast<const double*>(a.grad_sum) + row_start(a.grad_sum_rows, row);
  for (int64_t i = 0; i < a.hidden; ++i) out[i] += grad_sum[i];
}

void rms_norm_backward_blocks_float64(const RmsNormBackwardArguments& a, int64_t block_begin, int64_t block_end) {
  for (int64_t block = block_begin; block < block_end; ++block) {
    double* grad_weight =
        a.grad_weight == nullptr ? nullptr : static_cast<double*>(a.grad_weight) + block * 2 * a.hidden;
    if (grad_weight != nullptr) memset(grad_weight, 0, sizeof(double) * static_cast<size_t>(a.hidden));
    const int64_t row_end = smaller((block + 1) * a.block_rows, a.rows);
    for (int64_t row = block * a.block_rows; row < row_end; ++row) rms_norm_backward_row_float64(a, row, grad_weight);
  }
}

void rms_norm_squares_float64(const RmsNormArguments& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double* x = static_cast<const double*>(a.x) + row_start(a.x_rows, row);
    const bool adds = a.residual != nullptr;
    const double* residual = adds ? static_cast<const double*>(a.residual) + row_start(a.residual_rows, row) : nullptr;
    double squares = 0.0;
    for (int64_t i = 0; i < a.hidden; ++i) {
      const double h = adds ? x[i] + residual[i] : x[i];
      if (adds) static_cast<double*>(a.sum)[row * a.hidden + i] = h;
      squares += h * h;
    }
    static_cast<double*>(a.rstd)[row] = squares;
  }
}

void rms_norm_scale_float64(const RmsNormArguments& a, int64_t row_begin, int64_t row_end) {
  const double* weight = static_cast<const double*>(a.weight);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double* x = static_cast<const double*>(a.x) + row_start(a.x_rows, row);
    const double rstd = static_cast<const double*>(a.rstd)[row];
    for (int64_t i = 0; i < a.hidden; ++i) {
      static_cast<double*>(a.out)[row * a.hidden + i] = x[i] * rstd * weight[i];
    }
  }
}

}  // namespace

extern const RmsNormKernels kRmsNormPortable = {
    {rms_norm_rows<float>, rms_norm_rows<bfloat16>, rms_norm_rows<float16>, rms_norm_rows_float64},
    {rms_norm_backward_blocks<float>, rms_norm_backward_blocks<bfloat16>, rms_norm_backward_blocks<float16>,
     rms_norm_backward_blocks_float64},
    {rms_norm_squares<float>, rms_norm_squares<bfloat16>, rms_norm_squares<float16>, rms_norm_squares_float64},
    {rms_norm_scale<float>, rms_norm_scale<bfloat16>, rms_norm_scale<float16>, rms_norm_scale_float64},
};

}  // namespace fastpar
