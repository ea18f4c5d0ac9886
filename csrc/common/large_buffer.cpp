#include "common/large_buffer.h"

#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <mutex>

#include "common/checks.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr size_t kHugePage = size_t{2} << 20;

struct Buffer {
  void* address;
  size_t bytes;
};

// Cached memory is bounded to an eighth of the machine's and to eight buffers; the oldest goes first.
class Pool {
 public:
  Buffer take(size_t bytes) {
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto best = cached_.end();
      for (auto it = cached_.begin(); it != cached_.end(); ++it) {
        // A quarter of slack at most, so that a small tensor never holds a large buffer.
        const bool fits = it->bytes >= bytes && it->bytes <= bytes + bytes / 4;
        if (fits && (best == cached_.end() || it->bytes < best->bytes)) best = it;
      }
      if (best != cached_.end()) {
        const Buffer buffer = *best;
        cached_.erase(best);
        stats_.cached_bytes -= static_cast<int64_t>(buffer.bytes);
        stats_.in_use_bytes += static_cast<int64_t>(buffer.bytes);
        ++stats_.reused;
        return buffer;
      }
    }
    const Buffer buffer{map(bytes), bytes};
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.in_use_bytes += static_cast<int64_t>(bytes);
    ++stats_.mapped;
    return buffer;
  }

  void give_back(Buffer buffer) {
    std::vector<Buffer> dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stats_.in_use_bytes -= static_cast<int64_t>(buffer.bytes);
      cached_.push_back(buffer);
      stats_.cached_bytes += static_cast<int64_t>(buffer.bytes);
      while (cached_.size() > kMaxBuffers || stats_.cached_bytes > max_cached_bytes_) {
        dropped.push_back(cached_.front());
        stats_.cached_bytes -= static_cast<int64_t>(cached_.front().bytes);
        cached_.erase(cached_.begin());
      }
    }
    unmap(dropped);
  }

  void release() {
    std::vector<Buffer> dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      dropped.swap(cached_);
      stats_.cached_bytes = 0;
    }
    unmap(dropped);
  }

  LargeBufferStats stats() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

 private:
  static constexpr size_t kMaxBuffers = 8;

  // Maps one huge page more than asked for and cuts the ends, because only aligned ranges get huge pages.
  static void* map(size_t bytes) {
    void* raw = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    FASTPAR_CHECK(raw != MAP_FAILED, "out of memory: cannot map ", bytes, " bytes for an output tensor");
    const uintptr_t start = reinterpret_cast<uintptr_t>(raw);
    const uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
    const size_t head = aligned - start;
    if (head > 0) munmap(raw, head);
    munmap(reinterpret_cast<void*>(aligned + bytes), kHugePage - head);
    madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);  // a refusal costs speed only
    return reinterpret_cast<void*>(aligned);
  }

  static void unmap(const std::vector<Buffer>& buffers) {
    for (const Buffer& buffer : buffers) munmap(buffer.address, buffer.bytes);
  }

  std::mutex mutex_;
  std::vector<Buffer> cached_;
  LargeBufferStats stats_{};
  const int64_t max_cached_bytes_ =
      static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) / 8 * static_cast<int64_t>(sysconf(_SC_PAGE_SIZE));
};

// Never destroyed: tensors may outlive every static object of this library.
Pool& pool() {
  static Pool* instance = new Pool();
  return *instance;
}

size_t element_bytes(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
    case ScalarType::Half:
      return 2;
    case ScalarType::Float:
      return 4;
    default:
      return 8;
  }
}

}  // namespace

Tensor empty_cpu(const std::vector<int64_t>& sizes, ScalarType dtype) {
  constexpr int64_t kMaxElements = int64_t{1} << 48;  // more than fits a process: no product below overflows
  int64_t elements = 1;
  for (const int64_t size : sizes) {
    FASTPAR_CHECK(size >= 0 && size <= kMaxElements && elements <= kMaxElements / (size > 0 ? size : 1),
                  "a result cannot have a dim of ", size, " beside ", elements, " elements");
    elements *= size > 0 ? size : 1;
  }
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * (sizes[i] > 0 ? sizes[i] : 1);
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;

  const size_t bytes = static_cast<size_t>(numel) * element_bytes(dtype);
  if (bytes >= kLargeBufferBytes) {
    const Buffer buffer = pool().take(bytes);
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    return torch::stable::from_blob(buffer.address, sizes, strides, cpu, dtype,
                                    [buffer](void*) { pool().give_back(buffer); });
  }
  AtenTensorHandle handle;
  const int32_t shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  shim_dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

LargeBufferStats large_buffer_stats() { return pool().stats(); }

void large_buffer_release() { pool().release(); }

}  // namespace fastpar
