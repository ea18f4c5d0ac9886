// The tensors of one call as the kernels see them: a table that travels in the parameters of the launch.
//
// So nothing is uploaded, cached or freed, a launch never waits for the host, and a captured graph holds all it needs.
// A call with more tensors than fit the parameters (32764 bytes on compute capability 7.0 and later) takes several
// launches. A block does one chunk of one tensor, and finds it by bisection.
#pragma once

#include <cstdint>
#include <vector>

#include "optimizer/formats.cuh"

namespace fastpar {
namespace device {

constexpr int kBlockThreads = 256;
constexpr int kTilesPerWarp = 4;
constexpr int64_t kChunkElements = int64_t{kBlockThreads / kWarp} * kTilesPerWarp * kTileElements;
constexpr int64_t kMaxBlocks = 0x7fffffff;
constexpr size_t kMaxParameterBytes = 32764;
// Tensors of a launch: few, in the 4 KiB that every launch has, or many.
constexpr int kFewTensors = 32;
constexpr int kManyTensors = 256;

struct TensorEntry {
  OptimizerTensor tensor;
  bool is_packed;  // every address is a multiple of the packed accesses' width
};

template <int kCapacity>
struct TensorTable {
  int64_t first_chunk[kCapacity + 1];  // of each tensor, and their number
  TensorEntry entries[kCapacity];
  int num_tensors;
};

// The tensor that `chunk` belongs to.
template <int kCapacity>
__device__ inline int tensor_of_chunk(const TensorTable<kCapacity>& table, int64_t chunk) {
  int low = 0, high = table.num_tensors;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// ---- host -----------------------------------------------------------------------------------------------------------

inline bool is_multiple(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

inline Storage storage_of(ParamType type) {
  return type == ParamType::kSplit ? Storage::kBFloat16 : static_cast<Storage>(type);
}

inline int64_t packed_bytes(Storage storage) { return storage == Storage::kFloat32 ? 16 : 8; }

inline bool can_be_packed(const OptimizerTensor& t, StateType state_type) {
  const int64_t state_bytes = state_type == StateType::kFloat32 ? 16 : state_type == StateType::kBFloat16 ? 8 : 4;
  return is_multiple(t.param, packed_bytes(storage_of(t.param_type))) &&
         is_multiple(t.grad, packed_bytes(static_cast<Storage>(t.grad_type))) &&
         is_multiple(t.states[0], state_bytes) && is_multiple(t.states[1], state_bytes) && is_multiple(t.output, 8) &&
         is_multiple(t.remainder, 8);
}

// Calls launch(table, chunks) for runs of `tensors`, each with as many as a table and a grid hold.
template <int kCapacity, typename Launch>
void for_each_table(const std::vector<OptimizerTensor>& tensors, StateType state_type, int64_t max_blocks,
                    Launch&& launch) {
  TensorTable<kCapacity> table;
  int64_t chunks = 0;
  table.num_tensors = 0;
  const auto flush = [&] {
    if (table.num_tensors == 0) return;
    table.first_chunk[table.num_tensors] = chunks;
    launch(table, chunks);
    chunks = 0;
    table.num_tensors = 0;
  };
  for (const OptimizerTensor& tensor : tensors) {
    if (tensor.count == 0) continue;
    const int64_t more = (tensor.count + kChunkElements - 1) / kChunkElements;
    FASTPAR_CHECK(more <= max_blocks, "a tensor of ", tensor.count, " elements needs more blocks than a grid has");
    if (table.num_tensors == kCapacity || chunks + more > max_blocks) flush();
    table.first_chunk[table.num_tensors] = chunks;
    table.entries[table.num_tensors] = {tensor, can_be_packed(tensor, state_type)};
    ++table.num_tensors;
    chunks += more;
  }
  flush();
}

}  // namespace device
}  // namespace fastpar
