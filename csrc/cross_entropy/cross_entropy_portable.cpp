// The version for any processor, and float64, which exists for tests and small checks and uses the C library's exp.
#include "cross_entropy/cross_entropy_kernel.h"

namespace fastpar {
namespace {

void stats_rows_float64(const StatsArguments& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double* x = static_cast<const double*>(a.logits) + row_offset(a.rows, row);
    double maximum = -__builtin_inf();
    for (int64_t i = 0; i < a.vocab; ++i) maximum = x[i] > maximum ? x[i] : maximum;
    const double reference = maximum == -__builtin_inf() ? 0.0 : maximum;
    double sum = 0.0;
    for (int64_t i = 0; i < a.vocab; ++i) sum += __builtin_exp(x[i] - reference);
    const int64_t id = a.target[row];
    const int64_t column = id - a.vocab_start;
    const bool is_owned = id != a.ignore_index && column >= 0 && column < a.vocab;
    double* out = static_cast<double*>(a.stats) + 3 * row;
    out[0] = maximum;
    out[1] = sum;
    out[2] = is_owned ? x[column] : 0.0;
  }
}

void backward_rows_float64(const BackwardArguments& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double* x = static_cast<const double*>(a.logits) + row_offset(a.rows, row);
    double* out = static_cast<double*>(a.grad) + row_offset(a.grad_rows, row);
    const int64_t id = a.target[row];
    if (id == a.ignore_index) {
      fill_zero(out, a.vocab);
      continue;
    }
    const double scale = static_cast<const double*>(a.grad_loss)[row * a.grad_loss_stride];
    const int64_t column = id - a.vocab_start;
    const bool is_owned = column >= 0 && column < a.vocab;
    const double at_target = is_owned ? __builtin_expm1(x[column] - a.lse[row]) * scale : 0.0;
    for (int64_t i = 0; i < a.vocab; ++i) out[i] = __builtin_exp(x[i] - a.lse[row]) * scale;
    if (is_owned) out[column] = at_target;
  }
}

}  // namespace

extern const CrossEntropyKernels kCrossEntropyPortable = {
    {stats_rows<float>, stats_rows<bfloat16>, stats_rows<float16>, stats_rows_float64},
    {backward_rows<float>, backward_rows<bfloat16>, backward_rows<float16>, backward_rows_float64},
};

}  // namespace fastpar
