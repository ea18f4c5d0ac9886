// Where the rows of a tensor with any leading dims begin. Torch-free, for the files of one instruction set.
#pragma once

#include <cstdint>

namespace fastpar {

constexpr int kMaxRowDims = 8;

// Leading dims of a tensor whose last dim is contiguous, merged where rows are equally spaced; strides in elements.
struct StridedRows {
  int num_dims;
  int64_t sizes[kMaxRowDims];
  int64_t strides[kMaxRowDims];
};

namespace {

// The offset of row `row`, in elements.
inline int64_t row_start(const StridedRows& rows, int64_t row) {
  int64_t offset = 0;
  for (int d = rows.num_dims - 1; d > 0; --d) {
    offset += (row % rows.sizes[d]) * rows.strides[d];
    row /= rows.sizes[d];
  }
  return rows.num_dims > 0 ? offset + row * rows.strides[0] : 0;
}

}  // namespace
}  // namespace fastpar
