#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "cross_entropy/cross_entropy_reduction.cuh"
#include "cross_entropy/cross_entropy_resident.cuh"
#include "emulation/bindings.h"

namespace fastpar {
namespace emulation {
namespace {

LogitsType logits_type(const std::string& name) {
  if (name == "float32") return LogitsType::kFloat32;
  if (name == "bfloat16") return LogitsType::kBFloat16;
  if (name == "float16") return LogitsType::kFloat16;
  if (name == "float64") return LogitsType::kFloat64;
  throw py::value_error("no kernels for " + name);
}

// sizes and strides of the leading dims, in elements
RowLayout row_layout(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  RowLayout rows{};
  rows.num_dims = static_cast<int>(sizes.size());
  for (size_t d = 0; d < sizes.size(); ++d) {
    rows.sizes[d] = sizes[d];
    rows.strides[d] = strides[d];
  }
  return rows;
}

LossTerms loss_terms(const py::dict& options) {
  const auto number = [&](const char* name) { return options[name].cast<double>(); };
  const auto* weight = options["weight"].cast<const Buffer*>();
  const auto* weight_sum = options["weight_sum"].cast<const Buffer*>();
  return {number("label_smoothing"),
          number("z_loss"),
          number("softcap"),
          number("logit_scale"),
          FromPython<const void*>::get(weight),
          FromPython<const double*>::get(weight_sum),
          options["vocab_total"].cast<int64_t>()};
}

template <typename T>
T* pointer(const Buffer* buffer) {
  return FromPython<T*>::get(buffer);
}

// What every kernel gets: the logits' dtype, the rows, the columns.
struct Logits {
  LogitsType type;
  const Buffer* data;
  RowLayout rows;
  int64_t num_rows, vocab;
};

Logits logits_of(const py::dict& logits) {
  return {logits_type(logits["dtype"].cast<std::string>()), logits["data"].cast<const Buffer*>(),
          row_layout(logits["sizes"].cast<std::vector<int64_t>>(), logits["strides"].cast<std::vector<int64_t>>()),
          logits["num_rows"].cast<int64_t>(), logits["vocab"].cast<int64_t>()};
}

// stats, and stats_exp_ where `exp_out` is given
void stats(const py::dict& logits_dict, const Buffer* target, int64_t vocab_start, int64_t ignore_index,
           const py::dict& options, bool smoothing, const Buffer* out, const py::object& exp_out) {
  const Logits logits = logits_of(logits_dict);
  StatsArguments a{};
  a.logits = pointer<const void>(logits.data);
  a.rows = logits.rows;
  a.num_rows = logits.num_rows;
  a.vocab = logits.vocab;
  a.target = pointer<const int64_t>(target);
  a.vocab_start = vocab_start;
  a.ignore_index = ignore_index;
  a.terms = loss_terms(options);
  a.smoothing = smoothing;
  a.stats = pointer<void>(out);
  a.columns = smoothing ? 5 : 3;
  if (exp_out.is_none()) return device::launch_stats(logits.type, a, nullptr);
  const Logits exp_logits = logits_of(exp_out.cast<py::dict>());
  a.exp_out = pointer<void>(exp_logits.data);
  a.exp_rows = exp_logits.rows;
  device::launch_stats_exp(logits.type, a, nullptr);
}

void merge(bool is_double, const Buffer* gathered, int64_t ranks, int64_t rank_stride, int64_t columns, int64_t rows,
           const Buffer* target, int64_t ignore_index, const py::dict& options, const Buffer* loss, const Buffer* lse) {
  device::launch_merge(
      is_double,
      {pointer<const void>(gathered), ranks, rank_stride, columns, rows, pointer<const int64_t>(target), ignore_index,
       loss_terms(options), pointer<void>(loss), pointer<double>(lse)},
      nullptr);
}

void backward(const py::dict& logits_dict, const Buffer* lse, const Buffer* target, const Buffer* grad_loss,
              int64_t grad_loss_stride, const Buffer* grad_lse, int64_t grad_lse_stride, int64_t vocab_start,
              int64_t ignore_index, const py::dict& options, const py::dict& grad_dict) {
  const Logits logits = logits_of(logits_dict), grad = logits_of(grad_dict);
  const BackwardArguments a{pointer<const void>(logits.data),
                            logits.rows,
                            logits.vocab,
                            pointer<const double>(lse),
                            pointer<const int64_t>(target),
                            pointer<const void>(grad_loss),
                            grad_loss_stride,
                            pointer<const void>(grad_lse),
                            grad_lse_stride,
                            vocab_start,
                            ignore_index,
                            loss_terms(options),
                            pointer<void>(grad.data),
                            grad.rows,
                            false};
  device::launch_backward(logits.type, a, logits.num_rows, nullptr);
}

void forward_backward(const py::dict& logits_dict, const Buffer* target, const Buffer* grad_loss,
                      int64_t grad_loss_stride, int64_t ignore_index, const py::dict& options, const Buffer* loss,
                      const Buffer* lse, const py::dict& grad_dict) {
  const Logits logits = logits_of(logits_dict), grad = logits_of(grad_dict);
  const FusedArguments a{pointer<const void>(logits.data),
                         logits.rows,
                         logits.vocab,
                         pointer<const int64_t>(target),
                         pointer<const void>(grad_loss),
                         grad_loss_stride,
                         ignore_index,
                         loss_terms(options),
                         pointer<void>(loss),
                         pointer<double>(lse),
                         pointer<void>(grad.data),
                         grad.rows,
                         false};
  device::launch_forward_backward(logits.type, a, logits.num_rows, nullptr);
}

void divisor(bool is_double, const Buffer* target, int64_t rows, int64_t ignore_index, bool is_mean,
             const Buffer* denominator, const Buffer* divisor, const Buffer* grad_loss) {
  device::launch_divisor(is_double,
                         {pointer<const int64_t>(target), rows, ignore_index, is_mean, pointer<const void>(denominator),
                          pointer<void>(divisor), pointer<void>(grad_loss)},
                         nullptr);
}

void loss_sum(bool is_double, const Buffer* loss, int64_t rows, const Buffer* divisor, const Buffer* out) {
  device::launch_loss_sum(is_double,
                          {pointer<const void>(loss), rows, pointer<const void>(divisor), pointer<void>(out)}, nullptr);
}

// (blocks in a cluster, bytes of shared memory in each), or None where a row is read twice
py::object resident_plan(const std::string& dtype, int64_t vocab) {
  py::object result = py::none();
  device::dispatch(logits_type(dtype), [&](auto* tag) {
    const auto plan = device::plan_resident<std::remove_pointer_t<decltype(tag)>>(1, vocab);
    if (plan.is_resident) result = py::make_tuple(plan.config.cluster, plan.config.shared_bytes);
  });
  return result;
}

}  // namespace

void bind_cross_entropy(py::module_& m) {
  m.def("stats", &stats);
  m.def("merge", &merge);
  m.def("backward", &backward);
  m.def("forward_backward", &forward_backward);
  m.def("divisor", &divisor);
  m.def("loss_sum", &loss_sum);
  m.def("resident_plan", &resident_plan);
}

}  // namespace emulation
}  // namespace fastpar
