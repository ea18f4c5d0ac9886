// The k largest logits of every row, sorted; equal ones by ascending id.
//
// One read of the row. The k best so far are a heap with the worst on top, or sorted where they are few; ids come in
// ascending order, so a candidate replaces the worst only if it is strictly larger, and ties fall to the lowest id by
// themselves. Chunks without an element as large as the worst, nearly all after a few thousand elements, are passed
// over by a loop of comparisons that compilers vectorise, and so is, one by one, an element of another chunk.
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
constexpr int64_t kFew = 16;  // candidates up to which moving them is cheaper than a heap: the experts of a token

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

// The k best so far.
template <bool kSorted>
class Best {
 public:
  explicit Best(std::vector<Candidate>& items) : items_(items) {}

  const Candidate& worst() const { return kSorted ? items_.back() : items_.front(); }
  void start() {
    if (kSorted) {
      for (size_t i = 1; i < items_.size(); ++i) sink(items_[i], i);
    } else {
      std::make_heap(items_.begin(), items_.end(), is_better);
    }
  }
  void replace_worst(Candidate candidate) {
    if (kSorted) {
      sink(candidate, items_.size() - 1);
    } else {
      std::pop_heap(items_.begin(), items_.end(), is_better);
      items_.back() = candidate;
      std::push_heap(items_.begin(), items_.end(), is_better);
    }
  }
  void finish() {
    if (!kSorted) std::sort_heap(items_.begin(), items_.end(), is_better);
  }

 private:
  // Over the item at `place`, to before those that are worse.
  void sink(Candidate candidate, size_t place) {
    for (; place > 0 && items_[place - 1].key < candidate.key; --place) items_[place] = items_[place - 1];
    items_[place] = candidate;
  }

  std::vector<Candidate>& items_;
};

// Fills `items`, which has room for k, best first, and returns how many more elements equal the last value.
template <bool kSorted, typename T>
int64_t select_row(const T* x, int64_t vocab, int64_t k, std::vector<Candidate>& items) {
  items.clear();
  for (int64_t i = 0; i < k; ++i) items.push_back({ordered_key(x[i]), i});
  if (k == 0) return 0;
  Best<kSorted> best(items);
  best.start();
  int64_t equal = 0;  // elements left out that equal the worst
  auto limit = comparable(x[best.worst().column]);
  const auto offer = [&](int64_t i) {
    if (comparable(x[i]) < limit) return;  // not where one is a NaN
    const uint64_t key = ordered_key(x[i]), worst = best.worst().key;
    if (key < worst) return;
    if (key == worst) {
      ++equal;
      return;
    }
    best.replace_worst({key, i});
    limit = comparable(x[best.worst().column]);
    equal = best.worst().key == worst ? equal + 1 : 0;
  };
  int64_t i = k;
  for (; i + kChunk <= vocab; i += kChunk) {
    if (!may_hold_candidate(x + i, x[best.worst().column])) continue;
    for (int64_t j = i; j < i + kChunk; ++j) offer(j);
  }
  for (; i < vocab; ++i) offer(i);
  best.finish();
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
      std::vector<Candidate> best;
      for (int64_t row = begin; row < end; ++row) {
        const T* x = from + row_start(layout, row);
        equal_out[row] = k <= kFew ? select_row<true>(x, vocab, k, best) : select_row<false>(x, vocab, k, best);
        for (int64_t j = 0; j < k; ++j) {
          value_out[row * k + j] = x[best[static_cast<size_t>(j)].column];
          id_out[row * k + j] = best[static_cast<size_t>(j)].column + vocab_start;
        }
      }
    });
  });
  return {values, ids, equal};
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) { m.impl("vocab_topk", TORCH_BOX(&fastpar::topk_cpu)); }
