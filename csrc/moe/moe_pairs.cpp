// Pairs of token and choice: sorted by expert, given their rows, listed row by row, and as tokens for each rank. See
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
#include <tuple>
#include <utility>
#include <vector>

#include "common/checks.h"
#include "common/large_buffer.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kBlockPairs = 16384;             // 20 microseconds or more of a core
constexpr int64_t kMaxExperts = int64_t{1} << 24;  // tables of so many numbers are made without asking

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
  FASTPAR_CHECK(num_experts >= 0 && num_experts <= kMaxExperts, "num_experts must be between 0 and ", kMaxExperts,
                ", got ", num_experts);
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

template <typename Index, typename Weight>
void write_run(const Index* pairs, const Weight* weights, int64_t count, int64_t first_token, int64_t top_k,
               int64_t* source, Weight* row_weights) {
  const uint32_t divisor = static_cast<uint32_t>(top_k);  // of 32 bits, a third of the time
  for (int64_t n = 0; n < count; ++n) {
    const uint64_t pair = static_cast<uint64_t>(pairs[n]);
    const uint64_t token = pair >> 32 == 0 ? static_cast<uint32_t>(pair) / divisor : pair / divisor;
    source[n] = first_token + static_cast<int64_t>(token);
    row_weights[n] = weights == nullptr ? Weight{1} : weights[n];
  }
}

// `weights` are of this type, or none.
template <typename Weight>
void write_runs(const std::vector<Tensor>& orders, const std::vector<Tensor>& weights, const Tensor& runs,
                int64_t top_k, int64_t* source, Tensor& row_weights) {
  const int64_t num_rows = row_weights.numel();
  const int64_t* run = runs.const_data_ptr<int64_t>();
  Weight* weight = row_weights.mutable_data_ptr<Weight>();
  std::fill(weight, weight + num_rows, Weight{0});
  const int64_t grain = std::max<int64_t>(1, kBlockPairs * runs.size(0) / std::max<int64_t>(num_rows, 1));
  torch::stable::parallel_for(0, runs.size(0), grain, [&](int64_t begin, int64_t end) {
    for (const int64_t* r = run + begin * kRunNumbers; r < run + end * kRunNumbers; r += kRunNumbers) {
      const size_t table = static_cast<size_t>(r[0]);
      const Weight* of_run = weights.empty() ? nullptr : weights[table].const_data_ptr<Weight>() + r[1];
      const auto write = [&](const auto* pairs) {
        write_run(pairs + r[1], of_run, r[2], r[4], top_k, source + r[3], weight + r[3]);
      };
      if (orders[table].scalar_type() == ScalarType::Int) {
        write(orders[table].const_data_ptr<int32_t>());
      } else {
        write(orders[table].const_data_ptr<int64_t>());
      }
    }
  });
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
  const ScalarType weight_type = weights.empty() ? ScalarType::Float : weights[0].scalar_type();
  FASTPAR_CHECK(weight_type == ScalarType::Float || weight_type == ScalarType::Double,
                "weights must be float32 or float64");
  for (size_t t = 0; t < weights.size(); ++t) {
    FASTPAR_CHECK(weights[t].scalar_type() == weight_type && weights[t].numel() == orders[t].numel(),
                  "weights must be of one dtype, and of the sizes of orders");
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
  Tensor source = empty_cpu({num_rows}, ScalarType::Long), row_weights = empty_cpu({num_rows}, weight_type);
  int64_t* to = source.mutable_data_ptr<int64_t>();
  std::fill(to, to + num_rows, int64_t{-1});
  if (weight_type == ScalarType::Double) {
    write_runs<double>(orders, weights, runs, top_k, to, row_weights);
  } else {
    write_runs<float>(orders, weights, runs, top_k, to, row_weights);
  }
  return {source, row_weights};
}

// ---- tokens by rank -----------------------------------------------------------------------------------------------

// Calls body(token, choice, rank, number) for every choice that goes somewhere: `number` of the expert on its rank.
template <typename Index, typename Body>
void for_each_choice(const Tensor& indices, int64_t size, int64_t per_rank, const Body& body) {
  const Index* data = indices.const_data_ptr<Index>();
  const int64_t top_k = indices.size(1), num_experts = size * per_rank;
  std::vector<int64_t> rank_of(static_cast<size_t>(num_experts));  // a division costs more than looking it up
  for (int64_t expert = 0; expert < num_experts; ++expert) rank_of[static_cast<size_t>(expert)] = expert / per_rank;
  for (int64_t token = 0; token < indices.size(0); ++token) {
    for_each_pair(data, token * top_k, (token + 1) * top_k, num_experts, [&](int64_t pair, int64_t expert) {
      const int64_t rank = rank_of[static_cast<size_t>(expert)];
      body(token, pair - token * top_k, rank, expert - rank * per_rank);
    });
  }
}

template <typename Index>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tokens_by_rank_as(const Tensor& indices, int64_t size,
                                                                     int64_t per_rank) {
  const int64_t tokens = indices.size(0), top_k = indices.size(1), width = std::min(top_k, size);
  Tensor sizes = empty_cpu({size}, ScalarType::Long);
  int64_t* count = sizes.mutable_data_ptr<int64_t>();
  std::fill(count, count + size, int64_t{0});
  std::vector<int64_t> last(static_cast<size_t>(size), -1);  // the last token that goes to each rank
  for_each_choice<Index>(indices, size, per_rank, [&](int64_t token, int64_t, int64_t rank, int64_t) {
    count[rank] += last[static_cast<size_t>(rank)] != token;
    last[static_cast<size_t>(rank)] = token;
  });
  std::vector<int64_t> next(static_cast<size_t>(size), 0);
  int64_t total = 0;
  for (int64_t rank = 0; rank < size; ++rank) {
    next[static_cast<size_t>(rank)] = total;
    total += count[rank];
  }

  Tensor sent = empty_cpu({total}, ScalarType::Long), experts = empty_cpu({total, top_k}, ScalarType::Long);
  Tensor rows_of_token = empty_cpu({tokens, width}, ScalarType::Long);
  Tensor values_of_pair = empty_cpu({tokens, top_k}, ScalarType::Long);
  int64_t* token_of = sent.mutable_data_ptr<int64_t>();
  int64_t* number_of = experts.mutable_data_ptr<int64_t>();
  int64_t* rows = rows_of_token.mutable_data_ptr<int64_t>();
  int64_t* value = values_of_pair.mutable_data_ptr<int64_t>();
  std::fill(number_of, number_of + experts.numel(), int64_t{-1});
  std::fill(rows, rows + rows_of_token.numel(), int64_t{-1});
  std::fill(value, value + values_of_pair.numel(), int64_t{-1});
  std::fill(last.begin(), last.end(), int64_t{-1});
  for_each_choice<Index>(indices, size, per_rank, [&](int64_t token, int64_t k, int64_t rank, int64_t number) {
    const size_t r = static_cast<size_t>(rank);
    if (last[r] != token) {
      last[r] = token;
      const int64_t row = next[r]++;
      token_of[row] = token;
      // Into its place among the token's rows, of which there are few: those of higher ranks are larger numbers.
      int64_t* at = rows + token * width;
      while (*at >= 0 && *at < row) ++at;
      for (int64_t moved = row; moved >= 0; ++at) std::swap(*at, moved);
    }
    const int64_t row = next[r] - 1;
    number_of[row * top_k + k] = number;
    value[token * top_k + k] = row * top_k + k;
  });
  return {sent, experts, sizes, rows_of_token, values_of_pair};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tokens_by_rank_cpu(const Tensor& indices_in, int64_t size,
                                                                      int64_t per_rank) {
  FASTPAR_CHECK(indices_in.dim() == 2, "indices must be [T, K], got ", indices_in.dim(), " dims");
  FASTPAR_CHECK(size >= 1 && per_rank >= 1, "size and per_rank must be at least 1, got ", size, " and ", per_rank);
  FASTPAR_CHECK(size <= kMaxExperts && per_rank <= kMaxExperts / size, "size * per_rank must be at most ", kMaxExperts,
                ", got ", size, " and ", per_rank);
  const Tensor indices = dense(indices_in);
  if (indices.scalar_type() == ScalarType::Int) return tokens_by_rank_as<int32_t>(indices, size, per_rank);
  FASTPAR_CHECK(indices.scalar_type() == ScalarType::Long, "indices must be int64 or int32");
  return tokens_by_rank_as<int64_t>(indices, size, per_rank);
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("moe_sort_pairs", TORCH_BOX(&fastpar::sort_pairs_cpu));
  m.impl("moe_pair_slots", TORCH_BOX(&fastpar::pair_slots_cpu));
  m.impl("moe_row_sources", TORCH_BOX(&fastpar::row_sources_cpu));
  m.impl("moe_tokens_by_rank", TORCH_BOX(&fastpar::tokens_by_rank_cpu));
}
