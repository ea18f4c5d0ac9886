// The k largest logits of every row, sorted; equal ones by ascending id.
//
// One read of the row. The k best so far are a heap with the worst on top; ids come in ascending order, so a candidate
// replaces the top only if it is strictly larger, and ties fall to the lowest id by themselves. Chunks without an
// element as large as the top, nearly all once the heap has seen a few thousand, are passed over by a loop of
// comparisons that compilers vectorise.
//
//   logits [3, 5, 5, 1, 5], k = 2   ->   values [5, 5], ids [1, 2], and 1 more element equal to the last value
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/large_buffer.h"
#include "vocab_filter/dispatch.h"
#include "vocab_filter/ordered_key.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kChunk = 64;

struct Candidate {
  uint64_t key;
  int64_t column;
};

// Heap order: the worst on top.
inline bool is_better(const Candidate& a, const Candidate& b) {
  return a.key > b.key || (a.key == b.key && a.column < b.column);
}

inline double comparable(double x) { return x; }
template <typename T>
float comparable(T x) {
  return to_float(x);
}

// False only if every element is below the threshold; a NaN on either side is not.
template <typename T>
bool may_hold_candidate(const T* x, T threshold) {
  const auto limit = comparable(threshold);
  int found = 0;
  for (int64_t i = 0; i < kChunk; ++i) found |= !(comparable(x[i]) < limit);
  return found != 0;
}

// Fills `heap`, which has room for k, sorts it best first, and returns how many more elements equal the last value.
template <typename T>
int64_t select_row(const T* x, int64_t vocab, int64_t k, std::vector<Candidate>& heap) {
  heap.clear();
  for (int64_t i = 0; i < k; ++i) heap.push_back({ordered_key(x[i]), i});
  if (k == 0) return 0;
  std::make_heap(heap.begin(), heap.end(), is_better);
  int64_t equal = 0;  // elements left out that equal the worst of the heap
  const auto offer = [&](int64_t i) {
    const uint64_t key = ordered_key(x[i]), worst = heap.front().key;
    if (key < worst) return;
    if (key == worst) {
      ++equal;
      return;
    }
    std::pop_heap(heap.begin(), heap.end(), is_better);
    heap.back() = {key, i};
    std::push_heap(heap.begin(), heap.end(), is_better);
    equal = heap.front().key == worst ? equal + 1 : 0;
  };
  int64_t i = k;
  for (; i + kChunk <= vocab; i += kChunk) {
    if (!may_hold_candidate(x + i, x[heap.front().column])) continue;
    for (int64_t j = i; j < i + kChunk; ++j) offer(j);
  }
  for (; i < vocab; ++i) offer(i);
  std::sort_heap(heap.begin(), heap.end(), is_better);
  return equal;
}

std::tuple<Tensor, Tensor, Tensor> topk_cpu(const Tensor& logits_in, int64_t k, int64_t vocab_start) {
  FASTPAR_CHECK(logits_in.dim() >= 1, "logits must have at least one dim, the vocabulary");
  FASTPAR_CHECK(k >= 0, "k must not be negative, got ", k);
  const Tensor logits = with_dense_rows(logits_in);
  const int64_t vocab = last_size(logits), rows = count_rows(logits);
  k = std::min(k, vocab);
  std::vector<int64_t> sizes = shape_of(logits);
  sizes.back() = k;
  Tensor values = empty_cpu(sizes, logits.scalar_type());
  Tensor ids = empty_cpu(sizes, ScalarType::Long);
  sizes.pop_back();
  Tensor equal = empty_cpu(sizes, ScalarType::Long);
  const StridedRows layout = strided_rows(logits);
  int64_t* id_out = ids.mutable_data_ptr<int64_t>();
  int64_t* equal_out = equal.mutable_data_ptr<int64_t>();
  dispatch_float(logits, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(logits.const_data_ptr());
    T* value_out = static_cast<T*>(values.mutable_data_ptr());
    torch::stable::parallel_for(0, rows, row_grain(vocab), [&](int64_t begin, int64_t end) {
      std::vector<Candidate> heap;
      for (int64_t row = begin; row < end; ++row) {
        const T* x = from + row_start(layout, row);
        equal_out[row] = select_row(x, vocab, k, heap);
        for (int64_t j = 0; j < k; ++j) {
          value_out[row * k + j] = x[heap[static_cast<size_t>(j)].column];
          id_out[row * k + j] = heap[static_cast<size_t>(j)].column + vocab_start;
        }
      }
    });
  });
  return {values, ids, equal};
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) { m.impl("vocab_topk", TORCH_BOX(&fastpar::topk_cpu)); }
