// CPU op layer of RMSNorm: check, return early on empty, choose the kernel, launch.
// The algebra is in fastpar/ops/rms_norm.py, the numerics in rms_norm_kernel.h.
#include "rms_norm/rms_norm.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/large_buffer.h"
#include "common/simd.h"
#include "common/tensor_rows.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// dw is summed in at most kMaxBlocks blocks of at least kMinBlockRows rows: a function of the shape alone, so that its
// bits do not depend on the number of threads.
constexpr int64_t kMaxBlocks = 128;
constexpr int64_t kMinBlockRows = 8;

const RmsNormKernels& kernels(FloatType type) {
#if FASTPAR_X86
  if (type != FloatType::kFloat64) {
    if (cpu_capability() >= CpuCapability::kAvx512Bf16) return kRmsNormAvx512Bf16;
    if (cpu_capability() == CpuCapability::kAvx512) return kRmsNormAvx512;
    if (cpu_capability() == CpuCapability::kAvx2) return kRmsNormAvx2;
  }
#endif
  return kRmsNormPortable;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// float64 for float64 rows, float32 for all others: of the weight while it is used, of rstd and of dw.
ScalarType compute_dtype(FloatType type) {
  return type == FloatType::kFloat64 ? ScalarType::Double : ScalarType::Float;
}

template <typename From, typename To>
void copy_with_offset(const void* from, int64_t count, double offset, To* to) {
  const From* values = static_cast<const From*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(to_float(values[i])) + static_cast<To>(offset);
}

template <typename To>
void fill_weight(const std::optional<Tensor>& weight, int64_t hidden, double offset, To* to) {
  if (!weight.has_value()) {
    std::fill(to, to + hidden, To(1));
    return;
  }
  const Tensor dense = weight->is_contiguous() ? *weight : torch::stable::contiguous(*weight);
  const void* from = dense.const_data_ptr();
  switch (float_type(dense, "weight")) {
    case FloatType::kFloat32:
      return copy_with_offset<float>(from, hidden, offset, to);
    case FloatType::kBFloat16:
      return copy_with_offset<bfloat16>(from, hidden, offset, to);
    case FloatType::kFloat16:
      return copy_with_offset<float16>(from, hidden, offset, to);
    case FloatType::kFloat64:
      for (int64_t i = 0; i < hidden; ++i) to[i] = static_cast<To>(static_cast<const double*>(from)[i] + offset);
  }
}

// weight + offset in the dtype of the computation; ones without a weight.
Tensor effective_weight(const std::optional<Tensor>& weight, int64_t hidden, double offset, FloatType type) {
  FASTPAR_CHECK(!weight.has_value() || (weight->dim() == 1 && weight->size(0) == hidden), "weight must be [", hidden,
                "], the last dim of x");
  Tensor made = empty_cpu({hidden}, compute_dtype(type));
  if (type == FloatType::kFloat64) {
    fill_weight(weight, hidden, offset, made.mutable_data_ptr<double>());
  } else {
    fill_weight(weight, hidden, offset, made.mutable_data_ptr<float>());
  }
  return made;
}

// (out, x + residual or an empty tensor, rstd [rows])
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x_in, const std::optional<Tensor>& residual_in,
                                           const std::optional<Tensor>& weight_in, double eps, double weight_offset) {
  const FloatType type = float_type(x_in, "x");
  FASTPAR_CHECK(x_in.dim() >= 1, "x must have at least one dim, the one that is normalised");
  if (residual_in.has_value()) check_same_shape_and_dtype(x_in, *residual_in, "x", "residual");
  const Tensor x = with_dense_rows(x_in);
  const int64_t rows = count_rows(x), hidden = last_size(x);
  const Tensor weight = effective_weight(weight_in, hidden, weight_offset, type);
  Tensor out = empty_cpu(shape_of(x), x.scalar_type());
  Tensor sum = empty_cpu(residual_in.has_value() ? shape_of(x) : std::vector<int64_t>{0}, x.scalar_type());
  Tensor rstd = empty_cpu({rows}, compute_dtype(type));
  if (rows == 0) return {out, sum, rstd};
  const Tensor residual = residual_in.has_value() ? with_dense_rows(*residual_in) : x;
  const RmsNormArguments arguments{x.const_data_ptr(),
                                   strided_rows(x),
                                   residual_in.has_value() ? residual.const_data_ptr() : nullptr,
                                   strided_rows(residual),
                                   weight.const_data_ptr(),
                                   hidden,
                                   eps,
                                   out.mutable_data_ptr(),
                                   residual_in.has_value() ? sum.mutable_data_ptr() : nullptr,
                                   rstd.mutable_data_ptr(),
                                   rows * hidden * static_cast<int64_t>(out.element_size()) > kStreamedOutputBytes};
  const RmsNormKernel kernel = kernels(type).forward[static_cast<int>(type)];
  torch::stable::parallel_for(0, rows, row_grain(hidden),
                              [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  return {out, sum, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_cpu(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                                        double weight_offset) {
  const auto [out, sum, rstd] = forward(x, std::nullopt, weight, eps, weight_offset);
  return {out, rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_cpu(const Tensor& x, const Tensor& residual,
                                                    const std::optional<Tensor>& weight, double eps,
                                                    double weight_offset) {
  return forward(x, residual, weight, eps, weight_offset);
}

// Sums the blocks' [2, hidden] in their order, in double; only the first of the two holds a result.
template <typename T>
void sum_blocks(const T* partial, int64_t blocks, int64_t hidden, T* out) {
  torch::stable::parallel_for(0, hidden, divide_up(row_grain(1), std::max<int64_t>(blocks, 1)),
                              [&](int64_t begin, int64_t end) {
                                std::vector<double> sums(static_cast<size_t>(end - begin), 0.0);
                                for (int64_t block = 0; block < blocks; ++block) {
                                  const T* row = partial + block * 2 * hidden + begin;
                                  for (size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(row[i]);
                                }
                                for (size_t i = 0; i < sums.size(); ++i) out[begin + i] = static_cast<T>(sums[i]);
                              });
}

void check_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& x,
                    const Tensor& rstd) {
  FASTPAR_CHECK(x.dim() >= 1, "x must have at least one dim, the one that is normalised");
  check_same_shape_and_dtype(x, grad_out, "x", "grad_out");
  if (grad_sum.has_value()) check_same_shape_and_dtype(x, *grad_sum, "x", "grad_sum");
  FASTPAR_CHECK(rstd.dim() == 1 && rstd.size(0) == count_rows(x) && rstd.is_contiguous() &&
                    rstd.scalar_type() == compute_dtype(float_type(x, "x")),
                "rstd must be [", count_rows(x), "], float64 for float64 x and float32 for others");
}

// What a backward is asked for: `products` [rows] are written and `factor` [rows] is read where rows are split over
// ranks.
struct Wanted {
  bool grad_x, grad_weight;
  void* products;
  const void* factor;
};

// (grad of x, grad of the weight in the dtype of the computation); an empty tensor in place of what is not needed.
std::tuple<Tensor, Tensor> backward(const Tensor& grad_out_in, const std::optional<Tensor>& grad_sum_in,
                                    const Tensor& x_in, const Tensor& rstd, const std::optional<Tensor>& weight_in,
                                    double weight_offset, const Wanted& wanted) {
  check_backward(grad_out_in, grad_sum_in, x_in, rstd);
  const FloatType type = float_type(x_in, "x");
  const Tensor x = with_dense_rows(x_in), grad_out = with_dense_rows(grad_out_in);
  const Tensor grad_sum = grad_sum_in.has_value() ? with_dense_rows(*grad_sum_in) : x;
  const int64_t rows = count_rows(x), hidden = last_size(x);
  const Tensor weight = effective_weight(weight_in, hidden, weight_offset, type);
  const int64_t block_rows = wanted.grad_weight ? std::max(kMinBlockRows, divide_up(rows, kMaxBlocks)) : 1;
  const int64_t blocks = divide_up(rows, block_rows);

  Tensor grad_x = empty_cpu(wanted.grad_x ? shape_of(x) : std::vector<int64_t>{0}, x.scalar_type());
  Tensor grad_weight = empty_cpu({wanted.grad_weight ? hidden : 0}, compute_dtype(type));
  Tensor partial = empty_cpu({wanted.grad_weight ? blocks : 0, 2, hidden}, compute_dtype(type));
  const RmsNormBackwardArguments arguments{
      grad_out.const_data_ptr(),
      strided_rows(grad_out),
      grad_sum_in.has_value() ? grad_sum.const_data_ptr() : nullptr,
      strided_rows(grad_sum),
      x.const_data_ptr(),
      strided_rows(x),
      rstd.const_data_ptr(),
      wanted.factor,
      weight.const_data_ptr(),
      rows,
      hidden,
      block_rows,
      wanted.grad_x ? grad_x.mutable_data_ptr() : nullptr,
      wanted.grad_weight ? partial.mutable_data_ptr() : nullptr,
      wanted.products,
      rows * hidden * static_cast<int64_t>(x.element_size()) > kStreamedOutputBytes};
  const RmsNormBackwardKernel kernel = kernels(type).backward[static_cast<int>(type)];
  torch::stable::parallel_for(0, blocks, divide_up(row_grain(hidden), block_rows),
                              [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  if (wanted.grad_weight && type == FloatType::kFloat64) {
    sum_blocks(partial.const_data_ptr<double>(), blocks, hidden, grad_weight.mutable_data_ptr<double>());
  } else if (wanted.grad_weight) {
    sum_blocks(partial.const_data_ptr<float>(), blocks, hidden, grad_weight.mutable_data_ptr<float>());
  }
  return {grad_x, grad_weight};
}

std::tuple<Tensor, Tensor> rms_norm_backward_cpu(const Tensor& grad_out, const std::optional<Tensor>& grad_sum,
                                                 const Tensor& x, const Tensor& rstd,
                                                 const std::optional<Tensor>& weight, double weight_offset,
                                                 bool needs_grad_x, bool needs_grad_weight) {
  return backward(grad_out, grad_sum, x, rstd, weight, weight_offset,
                  {needs_grad_x, needs_grad_weight, nullptr, nullptr});
}

// ---- rows that are split over ranks ---------------------------------------------------------------------------------

// (sums of squares [rows], x + residual or an empty tensor)
std::tuple<Tensor, Tensor> rms_norm_squares_cpu(const Tensor& x_in, const std::optional<Tensor>& residual_in) {
  const FloatType type = float_type(x_in, "x");
  FASTPAR_CHECK(x_in.dim() >= 1, "x must have at least one dim, the one that is normalised");
  if (residual_in.has_value()) check_same_shape_and_dtype(x_in, *residual_in, "x", "residual");
  const Tensor x = with_dense_rows(x_in);
  const Tensor residual = residual_in.has_value() ? with_dense_rows(*residual_in) : x;
  const int64_t rows = count_rows(x), hidden = last_size(x);
  Tensor sum = empty_cpu(residual_in.has_value() ? shape_of(x) : std::vector<int64_t>{0}, x.scalar_type());
  Tensor squares = empty_cpu({rows}, compute_dtype(type));
  const RmsNormArguments arguments{x.const_data_ptr(),
                                   strided_rows(x),
                                   residual_in.has_value() ? residual.const_data_ptr() : nullptr,
                                   strided_rows(residual),
                                   nullptr,
                                   hidden,
                                   0.0,
                                   nullptr,
                                   residual_in.has_value() ? sum.mutable_data_ptr() : nullptr,
                                   squares.mutable_data_ptr(),
                                   false};
  const RmsNormKernel kernel = kernels(type).squares[static_cast<int>(type)];
  torch::stable::parallel_for(0, rows, row_grain(hidden),
                              [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  return {squares, sum};
}

void check_row_numbers(const Tensor& numbers, const Tensor& x, const char* name) {
  FASTPAR_CHECK(numbers.dim() == 1 && numbers.size(0) == count_rows(x) && numbers.is_contiguous() &&
                    numbers.scalar_type() == compute_dtype(float_type(x, "x")),
                name, " must be [", count_rows(x), "], float64 for float64 x and float32 for others");
}

Tensor rms_norm_scale_cpu(const Tensor& x_in, const Tensor& rstd, const std::optional<Tensor>& weight_in,
                          double weight_offset) {
  const FloatType type = float_type(x_in, "x");
  FASTPAR_CHECK(x_in.dim() >= 1, "x must have at least one dim, the one that is normalised");
  check_row_numbers(rstd, x_in, "rstd");
  const Tensor x = with_dense_rows(x_in);
  const int64_t rows = count_rows(x), hidden = last_size(x);
  const Tensor weight = effective_weight(weight_in, hidden, weight_offset, type);
  Tensor out = empty_cpu(shape_of(x), x.scalar_type());
  const RmsNormArguments arguments{x.const_data_ptr(),
                                   strided_rows(x),
                                   nullptr,
                                   strided_rows(x),
                                   weight.const_data_ptr(),
                                   hidden,
                                   0.0,
                                   out.mutable_data_ptr(),
                                   nullptr,
                                   const_cast<void*>(rstd.const_data_ptr()),
                                   rows * hidden * static_cast<int64_t>(out.element_size()) > kStreamedOutputBytes};
  const RmsNormKernel kernel = kernels(type).scale[static_cast<int>(type)];
  torch::stable::parallel_for(0, rows, row_grain(hidden),
                              [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  return out;
}

// (sums of g * x [rows], grad of the weight or an empty tensor)
std::tuple<Tensor, Tensor> rms_norm_products_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& rstd,
                                                 const std::optional<Tensor>& weight, double weight_offset,
                                                 bool needs_grad_weight) {
  FASTPAR_CHECK(x.dim() >= 1, "x must have at least one dim, the one that is normalised");
  Tensor products = empty_cpu({count_rows(x)}, compute_dtype(float_type(x, "x")));
  const auto [grad_x, grad_weight] = backward(grad_out, std::nullopt, x, rstd, weight, weight_offset,
                                              {false, needs_grad_weight, products.mutable_data_ptr(), nullptr});
  return {products, grad_weight};
}

Tensor rms_norm_grad_x_cpu(const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& x,
                           const Tensor& rstd, const Tensor& factor, const std::optional<Tensor>& weight,
                           double weight_offset) {
  FASTPAR_CHECK(x.dim() >= 1, "x must have at least one dim, the one that is normalised");
  check_row_numbers(factor, x, "factor");
  return std::get<0>(
      backward(grad_out, grad_sum, x, rstd, weight, weight_offset, {true, false, nullptr, factor.const_data_ptr()}));
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&fastpar::rms_norm_cpu));
  m.impl("add_rms_norm", TORCH_BOX(&fastpar::add_rms_norm_cpu));
  m.impl("rms_norm_backward", TORCH_BOX(&fastpar::rms_norm_backward_cpu));
  m.impl("rms_norm_squares", TORCH_BOX(&fastpar::rms_norm_squares_cpu));
  m.impl("rms_norm_scale", TORCH_BOX(&fastpar::rms_norm_scale_cpu));
  m.impl("rms_norm_products", TORCH_BOX(&fastpar::rms_norm_products_cpu));
  m.impl("rms_norm_grad_x", TORCH_BOX(&fastpar::rms_norm_grad_x_cpu));
}
