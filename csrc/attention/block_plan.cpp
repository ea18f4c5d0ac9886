#include "attention/block_plan.h"

#include <algorithm>

namespace fastpar {
namespace {

// A tile's share of a pair of blocks.
struct Share {
  int32_t queries, keys, tile;
  int64_t visible;  // pairs of a query and a key
};

int64_t visible_pairs(int64_t q0, int64_t q1, int64_t k0, int64_t k1, int64_t low, int64_t high) {
  if (low <= k0 - (q1 - 1) && high >= k1 - 1 - q0) return (q1 - q0) * (k1 - k0);
  int64_t count = 0;
  for (int64_t q = q0; q < q1; ++q) count += std::max<int64_t>(0, std::min(k1, q + high + 1) - std::max(k0, q + low));
  return count;
}

void append_shares(const AttentionTile& t, int32_t index, std::vector<Share>* shares) {
  // Bands in distances of the numbers of rows: low <= k - q <= high.
  const int64_t shift = int64_t{t.k0} - t.q0, low = t.lo + shift, high = t.hi + shift;
  for (int64_t queries = t.q0 / kBlock; queries * kBlock < t.q1; ++queries) {
    const int64_t q0 = std::max<int64_t>(t.q0, queries * kBlock);
    const int64_t q1 = std::min<int64_t>(t.q1, (queries + 1) * kBlock);
    const int64_t first = std::max<int64_t>(t.k0, q0 + low), stop = std::min<int64_t>(t.k1, q1 + high);
    if (stop <= first) continue;
    for (int64_t keys = first / kBlock; keys * kBlock < stop; ++keys) {
      const int64_t k0 = std::max(first, keys * kBlock), k1 = std::min(stop, (keys + 1) * kBlock);
      const int64_t visible = visible_pairs(q0, q1, k0, k1, low, high);
      if (visible == 0) continue;
      shares->push_back({static_cast<int32_t>(queries), static_cast<int32_t>(keys), index, visible});
    }
  }
}

}  // namespace

BlockPlan::BlockPlan(const AttentionTile* tiles, int64_t num_tiles, int64_t num_queries, int64_t num_keys, int group)
    : tiles_(tiles) {
  std::vector<Share> shares;
  for (int64_t i = 0; i < num_tiles; ++i) append_shares(tiles[i], static_cast<int32_t>(i), &shares);
  const auto run_of = [group](const Share& s) { return group == 0 ? s.queries : s.keys / group; };
  const auto before = [&run_of](const Share& a, const Share& b) {
    if (run_of(a) != run_of(b)) return run_of(a) < run_of(b);
    if (a.queries != b.queries) return a.queries < b.queries;
    return a.keys != b.keys ? a.keys < b.keys : a.tile < b.tile;
  };
  if (!std::is_sorted(shares.begin(), shares.end(), before)) std::sort(shares.begin(), shares.end(), before);

  const int64_t query_blocks = (num_queries + kBlock - 1) / kBlock, key_blocks = (num_keys + kBlock - 1) / kBlock;
  const int64_t num_runs = group == 0 ? query_blocks : (key_blocks + group - 1) / group;
  offsets_.assign(static_cast<size_t>(num_runs) + 1, 0);
  for (size_t i = 0, stop = 0; i < shares.size(); i = stop) {
    int64_t visible = 0;
    for (stop = i;
         stop < shares.size() && shares[stop].queries == shares[i].queries && shares[stop].keys == shares[i].keys;
         ++stop) {
      visible += shares[stop].visible;
    }
    // A pair is in at most one tile, so the counts add up.
    const bool is_full = visible == int64_t{kBlock} * kBlock;
    const int32_t first = static_cast<int32_t>(pieces_.size());
    for (size_t s = i; s < stop && !is_full; ++s) pieces_.push_back(shares[s].tile);
    pairs_.push_back({shares[i].queries, shares[i].keys, first, static_cast<int32_t>(pieces_.size()) - first});
    offsets_[static_cast<size_t>(run_of(shares[i])) + 1] = static_cast<int64_t>(pairs_.size());
  }
  for (size_t r = 1; r < offsets_.size(); ++r) offsets_[r] = std::max(offsets_[r], offsets_[r - 1]);
}

}  // namespace fastpar
