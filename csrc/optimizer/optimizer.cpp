// CPU op layer of the optimizer steps: gather what the lists say about every tensor, choose the kernel, launch.
// The algebra is in fastpar/ops/optimizer.py, which checks the arguments; here is checked what memory safety needs.
#include "optimizer/optimizer.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/tensor_rows.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int64_t kGrainElements = 32768;

const OptimizerKernels& kernels() {
#if FASTPAR_X86
  if (cpu_capability() == CpuCapability::kAvx512Bf16) return kOptimizerAvx512Bf16;
  if (cpu_capability() == CpuCapability::kAvx512) return kOptimizerAvx512;
  if (cpu_capability() == CpuCapability::kAvx2) return kOptimizerAvx2;
#endif
  return kOptimizerPortable;
}

// The lists that all steps have.
struct Lists {
  const Tensors &params, &grads;
  std::vector<const Tensors*> states, scales;
  const Tensors &outputs, &remainders;
  const std::vector<int64_t>&output_of, &rounding;
};

// A call, as the kernels want it. `starts[i]` elements come before tensors[i].
struct Call {
  std::vector<OptimizerTensor> tensors;
  std::vector<int64_t> starts;
  StateType state_type;
  bool stochastic;
};

void check_matches(const Tensor& x, const Tensor& param, const char* name, size_t i) {
  FASTPAR_CHECK(x.numel() == param.numel(), name, "[", i, "] must have the shape of params[", i, "]");
  FASTPAR_CHECK(x.is_contiguous(), name, "[", i, "] must be contiguous");
}

void check_count(const Tensors& list, size_t count, const char* name) {
  FASTPAR_CHECK(list.size() == count, name, " must have ", count, " tensors, got ", list.size());
}

StateType state_type(const Tensors& states) {
  if (states.empty()) return StateType::kFloat32;
  switch (states[0].scalar_type()) {
    case ScalarType::Float:
      return StateType::kFloat32;
    case ScalarType::BFloat16:
      return StateType::kBFloat16;
    case ScalarType::Byte:
      return StateType::k8Bit;
    default:
      FASTPAR_CHECK(false, "states must be float32, bfloat16 or uint8");
  }
  return StateType::kFloat32;
}

void add_states(const Lists& lists, size_t i, StateType type, OptimizerTensor* t) {
  for (size_t k = 0; k < lists.states.size(); ++k) {
    const Tensor& state = (*lists.states[k])[i];
    check_matches(state, lists.params[i], "states", i);
    FASTPAR_CHECK(state.scalar_type() == lists.states[0]->front().scalar_type(), "states must have one dtype");
    t->states[k] = state.mutable_data_ptr();
    if (type != StateType::k8Bit) continue;
    const Tensor& scale = (*lists.scales[k])[i];
    FASTPAR_CHECK(scale.scalar_type() == ScalarType::Float && scale.is_contiguous() &&
                      scale.numel() == (state.numel() + kOptimizerBlock - 1) / kOptimizerBlock,
                  "scales[", i, "] must be float32, one per ", kOptimizerBlock, " elements");
    t->scales[k] = scale.mutable_data_ptr<float>();
  }
}

OptimizerTensor describe(const Lists& lists, size_t i, StateType type) {
  const Tensor &param = lists.params[i], &grad = lists.grads[i];
  OptimizerTensor t{};
  FASTPAR_CHECK(param.is_contiguous(), "params[", i, "] must be contiguous");
  check_matches(grad, param, "grads", i);
  t.count = param.numel();
  const FloatType param_type = float_type(param, "params"), grad_type = float_type(grad, "grads");
  FASTPAR_CHECK(param_type != FloatType::kFloat64 && grad_type != FloatType::kFloat64, "float64 has no kernel");
  t.param_type = static_cast<ParamType>(param_type);
  t.grad_type = static_cast<GradType>(grad_type);
  t.param = param.mutable_data_ptr();
  t.grad = grad.const_data_ptr();
  if (!lists.remainders.empty()) {
    const Tensor& remainder = lists.remainders[i];
    check_matches(remainder, param, "remainders", i);
    FASTPAR_CHECK(param_type == FloatType::kBFloat16 && remainder.scalar_type() == ScalarType::Short,
                  "remainders must be int16, beside bfloat16 params");
    t.param_type = ParamType::kSplit;
    t.remainder = remainder.mutable_data_ptr<int16_t>();
  }
  add_states(lists, i, type, &t);
  if (!lists.rounding.empty()) {
    const uint64_t seed = static_cast<uint64_t>(lists.rounding[0]);
    t.rounding_key = splitmix64(splitmix64(seed) + static_cast<uint64_t>(lists.rounding[1 + 2 * i]));
    t.first_index = static_cast<uint64_t>(lists.rounding[2 + 2 * i]);
  }
  return t;
}

void add_output(const Tensor& output, const Tensor& param, size_t i, OptimizerTensor* t) {
  check_matches(output, param, "outputs", i);
  const FloatType type = float_type(output, "outputs");
  FASTPAR_CHECK(type == FloatType::kBFloat16 || type == FloatType::kFloat16, "outputs must be bfloat16 or float16");
  t->output_type = type == FloatType::kBFloat16 ? OutputType::kBFloat16 : OutputType::kFloat16;
  t->output = output.mutable_data_ptr();
}

Call describe_call(const Lists& lists) {
  const size_t count = lists.params.size();
  check_count(lists.grads, count, "grads");
  Call call{};
  for (const Tensors* states : lists.states) check_count(*states, count, "states");
  call.state_type = lists.states.empty() ? StateType::kFloat32 : state_type(*lists.states[0]);
  if (call.state_type == StateType::k8Bit) {
    for (const Tensors* scales : lists.scales) check_count(*scales, count, "scales");
  }
  if (!lists.remainders.empty()) check_count(lists.remainders, count, "remainders");
  FASTPAR_CHECK(lists.outputs.size() == lists.output_of.size(), "output_of must have an entry per output");
  FASTPAR_CHECK(lists.rounding.empty() || lists.rounding.size() == 1 + 2 * count, "rounding must have ", 1 + 2 * count,
                " entries, got ", lists.rounding.size());
  call.stochastic = !lists.rounding.empty();
  call.tensors.reserve(count);
  call.starts.reserve(count + 1);
  int64_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    call.tensors.push_back(describe(lists, i, call.state_type));
    call.starts.push_back(total);
    total += call.tensors.back().count;
  }
  call.starts.push_back(total);
  for (size_t j = 0; j < lists.outputs.size(); ++j) {
    const size_t i = static_cast<size_t>(lists.output_of[j]);
    FASTPAR_CHECK(i < count, "output_of has ", lists.output_of[j], " of ", count, " parameters");
    add_output(lists.outputs[j], lists.params[i], i, &call.tensors[i]);
    call.tensors[i].stream_output = total * 2 > kStreamedOutputBytes;
  }
  return call;
}

// Runs `kernel` on all elements of the call, a share of them per thread. Where a share ends inside a tensor, it ends at
// a multiple of kOptimizerBlock of that tensor's elements, the same for the share that begins there.
template <typename Numbers>
void launch(const Call& call, OptimizerKernel<Numbers> kernel, const Numbers& numbers, float factor) {
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
  const Call call = describe_call({params,
                                   grads,
                                   {&exp_avgs, &exp_avg_sqs},
                                   {&exp_avg_scales, &exp_avg_sq_scales},
                                   outputs,
                                   remainders,
                                   output_of,
                                   rounding});
  const double count = step_number(step_tensor, step);
  const AdamwNumbers numbers{static_cast<float>(1.0 - lr * weight_decay),
                             static_cast<float>(1.0 - beta1),
                             static_cast<float>(beta2),
                             static_cast<float>(1.0 - beta2),
                             static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, count))),
                             static_cast<float>(eps),
                             static_cast<float>(lr / (1.0 - std::pow(beta1, count)))};
  launch(call, kernels().adamw.kernels[static_cast<int>(call.state_type)][call.stochastic], numbers,
         scalar_or(grad_factor, factor));
}

void sgd_step_cpu(Tensors params, Tensors grads, Tensors momentum_buffers, Tensors momentum_scales, Tensors outputs,
                  Tensors remainders, std::optional<Tensor> grad_factor, std::optional<Tensor> found_inf,
                  std::vector<int64_t> output_of, std::vector<int64_t> rounding, double factor, double lr,
                  double momentum, double dampening, double weight_decay, bool nesterov, bool first) {
  if (params.empty() || is_skipped(found_inf)) return;
  Lists lists{params, grads, {}, {}, outputs, remainders, output_of, rounding};
  const bool has_momentum = momentum != 0.0;
  if (has_momentum) {
    lists.states = {&momentum_buffers};
    lists.scales = {&momentum_scales};
  }
  const Call call = describe_call(lists);
  const SgdNumbers numbers{static_cast<float>(lr),
                           static_cast<float>(momentum),
                           static_cast<float>(1.0 - dampening),
                           static_cast<float>(weight_decay),
                           nesterov,
                           first};
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
  const Call call =
      describe_call({params, grads, {&exp_avgs}, {&exp_avg_scales}, outputs, remainders, output_of, rounding});
  const LionNumbers numbers{static_cast<float>(1.0 - lr * weight_decay), static_cast<float>(beta1),
                            static_cast<float>(1.0 - beta1), static_cast<float>(1.0 - beta2), static_cast<float>(lr)};
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
