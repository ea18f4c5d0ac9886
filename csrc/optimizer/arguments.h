// From the lists that a step is called with to what the kernels take.
// fastpar/ops/optimizer.py checks the arguments; here is checked what memory safety needs.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "common/checks.h"
#include "common/tensor_rows.h"
#include "optimizer/numbers.h"
#include "optimizer/optimizer.h"

namespace fastpar {

using OptimizerTensors = std::vector<torch::stable::Tensor>;

// The lists that all steps have.
struct OptimizerLists {
  const OptimizerTensors &params, &grads;
  std::vector<const OptimizerTensors*> states, scales;
  const OptimizerTensors &outputs, &remainders;
  const std::vector<int64_t>&output_of, &rounding;
};

// A call, as the kernels want it. `starts[i]` elements come before tensors[i].
struct OptimizerCall {
  std::vector<OptimizerTensor> tensors;
  std::vector<int64_t> starts;
  StateType state_type;
  bool stochastic;
};

namespace optimizer {

inline void check_device(const torch::stable::Tensor& x, const torch::stable::Tensor& first, const char* name,
                         size_t i) {
  FASTPAR_CHECK(x.is_cuda() == first.is_cuda() && x.get_device_index() == first.get_device_index(), name, "[", i,
                "] must be on the device of the parameters");
}

inline void check_matches(const torch::stable::Tensor& x, const torch::stable::Tensor& param, const char* name,
                          size_t i) {
  FASTPAR_CHECK(x.numel() == param.numel(), name, "[", i, "] must have the shape of params[", i, "]");
  FASTPAR_CHECK(x.is_contiguous(), name, "[", i, "] must be contiguous");
  check_device(x, param, name, i);
}

inline void check_count(const OptimizerTensors& list, size_t count, const char* name) {
  FASTPAR_CHECK(list.size() == count, name, " must have ", count, " tensors, got ", list.size());
}

inline StateType state_type(const OptimizerTensors& states) {
  if (states.empty()) return StateType::kFloat32;
  switch (states[0].scalar_type()) {
    case torch::headeronly::ScalarType::Float:
      return StateType::kFloat32;
    case torch::headeronly::ScalarType::BFloat16:
      return StateType::kBFloat16;
    case torch::headeronly::ScalarType::Byte:
      return StateType::k8Bit;
    default:
      FASTPAR_CHECK(false, "states must be float32, bfloat16 or uint8");
  }
  return StateType::kFloat32;
}

inline void add_states(const OptimizerLists& lists, size_t i, StateType type, OptimizerTensor* t) {
  for (size_t k = 0; k < lists.states.size(); ++k) {
    const torch::stable::Tensor& state = (*lists.states[k])[i];
    check_matches(state, lists.params[i], "states", i);
    FASTPAR_CHECK(state.scalar_type() == lists.states[0]->front().scalar_type(), "states must have one dtype");
    t->states[k] = state.mutable_data_ptr();
    if (type != StateType::k8Bit) continue;
    const torch::stable::Tensor& scale = (*lists.scales[k])[i];
    FASTPAR_CHECK(scale.scalar_type() == torch::headeronly::ScalarType::Float && scale.is_contiguous() &&
                      scale.numel() == (state.numel() + kOptimizerBlock - 1) / kOptimizerBlock,
                  "scales[", i, "] must be float32, one per ", kOptimizerBlock, " elements");
    check_device(scale, state, "scales", i);
    t->scales[k] = scale.mutable_data_ptr<float>();
  }
}

inline OptimizerTensor describe(const OptimizerLists& lists, size_t i, StateType type) {
  const torch::stable::Tensor &param = lists.params[i], &grad = lists.grads[i];
  OptimizerTensor t{};
  FASTPAR_CHECK(param.is_contiguous(), "params[", i, "] must be contiguous");
  check_device(param, lists.params[0], "params", i);
  check_matches(grad, param, "grads", i);
  t.count = param.numel();
  const FloatType param_type = float_type(param, "params"), grad_type = float_type(grad, "grads");
  FASTPAR_CHECK(param_type != FloatType::kFloat64 && grad_type != FloatType::kFloat64, "float64 has no kernel");
  t.param_type = static_cast<ParamType>(param_type);
  t.grad_type = static_cast<GradType>(grad_type);
  t.param = param.mutable_data_ptr();
  t.grad = grad.const_data_ptr();
  if (!lists.remainders.empty()) {
    const torch::stable::Tensor& remainder = lists.remainders[i];
    check_matches(remainder, param, "remainders", i);
    FASTPAR_CHECK(param_type == FloatType::kBFloat16 && remainder.scalar_type() == torch::headeronly::ScalarType::Short,
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

inline void add_output(const torch::stable::Tensor& output, const torch::stable::Tensor& param, size_t i,
                       OptimizerTensor* t) {
  check_matches(output, param, "outputs", i);
  const FloatType type = float_type(output, "outputs");
  FASTPAR_CHECK(type == FloatType::kBFloat16 || type == FloatType::kFloat16, "outputs must be bfloat16 or float16");
  t->output_type = type == FloatType::kBFloat16 ? OutputType::kBFloat16 : OutputType::kFloat16;
  t->output = output.mutable_data_ptr();
}

}  // namespace optimizer

inline OptimizerCall describe_optimizer_call(const OptimizerLists& lists) {
  const size_t count = lists.params.size();
  optimizer::check_count(lists.grads, count, "grads");
  OptimizerCall call{};
  for (const OptimizerTensors* states : lists.states) optimizer::check_count(*states, count, "states");
  call.state_type = lists.states.empty() ? StateType::kFloat32 : optimizer::state_type(*lists.states[0]);
  if (call.state_type == StateType::k8Bit) {
    for (const OptimizerTensors* scales : lists.scales) optimizer::check_count(*scales, count, "scales");
  }
  if (!lists.remainders.empty()) optimizer::check_count(lists.remainders, count, "remainders");
  FASTPAR_CHECK(lists.outputs.size() == lists.output_of.size(), "output_of must have an entry per output");
  FASTPAR_CHECK(lists.rounding.empty() || lists.rounding.size() == 1 + 2 * count, "rounding must have ", 1 + 2 * count,
                " entries, got ", lists.rounding.size());
  call.stochastic = !lists.rounding.empty();
  call.tensors.reserve(count);
  call.starts.reserve(count + 1);
  int64_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    call.tensors.push_back(optimizer::describe(lists, i, call.state_type));
    call.starts.push_back(total);
    total += call.tensors.back().count;
  }
  call.starts.push_back(total);
  for (size_t j = 0; j < lists.outputs.size(); ++j) {
    const size_t i = static_cast<size_t>(lists.output_of[j]);
    FASTPAR_CHECK(i < count, "output_of has ", lists.output_of[j], " of ", count, " parameters");
    optimizer::add_output(lists.outputs[j], lists.params[i], i, &call.tensors[i]);
    call.tensors[i].stream_output = total * 2 > kStreamedOutputBytes;
  }
  return call;
}

}  // namespace fastpar
