// Checks and shapes that the CPU and the CUDA op layer share.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "common/checks.h"
#include "cross_entropy/cross_entropy.h"

namespace fastpar {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline LogitsType logits_type(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return LogitsType::kFloat32;
    case ScalarType::BFloat16:
      return LogitsType::kBFloat16;
    case ScalarType::Half:
      return LogitsType::kFloat16;
    case ScalarType::Double:
      return LogitsType::kFloat64;
    default:
      FASTPAR_CHECK(false, "logits must be float32, bfloat16, float16 or float64");
  }
  return LogitsType::kFloat32;
}

// float64 for float64 logits, float32 for all others.
inline ScalarType stats_dtype(LogitsType type) {
  return type == LogitsType::kFloat64 ? ScalarType::Double : ScalarType::Float;
}

inline std::vector<int64_t> sizes_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

inline int64_t num_rows(const Tensor& logits) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < logits.dim(); ++d) rows *= logits.size(d);
  return rows;
}

inline bool has_contiguous_rows(const Tensor& logits) {
  return logits.dim() <= kMaxLeadingDims + 1 &&
         (logits.size(logits.dim() - 1) <= 1 || logits.stride(logits.dim() - 1) == 1);
}

inline RowLayout row_layout(const Tensor& logits) {
  RowLayout rows{};
  for (int64_t d = 0; d + 1 < logits.dim(); ++d) {
    if (logits.size(d) == 1) continue;
    const int last = rows.num_dims - 1;
    if (last >= 0 && rows.strides[last] == logits.size(d) * logits.stride(d)) {
      rows.sizes[last] *= logits.size(d);  // one run of equally spaced rows
      rows.strides[last] = logits.stride(d);
      continue;
    }
    rows.sizes[rows.num_dims] = logits.size(d);
    rows.strides[rows.num_dims] = logits.stride(d);
    ++rows.num_dims;
  }
  return rows;
}

// Whether no two rows share memory, as an expanded tensor's do.
inline bool has_separate_rows(const Tensor& logits) {
  const RowLayout rows = row_layout(logits);
  bool seen[kMaxLeadingDims] = {};
  int64_t extent = logits.size(logits.dim() - 1);
  for (int n = 0; n < rows.num_dims; ++n) {
    int nearest = -1;  // the dim with the smallest stride of those not seen yet
    for (int d = 0; d < rows.num_dims; ++d) {
      if (!seen[d] && (nearest < 0 || rows.strides[d] < rows.strides[nearest])) nearest = d;
    }
    if (rows.strides[nearest] < extent) return false;
    seen[nearest] = true;
    extent = rows.strides[nearest] * (rows.sizes[nearest] - 1) + extent;
  }
  return true;
}

inline void check_inplace(const Tensor& logits) {
  FASTPAR_CHECK(has_contiguous_rows(logits), "the in-place backward needs logits whose last dim is contiguous");
  FASTPAR_CHECK(has_separate_rows(logits), "the in-place backward needs logits whose rows do not share memory");
}

inline Tensor as_contiguous(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

inline void check_logits_and_target(const Tensor& logits, const Tensor& target) {
  FASTPAR_CHECK(logits.dim() >= 1, "logits must have at least one dim, the vocabulary");
  FASTPAR_CHECK(target.scalar_type() == ScalarType::Long, "target must be int64");
  FASTPAR_CHECK(target.is_cuda() == logits.is_cuda() && target.get_device_index() == logits.get_device_index(),
                "target must be on the same device as the logits");
  FASTPAR_CHECK(target.numel() == num_rows(logits), "target has ", target.numel(), " elements, but logits has ",
                num_rows(logits), " rows");
}

inline Tensor with_contiguous_rows(const Tensor& logits) {
  return has_contiguous_rows(logits) ? logits : torch::stable::contiguous(logits);
}

inline void check_backward(const Tensor& logits, const Tensor& lse, const Tensor& target, const Tensor& grad_loss) {
  check_logits_and_target(logits, target);
  const int64_t rows = target.numel();
  FASTPAR_CHECK(lse.scalar_type() == ScalarType::Double && lse.numel() == rows, "lse must be float64 [", rows, "]");
  FASTPAR_CHECK(
      grad_loss.scalar_type() == stats_dtype(logits_type(logits)) && grad_loss.dim() == 1 && grad_loss.size(0) == rows,
      "grad_loss must be [", rows, "], float64 for float64 logits and float32 for others");
}

inline void check_merge(const Tensor& gathered, const Tensor& target) {
  FASTPAR_CHECK(gathered.dim() == 3 && gathered.size(2) == 3, "gathered must be [ranks, rows, 3]");
  FASTPAR_CHECK(gathered.size(1) == target.numel(), "gathered has ", gathered.size(1), " rows, target has ",
                target.numel(), " elements");
  FASTPAR_CHECK(target.scalar_type() == ScalarType::Long, "target must be int64");
  FASTPAR_CHECK(gathered.scalar_type() == ScalarType::Double || gathered.scalar_type() == ScalarType::Float,
                "gathered must be float32 or float64");
}

// Every rank's [rows, 3] must be dense; the ranks may be any distance apart, since one more row may travel between
// them.
inline Tensor with_dense_ranks(const Tensor& gathered) {
  const bool is_dense = gathered.stride(2) == 1 && (gathered.size(1) <= 1 || gathered.stride(1) == 3);
  return is_dense ? gathered : torch::stable::contiguous(gathered);
}

}  // namespace fastpar
