// CUDA op layer of vocab-parallel cross-entropy: check, return early on empty, choose the kernel, launch.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/cuda_stream.h"
#include "cross_entropy/arguments.h"
#include "cross_entropy/cross_entropy.cuh"

namespace fastpar {
namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr int kMergeThreads = 128;

unsigned grid_size(int64_t blocks) {
  FASTPAR_CHECK(blocks <= 0x7fffffff, "too many rows for one launch: ", blocks);
  return static_cast<unsigned>(blocks);
}

// Calls body with a null pointer of the logits' type and one of the type they are computed in.
template <typename F>
void dispatch(LogitsType type, const F& body) {
  switch (type) {
    case LogitsType::kFloat32:
      return body(static_cast<float*>(nullptr), static_cast<float*>(nullptr));
    case LogitsType::kBFloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr), static_cast<float*>(nullptr));
    case LogitsType::kFloat16:
      return body(static_cast<__half*>(nullptr), static_cast<float*>(nullptr));
    case LogitsType::kFloat64:
      return body(static_cast<double*>(nullptr), static_cast<double*>(nullptr));
  }
}

template <typename T, typename C>
void launch_stats(const StatsArguments& arguments, int64_t vocab_total, int64_t rows, cudaStream_t stream, T*, C*) {
  device::stats_kernel<T, C><<<grid_size(rows), device::kThreads, 0, stream>>>(arguments, vocab_total);
}

template <typename T, typename C>
void launch_backward(const BackwardArguments& arguments, int64_t rows, cudaStream_t stream, T*, C*) {
  device::backward_kernel<T, C><<<grid_size(rows), device::kThreads, 0, stream>>>(arguments);
}

template <typename C>
void launch_merge(const Tensor& gathered, const Tensor& target, int64_t ignore_index, Tensor& loss, Tensor& lse,
                  cudaStream_t stream) {
  const int64_t rows = gathered.size(1);
  device::merge_kernel<C><<<grid_size((rows + kMergeThreads - 1) / kMergeThreads), kMergeThreads, 0, stream>>>(
      gathered.const_data_ptr<C>(), gathered.size(0), gathered.stride(0), rows, target.const_data_ptr<int64_t>(),
      ignore_index, loss.mutable_data_ptr<C>(), lse.mutable_data_ptr<double>());
}

Tensor stats_cuda(const Tensor& logits_in, const Tensor& target_in, int64_t vocab_start, int64_t vocab_total,
                  int64_t ignore_index) {
  check_logits_and_target(logits_in, target_in);
  const DeviceGuard guard(logits_in.get_device_index());
  const LogitsType type = logits_type(logits_in);
  const Tensor logits = with_contiguous_rows(logits_in), target = as_contiguous(target_in);
  const int64_t rows = target.numel();
  Tensor stats = torch::stable::new_empty(logits, {rows, 3}, stats_dtype(type));
  if (rows == 0) return stats;
  const cudaStream_t stream = current_cuda_stream(logits.get_device_index());
  const StatsArguments arguments{logits.const_data_ptr(),          row_layout(logits), logits.size(logits.dim() - 1),
                                 target.const_data_ptr<int64_t>(), vocab_start,        ignore_index,
                                 stats.mutable_data_ptr()};
  dispatch(type, [&](auto* t, auto* c) { launch_stats(arguments, vocab_total, rows, stream, t, c); });
  FASTPAR_CUDA_CHECK(cudaGetLastError());
  return stats;
}

std::tuple<Tensor, Tensor> merge_cuda(const Tensor& gathered_in, const Tensor& target_in, int64_t ignore_index) {
  check_merge(gathered_in, target_in);
  const DeviceGuard guard(gathered_in.get_device_index());
  const Tensor gathered = with_dense_ranks(gathered_in), target = as_contiguous(target_in);
  const int64_t rows = gathered.size(1);
  Tensor loss = torch::stable::new_empty(gathered, {rows});
  Tensor lse = torch::stable::new_empty(gathered, {rows}, ScalarType::Double);
  if (rows == 0) return {loss, lse};
  const cudaStream_t stream = current_cuda_stream(gathered.get_device_index());
  if (gathered.scalar_type() == ScalarType::Double) {
    launch_merge<double>(gathered, target, ignore_index, loss, lse, stream);
  } else {
    launch_merge<float>(gathered, target, ignore_index, loss, lse, stream);
  }
  FASTPAR_CUDA_CHECK(cudaGetLastError());
  return {loss, lse};
}

void backward_into(const Tensor& logits, const Tensor& lse_in, const Tensor& target_in, const Tensor& grad_loss,
                   int64_t vocab_start, int64_t ignore_index, const Tensor& grad) {
  const int64_t rows = target_in.numel(), vocab = logits.size(logits.dim() - 1);
  if (rows == 0 || vocab == 0) return;
  const Tensor lse = as_contiguous(lse_in), target = as_contiguous(target_in);
  const cudaStream_t stream = current_cuda_stream(logits.get_device_index());
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
                                    false};
  dispatch(logits_type(logits), [&](auto* t, auto* c) { launch_backward(arguments, rows, stream, t, c); });
  FASTPAR_CUDA_CHECK(cudaGetLastError());
}

Tensor backward_cuda(const Tensor& logits_in, const Tensor& lse, const Tensor& target, const Tensor& grad_loss,
                     int64_t vocab_start, int64_t ignore_index) {
  check_backward(logits_in, lse, target, grad_loss);
  const DeviceGuard guard(logits_in.get_device_index());
  const Tensor logits = with_contiguous_rows(logits_in);
  Tensor grad = torch::stable::new_empty(logits, sizes_of(logits));
  backward_into(logits, lse, target, grad_loss, vocab_start, ignore_index, grad);
  return grad;
}

void backward_inplace_cuda(Tensor logits, const Tensor& lse, const Tensor& target, const Tensor& grad_loss,
                           int64_t vocab_start, int64_t ignore_index) {
  check_backward(logits, lse, target, grad_loss);
  check_inplace(logits);
  const DeviceGuard guard(logits.get_device_index());
  backward_into(logits, lse, target, grad_loss, vocab_start, ignore_index, logits);
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CUDA, m) {
  m.impl("vocab_parallel_cross_entropy_stats", TORCH_BOX(&fastpar::stats_cuda));
  m.impl("vocab_parallel_cross_entropy_merge", TORCH_BOX(&fastpar::merge_cuda));
  m.impl("vocab_parallel_cross_entropy_backward", TORCH_BOX(&fastpar::backward_cuda));
  m.impl("vocab_parallel_cross_entropy_backward_", TORCH_BOX(&fastpar::backward_inplace_cuda));
}
