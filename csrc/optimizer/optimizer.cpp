// CPU op layer of the optimizer steps: gather what the lists say about every tensor, choose the kernel, launch.
// The algebra is in fastpar/ops/optimizer.py, which checks the arguments; here is checked what memory safety needs.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "common/cpu_capability.h"
#include "optimizer/arguments.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = OptimizerTensors;

constexpr int64_t kGrainElements = 32768;

const OptimizerKernels& kernels() {
#if FASTPAR_X86
  if (cpu_capability() >= CpuCapability::kAvx512Bf16) return kOptimizerAvx512Bf16;
  if (cpu_capability() == CpuCapability::kAvx512) return kOptimizerAvx512;
  if (cpu_capability() == CpuCapability::kAvx2) return kOptimizerAvx2;
#endif
  return kOptimizerPortable;
}

// Runs `kernel` on all elements of the call, a share of them per thread. Where a share ends inside a tensor, it ends at
// a multiple of kOptimizerBlock of that tensor's elements, the same for the share that begins there.
template <typename Numbers>
void launch(const OptimizerCall& call, OptimizerKernel<Numbers> kernel, const Numbers& numbers, float factor) {
  const auto inside = [](int64_t position, int64_t start, int64_t count) {
    const int64_t rounded = (position - start + kOptimizerBlock - 1) / kOptimizerBlock * kOptimizerBlock;
    return std::clamp<int64_t>(rounded, 0, count);
  };
  torch::stable::parallel_for(0, call.starts.back(), kGrainElements, [&](int64_t begin, int64_t end) {
    const auto found = std::upper_bound(call.starts.begin(), call.starts.end(), begin);
    for (size_t i = static_cast<size_t>(found - call.starts.begin()) - 1; i < call.tensors.size(); ++i) {
      const int64_t start = call.starts[i];
      if (start >= end) break;
      const OptimizerTensor& t = call.tensors[i];
      const int64_t first = inside(begin, start, t.count), last = inside(end, start, t.count);
      if (first < last) kernel(numbers, factor, t, first, last);
    }
  });
}

float scalar_or(const std::optional<Tensor>& x, double otherwise) {
  if (!x.has_value()) return static_cast<float>(otherwise);
  FASTPAR_CHECK(x->numel() == 1 && x->scalar_type() == ScalarType::Float, "grad_factor and found_inf: one float32");
  return *x->const_data_ptr<float>();
}

bool is_skipped(const std::optional<Tensor>& found_inf) { return scalar_or(found_inf, 0.0) != 0.0f; }

double step_number(const std::optional<Tensor>& step_tensor, int64_t step) {
  if (!step_tensor.has_value()) return static_cast<double>(step);
  FASTPAR_CHECK(step_tensor->numel() == 1, "step must be one number");
  if (step_tensor->scalar_type() == ScalarType::Long) {
    return static_cast<double>(*step_tensor->const_data_ptr<int64_t>());
  }
  FASTPAR_CHECK(step_tensor->scalar_type() == ScalarType::Float, "a step tensor must be float32 or int64");
  return static_cast<double>(*step_tensor->const_data_ptr<float>());
}

void adamw_step_cpu(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors exp_avg_scales,
                    Tensors exp_avg_sq_scales, Tensors outputs, Tensors remainders, std::optional<Tensor> grad_factor,
                    std::optional<Tensor> found_inf, std::optional<Tensor> step_tensor, std::vector<int64_t> output_of,
                    std::vector<int64_t> rounding, double factor, int64_t step, double lr, double beta1, double beta2,
                    double eps, double weight_decay) {
  if (params.empty() || is_skipped(found_inf)) return;
  const OptimizerCall call = describe_optimizer_call({params,
                                                      grads,
                                                      {&exp_avgs, &exp_avg_sqs},
                                                      {&exp_avg_scales, &exp_avg_sq_scales},
                                                      outputs,
                                                      remainders,
                                                      output_of,
                                                      rounding});
  const AdamwNumbers numbers = adamw_numbers(step_number(step_tensor, step), lr, beta1, beta2, eps, weight_decay);
  launch(call, kernels().adamw.kernels[static_cast<int>(call.state_type)][call.stochastic], numbers,
         scalar_or(grad_factor, factor));
}

void sgd_step_cpu(Tensors params, Tensors grads, Tensors momentum_buffers, Tensors momentum_scales, Tensors outputs,
                  Tensors remainders, std::optional<Tensor> grad_factor, std::optional<Tensor> found_inf,
                  std::vector<int64_t> output_of, std::vector<int64_t> rounding, double factor, double lr,
                  double momentum, double dampening, double weight_decay, bool nesterov, bool first) {
  if (params.empty() || is_skipped(found_inf)) return;
  OptimizerLists lists{params, grads, {}, {}, outputs, remainders, output_of, rounding};
  const bool has_momentum = momentum != 0.0;
  if (has_momentum) {
    lists.states = {&momentum_buffers};
    lists.scales = {&momentum_scales};
  }
  const OptimizerCall call = describe_optimizer_call(lists);
  const SgdNumbers numbers = sgd_numbers(lr, momentum, dampening, weight_decay, nesterov, first);
  launch(call,
         has_momentum ? kernels().sgd.kernels[static_cast<int>(call.state_type)][call.stochastic]
                      : kernels().plain_sgd[call.stochastic],
         numbers, scalar_or(grad_factor, factor));
}

void lion_step_cpu(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_scales, Tensors outputs,
                   Tensors remainders, std::optional<Tensor> grad_factor, std::optional<Tensor> found_inf,
                   std::vector<int64_t> output_of, std::vector<int64_t> rounding, double factor, double lr,
                   double beta1, double beta2, double weight_decay) {
  if (params.empty() || is_skipped(found_inf)) return;
  const OptimizerCall call = describe_optimizer_call(
      {params, grads, {&exp_avgs}, {&exp_avg_scales}, outputs, remainders, output_of, rounding});
  const LionNumbers numbers = lion_numbers(lr, beta1, beta2, weight_decay);
  launch(call, kernels().lion.kernels[static_cast<int>(call.state_type)][call.stochastic], numbers,
         scalar_or(grad_factor, factor));
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("adamw_step", TORCH_BOX(&fastpar::adamw_step_cpu));
  m.impl("sgd_step", TORCH_BOX(&fastpar::sgd_step_cpu));
  m.impl("lion_step", TORCH_BOX(&fastpar::lion_step_cpu));
}
