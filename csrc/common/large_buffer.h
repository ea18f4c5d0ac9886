// Output tensors of CPU ops, with large ones taken from a pool of huge-page buffers.
//
// Touching a newly mapped page costs more than filling it (2.4 GB/s with 4 KiB pages, against 35 to 50 GB/s for the
// kernels here), and torch's CPU allocator returns every large block to the system. A gradient of the logits is
// hundreds of megabytes, of the same size every step, so its memory is kept and handed out again.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastpar {

constexpr size_t kLargeBufferBytes = size_t{8} << 20;  // smaller outputs come from torch's allocator

struct LargeBufferStats {
  int64_t in_use_bytes;
  int64_t cached_bytes;
  int64_t reused;  // requests served from the cache
  int64_t mapped;  // requests that mapped new memory
};

// An uninitialised contiguous CPU tensor.
torch::stable::Tensor empty_cpu(const std::vector<int64_t>& sizes, torch::headeronly::ScalarType dtype);

LargeBufferStats large_buffer_stats();

// Unmaps everything that is cached and not in use.
void large_buffer_release();

}  // namespace fastpar
