// Embedding lookup over a shard of the vocabulary, and its weight gradient.
//
// gather:    one pass: rows of foreign ids are zeros as they are written, instead of a masked copy afterwards.
// backward:  the positions of every id are listed in order by a counting sort; then each row of the gradient adds up
//            its positions in float32 (float64 for float64) and is rounded once. No two tasks write one row's columns,
//            so the result does not depend on the number of threads.
//
// Both are bound by memory, and the loops are ones that compilers vectorise: no version per instruction set.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "common/checks.h"
#include "common/large_buffer.h"
#include "common/simd.h"
#include "common/tensor_rows.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Columns that one task adds up at a time: many tasks share a row that is hit often, and the sums stay in cache.
constexpr int64_t kColumnBlock = 256;

void check_ids_and_weight(const Tensor& ids, const Tensor& rows, const char* name) {
  FASTPAR_CHECK(ids.scalar_type() == ScalarType::Long, "ids must be int64");
  FASTPAR_CHECK(rows.dim() >= 1, name, " must have at least one dim");
  float_type(rows, name);
}

Tensor embedding_cpu(const Tensor& ids_in, const Tensor& weight_in, int64_t vocab_start) {
  check_ids_and_weight(ids_in, weight_in, "weight");
  FASTPAR_CHECK(weight_in.dim() == 2, "weight must be [vocabulary, hidden], got ", weight_in.dim(), " dims");
  const Tensor ids = ids_in.is_contiguous() ? ids_in : torch::stable::contiguous(ids_in);
  const Tensor weight = with_dense_rows(weight_in);
  const int64_t rows = weight.size(0), hidden = weight.size(1), count = ids.numel();
  std::vector<int64_t> sizes = shape_of(ids);
  sizes.push_back(hidden);
  Tensor out = empty_cpu(sizes, weight.scalar_type());
  if (count == 0 || hidden == 0) return out;
  const int64_t row_bytes = hidden * static_cast<int64_t>(weight.element_size());
  const int64_t stride_bytes = rows > 1 ? weight.stride(0) * static_cast<int64_t>(weight.element_size()) : row_bytes;
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const char* table = static_cast<const char*>(weight.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, count, row_grain(hidden), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = id[i] - vocab_start;
      if (row >= 0 && row < rows) {
        memcpy(to + i * row_bytes, table + row * stride_bytes, static_cast<size_t>(row_bytes));
      } else {
        memset(to + i * row_bytes, 0, static_cast<size_t>(row_bytes));
      }
    }
  });
  return out;
}

// Where each row of a table is looked up: positions[begins[t]..begins[t + 1]) belong to row rows[t], in order.
struct Occurrences {
  std::vector<int64_t> rows, begins, positions;
};

Occurrences list_occurrences(const int64_t* ids, int64_t count, int64_t vocab_start, int64_t num_rows,
                             int64_t padding_idx) {
  Occurrences found;
  std::vector<int64_t> next(static_cast<size_t>(num_rows) + 1, 0);
  const auto owned = [&](int64_t i) {
    const int64_t row = ids[i] - vocab_start;
    return row >= 0 && row < num_rows && ids[i] != padding_idx ? row : -1;
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = owned(i);
    if (row >= 0) ++next[static_cast<size_t>(row)];
  }
  int64_t total = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t hits = next[static_cast<size_t>(row)];
    next[static_cast<size_t>(row)] = total;
    if (hits == 0) continue;
    found.rows.push_back(row);
    found.begins.push_back(total);
    total += hits;
  }
  found.begins.push_back(total);
  found.positions.resize(static_cast<size_t>(total));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = owned(i);
    if (row >= 0) found.positions[static_cast<size_t>(next[static_cast<size_t>(row)]++)] = i;
  }
  return found;
}

// Columns [column, column + width) of one row: the sum over its positions, rounded once.
template <typename T>
void sum_positions(const T* grad_out, int64_t hidden, const int64_t* positions, int64_t count, int64_t column,
                   int64_t width, T* out) {
  float sum[kColumnBlock] = {};
  for (int64_t p = 0; p < count; ++p) {
    const T* grad = grad_out + positions[p] * hidden + column;
    for (int64_t c = 0; c < width; ++c) sum[c] += to_float(grad[c]);
  }
  for (int64_t c = 0; c < width; ++c) from_float(sum[c], out + c);
}

void sum_positions(const double* grad_out, int64_t hidden, const int64_t* positions, int64_t count, int64_t column,
                   int64_t width, double* out) {
  double sum[kColumnBlock] = {};
  for (int64_t p = 0; p < count; ++p) {
    const double* grad = grad_out + positions[p] * hidden + column;
    for (int64_t c = 0; c < width; ++c) sum[c] += grad[c];
  }
  for (int64_t c = 0; c < width; ++c) out[c] = sum[c];
}

template <typename T>
void scatter_add(const Tensor& grad_out, int64_t hidden, const Occurrences& found, int64_t num_rows, Tensor& grad) {
  const T* from = static_cast<const T*>(grad_out.const_data_ptr());
  T* to = static_cast<T*>(grad.mutable_data_ptr());
  torch::stable::parallel_for(0, num_rows, row_grain(hidden), [&](int64_t begin, int64_t end) {
    memset(static_cast<void*>(to + begin * hidden), 0, sizeof(T) * static_cast<size_t>((end - begin) * hidden));
  });
  const int64_t touched = static_cast<int64_t>(found.rows.size());
  const int64_t blocks = (hidden + kColumnBlock - 1) / kColumnBlock;
  // Column blocks outermost, so that a row that is hit often is shared out.
  torch::stable::parallel_for(0, blocks * touched, row_grain(kColumnBlock), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t column = task / touched * kColumnBlock;
      const size_t t = static_cast<size_t>(task % touched);
      const int64_t width = hidden - column < kColumnBlock ? hidden - column : kColumnBlock;
      sum_positions(from, hidden, found.positions.data() + found.begins[t], found.begins[t + 1] - found.begins[t],
                    column, width, to + found.rows[t] * hidden + column);
    }
  });
}

Tensor embedding_backward_cpu(const Tensor& ids_in, const Tensor& grad_in, int64_t num_rows, int64_t vocab_start,
                              int64_t padding_idx) {
  check_ids_and_weight(ids_in, grad_in, "grad_out");
  FASTPAR_CHECK(num_rows >= 0, "num_rows must not be negative, got ", num_rows);
  FASTPAR_CHECK(grad_in.dim() == ids_in.dim() + 1 && count_rows(grad_in) == ids_in.numel(),
                "grad_out must have the shape of ids and one dim more");
  const Tensor ids = ids_in.is_contiguous() ? ids_in : torch::stable::contiguous(ids_in);
  const Tensor grad_out = grad_in.is_contiguous() ? grad_in : torch::stable::contiguous(grad_in);
  const int64_t hidden = last_size(grad_out);
  Tensor grad = empty_cpu({num_rows, hidden}, grad_out.scalar_type());
  if (num_rows == 0 || hidden == 0) return grad;
  const Occurrences found =
      list_occurrences(ids.const_data_ptr<int64_t>(), ids.numel(), vocab_start, num_rows, padding_idx);
  switch (float_type(grad_out, "grad_out")) {
    case FloatType::kFloat32:
      scatter_add<float>(grad_out, hidden, found, num_rows, grad);
      break;
    case FloatType::kBFloat16:
      scatter_add<bfloat16>(grad_out, hidden, found, num_rows, grad);
      break;
    case FloatType::kFloat16:
      scatter_add<float16>(grad_out, hidden, found, num_rows, grad);
      break;
    case FloatType::kFloat64:
      scatter_add<double>(grad_out, hidden, found, num_rows, grad);
      break;
  }
  return grad;
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("vocab_embedding", TORCH_BOX(&fastpar::embedding_cpu));
  m.impl("vocab_embedding_backward", TORCH_BOX(&fastpar::embedding_backward_cpu));
}
