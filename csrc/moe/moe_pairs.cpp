// Pairs of token and choice: sorted by expert, given their rows, and listed row by row. See
// fastpar/reference/moe_rows.py.
//
// The sort is a counting sort in two passes over blocks of pairs: each block counts its pairs of every expert; the sums
// over earlier experts and blocks are where each block begins to write. So it is stable, and the same for any number of
// threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/large_buffer.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kBlockPairs = 16384;  // 20 microseconds or more of a core

Tensor dense(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// ---- sort ---------------------------------------------------------------------------------------------------------

// Pairs of a block: (number, expert) of each that goes somewhere.
template <typename Index, typename Body>
void for_each_pair(const Index* indices, int64_t begin, int64_t end, int64_t num_experts, const Body& body) {
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t expert = static_cast<int64_t>(indices[pair]);
    // One comparison: negative numbers are large ones.
    if (static_cast<uint64_t>(expert) < static_cast<uint64_t>(num_experts)) body(pair, expert);
  }
}

template <typename Index>
std::tuple<Tensor, Tensor> sort_pairs_as(const Tensor& indices, int64_t num_experts) {
  const Index* data = indices.const_data_ptr<Index>();
  const int64_t pairs = indices.numel();
  // With many experts, blocks so large that their counts are few beside their pairs.
  const int64_t block = std::max(kBlockPairs, 8 * num_experts);
  const int64_t blocks = std::max<int64_t>((pairs + block - 1) / block, 1);
  std::vector<int64_t> next(static_cast<size_t>(blocks * num_experts), 0);
  const auto for_each_block = [&](const auto& body) {
    torch::stable::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) body(b * block, std::min(pairs, (b + 1) * block), &next[b * num_experts]);
    });
  };
  for_each_block([&](int64_t begin, int64_t end, int64_t* counts) {
    for_each_pair(data, begin, end, num_experts, [&](int64_t, int64_t expert) { ++counts[expert]; });
  });

  Tensor counts = empty_cpu({num_experts}, ScalarType::Long);
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  int64_t total = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t before = total;
    for (int64_t b = 0; b < blocks; ++b) {
      int64_t* entry = &next[b * num_experts + expert];
      const int64_t hits = *entry;
      *entry = total;
      total += hits;
    }
    count[expert] = total - before;
  }

  Tensor order = empty_cpu({total}, ScalarType::Long);
  int64_t* to = order.mutable_data_ptr<int64_t>();
  for_each_block([&](int64_t begin, int64_t end, int64_t* at) {
    for_each_pair(data, begin, end, num_experts, [&](int64_t pair, int64_t expert) { to[at[expert]++] = pair; });
  });
  return {order, counts};
}

std::tuple<Tensor, Tensor> sort_pairs_cpu(const Tensor& indices_in, int64_t num_experts) {
  FASTPAR_CHECK(num_experts >= 0, "num_experts must not be negative, got ", num_experts);
  const Tensor indices = dense(indices_in);
  if (indices.scalar_type() == ScalarType::Int) return sort_pairs_as<int32_t>(indices, num_experts);
  FASTPAR_CHECK(indices.scalar_type() == ScalarType::Long, "indices must be int64 or int32");
  return sort_pairs_as<int64_t>(indices, num_experts);
}

// ---- rows of pairs ------------------------------------------------------------------------------------------------

Tensor pair_slots_cpu(const Tensor& order_in, const Tensor& counts_in, const Tensor& first_in, int64_t pairs) {
  const Tensor order = dense(order_in), counts = dense(counts_in), first = dense(first_in);
  const int64_t* from = order.const_data_ptr<int64_t>();
  const int64_t* count = counts.const_data_ptr<int64_t>();
  const int64_t* start = first.const_data_ptr<int64_t>();
  FASTPAR_CHECK(counts.numel() == first.numel(), "counts and first must have one entry for each expert");
  Tensor slots = empty_cpu({pairs}, ScalarType::Long);
  int64_t* slot = slots.mutable_data_ptr<int64_t>();
  std::fill(slot, slot + pairs, int64_t{-1});
  int64_t i = 0;
  for (int64_t expert = 0; expert < counts.numel(); ++expert) {
    FASTPAR_CHECK(count[expert] >= 0 && count[expert] <= order.numel() - i, "counts must add up to the pairs of order");
    for (int64_t n = 0; n < count[expert]; ++n, ++i) {
      FASTPAR_CHECK(static_cast<uint64_t>(from[i]) < static_cast<uint64_t>(pairs), "order has ", from[i], " of ", pairs,
                    " pairs");
      slot[from[i]] = start[expert] + n;
    }
  }
  return slots;
}

// ---- sources of rows ----------------------------------------------------------------------------------------------

constexpr int kRunNumbers = 5;  // table, begin, count, row, token

template <typename Index>
void write_run(const Index* pairs, const float* weights, int64_t count, int64_t first_token, int64_t top_k,
               int64_t* source, float* row_weights) {
  const uint32_t divisor = static_cast<uint32_t>(top_k);  // of 32 bits, a third of the time
  for (int64_t n = 0; n < count; ++n) {
    const uint64_t pair = static_cast<uint64_t>(pairs[n]);
    const uint64_t token = pair >> 32 == 0 ? static_cast<uint32_t>(pair) / divisor : pair / divisor;
    source[n] = first_token + static_cast<int64_t>(token);
    row_weights[n] = weights == nullptr ? 1.0f : weights[n];
  }
}

std::tuple<Tensor, Tensor> row_sources_cpu(std::vector<Tensor> orders, std::vector<Tensor> weights,
                                           const Tensor& runs_in, int64_t top_k, int64_t num_rows) {
  FASTPAR_CHECK(top_k >= 1 && top_k <= 0xffffffffLL, "top_k must be at least 1, got ", top_k);
  FASTPAR_CHECK(weights.empty() || weights.size() == orders.size(), "weights must be as many as orders, or none");
  for (Tensor& x : orders) {
    FASTPAR_CHECK(x.scalar_type() == ScalarType::Long || x.scalar_type() == ScalarType::Int,
                  "orders must be int64 or int32");
    x = dense(x);
  }
  for (size_t t = 0; t < weights.size(); ++t) {
    FASTPAR_CHECK(weights[t].scalar_type() == ScalarType::Float && weights[t].numel() == orders[t].numel(),
                  "weights must be float32, of the sizes of orders");
    weights[t] = dense(weights[t]);
  }
  const Tensor runs = dense(runs_in);
  FASTPAR_CHECK(runs.scalar_type() == ScalarType::Long && runs.dim() == 2 && runs.size(1) == kRunNumbers,
                "runs must be int64 [n, 5]");
  const int64_t* run = runs.const_data_ptr<int64_t>();
  for (const int64_t* r = run; r < run + runs.numel(); r += kRunNumbers) {
    FASTPAR_CHECK(r[0] >= 0 && r[0] < static_cast<int64_t>(orders.size()) && r[1] >= 0 && r[2] >= 0 &&
                      r[1] + r[2] <= orders[static_cast<size_t>(r[0])].numel() && r[3] >= 0 && r[3] + r[2] <= num_rows,
                  "a run is out of bounds: table ", r[0], ", begin ", r[1], ", count ", r[2], ", row ", r[3]);
  }
  Tensor source = empty_cpu({num_rows}, ScalarType::Long), row_weights = empty_cpu({num_rows}, ScalarType::Float);
  int64_t* to = source.mutable_data_ptr<int64_t>();
  float* weight = row_weights.mutable_data_ptr<float>();
  std::fill(to, to + num_rows, int64_t{-1});
  std::fill(weight, weight + num_rows, 0.0f);
  const int64_t grain = std::max<int64_t>(1, kBlockPairs * runs.size(0) / std::max<int64_t>(num_rows, 1));
  torch::stable::parallel_for(0, runs.size(0), grain, [&](int64_t begin, int64_t end) {
    for (const int64_t* r = run + begin * kRunNumbers; r < run + end * kRunNumbers; r += kRunNumbers) {
      const Tensor& order = orders[static_cast<size_t>(r[0])];
      const float* weights_of_run =
          weights.empty() ? nullptr : weights[static_cast<size_t>(r[0])].const_data_ptr<float>() + r[1];
      if (order.scalar_type() == ScalarType::Int) {
        write_run(order.const_data_ptr<int32_t>() + r[1], weights_of_run, r[2], r[4], top_k, to + r[3], weight + r[3]);
      } else {
        write_run(order.const_data_ptr<int64_t>() + r[1], weights_of_run, r[2], r[4], top_k, to + r[3], weight + r[3]);
      }
    }
  });
  return {source, row_weights};
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("moe_sort_pairs", TORCH_BOX(&fastpar::sort_pairs_cpu));
  m.impl("moe_pair_slots", TORCH_BOX(&fastpar::pair_slots_cpu));
  m.impl("moe_row_sources", TORCH_BOX(&fastpar::row_sources_cpu));
}
