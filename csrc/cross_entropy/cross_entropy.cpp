// CPU op layer of vocab-parallel cross-entropy: check, return early on empty, choose the kernel, launch.
// The algebra is in fastpar/ops/cross_entropy.py, the numerics in cross_entropy_kernel.h.
#include "cross_entropy/cross_entropy.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <functional>
#include <limits>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/large_buffer.h"
#include "cross_entropy/arguments.h"

namespace fastpar {
namespace {

// Elements that one task should have at least: about 10 microseconds of work.
constexpr int64_t kGrainElements = 32768;
// Outputs beyond this do not fit the caches, and are stored past them.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

const CrossEntropyKernels& kernels(LogitsType type) {
#if FASTPAR_X86
  if (type != LogitsType::kFloat64) {
    if (cpu_capability() == CpuCapability::kAvx512Bf16) return kCrossEntropyAvx512Bf16;
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

Tensor stats_cpu(const Tensor& logits_in, const Tensor& target_in, int64_t vocab_start, int64_t vocab_total,
                 int64_t ignore_index) {
  check_logits_and_target(logits_in, target_in);
  const LogitsType type = logits_type(logits_in);
  const Tensor logits = with_contiguous_rows(logits_in);
  const Tensor target = as_contiguous(target_in);
  const int64_t rows = target.numel(), vocab = logits.size(logits.dim() - 1);
  const int64_t* ids = target.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    FASTPAR_CHECK(ids[row] == ignore_index || (ids[row] >= 0 && ids[row] < vocab_total), "target[", row, "] is ",
                  ids[row], ", outside the vocabulary [0, ", vocab_total, ") and not ignore_index (", ignore_index,
                  ")");
  }
  Tensor stats = empty_cpu({rows, 3}, stats_dtype(type));
  if (rows == 0) return stats;
  const StatsArguments arguments{logits.const_data_ptr(), row_layout(logits), vocab, ids, vocab_start, ignore_index,
                                 stats.mutable_data_ptr()};
  const StatsKernel kernel = kernels(type).stats[static_cast<int>(type)];
  parallel_over_rows(rows, vocab, [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  return stats;
}

// Combines the ranks' (maximum, sum, target logit) of every token, always in rank order: the same bits on every rank.
template <typename T>
void merge_rows(const T* gathered, int64_t ranks, int64_t rank_stride, int64_t rows, const int64_t* target,
                int64_t ignore_index, T* loss, double* lse) {
  for (int64_t row = 0; row < rows; ++row) {
    double maximum = -std::numeric_limits<double>::infinity();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const double candidate = static_cast<double>(gathered[rank * rank_stride + 3 * row]);
      if (candidate > maximum) maximum = candidate;
    }
    // Shards without a finite logit contribute nothing; if all are like that, exp(-inf - 0) keeps the sum at 0.
    const double reference = std::isinf(maximum) && maximum < 0 ? 0.0 : maximum;
    double sum = 0.0, target_logit = 0.0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const T* stats = gathered + rank * rank_stride + 3 * row;
      sum += static_cast<double>(stats[1]) * std::exp(static_cast<double>(stats[0]) - reference);
      target_logit += static_cast<double>(stats[2]);
    }
    lse[row] = reference + std::log(sum);
    // Not lse - target_logit: the maximum and the target's logit are close where the loss is small.
    loss[row] = target[row] == ignore_index ? T(0) : static_cast<T>((reference - target_logit) + std::log(sum));
  }
}

std::tuple<Tensor, Tensor> merge_cpu(const Tensor& gathered_in, const Tensor& target_in, int64_t ignore_index) {
  check_merge(gathered_in, target_in);
  const bool is_double = gathered_in.scalar_type() == ScalarType::Double;
  const Tensor gathered = with_dense_ranks(gathered_in), target = as_contiguous(target_in);
  const int64_t ranks = gathered.size(0), rows = gathered.size(1), stride = gathered.stride(0);
  Tensor loss = empty_cpu({rows}, gathered.scalar_type());
  Tensor lse = empty_cpu({rows}, ScalarType::Double);
  const int64_t* ids = target.const_data_ptr<int64_t>();
  double* lse_out = lse.mutable_data_ptr<double>();
  if (is_double) {
    merge_rows(gathered.const_data_ptr<double>(), ranks, stride, rows, ids, ignore_index,
               loss.mutable_data_ptr<double>(), lse_out);
  } else {
    merge_rows(gathered.const_data_ptr<float>(), ranks, stride, rows, ids, ignore_index, loss.mutable_data_ptr<float>(),
               lse_out);
  }
  return {loss, lse};
}

void launch_backward(const Tensor& logits, const Tensor& lse_in, const Tensor& target_in, const Tensor& grad_loss,
                     int64_t vocab_start, int64_t ignore_index, const Tensor& grad) {
  const LogitsType type = logits_type(logits);
  const int64_t rows = target_in.numel(), vocab = logits.size(logits.dim() - 1);
  if (rows == 0 || vocab == 0) return;
  const Tensor lse = as_contiguous(lse_in), target = as_contiguous(target_in);
  const bool in_place = grad.const_data_ptr() == logits.const_data_ptr();
  const int64_t bytes = rows * vocab * static_cast<int64_t>(grad.element_size());
  const BackwardArguments arguments{logits.const_data_ptr(),
                                    row_layout(logits),
                                    vocab,
                                    lse.const_data_ptr<double>(),
                                    target.const_data_ptr<int64_t>(),
                                    grad_loss.const_data_ptr(),
                                    rows == 1 ? 0 : grad_loss.stride(0),
                                    vocab_start,
                                    ignore_index,
                                    grad.mutable_data_ptr(),
                                    row_layout(grad),
                                    !in_place && bytes > kStreamBytes};
  const BackwardKernel kernel = kernels(type).backward[static_cast<int>(type)];
  parallel_over_rows(rows, vocab, [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
}

Tensor backward_cpu(const Tensor& logits_in, const Tensor& lse, const Tensor& target, const Tensor& grad_loss,
                    int64_t vocab_start, int64_t ignore_index) {
  check_backward(logits_in, lse, target, grad_loss);
  const Tensor logits = with_contiguous_rows(logits_in);
  Tensor grad = empty_cpu(sizes_of(logits), logits.scalar_type());
  launch_backward(logits, lse, target, grad_loss, vocab_start, ignore_index, grad);
  return grad;
}

void backward_inplace_cpu(Tensor logits, const Tensor& lse, const Tensor& target, const Tensor& grad_loss,
                          int64_t vocab_start, int64_t ignore_index) {
  check_backward(logits, lse, target, grad_loss);
  check_inplace(logits);
  launch_backward(logits, lse, target, grad_loss, vocab_start, ignore_index, logits);
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("vocab_parallel_cross_entropy_stats", TORCH_BOX(&fastpar::stats_cpu));
  m.impl("vocab_parallel_cross_entropy_merge", TORCH_BOX(&fastpar::merge_cpu));
  m.impl("vocab_parallel_cross_entropy_backward", TORCH_BOX(&fastpar::backward_cpu));
  m.impl("vocab_parallel_cross_entropy_backward_", TORCH_BOX(&fastpar::backward_inplace_cpu));
}
