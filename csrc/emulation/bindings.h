// What the parts of the Python test module share: buffers that stand for device memory, and kernels as functions.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "common/device.cuh"

namespace fastpar {
namespace emulation {

namespace py = pybind11;

// Memory of exactly `bytes` bytes that begins `offset` bytes past a multiple of 256, full of poison. It has
// AddressSanitizer's guard zones on both sides, and numpy sees it through the buffer protocol.
class Buffer {
 public:
  Buffer(size_t bytes, size_t offset) : bytes_(bytes), offset_(offset) {
    memory_ = static_cast<unsigned char*>(::operator new(offset + bytes, std::align_val_t(256)));
    std::memset(memory_, kPoison, offset + bytes);
  }
  ~Buffer() { ::operator delete(memory_, std::align_val_t(256)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  unsigned char* data() const { return memory_ + offset_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_, offset_;
  unsigned char* memory_;
};

// A kernel's pointers are buffers (or None) in Python; everything else is what it is.
template <typename P>
struct FromPython {
  using Type = P;
  static P get(P value) { return value; }
};
template <typename T>
struct FromPython<T*> {
  using Type = const Buffer*;
  static T* get(const Buffer* buffer) { return buffer == nullptr ? nullptr : reinterpret_cast<T*>(buffer->data()); }
};

// m.name(config, arguments...) launches the kernel; with stream=, `synchronize` does.
template <typename... P>
void bind_kernel(py::module_& m, const char* name, void (*kernel)(P...)) {
  m.def(
      name,
      [kernel](const device::LaunchConfig& config, typename FromPython<P>::Type... arguments, Stream* stream) {
        device::launch(kernel, config, stream, FromPython<P>::get(arguments)...);
      },
      py::arg(), (static_cast<void>(sizeof(P)), py::arg())..., py::arg("stream") = nullptr);
}

// One function per file of bindings; module.cpp calls them.
void bind_self_test(py::module_& m);
void bind_cross_entropy(py::module_& m);
void bind_symmetric(py::module_& m);

}  // namespace emulation
}  // namespace fastpar
