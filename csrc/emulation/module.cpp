// The Python module fastpar_emulation, for tests only.
#include <pybind11/stl.h>

#include <string>

#include "emulation/bindings.h"

namespace fastpar {
namespace emulation {
namespace {

void set_schedule_by_name(const std::string& name, uint64_t seed) {
  if (name == "ascending") return set_schedule(Schedule::kAscending);
  if (name == "descending") return set_schedule(Schedule::kDescending);
  if (name == "random") return set_schedule(Schedule::kRandom, seed);
  throw py::value_error("schedule must be 'ascending', 'descending' or 'random', not '" + name + "'");
}

void set_device_by_name(unsigned multiprocessors, unsigned registers, const std::string& residency) {
  if (residency != "one cluster" && residency != "what fits") {
    throw py::value_error("residency must be 'one cluster' or 'what fits', not '" + residency + "'");
  }
  set_device({multiprocessors, registers, residency == "what fits" ? Residency::kWhatFits : Residency::kOneCluster});
}

}  // namespace
}  // namespace emulation
}  // namespace fastpar

PYBIND11_MODULE(fastpar_emulation, m) {
  namespace py = pybind11;
  using fastpar::device::LaunchConfig;
  using fastpar::emulation::Buffer;
  using fastpar::emulation::Stream;
  py::register_exception<fastpar::emulation::Error>(m, "Error", PyExc_RuntimeError);
  m.def("set_schedule", &fastpar::emulation::set_schedule_by_name, py::arg("name"), py::arg("seed") = 0);
  m.def("set_device", &fastpar::emulation::set_device_by_name,
        py::arg("multiprocessors") = fastpar::emulation::Device().multiprocessors, py::arg("registers") = 0,
        py::arg("residency") = "one cluster");
  py::class_<Stream>(m, "Stream")
      .def(py::init([](int device) {
             Stream stream;
             stream.device = device;
             return stream;
           }),
           py::arg("device") = -1);
  m.def("clock_nanoseconds", &fastpar::emulation::clock_nanoseconds);
  m.def("synchronize", &fastpar::emulation::synchronize);
  py::class_<LaunchConfig>(m, "LaunchConfig")
      .def(py::init([](int64_t blocks, unsigned threads, size_t shared_bytes, unsigned cluster, bool cooperative) {
             return LaunchConfig{blocks, threads, shared_bytes, cluster, cooperative};
           }),
           py::arg("blocks"), py::arg("threads"), py::arg("shared_bytes") = 0, py::arg("cluster") = 1,
           py::arg("cooperative") = false);
  py::class_<Buffer>(m, "Buffer", py::buffer_protocol())
      .def(py::init<size_t, size_t>(), py::arg("bytes"), py::arg("offset") = 0)
      .def_buffer([](Buffer& buffer) {
        return py::buffer_info(buffer.data(), 1, "B", 1, {static_cast<py::ssize_t>(buffer.bytes())}, {1});
      });
  auto self_test = m.def_submodule("self_test");
  fastpar::emulation::bind_self_test(self_test);
  auto cross_entropy = m.def_submodule("cross_entropy");
  fastpar::emulation::bind_cross_entropy(cross_entropy);
  auto symmetric = m.def_submodule("symmetric");
  fastpar::emulation::bind_symmetric(symmetric);
}
