#include "emulation/bindings.h"
#include "emulation/self_test.cuh"

namespace fastpar {
namespace emulation {
namespace {

// Element by element, for comparison with numpy.
template <typename To, typename From, typename F>
py::array_t<To> map(const py::array_t<From, py::array::c_style | py::array::forcecast>& in, const F& body) {
  py::array_t<To> out(in.size());
  for (py::ssize_t i = 0; i < in.size(); ++i) out.mutable_data()[i] = body(in.data()[i]);
  return out;
}

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Halves = py::array_t<uint16_t, py::array::c_style | py::array::forcecast>;

void bind_conversions(py::module_& m) {
  m.def("to_bfloat16",
        [](const Floats& x) { return map<uint16_t>(x, [](float v) { return __float2bfloat16_rn(v).bits; }); });
  m.def("to_half", [](const Floats& x) { return map<uint16_t>(x, [](float v) { return __float2half_rn(v).bits; }); });
  m.def("from_bfloat16",
        [](const Halves& x) { return map<float>(x, [](uint16_t v) { return __bfloat162float(__nv_bfloat16{v}); }); });
  m.def("from_half", [](const Halves& x) { return map<float>(x, [](uint16_t v) { return __half2float(__half{v}); }); });
}

// A launch past device::launch: of a kernel that does nothing.
void launch_as(size_t shared_bytes, size_t static_bytes, size_t allowed_shared_bytes) {
  LaunchShape shape;
  shape.grid = shape.block = dim3(1);
  shape.shared_bytes = shared_bytes;
  shape.static_bytes = static_bytes;
  shape.allowed_shared_bytes = allowed_shared_bytes;
  run_grid(shape, [] {});
}

}  // namespace

void bind_self_test(py::module_& m) {
  bind_conversions(m);
  bind_kernel(m, "block_sum", &self_test::block_sum);
  bind_kernel(m, "missing_barrier", &self_test::missing_barrier);
  bind_kernel(m, "copies_all", &self_test::copies<0>);
  bind_kernel(m, "copies_but_one", &self_test::copies<1>);
  bind_kernel(m, "bulk_copy", &self_test::bulk_copy);
  bind_kernel(m, "bulk_copy_without_end", &self_test::bulk_copy_without_end);
  bind_kernel(m, "shuffles", &self_test::shuffles);
  bind_kernel(m, "atomics", &self_test::atomics);
  bind_kernel(m, "cluster_sum", &self_test::cluster_sum);
  bind_kernel(m, "read_dynamic", &self_test::read_dynamic);
  bind_kernel(m, "read_static", &self_test::read_static);
  bind_kernel(m, "both_kinds", &self_test::both_kinds);
  bind_kernel(m, "much_static", &self_test::much_static);
  m.def("launch_as", &launch_as, py::arg("shared_bytes"), py::arg("static_bytes"), py::arg("allowed_shared_bytes"));
  bind_kernel(m, "copy_packets", &self_test::copy_packets);
  bind_kernel(m, "barrier_and_shuffle", &self_test::barrier_and_shuffle);
  bind_kernel(m, "divergent_barriers", &self_test::divergent_barriers);
  bind_kernel(m, "early_exit_then_barrier", &self_test::early_exit_then_barrier);
  bind_kernel(m, "shuffle_with_ended_lane", &self_test::shuffle_with_ended_lane);
  bind_kernel(m, "shuffle_from_outside_the_mask", &self_test::shuffle_from_outside_the_mask);
  bind_kernel(m, "shuffle_without_itself", &self_test::shuffle_without_itself);
  bind_kernel(m, "different_operations", &self_test::different_operations);
  bind_kernel(m, "map_before_meeting", &self_test::map_before_meeting);
  bind_kernel(m, "read_ended_peer", &self_test::read_ended_peer);
  bind_kernel(m, "one_block_never_comes", &self_test::one_block_never_comes);
  bind_kernel(m, "meet", &self_test::meet);
  bind_kernel(m, "meet_rank", &self_test::meet_rank);
  bind_kernel(m, "hand_over", &self_test::hand_over);
  bind_kernel(m, "hand_over_words", &self_test::hand_over_words);
  bind_kernel(m, "sleep_until_set", &self_test::sleep_until_set);
}

}  // namespace emulation
}  // namespace fastpar
