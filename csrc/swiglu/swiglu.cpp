// CPU op layer of SwiGLU: check, return early on empty, choose the kernel, launch.
// The algebra is in fastpar/ops/swiglu.py, the numerics in swiglu_kernel.h.
#include "swiglu/swiglu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/large_buffer.h"
#include "common/tensor_rows.h"

namespace fastpar {

const SwigluKernels& swiglu_kernels(int float_type) {
#if FASTPAR_X86
  if (float_type != static_cast<int>(FloatType::kFloat64)) {
    if (cpu_capability() >= CpuCapability::kAvx512Bf16) return kSwigluAvx512Bf16;
    if (cpu_capability() == CpuCapability::kAvx512) return kSwigluAvx512;
    if (cpu_capability() == CpuCapability::kAvx2) return kSwigluAvx2;
  }
#else
  (void)float_type;
#endif
  return kSwigluPortable;
}

namespace {

using torch::stable::Tensor;

// Gate and up as rows, from two tensors or from the halves of the rows of one.
struct Operands {
  Tensor gate_tensor, up_tensor;  // keep the memory alive
  const void *gate, *up;
  StridedRows gate_rows, up_rows;
  int64_t rows, features;
  std::vector<int64_t> out_shape;
};

Operands operands_of(const Tensor& gate_in, const std::optional<Tensor>& up_in) {
  FASTPAR_CHECK(gate_in.dim() >= 1, "gate must have at least one dim, the features");
  const Tensor gate = with_dense_rows(gate_in);
  std::vector<int64_t> shape = shape_of(gate);
  if (up_in.has_value()) {
    check_same_shape_and_dtype(gate_in, *up_in, "gate", "up");
    const Tensor up = with_dense_rows(*up_in);
    return {gate,
            up,
            gate.const_data_ptr(),
            up.const_data_ptr(),
            strided_rows(gate),
            strided_rows(up),
            count_rows(gate),
            last_size(gate),
            shape};
  }
  FASTPAR_CHECK(last_size(gate) % 2 == 0, "a packed gate_up needs an even last dim, got ", last_size(gate));
  const int64_t features = last_size(gate) / 2;
  shape.back() = features;
  const char* start = static_cast<const char*>(gate.const_data_ptr());
  const StridedRows rows = strided_rows(gate);
  const void* up = start + features * static_cast<int64_t>(gate.element_size());
  return {gate, gate, start, up, rows, rows, count_rows(gate), features, shape};
}

Tensor swiglu_cpu(const Tensor& gate, const std::optional<Tensor>& up) {
  const int type = static_cast<int>(float_type(gate, "gate"));
  const Operands x = operands_of(gate, up);
  Tensor out = empty_cpu(x.out_shape, gate.scalar_type());
  if (out.numel() == 0) return out;
  const bool stream = out.numel() * static_cast<int64_t>(out.element_size()) > kStreamedOutputBytes;
  const SwigluArguments arguments{x.gate, x.gate_rows, x.up, x.up_rows, x.features, out.mutable_data_ptr(), stream};
  const SwigluKernel kernel = swiglu_kernels(type).forward[type];
  torch::stable::parallel_for(0, x.rows, row_grain(x.features),
                              [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  return out;
}

// (gradient of the packed tensor, an empty tensor), or those of gate and up.
std::tuple<Tensor, Tensor> swiglu_backward_cpu(const Tensor& grad_out_in, const Tensor& gate,
                                               const std::optional<Tensor>& up) {
  const int type = static_cast<int>(float_type(gate, "gate"));
  const Operands x = operands_of(gate, up);
  FASTPAR_CHECK(grad_out_in.scalar_type() == gate.scalar_type(), "grad_out must have the dtype of gate");
  FASTPAR_CHECK(shape_of(grad_out_in) == x.out_shape, "grad_out must have the shape of the output");
  const bool is_packed = !up.has_value();
  Tensor grad_gate = empty_cpu(shape_of(gate), gate.scalar_type());
  Tensor grad_up = empty_cpu(is_packed ? std::vector<int64_t>{0} : x.out_shape, gate.scalar_type());
  if (grad_gate.numel() == 0) return {grad_gate, grad_up};
  const Tensor grad_out = with_dense_rows(grad_out_in);
  const int64_t element = static_cast<int64_t>(gate.element_size());
  char* first = static_cast<char*>(grad_gate.mutable_data_ptr());
  const SwigluBackwardArguments arguments{
      grad_out.const_data_ptr(),
      strided_rows(grad_out),
      x.gate,
      x.gate_rows,
      x.up,
      x.up_rows,
      x.features,
      first,
      is_packed ? first + x.features * element : static_cast<char*>(grad_up.mutable_data_ptr()),
      is_packed ? 2 * x.features : x.features,
      2 * x.rows * x.features * element > kStreamedOutputBytes};
  const SwigluBackwardKernel kernel = swiglu_kernels(type).backward[type];
  torch::stable::parallel_for(0, x.rows, row_grain(x.features),
                              [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  return {grad_gate, grad_up};
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("swiglu", TORCH_BOX(&fastpar::swiglu_cpu));
  m.impl("swiglu_backward", TORCH_BOX(&fastpar::swiglu_backward_cpu));
}
