// CPU op layer of softmax, log-softmax, log-probabilities and entropy over a split vocabulary: check, return early on
// empty, choose the kernel, share out rows. The algebra is in fastpar/ops/vocab_softmax.py and vocab_entropy.py.
#include "vocab_softmax/vocab_softmax.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/far_rows.h"
#include "common/id_checksum.h"
#include "common/large_buffer.h"
#include "common/tensor_rows.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kHeaderRows = 3;  // see fastpar/contracts/vocab_shard.py
constexpr int64_t kSums = 3;        // columns before those of the ids

const SoftmaxKernels& kernels(FloatType type) {
#if FASTPAR_X86
  if (type != FloatType::kFloat64) {
    if (cpu_capability() >= CpuCapability::kAvx512Bf16) return kSoftmaxAvx512Bf16;
    if (cpu_capability() == CpuCapability::kAvx512) return kSoftmaxAvx512;
    if (cpu_capability() == CpuCapability::kAvx2) return kSoftmaxAvx2;
  }
#endif
  return kSoftmaxPortable;
}

ScalarType sums_dtype(FloatType type) { return type == FloatType::kFloat64 ? ScalarType::Double : ScalarType::Float; }

Tensor checked_logits(const Tensor& logits) {
  FASTPAR_CHECK(logits.dim() >= 1, "logits must have at least one dim, the vocabulary");
  return with_dense_rows(logits);
}

// Logits [..., V] as rows, whatever their strides.
struct Rows {
  Tensor logits;
  FloatType type;
  int64_t vocab, count;
  StridedRows layout;
  LogitTransform transform;

  Rows(const Tensor& logits_in, double softcap, double logit_scale)
      : logits(checked_logits(logits_in)),
        type(float_type(logits, "logits")),
        vocab(last_size(logits)),
        count(count_rows(logits)),
        layout(strided_rows(logits)),
        transform{softcap, logit_scale} {}

  LogitsRow row(int64_t index, double lse) const {
    const char* x = static_cast<const char*>(logits.const_data_ptr());
    return {x + row_start(layout, index) * static_cast<int64_t>(logits.element_size()), vocab, transform, lse};
  }
};

void set_element(void* row, FloatType type, int64_t column, double value) {
  switch (type) {
    case FloatType::kFloat32:
      static_cast<float*>(row)[column] = static_cast<float>(value);
      break;
    case FloatType::kBFloat16:
      from_float(static_cast<float>(value), static_cast<bfloat16*>(row) + column);
      break;
    case FloatType::kFloat16:
      from_float(static_cast<float>(value), static_cast<float16*>(row) + column);
      break;
    default:
      static_cast<double*>(row)[column] = value;
  }
}

// Ids [rows, K], or none: K = 0.
struct Ids {
  OptionalTensor tensor;
  const int64_t* data = nullptr;
  int64_t per_row = 0;

  Ids(const OptionalTensor& ids, int64_t rows) {
    if (!ids.has_value()) return;
    FASTPAR_CHECK(ids->scalar_type() == ScalarType::Long && ids->dim() == 2 && ids->size(0) == rows,
                  "ids must be int64 [", rows, ", K]");
    tensor = ids->is_contiguous() ? *ids : torch::stable::contiguous(*ids);
    data = tensor->const_data_ptr<int64_t>();
    per_row = tensor->size(1);
  }
};

const double* float64_rows(const Tensor& x, int64_t rows, const char* name) {
  FASTPAR_CHECK(x.scalar_type() == ScalarType::Double && x.numel() == rows && x.is_contiguous(), name,
                " must be contiguous float64 [", rows, "]");
  return x.const_data_ptr<double>();
}

// ---- statistics ---------------------------------------------------------------------------------------------------

template <typename T>
void write_header(T* tail, int64_t columns, int64_t size, int64_t start, int64_t total, int64_t bad_row,
                  uint32_t checksum) {
  const int64_t words[4] = {size, start, total, bad_row + 1};
  memset(tail, 0, sizeof(T) * static_cast<size_t>(kHeaderRows * columns));
  memcpy(tail, words, sizeof words);
  memcpy(reinterpret_cast<char*>(tail) + sizeof words, &checksum, sizeof checksum);
}

template <typename T>
int64_t fill_stats(const Rows& rows, const Ids& ids, int64_t vocab_start, int64_t vocab_total, int64_t ignore_index,
                   bool entropy, T* out) {
  const int64_t columns = kSums + ids.per_row;
  const SumsRowKernel kernel = kernels(rows.type).sums[static_cast<int>(rows.type)];
  const ElementKernel element = kernels(rows.type).element[static_cast<int>(rows.type)];
  torch::stable::parallel_for(0, rows.count, row_grain(rows.vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const LogitsRow row = rows.row(r, 0.0);
      double sums[kSums];
      kernel(row, entropy, sums);
      T* to = out + r * columns;
      for (int64_t c = 0; c < kSums; ++c) to[c] = static_cast<T>(sums[c]);
      for (int64_t k = 0; k < ids.per_row; ++k) {
        const int64_t id = ids.data[r * ids.per_row + k], column = id - vocab_start;
        const bool owned = id != ignore_index && column >= 0 && column < rows.vocab;
        to[kSums + k] = owned ? static_cast<T>(element(row, column)) : static_cast<T>(0);
      }
    }
  });
  int64_t bad_row = -1;
  for (int64_t i = rows.count * ids.per_row; i-- > 0;) {
    const int64_t id = ids.data[i];
    if (id == ignore_index || (id >= 0 && id < vocab_total)) continue;
    bad_row = i / ids.per_row;
    out[bad_row * columns + kSums + i % ids.per_row] = std::numeric_limits<T>::quiet_NaN();
  }
  return bad_row;
}

Tensor stats_cpu(const Tensor& logits, const OptionalTensor& ids_in, int64_t vocab_start, int64_t vocab_total,
                 int64_t ignore_index, bool entropy, double softcap, double logit_scale, int64_t call) {
  const Rows rows(logits, softcap, logit_scale);
  const Ids ids(ids_in, rows.count);
  const int64_t columns = kSums + ids.per_row;
  Tensor stats = empty_cpu({rows.count + kHeaderRows, columns}, sums_dtype(rows.type));
  const auto run = [&](auto* out) {
    const int64_t bad_row = fill_stats(rows, ids, vocab_start, vocab_total, ignore_index, entropy, out);
    write_header(out + rows.count * columns, columns, rows.vocab, vocab_start, vocab_total, bad_row,
                 id_checksum(ids.data, rows.count * ids.per_row, call));
  };
  if (rows.type == FloatType::kFloat64) {
    run(stats.mutable_data_ptr<double>());
  } else {
    run(stats.mutable_data_ptr<float>());
  }
  return stats;
}

// Every rank's sums of one row, combined in rank order.
struct MergedRow {
  double reference;  // the largest maximum, or 0 if there is no finite one
  double log_sum;
  double entropy;
};

template <typename T>
MergedRow merge_row(const T* gathered, int64_t ranks, int64_t rank_stride) {
  double highest = -std::numeric_limits<double>::infinity();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    highest = std::max(highest, static_cast<double>(gathered[rank * rank_stride]));
  }
  const double reference = highest == -std::numeric_limits<double>::infinity() ? 0.0 : highest;
  double sum = 0.0, weighted = 0.0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const T* sums = gathered + rank * rank_stride;
    const double shift = static_cast<double>(sums[0]) - reference, factor = std::exp(shift);
    sum += factor * static_cast<double>(sums[1]);
    // A shard of -inf has nothing to shift, and -inf * 0 would be NaN.
    const double moved = factor == 0.0 ? 0.0 : shift * static_cast<double>(sums[1]);
    weighted += factor * (static_cast<double>(sums[2]) + moved);
  }
  return {reference, std::log(sum), std::log(sum) - weighted / sum};
}

template <typename T>
void merge_rows(const Tensor& gathered, const Ids& ids, int64_t rows, int64_t ignore_index, double* lse,
                double* entropy, T* log_prob) {
  const T* data = gathered.const_data_ptr<T>();
  const int64_t ranks = gathered.size(0), columns = gathered.size(2), stride = gathered.size(1) * columns;
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = data + r * columns;
    const MergedRow merged = merge_row(row, ranks, stride);
    lse[r] = std::is_same_v<T, float> ? join_lse(merged.reference, merged.log_sum) : merged.reference + merged.log_sum;
    entropy[r] = merged.entropy;
    for (int64_t k = 0; k < ids.per_row; ++k) {
      double picked = 0.0;
      for (int64_t rank = 0; rank < ranks; ++rank) picked += static_cast<double>(row[rank * stride + kSums + k]);
      const bool ignored = ids.data[r * ids.per_row + k] == ignore_index;
      // Not picked - lse: the maximum and a likely id's z are close.
      log_prob[r * ids.per_row + k] = ignored ? T(0) : static_cast<T>((picked - merged.reference) - merged.log_sum);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> merge_cpu(const Tensor& gathered_in, const OptionalTensor& ids_in,
                                             int64_t ignore_index) {
  FASTPAR_CHECK(gathered_in.dim() == 3 && gathered_in.size(1) >= kHeaderRows, "gathered must be [ranks, rows + ",
                kHeaderRows, ", columns]");
  const Tensor gathered = gathered_in.is_contiguous() ? gathered_in : torch::stable::contiguous(gathered_in);
  const int64_t rows = gathered.size(1) - kHeaderRows;
  const Ids ids(ids_in, rows);
  FASTPAR_CHECK(gathered.size(2) == kSums + ids.per_row, "gathered must have ", kSums + ids.per_row, " columns, got ",
                gathered.size(2));
  Tensor lse = empty_cpu({rows}, ScalarType::Double), entropy = empty_cpu({rows}, ScalarType::Double);
  Tensor log_prob = empty_cpu({rows, ids.per_row}, gathered.scalar_type());
  double* lse_out = lse.mutable_data_ptr<double>();
  double* entropy_out = entropy.mutable_data_ptr<double>();
  if (gathered.scalar_type() == ScalarType::Double) {
    merge_rows(gathered, ids, rows, ignore_index, lse_out, entropy_out, log_prob.mutable_data_ptr<double>());
  } else {
    FASTPAR_CHECK(gathered.scalar_type() == ScalarType::Float, "gathered must be float32 or float64");
    merge_rows(gathered, ids, rows, ignore_index, lse_out, entropy_out, log_prob.mutable_data_ptr<float>());
  }
  return {lse, entropy, log_prob};
}

// ---- softmax and log-softmax --------------------------------------------------------------------------------------

bool is_streamed(const Tensor& out) {
  return out.numel() * static_cast<int64_t>(out.element_size()) > kStreamedOutputBytes;
}

Tensor normalize_cpu(const Tensor& logits, const Tensor& lse, bool log, bool widen, double softcap,
                     double logit_scale) {
  const Rows rows(logits, softcap, logit_scale);
  const double* lse_data = float64_rows(lse, rows.count, "lse");
  const ScalarType dtype = widen ? sums_dtype(rows.type) : rows.logits.scalar_type();
  Tensor out = empty_cpu(shape_of(rows.logits), dtype);
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t row_bytes = rows.vocab * static_cast<int64_t>(out.element_size());
  const bool stream = is_streamed(out);
  const NormalizeRowKernel kernel = kernels(rows.type).normalize[static_cast<int>(rows.type)][widen];
  torch::stable::parallel_for(0, rows.count, row_grain(rows.vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) kernel(rows.row(r, lse_data[r]), log, stream, to + r * row_bytes);
  });
  return out;
}

// The gradient of a softmax: in the logits' dtype, or float32.
struct GradRows {
  Tensor tensor;
  bool wide;
  int64_t row_bytes;

  GradRows(const Tensor& grad, const Rows& rows)
      : tensor(grad.is_contiguous() ? grad : torch::stable::contiguous(grad)) {
    FASTPAR_CHECK(shape_of(grad) == shape_of(rows.logits), "grad_out must have the shape of logits");
    wide = grad.scalar_type() != rows.logits.scalar_type();
    FASTPAR_CHECK(!wide || grad.scalar_type() == ScalarType::Float,
                  "grad_out must be float32 or have the logits' dtype");
    FASTPAR_CHECK(!wide || rows.type != FloatType::kFloat64, "grad_out of float64 logits must be float64");
    row_bytes = rows.vocab * static_cast<int64_t>(grad.element_size());
  }
  const char* row(int64_t index) const { return static_cast<const char*>(tensor.const_data_ptr()) + index * row_bytes; }
};

Tensor dot_cpu(const Tensor& logits, const Tensor& lse, const Tensor& grad_out, bool log, double softcap,
               double logit_scale) {
  const Rows rows(logits, softcap, logit_scale);
  const GradRows grads(grad_out, rows);
  const double* lse_data = float64_rows(lse, rows.count, "lse");
  Tensor dot = empty_cpu({rows.count}, ScalarType::Double);
  double* out = dot.mutable_data_ptr<double>();
  const DotRowKernel kernel = kernels(rows.type).dot[static_cast<int>(rows.type)][grads.wide];
  torch::stable::parallel_for(0, rows.count, row_grain(rows.vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) out[r] = kernel(rows.row(r, lse_data[r]), grads.row(r), log);
  });
  return dot;
}

// Without `dot` the logits are a whole vocabulary, and each row's is computed just before it is needed: the second read
// finds the row in cache.
Tensor backward_cpu(const Tensor& logits, const Tensor& lse, const Tensor& grad_out, const OptionalTensor& dot,
                    bool log, double softcap, double logit_scale) {
  const Rows rows(logits, softcap, logit_scale);
  const GradRows grads(grad_out, rows);
  const double* lse_data = float64_rows(lse, rows.count, "lse");
  const double* dots = dot.has_value() ? float64_rows(*dot, rows.count, "dot") : nullptr;
  Tensor grad = empty_cpu(shape_of(rows.logits), rows.logits.scalar_type());
  char* to = static_cast<char*>(grad.mutable_data_ptr());
  const int64_t row_bytes = rows.vocab * static_cast<int64_t>(grad.element_size());
  const bool stream = is_streamed(grad);
  const int type = static_cast<int>(rows.type);
  const DotRowKernel dot_kernel = kernels(rows.type).dot[type][grads.wide];
  const BackwardRowKernel kernel = kernels(rows.type).backward[type][grads.wide];
  torch::stable::parallel_for(0, rows.count, row_grain(rows.vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const LogitsRow row = rows.row(r, lse_data[r]);
      const double row_dot = dots != nullptr ? dots[r] : dot_kernel(row, grads.row(r), log);
      kernel(row, grads.row(r), row_dot, log, stream, to + r * row_bytes);
    }
  });
  return grad;
}

// ---- log-probabilities and entropy --------------------------------------------------------------------------------

// One value a row (or id), of float32 or float64 and any stride; 0 if there is no tensor.
class GradValues {
 public:
  GradValues(const OptionalTensor& grad, int64_t count, const char* name) {
    if (!grad.has_value()) return;
    FASTPAR_CHECK(grad->numel() == count, name, " must have ", count, " elements, got ", grad->numel());
    FASTPAR_CHECK(grad->scalar_type() == ScalarType::Float || grad->scalar_type() == ScalarType::Double, name,
                  " must be float32 or float64");
    tensor_ = grad->is_contiguous() ? *grad : torch::stable::contiguous(*grad);
    if (tensor_->scalar_type() == ScalarType::Double) {
      double_ = tensor_->const_data_ptr<double>();
    } else {
      float_ = tensor_->const_data_ptr<float>();
    }
  }
  double operator[](int64_t i) const {
    return double_ != nullptr ? double_[i] : float_ != nullptr ? static_cast<double>(float_[i]) : 0.0;
  }

 private:
  OptionalTensor tensor_;
  const double* double_ = nullptr;
  const float* float_ = nullptr;
};

// The entries of the ids, which get more than the vector kernel writes: sum of g over the ids that equal the column.
// They are computed from the logits in double, and rounded once.
void write_id_columns(const LogitsRow& row, FloatType type, std::vector<std::pair<int64_t, double>>& hits, double total,
                      double base, double slope, void* out) {
  std::sort(hits.begin(), hits.end());
  for (size_t i = 0; i < hits.size();) {
    const int64_t column = hits[i].first;
    double own = 0.0;
    for (; i < hits.size() && hits[i].first == column; ++i) own += hits[i].second;
    const double z = kernels(type).element[static_cast<int>(type)](row, column);
    const double below = type == FloatType::kFloat64 ? z - row.lse : SplitLse(row.lse).below(z), p = std::exp(below);
    // own - total p; p - 1 would cancel where the model is confident.
    const double from_ids = own == total ? -total * std::expm1(below) : own - total * p;
    const double from_entropy = p == 0.0 ? 0.0 : p * (base + slope * below);
    set_element(out, type, column, (from_ids + from_entropy) * transform_slope(z, row.transform));
  }
}

Tensor log_prob_backward_cpu(const Tensor& logits, const Tensor& lse, const OptionalTensor& ids_in,
                             const OptionalTensor& grad_log_prob, const OptionalTensor& entropy,
                             const OptionalTensor& grad_entropy, int64_t vocab_start, int64_t ignore_index,
                             double softcap, double logit_scale) {
  const Rows rows(logits, softcap, logit_scale);
  const Ids ids(ids_in, rows.count);
  const GradValues id_grads(grad_log_prob, rows.count * ids.per_row, "grad_log_prob");
  const GradValues entropy_grads(grad_entropy, rows.count, "grad_entropy");
  FASTPAR_CHECK(!grad_entropy.has_value() || entropy.has_value(), "grad_entropy needs entropy");
  const double* lse_data = float64_rows(lse, rows.count, "lse");
  const double* entropies = grad_entropy.has_value() ? float64_rows(*entropy, rows.count, "entropy") : nullptr;
  Tensor grad = empty_cpu(shape_of(rows.logits), rows.logits.scalar_type());
  char* to = static_cast<char*>(grad.mutable_data_ptr());
  const int64_t row_bytes = rows.vocab * static_cast<int64_t>(grad.element_size());
  const bool stream = is_streamed(grad);
  const LogProbBackwardRowKernel kernel = kernels(rows.type).log_prob_backward[static_cast<int>(rows.type)];
  torch::stable::parallel_for(0, rows.count, row_grain(rows.vocab), [&](int64_t begin, int64_t end) {
    std::vector<std::pair<int64_t, double>> hits;
    for (int64_t r = begin; r < end; ++r) {
      char* out = to + r * row_bytes;
      double total = 0.0;
      bool has_grad = entropy_grads[r] != 0.0;
      hits.clear();
      for (int64_t i = r * ids.per_row; i < (r + 1) * ids.per_row; ++i) {
        if (ids.data[i] == ignore_index) continue;
        const double g = id_grads[i];
        has_grad |= g != 0.0;
        total += g;
        const int64_t column = ids.data[i] - vocab_start;
        if (column >= 0 && column < rows.vocab) hits.emplace_back(column, g);
      }
      if (!has_grad) {  // a masked token: nothing of its row is read
        memset(out, 0, static_cast<size_t>(row_bytes));
        continue;
      }
      const double slope = -entropy_grads[r];
      const double base = slope == 0.0 ? 0.0 : slope * entropies[r];
      const LogitsRow row = rows.row(r, lse_data[r]);
      kernel(row, base - total, slope, stream, out);
      write_id_columns(row, rows.type, hits, total, base, slope, out);
    }
  });
  return grad;
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("vocab_softmax_stats", TORCH_BOX(&fastpar::stats_cpu));
  m.impl("vocab_softmax_merge", TORCH_BOX(&fastpar::merge_cpu));
  m.impl("vocab_softmax_normalize", TORCH_BOX(&fastpar::normalize_cpu));
  m.impl("vocab_softmax_dot", TORCH_BOX(&fastpar::dot_cpu));
  m.impl("vocab_softmax_backward", TORCH_BOX(&fastpar::backward_cpu));
  m.impl("vocab_log_prob_backward", TORCH_BOX(&fastpar::log_prob_backward_cpu));
}
