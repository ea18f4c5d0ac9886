// CUDA op layer of vocab-parallel cross-entropy: check, return early on empty, launch.
// Which kernel, and with how many threads and blocks, is decided beside the kernels, where the emulation can test it.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "common/cuda_stream.h"
#include "cross_entropy/arguments.h"
#include "cross_entropy/cross_entropy_reduction.cuh"
#include "cross_entropy/cross_entropy_resident.cuh"

namespace fastpar {
namespace {

using torch::stable::accelerator::DeviceGuard;
using OptionalTensor = std::optional<Tensor>;

// ---- stats ----------------------------------------------------------------------------------------------------------

// `in_place`: the exponentials are written over the logits.
Tensor stats_into(const Tensor& logits, const Tensor& target_in, const OptionalTensor& weight, int64_t vocab_start,
                  int64_t vocab_total, int64_t ignore_index, bool smoothing, double softcap, double logit_scale,
                  bool in_place) {
  const LogitsType type = logits_type(logits);
  const Tensor target = as_contiguous(target_in);
  const int64_t rows = target.numel(), vocab = logits.size(logits.dim() - 1), columns = stats_columns(smoothing);
  check_columns(vocab, vocab_start, vocab_total);
  const LossTerms terms =
      loss_terms(weight, std::nullopt, stats_dtype(type), vocab_total, 0.0, 0.0, softcap, logit_scale);
  Tensor stats = torch::stable::new_empty(logits, {rows + kHeaderRows, columns}, stats_dtype(type));
  const StatsArguments arguments{logits.const_data_ptr(),
                                 row_layout(logits),
                                 rows,
                                 vocab,
                                 target.const_data_ptr<int64_t>(),
                                 vocab_start,
                                 ignore_index,
                                 terms,
                                 smoothing,
                                 stats.mutable_data_ptr(),
                                 columns,
                                 in_place ? logits.mutable_data_ptr() : nullptr,
                                 row_layout(logits)};
  const cudaStream_t stream = current_cuda_stream(logits.get_device_index());
  if (in_place && rows > 0) {
    device::launch_stats_exp(type, arguments, stream);
  } else {
    device::launch_stats(type, arguments, stream);
  }
  return stats;
}

Tensor stats_cuda(const Tensor& logits, const Tensor& target, OptionalTensor weight, int64_t vocab_start,
                  int64_t vocab_total, int64_t ignore_index, bool smoothing, double softcap, double logit_scale,
                  int64_t /* call: nobody looks at headers on a device */) {
  check_logits_and_target(logits, target);
  const DeviceGuard guard(logits.get_device_index());
  return stats_into(with_contiguous_rows(logits), target, weight, vocab_start, vocab_total, ignore_index, smoothing,
                    softcap, logit_scale, false);
}

Tensor stats_exp_inplace_cuda(Tensor logits, const Tensor& target, OptionalTensor weight, int64_t vocab_start,
                              int64_t vocab_total, int64_t ignore_index, bool smoothing, double softcap,
                              double logit_scale, int64_t) {
  check_logits_and_target(logits, target);
  check_inplace(logits);
  const DeviceGuard guard(logits.get_device_index());
  return stats_into(logits, target, weight, vocab_start, vocab_total, ignore_index, smoothing, softcap, logit_scale,
                    true);
}

// ---- merge ----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> merge_cuda(const Tensor& gathered_in, const Tensor& target_in, OptionalTensor weight,
                                      OptionalTensor weight_sum, int64_t vocab_total, int64_t ignore_index,
                                      double label_smoothing, double z_loss) {
  check_merge(gathered_in, target_in, label_smoothing != 0.0);
  const DeviceGuard guard(gathered_in.get_device_index());
  const ScalarType dtype = gathered_in.scalar_type();
  const LossTerms terms = loss_terms(weight, weight_sum, dtype, vocab_total, label_smoothing, z_loss, 0.0, 1.0);
  const Tensor gathered = with_dense_ranks(gathered_in), target = as_contiguous(target_in);
  const int64_t rows = target.numel();
  Tensor loss = torch::stable::new_empty(gathered, {rows});
  Tensor lse = torch::stable::new_empty(gathered, {rows}, ScalarType::Double);
  if (rows == 0) return {loss, lse};
  const device::MergeArguments arguments{gathered.const_data_ptr(),
                                         gathered.size(0),
                                         gathered.stride(0),
                                         gathered.size(2),
                                         rows,
                                         target.const_data_ptr<int64_t>(),
                                         ignore_index,
                                         terms,
                                         loss.mutable_data_ptr(),
                                         lse.mutable_data_ptr<double>()};
  device::launch_merge(dtype == ScalarType::Double, arguments, current_cuda_stream(gathered.get_device_index()));
  return {loss, lse};
}

// ---- backward -------------------------------------------------------------------------------------------------------

void backward_into(const Tensor& logits, const Tensor& lse_in, const Tensor& target_in, const OptionalTensor& weight,
                   const OptionalTensor& weight_sum, const Tensor& grad_loss, const OptionalTensor& grad_lse,
                   int64_t vocab_start, int64_t vocab_total, int64_t ignore_index, double label_smoothing,
                   double z_loss, double softcap, double logit_scale, const Tensor& grad) {
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
                                    grad_loss.const_data_ptr(),
                                    row_stride(grad_loss),
                                    grad_lse.has_value() ? grad_lse->const_data_ptr() : nullptr,
                                    grad_lse.has_value() ? row_stride(*grad_lse) : 0,
                                    vocab_start,
                                    ignore_index,
                                    terms,
                                    grad.mutable_data_ptr(),
                                    row_layout(grad),
                                    true};
  device::launch_backward(type, arguments, rows, current_cuda_stream(logits.get_device_index()));
}

Tensor backward_cuda(const Tensor& logits_in, const Tensor& lse, const Tensor& target, OptionalTensor weight,
                     OptionalTensor weight_sum, const Tensor& grad_loss, OptionalTensor grad_lse, int64_t vocab_start,
                     int64_t vocab_total, int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                     double logit_scale) {
  check_backward(logits_in, lse, target, grad_loss, grad_lse);
  const DeviceGuard guard(logits_in.get_device_index());
  const Tensor logits = with_contiguous_rows(logits_in);
  Tensor grad = torch::stable::new_empty(logits, sizes_of(logits));
  backward_into(logits, lse, target, weight, weight_sum, grad_loss, grad_lse, vocab_start, vocab_total, ignore_index,
                label_smoothing, z_loss, softcap, logit_scale, grad);
  return grad;
}

void backward_inplace_cuda(Tensor logits, const Tensor& lse, const Tensor& target, OptionalTensor weight,
                           OptionalTensor weight_sum, const Tensor& grad_loss, OptionalTensor grad_lse,
                           int64_t vocab_start, int64_t vocab_total, int64_t ignore_index, double label_smoothing,
                           double z_loss, double softcap, double logit_scale) {
  check_backward(logits, lse, target, grad_loss, grad_lse);
  check_inplace(logits);
  const DeviceGuard guard(logits.get_device_index());
  backward_into(logits, lse, target, weight, weight_sum, grad_loss, grad_lse, vocab_start, vocab_total, ignore_index,
                label_smoothing, z_loss, softcap, logit_scale, logits);
}

// ---- both at once ---------------------------------------------------------------------------------------------------

// (loss, lse), with the gradient in `grad`.
std::tuple<Tensor, Tensor> forward_backward_into(const Tensor& logits, const Tensor& target_in,
                                                 const OptionalTensor& weight, const OptionalTensor& weight_sum,
                                                 const void* grad_loss, int64_t grad_loss_stride, int64_t ignore_index,
                                                 double label_smoothing, double z_loss, double softcap,
                                                 double logit_scale, const Tensor& grad) {
  const LogitsType type = logits_type(logits);
  const Tensor target = as_contiguous(target_in);
  const int64_t rows = target.numel(), vocab = logits.size(logits.dim() - 1);
  const LossTerms terms =
      loss_terms(weight, weight_sum, stats_dtype(type), vocab, label_smoothing, z_loss, softcap, logit_scale);
  Tensor loss = torch::stable::new_empty(logits, {rows}, stats_dtype(type));
  Tensor lse = torch::stable::new_empty(logits, {rows}, ScalarType::Double);
  if (rows == 0) return {loss, lse};
  const FusedArguments arguments{logits.const_data_ptr(),
                                 row_layout(logits),
                                 vocab,
                                 target.const_data_ptr<int64_t>(),
                                 grad_loss,
                                 grad_loss_stride,
                                 ignore_index,
                                 terms,
                                 loss.mutable_data_ptr(),
                                 lse.mutable_data_ptr<double>(),
                                 grad.mutable_data_ptr(),
                                 row_layout(grad),
                                 true};
  device::launch_forward_backward(type, arguments, rows, current_cuda_stream(logits.get_device_index()));
  return {loss, lse};
}

std::tuple<Tensor, Tensor, Tensor> forward_backward_cuda(const Tensor& logits_in, const Tensor& target,
                                                         OptionalTensor weight, OptionalTensor weight_sum,
                                                         const Tensor& grad_loss, int64_t ignore_index,
                                                         double label_smoothing, double z_loss, double softcap,
                                                         double logit_scale) {
  check_logits_and_target(logits_in, target);
  const DeviceGuard guard(logits_in.get_device_index());
  const Tensor logits = with_contiguous_rows(logits_in);
  check_row_gradient("grad_loss", grad_loss, logits, target.numel());
  Tensor grad = torch::stable::new_empty(logits, sizes_of(logits));
  const auto [loss, lse] =
      forward_backward_into(logits, target, weight, weight_sum, grad_loss.const_data_ptr(), row_stride(grad_loss),
                            ignore_index, label_smoothing, z_loss, softcap, logit_scale, grad);
  return {loss, lse, grad};
}

std::tuple<Tensor, Tensor> forward_backward_inplace_cuda(Tensor logits, const Tensor& target, OptionalTensor weight,
                                                         OptionalTensor weight_sum, const Tensor& grad_loss,
                                                         int64_t ignore_index, double label_smoothing, double z_loss,
                                                         double softcap, double logit_scale) {
  check_logits_and_target(logits, target);
  check_inplace(logits);
  const DeviceGuard guard(logits.get_device_index());
  check_row_gradient("grad_loss", grad_loss, logits, target.numel());
  return forward_backward_into(logits, target, weight, weight_sum, grad_loss.const_data_ptr(), row_stride(grad_loss),
                               ignore_index, label_smoothing, z_loss, softcap, logit_scale, logits);
}

// (the sum or mean of the rows' losses, lse, what a mean divides by or 1, its gradient for an upstream of 1)
std::tuple<Tensor, Tensor, Tensor, Tensor> reduced_forward_backward_cuda(
    const Tensor& logits_in, const Tensor& target_in, OptionalTensor weight, OptionalTensor weight_sum,
    OptionalTensor denominator, int64_t reduction, int64_t ignore_index, double label_smoothing, double z_loss,
    double softcap, double logit_scale) {
  check_logits_and_target(logits_in, target_in);
  check_reduced(reduction);
  const DeviceGuard guard(logits_in.get_device_index());
  const Tensor logits = with_contiguous_rows(logits_in), target = as_contiguous(target_in);
  const ScalarType dtype = stats_dtype(logits_type(logits));
  if (denominator.has_value()) check_number("denominator", *denominator, dtype);
  Tensor out = torch::stable::new_empty(logits, {}, dtype), divisor = torch::stable::new_empty(logits, {}, dtype);
  Tensor grad_loss = torch::stable::new_empty(logits, {}, dtype);
  const bool is_double = dtype == ScalarType::Double;
  const cudaStream_t stream = current_cuda_stream(logits.get_device_index());
  const bool is_mean = reduction == static_cast<int64_t>(Reduction::kMean);
  const int64_t rows = target.numel();
  device::launch_divisor(is_double,
                         {target.const_data_ptr<int64_t>(), rows, ignore_index, is_mean,
                          is_mean && denominator.has_value() ? denominator->const_data_ptr() : nullptr,
                          divisor.mutable_data_ptr(), grad_loss.mutable_data_ptr()},
                         stream);
  Tensor grad = torch::stable::new_empty(logits, sizes_of(logits));
  const auto [loss, lse] = forward_backward_into(logits, target, weight, weight_sum, grad_loss.const_data_ptr(), 0,
                                                 ignore_index, label_smoothing, z_loss, softcap, logit_scale, grad);
  device::launch_loss_sum(is_double, {loss.const_data_ptr(), rows, divisor.const_data_ptr(), out.mutable_data_ptr()},
                          stream);
  return {out, lse, divisor, grad};
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CUDA, m) {
  m.impl("vocab_parallel_cross_entropy_stats", TORCH_BOX(&fastpar::stats_cuda));
  m.impl("vocab_parallel_cross_entropy_stats_exp_", TORCH_BOX(&fastpar::stats_exp_inplace_cuda));
  m.impl("vocab_parallel_cross_entropy_merge", TORCH_BOX(&fastpar::merge_cuda));
  m.impl("vocab_parallel_cross_entropy_backward", TORCH_BOX(&fastpar::backward_cuda));
  m.impl("vocab_parallel_cross_entropy_backward_", TORCH_BOX(&fastpar::backward_inplace_cuda));
  m.impl("cross_entropy_forward_backward", TORCH_BOX(&fastpar::forward_backward_cuda));
  m.impl("cross_entropy_forward_backward_", TORCH_BOX(&fastpar::forward_backward_inplace_cuda));
  m.impl("cross_entropy_reduced_forward_backward", TORCH_BOX(&fastpar::reduced_forward_backward_cuda));
}
