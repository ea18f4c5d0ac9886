// Checks and shapes that the CPU and the CUDA op layer share.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "common/checks.h"
#include "common/id_checksum.h"
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
  if (logits.numel() == 0) return true;  // whatever the strides are
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
  FASTPAR_CHECK(has_contiguous_rows(logits), "the in-place op needs logits whose last dim is contiguous");
  FASTPAR_CHECK(has_separate_rows(logits), "the in-place op needs logits whose rows do not share memory");
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

enum class Reduction : int64_t { kNone, kSum, kMean };

inline void check_reduced(int64_t reduction) {
  FASTPAR_CHECK(
      reduction == static_cast<int64_t>(Reduction::kSum) || reduction == static_cast<int64_t>(Reduction::kMean),
      "the reduction must be a sum (1) or a mean (2), not ", reduction);
}

inline void check_number(const char* name, const Tensor& x, ScalarType dtype) {
  FASTPAR_CHECK(x.scalar_type() == dtype && x.numel() == 1, name,
                " must be one number, float64 for float64 logits and float32 for others");
}

// One number a row, in the dtype that the logits are computed in.
inline void check_row_gradient(const char* name, const Tensor& gradient, const Tensor& logits, int64_t rows) {
  FASTPAR_CHECK(
      gradient.scalar_type() == stats_dtype(logits_type(logits)) && gradient.dim() == 1 && gradient.size(0) == rows,
      name, " must be [", rows, "], float64 for float64 logits and float32 for others");
}

inline void check_backward(const Tensor& logits, const Tensor& lse, const Tensor& target, const Tensor& grad_loss,
                           const std::optional<Tensor>& grad_lse) {
  check_logits_and_target(logits, target);
  const int64_t rows = target.numel();
  FASTPAR_CHECK(lse.scalar_type() == ScalarType::Double && lse.numel() == rows, "lse must be float64 [", rows, "]");
  check_row_gradient("grad_loss", grad_loss, logits, rows);
  if (grad_lse.has_value()) check_row_gradient("grad_lse", *grad_lse, logits, rows);
}

inline int64_t row_stride(const Tensor& x) { return x.size(0) == 1 ? 0 : x.stride(0); }

// The tensors stay owned by the caller. `weight_dtype` is float64 for float64 logits and float32 for all others.
inline LossTerms loss_terms(const std::optional<Tensor>& weight, const std::optional<Tensor>& weight_sum,
                            ScalarType weight_dtype, int64_t vocab_total, double label_smoothing, double z_loss,
                            double softcap, double logit_scale) {
  FASTPAR_CHECK(softcap >= 0.0, "softcap must be positive, or 0 for none, got ", softcap);
  FASTPAR_CHECK(label_smoothing >= 0.0 && label_smoothing <= 1.0, "label_smoothing must be in [0, 1], got ",
                label_smoothing);
  if (weight.has_value()) {
    FASTPAR_CHECK(weight->scalar_type() == weight_dtype && weight->dim() == 1 && weight->size(0) == vocab_total &&
                      weight->is_contiguous(),
                  "weight must be contiguous [", vocab_total, "], float64 for float64 logits and float32 for others");
  }
  if (weight_sum.has_value()) {
    FASTPAR_CHECK(weight_sum->scalar_type() == ScalarType::Double && weight_sum->numel() == 1,
                  "weight_sum must be one float64");
  }
  FASTPAR_CHECK(label_smoothing == 0.0 || weight.has_value() == weight_sum.has_value(),
                "label_smoothing with weight needs weight_sum, and only then");
  return {label_smoothing,
          z_loss,
          softcap,
          logit_scale,
          weight.has_value() ? weight->const_data_ptr() : nullptr,
          weight_sum.has_value() ? weight_sum->const_data_ptr<double>() : nullptr,
          vocab_total};
}

inline void check_columns(int64_t vocab, int64_t vocab_start, int64_t vocab_total) {
  FASTPAR_CHECK(vocab_start >= 0 && vocab_start + vocab <= vocab_total, "the columns [", vocab_start, ", ",
                vocab_start + vocab, ") are not within the vocabulary [0, ", vocab_total, ")");
}

// Statistics are [rows + kHeaderRows, columns]: the last rows are not numbers but the header that travels with them.
constexpr int64_t kHeaderRows = 3;

inline int64_t stats_columns(bool smoothing) { return smoothing ? 5 : 3; }

// Four int64 and a checksum, then zeros; see Note: the header in fastpar/contracts/vocab_shard.py. A header row has at
// least 12 bytes.
struct StatsHeader {
  int64_t size;
  int64_t vocab_start;
  int64_t vocab_total;
  int64_t bad_row;    // 1 + the first row whose target is no class and not ignored, or 0: never a NaN's bits
  uint32_t checksum;  // of the targets and of what the caller adds
};
constexpr size_t kHeaderBytes = offsetof(StatsHeader, checksum) + sizeof(uint32_t);  // without the padding
static_assert(kHeaderBytes <= kHeaderRows * 3 * sizeof(float), "the header does not fit");

inline void check_merge(const Tensor& gathered, const Tensor& target, bool smoothing) {
  FASTPAR_CHECK(gathered.dim() == 3 && (gathered.size(2) == 5 || (gathered.size(2) == 3 && !smoothing)),
                "gathered must be [ranks, rows + 3, 5], or 3 without label_smoothing");
  FASTPAR_CHECK(gathered.size(1) == target.numel() + kHeaderRows, "gathered has ", gathered.size(1), " - 3 rows, ",
                "target has ", target.numel(), " elements");
  FASTPAR_CHECK(target.scalar_type() == ScalarType::Long, "target must be int64");
  FASTPAR_CHECK(gathered.scalar_type() == ScalarType::Double || gathered.scalar_type() == ScalarType::Float,
                "gathered must be float32 or float64");
}

// Every rank's [rows + 3, columns] must be dense; the ranks may be any distance apart.
inline Tensor with_dense_ranks(const Tensor& gathered) {
  const bool is_dense = gathered.stride(2) == 1 && gathered.stride(1) == gathered.size(2);
  return is_dense ? gathered : torch::stable::contiguous(gathered);
}

}  // namespace fastpar
