// CPU op layer of SwiGLU with a weight for each row: check, choose the kernel, launch.
// The algebra is in fastpar/ops/moe/gemms.py, the numerics in swiglu_weighted_kernel.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/checks.h"
#include "common/tensor_rows.h"
#include "swiglu/swiglu.h"

namespace fastpar {
namespace {

using torch::stable::Tensor;

void check_matrix(const Tensor& x, const Tensor& like, int64_t columns, const char* name) {
  FASTPAR_CHECK(x.dim() == 2 && x.size(0) == like.size(0) && x.size(1) == columns, name, " must be a matrix [",
                like.size(0), ", ", columns, "]");
  FASTPAR_CHECK(x.scalar_type() == like.scalar_type(), name, " must have the dtype of gate_up");
  FASTPAR_CHECK(columns <= 1 || x.stride(1) == 1, name, " must have dense rows");
}

// A float32 number for each row.
float* row_numbers(const Tensor& x, int64_t rows, const char* name) {
  FASTPAR_CHECK(x.dim() == 1 && x.size(0) == rows && (rows <= 1 || x.stride(0) == 1), name, " must be [", rows,
                "] and contiguous");
  FASTPAR_CHECK(float_type(x, name) == FloatType::kFloat32, name, " must be float32");
  return static_cast<float*>(x.mutable_data_ptr());
}

// The arguments that both directions have, checked.
SwigluWeightedArguments arguments_of(const Tensor& gate_up, const std::optional<Tensor>& weights, const Tensor& out) {
  FASTPAR_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "gate_up must be a matrix with an even last dim");
  FASTPAR_CHECK(float_type(gate_up, "gate_up") != FloatType::kFloat64, "gate_up must not be float64");
  const int64_t rows = gate_up.size(0), features = gate_up.size(1) / 2;
  check_matrix(gate_up, gate_up, 2 * features, "gate_up");
  check_matrix(out, gate_up, features, "out");
  SwigluWeightedArguments a{};
  a.gate_up = gate_up.const_data_ptr();
  a.gate_up_stride = gate_up.stride(0);
  a.weights = weights.has_value() ? row_numbers(*weights, rows, "weights") : nullptr;
  a.features = features;
  a.out = out.mutable_data_ptr();
  a.out_stride = out.stride(0);
  return a;
}

void launch(SwigluWeightedKernel kernel, const SwigluWeightedArguments& arguments, int64_t rows) {
  torch::stable::parallel_for(0, rows, row_grain(arguments.features),
                              [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
}

void swiglu_weighted_cpu(const Tensor& gate_up, const std::optional<Tensor>& weights, Tensor out) {
  const SwigluWeightedArguments arguments = arguments_of(gate_up, weights, out);
  if (out.numel() == 0) return;
  const int type = static_cast<int>(float_type(gate_up, "gate_up"));
  launch(swiglu_kernels(type).weighted[type], arguments, gate_up.size(0));
}

void swiglu_weighted_backward_cpu(const Tensor& grad_out, const Tensor& gate_up, const std::optional<Tensor>& weights,
                                  Tensor out, Tensor grad_gate_up, std::optional<Tensor> dots) {
  SwigluWeightedArguments arguments = arguments_of(gate_up, weights, out);
  check_matrix(grad_out, gate_up, arguments.features, "grad_out");
  check_matrix(grad_gate_up, gate_up, 2 * arguments.features, "grad_gate_up");
  arguments.grad_out = grad_out.const_data_ptr();
  arguments.grad_out_stride = grad_out.stride(0);
  arguments.grad_gate_up = grad_gate_up.mutable_data_ptr();
  arguments.grad_gate_up_stride = grad_gate_up.stride(0);
  arguments.dots = dots.has_value() ? row_numbers(*dots, gate_up.size(0), "dots") : nullptr;
  const int type = static_cast<int>(float_type(gate_up, "gate_up"));
  launch(swiglu_kernels(type).weighted_backward[type], arguments, gate_up.size(0));
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("swiglu_weighted", TORCH_BOX(&fastpar::swiglu_weighted_cpu));
  m.impl("swiglu_weighted_backward", TORCH_BOX(&fastpar::swiglu_weighted_backward_cpu));
}
