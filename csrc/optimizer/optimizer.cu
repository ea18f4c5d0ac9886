// CUDA op layer of the optimizer steps: describe the call, launch; nothing waits for the device.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "common/cuda_stream.h"
#include "optimizer/arguments.h"
#include "optimizer/optimizer.cuh"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using OptionalTensor = std::optional<Tensor>;

// A float32 on the device of the parameters, or null.
const float* device_scalar(const OptionalTensor& x, const Tensor& param, const char* name) {
  if (!x.has_value()) return nullptr;
  FASTPAR_CHECK(x->numel() == 1 && x->scalar_type() == ScalarType::Float, name, " must be one float32");
  optimizer::check_device(*x, param, name, 0);
  return x->const_data_ptr<float>();
}

// found_inf has no effect without tensors, and neither has anything else.
template <typename Rule>
void launch_step(const Rule& rule, const OptimizerLists& lists, const OptionalTensor& grad_factor,
                 const OptionalTensor& found_inf, double factor) {
  const OptimizerCall call = describe_optimizer_call(lists);
  const Tensor& param = lists.params[0];
  const device::StepOptions options{device_scalar(grad_factor, param, "grad_factor"), static_cast<float>(factor),
                                    device_scalar(found_inf, param, "found_inf"), call.state_type, call.stochastic};
  device::launch_step(rule, options, call.tensors, current_cuda_stream(param.get_device_index()));
}

// [inverse_root, step_size] on the device, from a step that is counted there.
Tensor launch_corrections(const Tensor& step, const Tensor& param, double lr, double beta1, double beta2) {
  FASTPAR_CHECK(step.numel() == 1, "step must be one number");
  optimizer::check_device(step, param, "step", 0);
  Tensor out = torch::stable::new_empty(param, {2}, ScalarType::Float);
  const cudaStream_t stream = current_cuda_stream(param.get_device_index());
  const device::LaunchConfig config{1, 1};
  float* found = out.mutable_data_ptr<float>();
  if (step.scalar_type() == ScalarType::Long) {
    device::launch(device::adamw_corrections_kernel<int64_t>, config, stream, step.const_data_ptr<int64_t>(), lr, beta1,
                   beta2, found);
  } else {
    FASTPAR_CHECK(step.scalar_type() == ScalarType::Float, "a step tensor must be float32 or int64");
    device::launch(device::adamw_corrections_kernel<float>, config, stream, step.const_data_ptr<float>(), lr, beta1,
                   beta2, found);
  }
  return out;
}

void adamw_step_cuda(OptimizerTensors params, OptimizerTensors grads, OptimizerTensors exp_avgs,
                     OptimizerTensors exp_avg_sqs, OptimizerTensors exp_avg_scales, OptimizerTensors exp_avg_sq_scales,
                     OptimizerTensors outputs, OptimizerTensors remainders, OptionalTensor grad_factor,
                     OptionalTensor found_inf, OptionalTensor step_tensor, std::vector<int64_t> output_of,
                     std::vector<int64_t> rounding, double factor, int64_t step, double lr, double beta1, double beta2,
                     double eps, double weight_decay) {
  if (params.empty()) return;
  const DeviceGuard guard(params[0].get_device_index());
  // Where the step is on the device, the numbers made of it here are not used.
  device::AdamwRule rule{adamw_numbers(static_cast<double>(step), lr, beta1, beta2, eps, weight_decay), nullptr};
  OptionalTensor corrections;
  if (step_tensor.has_value()) {
    corrections = launch_corrections(*step_tensor, params[0], lr, beta1, beta2);
    rule.corrections = corrections->const_data_ptr<float>();
  }
  const OptimizerLists lists{
      params,    grads,   {&exp_avgs, &exp_avg_sqs}, {&exp_avg_scales, &exp_avg_sq_scales}, outputs, remainders,
      output_of, rounding};
  launch_step(rule, lists, grad_factor, found_inf, factor);
}

void sgd_step_cuda(OptimizerTensors params, OptimizerTensors grads, OptimizerTensors momentum_buffers,
                   OptimizerTensors momentum_scales, OptimizerTensors outputs, OptimizerTensors remainders,
                   OptionalTensor grad_factor, OptionalTensor found_inf, std::vector<int64_t> output_of,
                   std::vector<int64_t> rounding, double factor, double lr, double momentum, double dampening,
                   double weight_decay, bool nesterov, bool first) {
  if (params.empty()) return;
  const DeviceGuard guard(params[0].get_device_index());
  const SgdNumbers numbers = sgd_numbers(lr, momentum, dampening, weight_decay, nesterov, first);
  OptimizerLists lists{params, grads, {}, {}, outputs, remainders, output_of, rounding};
  if (momentum == 0.0) return launch_step(device::SgdRule<false>{numbers}, lists, grad_factor, found_inf, factor);
  lists.states = {&momentum_buffers};
  lists.scales = {&momentum_scales};
  launch_step(device::SgdRule<true>{numbers}, lists, grad_factor, found_inf, factor);
}

void lion_step_cuda(OptimizerTensors params, OptimizerTensors grads, OptimizerTensors exp_avgs,
                    OptimizerTensors exp_avg_scales, OptimizerTensors outputs, OptimizerTensors remainders,
                    OptionalTensor grad_factor, OptionalTensor found_inf, std::vector<int64_t> output_of,
                    std::vector<int64_t> rounding, double factor, double lr, double beta1, double beta2,
                    double weight_decay) {
  if (params.empty()) return;
  const DeviceGuard guard(params[0].get_device_index());
  const device::LionRule rule{lion_numbers(lr, beta1, beta2, weight_decay)};
  launch_step(rule, {params, grads, {&exp_avgs}, {&exp_avg_scales}, outputs, remainders, output_of, rounding},
              grad_factor, found_inf, factor);
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CUDA, m) {
  m.impl("adamw_step", TORCH_BOX(&fastpar::adamw_step_cuda));
  m.impl("sgd_step", TORCH_BOX(&fastpar::sgd_step_cuda));
  m.impl("lion_step", TORCH_BOX(&fastpar::lion_step_cuda));
}
