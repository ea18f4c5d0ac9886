// Tensors of any floating dtype as rows of their last dim: what the op layers of the row-wise kernels share.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "common/checks.h"
#include "common/strided_rows.h"

namespace fastpar {

// Index into the kernel tables.
enum class FloatType { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };
constexpr int kNumFloatTypes = 4;

inline FloatType float_type(const torch::stable::Tensor& x, const char* name) {
  using torch::headeronly::ScalarType;
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return FloatType::kFloat32;
    case ScalarType::BFloat16:
      return FloatType::kBFloat16;
    case ScalarType::Half:
      return FloatType::kFloat16;
    case ScalarType::Double:
      return FloatType::kFloat64;
    default:
      FASTPAR_CHECK(false, name, " must be float32, bfloat16, float16 or float64");
  }
  return FloatType::kFloat32;
}

inline std::vector<int64_t> shape_of(const torch::stable::Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

inline int64_t last_size(const torch::stable::Tensor& x) { return x.size(x.dim() - 1); }

// Rows along the last dim, which may be empty.
inline int64_t count_rows(const torch::stable::Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}

// `x` itself where the elements of a row are adjacent, whatever the distances of the rows; else a contiguous copy.
inline torch::stable::Tensor with_dense_rows(const torch::stable::Tensor& x) {
  const bool is_dense = x.dim() <= kMaxRowDims + 1 && (last_size(x) <= 1 || x.stride(x.dim() - 1) == 1);
  return is_dense ? x : torch::stable::contiguous(x);
}

inline StridedRows strided_rows(const torch::stable::Tensor& x) {
  StridedRows rows{};
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    if (x.size(d) == 1) continue;
    const int last = rows.num_dims - 1;
    if (last >= 0 && rows.strides[last] == x.size(d) * x.stride(d)) {
      rows.sizes[last] *= x.size(d);
      rows.strides[last] = x.stride(d);
      continue;
    }
    rows.sizes[rows.num_dims] = x.size(d);
    rows.strides[rows.num_dims] = x.stride(d);
    ++rows.num_dims;
  }
  return rows;
}

inline void check_same_shape_and_dtype(const torch::stable::Tensor& x, const torch::stable::Tensor& other,
                                       const char* x_name, const char* other_name) {
  FASTPAR_CHECK(other.scalar_type() == x.scalar_type(), other_name, " must have the dtype of ", x_name);
  FASTPAR_CHECK(shape_of(other) == shape_of(x), other_name, " must have the shape of ", x_name);
}

// Rows per task so that a task is about 10 microseconds of work at least.
inline int64_t row_grain(int64_t row_elements) {
  constexpr int64_t kGrainElements = 32768;
  return row_elements >= kGrainElements ? 1 : kGrainElements / (row_elements > 0 ? row_elements : 1);
}

// Outputs beyond this do not fit the caches, and are stored past them.
constexpr int64_t kStreamedOutputBytes = int64_t{8} << 20;

}  // namespace fastpar
