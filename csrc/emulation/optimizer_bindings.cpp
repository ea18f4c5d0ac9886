#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "emulation/bindings.h"
#include "optimizer/numbers.h"
#include "optimizer/optimizer.cuh"

namespace fastpar {
namespace emulation {
namespace {

template <typename T>
T* pointer(const py::dict& values, const char* name) {
  const py::object value = values[name];
  return FromPython<T*>::get(value.cast<const Buffer*>());
}

// The place of `name` among the words, for an enumeration whose values are in their order.
template <typename E>
E one_of(const py::dict& values, const char* name, const std::vector<std::string>& words) {
  const auto value = values[name].cast<std::string>();
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == value) return static_cast<E>(i);
  }
  throw py::value_error(std::string(name) + " has no value " + value);
}

OptimizerTensor tensor_of(const py::dict& values) {
  OptimizerTensor t{};
  t.param = pointer<void>(values, "param");
  t.grad = pointer<const void>(values, "grad");
  t.states[0] = pointer<void>(values, "state0");
  t.states[1] = pointer<void>(values, "state1");
  t.scales[0] = pointer<float>(values, "scale0");
  t.scales[1] = pointer<float>(values, "scale1");
  t.output = pointer<void>(values, "output");
  t.remainder = pointer<int16_t>(values, "remainder");
  t.count = values["count"].cast<int64_t>();
  t.param_type = one_of<ParamType>(values, "param_type", {"float32", "bfloat16", "float16", "split"});
  t.grad_type = one_of<GradType>(values, "grad_type", {"float32", "bfloat16", "float16"});
  t.output_type = one_of<OutputType>(values, "output_type", {"none", "bfloat16", "float16"});
  t.rounding_key = values["rounding_key"].cast<uint64_t>();
  t.first_index = values["first_index"].cast<uint64_t>();
  return t;
}

device::StepOptions options_of(const py::dict& options) {
  return {pointer<const float>(options, "grad_factor"), options["factor"].cast<float>(),
          pointer<const float>(options, "found_inf"),
          one_of<StateType>(options, "state_type", {"float32", "bfloat16", "uint8"}),
          options["is_stochastic"].cast<bool>()};
}

double number(const py::dict& numbers, const char* name) { return numbers[name].cast<double>(); }

device::AdamwRule adamw_of(const py::dict& n) {
  return {adamw_numbers(number(n, "step"), number(n, "lr"), number(n, "beta1"), number(n, "beta2"), number(n, "eps"),
                        number(n, "weight_decay")),
          pointer<const float>(n, "corrections")};
}

template <bool kMomentum>
device::SgdRule<kMomentum> sgd_of(const py::dict& n) {
  return {sgd_numbers(number(n, "lr"), number(n, "momentum"), number(n, "dampening"), number(n, "weight_decay"),
                      n["nesterov"].cast<bool>(), n["first"].cast<bool>())};
}

device::LionRule lion_of(const py::dict& n) {
  return {lion_numbers(number(n, "lr"), number(n, "beta1"), number(n, "beta2"), number(n, "weight_decay"))};
}

// m.name(tensors, numbers, options, max_blocks)
template <typename Rule>
void bind_step(py::module_& m, const char* name, Rule (*rule_of)(const py::dict&)) {
  m.def(name, [rule_of](const std::vector<py::dict>& tensors, const py::dict& numbers, const py::dict& options,
                        int64_t max_blocks) {
    std::vector<OptimizerTensor> described;
    for (const py::dict& tensor : tensors) described.push_back(tensor_of(tensor));
    device::launch_step(rule_of(numbers), options_of(options), described, nullptr, max_blocks);
  });
}

// (tensors, chunks) of every launch
std::vector<std::pair<int, int64_t>> tables_of(const std::vector<int64_t>& counts, int64_t max_blocks) {
  std::vector<OptimizerTensor> tensors;
  for (const int64_t count : counts) {
    OptimizerTensor t{};
    t.count = count;
    tensors.push_back(t);
  }
  std::vector<std::pair<int, int64_t>> found;
  const auto note = [&](const auto& table, int64_t chunks) { found.emplace_back(table.num_tensors, chunks); };
  device::for_each_table<device::kManyTensors>(tensors, StateType::kFloat32, max_blocks, note);
  return found;
}

}  // namespace

void bind_optimizer(py::module_& m) {
  m.attr("CHUNK_ELEMENTS") = device::kChunkElements;
  m.attr("FEW_TENSORS") = device::kFewTensors;
  m.attr("MANY_TENSORS") = device::kManyTensors;
  m.attr("MAX_BLOCKS") = device::kMaxBlocks;
  m.def("tables_of", &tables_of);
  bind_kernel(m, "corrections_of_float", &device::adamw_corrections_kernel<float>);
  bind_kernel(m, "corrections_of_int", &device::adamw_corrections_kernel<int64_t>);
  bind_step(m, "adamw", &adamw_of);
  bind_step(m, "sgd", &sgd_of<true>);
  bind_step(m, "plain_sgd", &sgd_of<false>);
  bind_step(m, "lion", &lion_of);
}

}  // namespace emulation
}  // namespace fastpar
