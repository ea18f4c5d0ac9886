// The collectives over the ranks of a World.
//
//   all_reduce       small: every rank reduces all inputs            one phase
//                    large: every rank reduces a part of each chunk  chunks + 1 phases, copies overlap the reduction
//                    in a region, in place: the same without copies  two phases
//   reduce_scatter   every rank reduces its own part                 a phase a chunk; one more from a region
//   all_gather       every rank reads all parts                      likewise
//   all_to_all, broadcast                                            a phase a chunk
//   reduce           as a large all_reduce, but only the root collects
//   barrier          one phase
//
// Whatever the algorithm, values are added in the order of ranks, 16-bit floats in float32 with one rounding at the
// end. All ranks get the same bits, and the algorithm does not show in them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/world.h"

namespace fastpar {

struct Call {
  CommOp op;
  uint8_t dtype;  // torch's ScalarType
  Reduction reduction;
  int32_t root;
  int64_t element_bytes;
  const void* input;
  void* output;
  int64_t count;                // elements of the input; all_gather: of the output
  const int64_t* sizes;         // by rank: reduce_scatter, all_gather: of the parts; all_to_all: sent to
  const int64_t* output_sizes;  // all_to_all: received from
  double timeout_seconds;
};

// Throws CommFailure. After kMismatch no data was touched and the world can be used further.
void run_collective(World& world, uint64_t sequence, const Call& call);

class Collective;

// A collective in two halves, for a caller who computes something in between: the constructor shows the first of the
// data to the other ranks, finish() does the rest on the caller's thread. In between nothing else may happen in the
// world, and nothing that waits for other ranks: they may wait for the rest.
class StartedCall {
 public:
  StartedCall(World& world, uint64_t sequence, const Call& call);  // copies the sizes
  ~StartedCall();
  void finish();

 private:
  World& world_;
  Call call_;
  std::vector<int64_t> sizes_, output_sizes_;
  std::unique_ptr<Collective> collective_;
};

// Whether this dtype can be reduced here.
bool can_reduce(uint8_t dtype);

// all_reduce: up to this many bytes every rank reduces everything. Set before the first call, and equal on all ranks:
// for tests and benches.
constexpr int64_t kOneShotBytes = 64 << 10;
// Bytes of a chunk of a large all_reduce, of all ranks' parts.
constexpr int64_t kChunkBytes = 1 << 20;

struct Tuning {
  int64_t one_shot_bytes = kOneShotBytes;
  int64_t chunk_bytes = kChunkBytes;
};
Tuning& tuning();

}  // namespace fastpar
