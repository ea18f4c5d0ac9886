// CPU op layer of rotary embeddings: check, return early on empty, choose the kernel, launch.
// The algebra is in fastpar/ops/rotary_embedding.py, the numerics in rotary_embedding_kernel.h.
#include "rotary_embedding/rotary_embedding.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/large_buffer.h"
#include "common/tensor_rows.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const RotaryKernels& kernels(FloatType type) {
#if FASTPAR_X86
  if (type != FloatType::kFloat64) {
    if (cpu_capability() >= CpuCapability::kAvx512Bf16) return kRotaryAvx512Bf16;
    if (cpu_capability() == CpuCapability::kAvx512) return kRotaryAvx512;
    if (cpu_capability() == CpuCapability::kAvx2) return kRotaryAvx2;
  }
#endif
  return kRotaryPortable;
}

// [batch, positions, heads, dim] of [.., positions, heads, dim] or [.., heads, positions, dim]; no dim before: one.
struct HeadDims {
  int64_t batch, positions, heads, dim;
  int64_t strides[3];
};

HeadDims dims_of(const Tensor& x, bool heads_first) {
  const int64_t n = x.dim(), position = heads_first ? n - 2 : n - 3, head = heads_first ? n - 3 : n - 2;
  return {n == 4 ? x.size(0) : 1,
          x.size(position),
          x.size(head),
          x.size(n - 1),
          {n == 4 ? x.stride(0) : 0, x.stride(position), x.stride(head)}};
}

void check(const Tensor& x, const Tensor& cos, const Tensor& sin, bool heads_first) {
  const FloatType type = float_type(x, "x");
  FASTPAR_CHECK(x.dim() == 3 || x.dim() == 4, "x must have 3 or 4 dims, got ", x.dim());
  const HeadDims dims = dims_of(x, heads_first);
  const ScalarType dtype = type == FloatType::kFloat64 ? ScalarType::Double : ScalarType::Float;
  FASTPAR_CHECK(cos.scalar_type() == dtype && sin.scalar_type() == dtype && cos.is_contiguous() &&
                    sin.is_contiguous() && shape_of(cos) == shape_of(sin),
                "cos and sin must be alike, contiguous, and float64 for float64 x and float32 for others");
  const int64_t n = cos.dim();
  FASTPAR_CHECK((n == 2 || (n == 3 && (cos.size(0) == 1 || cos.size(0) == dims.batch))) &&
                    cos.size(n - 2) == dims.positions && 2 * cos.size(n - 1) <= dims.dim,
                "cos must be [", dims.positions, ", R / 2] or [", dims.batch, ", ", dims.positions,
                ", R / 2], R at most ", dims.dim);
}

void rotate(const Tensor& x, Tensor& out, const Tensor& cos, const Tensor& sin, bool heads_first, bool interleaved,
            bool inverse, bool stream) {
  const HeadDims from = dims_of(x, heads_first), to = dims_of(out, heads_first);
  const int64_t half = last_size(cos), rows = from.batch * from.positions;
  if (rows * from.heads * from.dim == 0) return;
  RotaryArguments a{};
  a.x = x.const_data_ptr();
  a.out = out.mutable_data_ptr();
  std::copy(from.strides, from.strides + 3, a.x_strides);
  std::copy(to.strides, to.strides + 3, a.out_strides);
  a.cos = cos.const_data_ptr();
  a.sin = sin.const_data_ptr();
  a.table_batch_stride = cos.dim() == 3 && cos.size(0) > 1 ? from.positions * half : 0;
  a.positions = from.positions;
  a.heads = from.heads;
  a.dim = from.dim;
  a.half = half;
  a.inverse = inverse;
  a.stream = stream;
  const FloatType type = float_type(x, "x");
  const RotaryKernels& table = kernels(type);
  const RotaryKernel kernel = (interleaved ? table.interleaved : table.halves)[static_cast<int>(type)];
  torch::stable::parallel_for(0, rows, row_grain(from.heads * from.dim),
                              [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

bool has_dense_heads(const Tensor& x) { return last_size(x) <= 1 || x.stride(x.dim() - 1) == 1; }

Tensor rotary_embedding_cpu(const Tensor& x_in, const Tensor& cos, const Tensor& sin, bool heads_first,
                            bool interleaved, bool inverse) {
  check(x_in, cos, sin, heads_first);
  const Tensor x = has_dense_heads(x_in) ? x_in : torch::stable::contiguous(x_in);
  Tensor out = empty_cpu(shape_of(x), x.scalar_type());
  const bool stream = out.numel() * static_cast<int64_t>(out.element_size()) > kStreamedOutputBytes;
  rotate(x, out, cos, sin, heads_first, interleaved, inverse, stream);
  return out;
}

void rotary_embedding_in_place_cpu(Tensor x, const Tensor& cos, const Tensor& sin, bool heads_first, bool interleaved,
                                   bool inverse) {
  check(x, cos, sin, heads_first);
  FASTPAR_CHECK(has_dense_heads(x), "x must be contiguous along its last dim to be rotated in place");
  rotate(x, x, cos, sin, heads_first, interleaved, inverse, false);
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("rotary_embedding", TORCH_BOX(&fastpar::rotary_embedding_cpu));
  m.impl("rotary_embedding_", TORCH_BOX(&fastpar::rotary_embedding_in_place_cpu));
}
