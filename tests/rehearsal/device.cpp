// A CUDA device made of host memory, for a torch without CUDA: what tests/rehearsal/device.py loads.
//
// Tensors of device "cuda" are real ones (storages, views, autograd, data pointers), and every kernel that they have
// not is the CPU's, on copies. Nothing runs at the same time as anything else: streams and events do nothing.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <malloc.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace at::native {  // exported by libtorch_cpu; their headers are one per op
Tensor as_strided_tensorimpl(const Tensor&, IntArrayRef, IntArrayRef, std::optional<int64_t>);
Tensor view(const Tensor&, IntArrayRef);
Tensor unfold(const Tensor&, int64_t, int64_t, int64_t);
const Tensor& resize_(const Tensor&, IntArrayRef, std::optional<MemoryFormat>);
Tensor& set_(Tensor&, Storage, int64_t, IntArrayRef, IntArrayRef);
}  // namespace at::native

namespace {

constexpr size_t kAlignment = 256;  // as cudaMalloc's
thread_local c10::DeviceIndex current = 0;

std::atomic<int64_t> allocated{0};  // bytes

void release(void* data) {
  allocated -= static_cast<int64_t>(malloc_usable_size(data));
  std::free(data);
}

class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data =
        bytes == 0 ? nullptr : std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    allocated += static_cast<int64_t>(malloc_usable_size(data));
    return {data, data, &release, c10::Device(c10::kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

class HostGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct HostHooks final : at::CUDAHooksInterface {
  explicit HostHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 2; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::kCUDA, current}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
};

HostAllocator allocator;

c10::ScalarType dtype_of(std::optional<c10::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}

struct OnDevice {  // allocations go to the device that was asked for
  explicit OnDevice(std::optional<c10::Device> device) : before(current) {
    if (device && device->has_index()) current = device->index();
  }
  ~OnDevice() { current = before; }
  const c10::DeviceIndex before;
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  OnDevice guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype_of(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype_of(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> begin;
  if (offset) begin = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), begin);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, std::nullopt);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* self_impl = self.unsafeGetTensorImpl();
  self_impl->set_storage_keep_dtype(source);
  self_impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                   offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_whole(at::Tensor& self, c10::Storage source) {
  const c10::SymInt size = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, source, 0, size, c10::SymInt(1));
}

// The same memory as a CPU tensor.
at::Tensor on_host(const at::Tensor& self) {
  if (self.device().is_cpu()) return self;
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const at::Tensor keeper = self;
  return at::from_blob(
      self.data_ptr(), self.sizes(), self.strides(), [keeper](void*) {}, self.options().device(c10::kCPU));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0 && source.numel() == 0) return self;
  at::Tensor target = on_host(self);
  target.copy_(on_host(source), non_blocking);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  at::Tensor out = target;
  return copy_(out, source, false);
}

void record_stream(at::Tensor&, c10::Stream) {}

bool is_pinned(const at::Tensor&, std::optional<c10::Device>) { return false; }

// Operations that CUDA takes tensors of several devices for: indices may lie on the CPU.
bool takes_several_devices(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 ||
         name.rfind("aten::_unsafe_index", 0) == 0 || name == "aten::_foreach_copy_";
}

void check_device(const c10::OperatorHandle& op, const at::Tensor& x, std::optional<c10::Device>& seen) {
  if (!x.defined() || (x.device().is_cpu() && x.dim() == 0)) return;  // a number for the host
  TORCH_CHECK(!seen || *seen == x.device(), "Expected all tensors to be on the same device, but ", op.schema().name(),
              " got ", *seen, " and ", x.device());
  seen = x.device();
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK(op.schema().name().rfind("fastpar::", 0) != 0, op.schema().name(), " has no kernel for CUDA tensors");
  if (!takes_several_devices(op.schema().name())) {
    std::optional<c10::Device> seen;
    for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
      if (value.isTensor()) check_device(op, value.toTensor(), seen);
      if (value.isTensorList())
        for (const at::Tensor& x : value.toTensorVector()) check_device(op, x, seen);
    }
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, HostGuard)

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", HostHooks)
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("is_pinned", TORCH_FN(is_pinned));
}

int64_t exchange_device(int64_t index) {
  const c10::DeviceIndex before = current;
  if (index >= 0) current = static_cast<c10::DeviceIndex>(index);
  return before;
}

void resize_storage(const at::Tensor& self, int64_t bytes) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  c10::DataPtr data = allocator.allocate(bytes);
  const size_t kept = std::min<size_t>(bytes, storage->nbytes());
  if (kept > 0) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

TORCH_LIBRARY(rehearsal, m) {
  m.def("on_host(Tensor x) -> Tensor");  // no alias annotation: nobody differentiates through it
  m.def("exchange_device(int index) -> int", exchange_device);
  m.def("resize_storage(Tensor x, int bytes) -> ()");
  m.def("allocated() -> int", [] { return allocated.load(); });
}
TORCH_LIBRARY_IMPL(rehearsal, CompositeExplicitAutograd, m) {
  m.impl("on_host", TORCH_FN(on_host));
  m.impl("resize_storage", TORCH_FN(resize_storage));
}

struct SetAllocator {
  SetAllocator() { c10::SetAllocator(c10::kCUDA, &allocator, 10); }
};
static SetAllocator set_allocator;
