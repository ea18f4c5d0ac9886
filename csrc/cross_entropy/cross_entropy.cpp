// CPU op layer of vocab-parallel cross-entropy: check, return early on empty, choose the kernel, launch.
// The algebra is in row_terms.h, the numerics in cross_entropy_kernel.h and the headers that include it.
#include "cross_entropy/cross_entropy.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/large_buffer.h"
#include "cross_entropy/arguments.h"
#include "cross_entropy/row_terms.h"

namespace fastpar {
namespace {

// Elements that one task should have at least: about 10 microseconds of work.
constexpr int64_t kGrainElements = 32768;
// Rows that one task of merge should have at least: two logarithms each.
constexpr int64_t kGrainMerge = 512;
// Outputs beyond this do not fit the caches, and are stored past them.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

const CrossEntropyKernels& kernels(LogitsType type) {
#if FASTPAR_X86
  if (type != LogitsType::kFloat64) {
    if (cpu_capability() >= CpuCapability::kAvx512Bf16) return kCrossEntropyAvx512Bf16;
    if (cpu_capability() == CpuCapability::kAvx512) return kCrossEntropyAvx512;
    if (cpu_capability() == CpuCapability::kAvx2) return kCrossEntropyAvx2;
  }
#endif
  return kCrossEntropyPortable;
}

void parallel_over_rows(int64_t rows, int64_t vocab, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t grain = vocab >= kGrainElements ? 1 : kGrainElements / (vocab > 0 ? vocab : 1);
  torch::stable::parallel_for(0, rows, grain, body);
}

using OptionalTensor = std::optional<Tensor>;

bool is_bad_target(int64_t id, int64_t vocab_total, int64_t ignore_index) {
  return id != ignore_index && (id < 0 || id >= vocab_total);
}

// The first row whose target is no class and not ignored, or -1.
int64_t find_bad_row(const int64_t* ids, int64_t rows, int64_t vocab_total, int64_t ignore_index) {
  for (int64_t row = 0; row < rows; ++row) {
    if (is_bad_target(ids[row], vocab_total, ignore_index)) return row;
  }
  return -1;
}

// ---- stats ----------------------------------------------------------------------------------------------------------

// `exp_out` is the logits themselves, or nothing.
Tensor launch_stats(const Tensor& logits, const Tensor& target_in, const OptionalTensor& weight, int64_t vocab_start,
                    int64_t vocab_total, int64_t ignore_index, bool smoothing, double softcap, double logit_scale,
                    int64_t call, bool in_place) {
  const LogitsType type = logits_type(logits);
  const Tensor target = as_contiguous(target_in);
  const int64_t rows = target.numel(), vocab = logits.size(logits.dim() - 1), columns = stats_columns(smoothing);
  check_columns(vocab, vocab_start, vocab_total);
  const LossTerms terms =
      loss_terms(weight, std::nullopt, stats_dtype(type), vocab_total, 0.0, 0.0, softcap, logit_scale);
  const int64_t* ids = target.const_data_ptr<int64_t>();
  Tensor stats = empty_cpu({rows + kHeaderRows, columns}, stats_dtype(type));
  const StatsArguments arguments{logits.const_data_ptr(),
                                 row_layout(logits),
                                 rows,
                                 vocab,
                                 ids,
                                 vocab_start,
                                 ignore_index,
                                 terms,
                                 smoothing,
                                 stats.mutable_data_ptr(),
                                 columns,
                                 in_place ? logits.mutable_data_ptr() : nullptr,
                                 row_layout(logits)};
  const size_t row_bytes = static_cast<size_t>(columns) * static_cast<size_t>(stats.element_size());
  char* header = static_cast<char*>(arguments.stats) + static_cast<size_t>(rows) * row_bytes;
  memset(header, 0, static_cast<size_t>(kHeaderRows) * row_bytes);
  const StatsHeader values{vocab, vocab_start, vocab_total, find_bad_row(ids, rows, vocab_total, ignore_index) + 1,
                           id_checksum(ids, rows, call)};
  memcpy(header, &values, kHeaderBytes);
  const StatsKernel kernel = kernels(type).stats[static_cast<int>(type)];
  parallel_over_rows(rows, vocab, [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  return stats;
}

Tensor stats_cpu(const Tensor& logits, const Tensor& target, OptionalTensor weight, int64_t vocab_start,
                 int64_t vocab_total, int64_t ignore_index, bool smoothing, double softcap, double logit_scale,
                 int64_t call) {
  check_logits_and_target(logits, target);
  return launch_stats(with_contiguous_rows(logits), target, weight, vocab_start, vocab_total, ignore_index, smoothing,
                      softcap, logit_scale, call, false);
}

Tensor stats_exp_inplace_cpu(Tensor logits, const Tensor& target, OptionalTensor weight, int64_t vocab_start,
                             int64_t vocab_total, int64_t ignore_index, bool smoothing, double softcap,
                             double logit_scale, int64_t call) {
  check_logits_and_target(logits, target);
  check_inplace(logits);
  return launch_stats(logits, target, weight, vocab_start, vocab_total, ignore_index, smoothing, softcap, logit_scale,
                      call, true);
}

// ---- merge ----------------------------------------------------------------------------------------------------------

// Combines the ranks' statistics of every token, always in rank order: the same bits on every rank.
template <typename T>
void merge_rows(const T* gathered, int64_t ranks, int64_t rank_stride, int64_t columns, int64_t row_begin,
                int64_t row_end, const int64_t* target, const LossTerms& terms, int64_t ignore_index, T* loss,
                double* lse) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    double maximum = -std::numeric_limits<double>::infinity();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const double candidate = static_cast<double>(gathered[rank * rank_stride + columns * row]);
      if (candidate > maximum) maximum = candidate;
    }
    // Shards without a finite logit contribute nothing; if all are like that, exp(-inf - 0) keeps the sum at 0.
    const double reference = std::isinf(maximum) && maximum < 0 ? 0.0 : maximum;
    double sum = 0.0, target_logit = 0.0, weighted_sum = 0.0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const T* stats = gathered + rank * rank_stride + columns * row;
      sum += static_cast<double>(stats[1]) * std::exp(static_cast<double>(stats[0]) - reference);
      target_logit += static_cast<double>(stats[2]);
      if (columns == 5) weighted_sum += static_cast<double>(stats[3]) + static_cast<double>(stats[4]);
    }
    const double log_sum = std::log(sum);
    lse[row] = std::is_same_v<T, float> ? join_lse(reference, log_sum) : reference + log_sum;
    const int64_t id = target[row];
    loss[row] = id == ignore_index ? T(0)
                                   : static_cast<T>(row_loss(terms, reference, log_sum, target_logit,
                                                             weighted_sum / kSumUnit, target_weight<T>(terms, id)));
  }
}

// Every rank's statistics are dense [rows + kHeaderRows, columns], `stride` elements apart.
std::tuple<Tensor, Tensor> launch_merge(const Tensor& gathered, int64_t ranks, int64_t stride, int64_t columns,
                                        const Tensor& target, const LossTerms& terms, int64_t ignore_index) {
  const ScalarType dtype = gathered.scalar_type();
  const int64_t rows = target.numel();
  Tensor loss = empty_cpu({rows}, dtype);
  Tensor lse = empty_cpu({rows}, ScalarType::Double);
  const int64_t* ids = target.const_data_ptr<int64_t>();
  double* lse_out = lse.mutable_data_ptr<double>();
  torch::stable::parallel_for(0, rows, kGrainMerge, [&](int64_t begin, int64_t end) {
    if (dtype == ScalarType::Double) {
      merge_rows(static_cast<const double*>(gathered.const_data_ptr()), ranks, stride, columns, begin, end, ids, terms,
                 ignore_index, static_cast<double*>(loss.mutable_data_ptr()), lse_out);
    } else {
      merge_rows(static_cast<const float*>(gathered.const_data_ptr()), ranks, stride, columns, begin, end, ids, terms,
                 ignore_index, static_cast<float*>(loss.mutable_data_ptr()), lse_out);
    }
  });
  return {loss, lse};
}

std::tuple<Tensor, Tensor> merge_cpu(const Tensor& gathered_in, const Tensor& target, OptionalTensor weight,
                                     OptionalTensor weight_sum, int64_t vocab_total, int64_t ignore_index,
                                     double label_smoothing, double z_loss) {
  check_merge(gathered_in, target, label_smoothing != 0.0);
  const Tensor gathered = with_dense_ranks(gathered_in);
  const LossTerms terms =
      loss_terms(weight, weight_sum, gathered.scalar_type(), vocab_total, label_smoothing, z_loss, 0.0, 1.0);
  return launch_merge(gathered, gathered.size(0), gathered.stride(0), gathered.size(2), as_contiguous(target), terms,
                      ignore_index);
}

// ---- one rank -------------------------------------------------------------------------------------------------------

void check_targets(const int64_t* ids, int64_t rows, int64_t vocab, int64_t ignore_index) {
  const int64_t bad_row = find_bad_row(ids, rows, vocab, ignore_index);
  FASTPAR_CHECK(bad_row < 0, "target[", bad_row, "] is ", ids[bad_row < 0 ? 0 : bad_row],
                ", outside the vocabulary [0, ", vocab, ") and not ignore_index (", ignore_index, ")");
}

double number_in(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? *static_cast<const double*>(x.const_data_ptr())
                                               : static_cast<double>(*static_cast<const float*>(x.const_data_ptr()));
}

void put_number(const Tensor& x, double value) {
  if (x.scalar_type() == ScalarType::Double) {
    *static_cast<double*>(x.mutable_data_ptr()) = value;
  } else {
    *static_cast<float*>(x.mutable_data_ptr()) = static_cast<float>(value);
  }
}

// a / b, rounded as their dtype is: a quotient of floats that is rounded to double first rounds the same way.
double quotient(const Tensor& a, const Tensor& b) { return number_in(a) / number_in(b); }

// (the rows' losses or their sum or mean, lse, what a mean divides by or 1) where this rank has the whole vocabulary:
// stats, merge and the reduction in one call.
std::tuple<Tensor, Tensor, Tensor> forward_cpu(const Tensor& logits_in, const Tensor& target_in, OptionalTensor weight,
                                               OptionalTensor weight_sum, OptionalTensor denominator,
                                               int64_t reduction_in, int64_t ignore_index, double label_smoothing,
                                               double z_loss, double softcap, double logit_scale) {
  check_logits_and_target(logits_in, target_in);
  const Tensor logits = with_contiguous_rows(logits_in), target = as_contiguous(target_in);
  const int64_t rows = target.numel(), vocab = logits.size(logits.dim() - 1);
  const int64_t* ids = target.const_data_ptr<int64_t>();
  check_targets(ids, rows, vocab, ignore_index);
  const bool smoothing = label_smoothing != 0.0;
  const Tensor stats =
      launch_stats(logits, target, weight, 0, vocab, ignore_index, smoothing, softcap, logit_scale, 0, false);
  const ScalarType dtype = stats.scalar_type();
  const LossTerms terms = loss_terms(weight, weight_sum, dtype, vocab, label_smoothing, z_loss, 0.0, 1.0);
  const auto [loss, lse] = launch_merge(stats, 1, stats.numel(), stats.size(1), target, terms, ignore_index);
  const Reduction reduction = static_cast<Reduction>(reduction_in);
  Tensor divisor = empty_cpu({}, dtype);
  if (reduction == Reduction::kMean && denominator.has_value()) {
    check_number("denominator", *denominator, dtype);
    put_number(divisor, number_in(*denominator));
  } else {
    int64_t counted = 0;
    if (reduction == Reduction::kMean) {
      for (int64_t row = 0; row < rows; ++row) counted += ids[row] != ignore_index;
    }
    put_number(divisor, counted > 0 ? static_cast<double>(counted) : 1.0);
  }
  if (reduction == Reduction::kNone) return {loss, lse, divisor};
  Tensor out = torch::stable::sum(loss);
  if (reduction == Reduction::kMean) put_number(out, quotient(out, divisor));
  return {out, lse, divisor};
}

// ---- backward -------------------------------------------------------------------------------------------------------

bool should_stream(const Tensor& logits, const Tensor& grad) {
  const bool in_place = grad.const_data_ptr() == logits.const_data_ptr();
  return !in_place && grad.numel() * static_cast<int64_t>(grad.element_size()) > kStreamBytes;
}

void launch_backward(const Tensor& logits, const Tensor& lse_in, const Tensor& target_in, const OptionalTensor& weight,
                     const OptionalTensor& weight_sum, const void* grad_loss, int64_t grad_loss_stride,
                     const OptionalTensor& grad_lse, int64_t vocab_start, int64_t vocab_total, int64_t ignore_index,
                     double label_smoothing, double z_loss, double softcap, double logit_scale, const Tensor& grad) {
  const LogitsType type = logits_type(logits);
  const int64_t rows = target_in.numel(), vocab = logits.size(logits.dim() - 1);
  check_columns(vocab, vocab_start, vocab_total);
  const LossTerms terms =
      loss_terms(weight, weight_sum, stats_dtype(type), vocab_total, label_smoothing, z_loss, softcap, logit_scale);
  if (rows == 0 || vocab == 0) return;
  const Tensor lse = as_contiguous(lse_in), target = as_contiguous(target_in);
  const BackwardArguments arguments{logits.const_data_ptr(),
                                    row_layout(logits),
                                    vocab,
                                    lse.const_data_ptr<double>(),
                                    target.const_data_ptr<int64_t>(),
                                    grad_loss,
                                    grad_loss_stride,
                                    grad_lse.has_value() ? grad_lse->const_data_ptr() : nullptr,
                                    grad_lse.has_value() ? row_stride(*grad_lse) : 0,
                                    vocab_start,
                                    ignore_index,
                                    terms,
                                    grad.mutable_data_ptr(),
                                    row_layout(grad),
                                    should_stream(logits, grad)};
  const BackwardKernel kernel = kernels(type).backward[static_cast<int>(type)];
  parallel_over_rows(rows, vocab, [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
}

Tensor backward_cpu(const Tensor& logits_in, const Tensor& lse, const Tensor& target, OptionalTensor weight,
                    OptionalTensor weight_sum, const Tensor& grad_loss, OptionalTensor grad_lse, int64_t vocab_start,
                    int64_t vocab_total, int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                    double logit_scale) {
  check_backward(logits_in, lse, target, grad_loss, grad_lse);
  const Tensor logits = with_contiguous_rows(logits_in);
  Tensor grad = empty_cpu(sizes_of(logits), logits.scalar_type());
  launch_backward(logits, lse, target, weight, weight_sum, grad_loss.const_data_ptr(), row_stride(grad_loss), grad_lse,
                  vocab_start, vocab_total, ignore_index, label_smoothing, z_loss, softcap, logit_scale, grad);
  return grad;
}

// The gradient of a loss that is one number: every row's upstream gradient is grad_out / divisor.
Tensor backward_reduced_cpu(const Tensor& logits_in, const Tensor& lse, const Tensor& target, OptionalTensor weight,
                            OptionalTensor weight_sum, const Tensor& grad_out, const Tensor& divisor,
                            int64_t vocab_start, int64_t vocab_total, int64_t ignore_index, double label_smoothing,
                            double z_loss, double softcap, double logit_scale) {
  check_logits_and_target(logits_in, target);
  const Tensor logits = with_contiguous_rows(logits_in);
  const ScalarType dtype = stats_dtype(logits_type(logits));
  FASTPAR_CHECK(lse.scalar_type() == ScalarType::Double && lse.numel() == target.numel(), "lse must be float64 [",
                target.numel(), "]");
  check_number("grad_out", grad_out, dtype);
  check_number("divisor", divisor, dtype);
  const double wide = quotient(grad_out, divisor);
  const float narrow = static_cast<float>(wide);
  const void* grad_loss = dtype == ScalarType::Double ? static_cast<const void*>(&wide) : &narrow;
  Tensor grad = empty_cpu(sizes_of(logits), logits.scalar_type());
  launch_backward(logits, lse, target, weight, weight_sum, grad_loss, 0, std::nullopt, vocab_start, vocab_total,
                  ignore_index, label_smoothing, z_loss, softcap, logit_scale, grad);
  return grad;
}

void backward_inplace_cpu(Tensor logits, const Tensor& lse, const Tensor& target, OptionalTensor weight,
                          OptionalTensor weight_sum, const Tensor& grad_loss, OptionalTensor grad_lse,
                          int64_t vocab_start, int64_t vocab_total, int64_t ignore_index, double label_smoothing,
                          double z_loss, double softcap, double logit_scale) {
  check_backward(logits, lse, target, grad_loss, grad_lse);
  check_inplace(logits);
  launch_backward(logits, lse, target, weight, weight_sum, grad_loss.const_data_ptr(), row_stride(grad_loss), grad_lse,
                  vocab_start, vocab_total, ignore_index, label_smoothing, z_loss, softcap, logit_scale, logits);
}

// ---- both at once ---------------------------------------------------------------------------------------------------

// (loss, lse), with the gradient in `grad`.
std::tuple<Tensor, Tensor> launch_fused(const Tensor& logits, const Tensor& target_in, const OptionalTensor& weight,
                                        const OptionalTensor& weight_sum, const Tensor& grad_loss, int64_t ignore_index,
                                        double label_smoothing, double z_loss, double softcap, double logit_scale,
                                        const Tensor& grad) {
  const LogitsType type = logits_type(logits);
  const Tensor target = as_contiguous(target_in);
  const int64_t rows = target.numel(), vocab = logits.size(logits.dim() - 1);
  check_row_gradient("grad_loss", grad_loss, logits, rows);
  const LossTerms terms =
      loss_terms(weight, weight_sum, stats_dtype(type), vocab, label_smoothing, z_loss, softcap, logit_scale);
  const int64_t* ids = target.const_data_ptr<int64_t>();
  check_targets(ids, rows, vocab, ignore_index);
  Tensor loss = empty_cpu({rows}, stats_dtype(type));
  Tensor lse = empty_cpu({rows}, ScalarType::Double);
  const FusedArguments arguments{logits.const_data_ptr(),
                                 row_layout(logits),
                                 vocab,
                                 ids,
                                 grad_loss.const_data_ptr(),
                                 row_stride(grad_loss),
                                 ignore_index,
                                 terms,
                                 loss.mutable_data_ptr(),
                                 lse.mutable_data_ptr<double>(),
                                 grad.mutable_data_ptr(),
                                 row_layout(grad),
                                 should_stream(logits, grad)};
  const FusedKernel kernel = kernels(type).fused[static_cast<int>(type)];
  parallel_over_rows(rows, vocab, [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  return {loss, lse};
}

std::tuple<Tensor, Tensor, Tensor> forward_backward_cpu(const Tensor& logits_in, const Tensor& target,
                                                        OptionalTensor weight, OptionalTensor weight_sum,
                                                        const Tensor& grad_loss, int64_t ignore_index,
                                                        double label_smoothing, double z_loss, double softcap,
                                                        double logit_scale) {
  check_logits_and_target(logits_in, target);
  const Tensor logits = with_contiguous_rows(logits_in);
  Tensor grad = empty_cpu(sizes_of(logits), logits.scalar_type());
  const auto [loss, lse] = launch_fused(logits, target, weight, weight_sum, grad_loss, ignore_index, label_smoothing,
                                        z_loss, softcap, logit_scale, grad);
  return {loss, lse, grad};
}

std::tuple<Tensor, Tensor> forward_backward_inplace_cpu(Tensor logits, const Tensor& target, OptionalTensor weight,
                                                        OptionalTensor weight_sum, const Tensor& grad_loss,
                                                        int64_t ignore_index, double label_smoothing, double z_loss,
                                                        double softcap, double logit_scale) {
  check_logits_and_target(logits, target);
  check_inplace(logits);
  return launch_fused(logits, target, weight, weight_sum, grad_loss, ignore_index, label_smoothing, z_loss, softcap,
                      logit_scale, logits);
}

// `forward_cpu`, and the gradient for an upstream of 1.
std::tuple<Tensor, Tensor, Tensor, Tensor> reduced_forward_backward_cpu(
    const Tensor& logits, const Tensor& target, OptionalTensor weight, OptionalTensor weight_sum,
    OptionalTensor denominator, int64_t reduction, int64_t ignore_index, double label_smoothing, double z_loss,
    double softcap, double logit_scale) {
  check_reduced(reduction);
  const auto [out, lse, divisor] = forward_cpu(logits, target, weight, weight_sum, denominator, reduction, ignore_index,
                                               label_smoothing, z_loss, softcap, logit_scale);
  Tensor one = empty_cpu({}, divisor.scalar_type());
  put_number(one, 1.0);
  const int64_t vocab = logits.size(logits.dim() - 1);
  return {out, lse, divisor,
          backward_reduced_cpu(logits, lse, target, weight, weight_sum, one, divisor, 0, vocab, ignore_index,
                               label_smoothing, z_loss, softcap, logit_scale)};
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("vocab_parallel_cross_entropy_stats", TORCH_BOX(&fastpar::stats_cpu));
  m.impl("vocab_parallel_cross_entropy_stats_exp_", TORCH_BOX(&fastpar::stats_exp_inplace_cpu));
  m.impl("vocab_parallel_cross_entropy_merge", TORCH_BOX(&fastpar::merge_cpu));
  m.impl("vocab_parallel_cross_entropy_backward", TORCH_BOX(&fastpar::backward_cpu));
  m.impl("vocab_parallel_cross_entropy_backward_", TORCH_BOX(&fastpar::backward_inplace_cpu));
  m.impl("cross_entropy_forward", TORCH_BOX(&fastpar::forward_cpu));
  m.impl("cross_entropy_backward", TORCH_BOX(&fastpar::backward_reduced_cpu));
  m.impl("cross_entropy_forward_backward", TORCH_BOX(&fastpar::forward_backward_cpu));
  m.impl("cross_entropy_forward_backward_", TORCH_BOX(&fastpar::forward_backward_inplace_cpu));
  m.impl("cross_entropy_reduced_forward_backward", TORCH_BOX(&fastpar::reduced_forward_backward_cpu));
}
