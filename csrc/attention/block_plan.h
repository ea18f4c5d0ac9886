// Tiles of any size cut into pairs of blocks on a fixed grid, so that kernels see full blocks and masked ones, whatever
// the tiles are: results depend on which pairs are visible and on nothing else of the table.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention.h"

namespace fastpar {

class BlockPlan {
 public:
  // `group` 0: runs by block of queries; else by groups of that many key blocks.
  BlockPlan(const AttentionTile* tiles, int64_t num_tiles, int64_t num_queries, int64_t num_keys, int group);

  BlockRuns runs() const { return {offsets_.data(), pairs_.data(), pieces_.data(), tiles_}; }

 private:
  const AttentionTile* tiles_;
  std::vector<int64_t> offsets_;
  std::vector<BlockPair> pairs_;
  std::vector<int32_t> pieces_;
};

}  // namespace fastpar
