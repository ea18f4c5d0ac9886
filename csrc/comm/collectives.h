// The collectives over the ranks of a World.
//
//   all_reduce       small: every rank reduces all inputs            one phase
//                    large: every rank reduces a part of each chunk  chunks + 1 phases, copies overlap the reduction
//                    in a region, in place: the same without copies  two phases
//   reduce_scatter   every rank reduces its own part                 a phase a chunk; one more from a region
//                    (of 16-bit floats also to float32, not rounded)
//   all_gather       every rank reads all parts                      likewise
//   all_to_all, broadcast                                            a phase a chunk
//   reduce           as a large all_reduce, but only the root collects
//   barrier          one phase
//
// Whatever the algorithm, values are added in the order of ranks, 16-bit floats in float32 with one rounding at the
// end. All ranks get the same bits, and the algorithm does not show in them.
//
// Note: past the caches. The buffers are written in turns by their owner and read by the others, so a plain store finds
// its line in another core's cache and has to fetch it, for nothing, and take it away. What that costs depends on where
// the cores are: a virtual machine's processors may share a last-level cache in one minute and not in the next, and
// cores of two chiplets or sockets never do. Measured on two of them (Zen 4), nanoseconds a line of 64 bytes:
//
//                                       one cache between them    not     (a line goes there and back in 60 and 300)
//     plain store, and the other's read        8.4 + 0.9        28 + 2.5
//     past the caches, and the read            2.3 + 1.8        2.3 + 1.8
//
// So all that is shown to others, from a few kilobytes on, is stored past the caches. all_reduce, two ranks, us:
//
//                              64 KB     256 KB     1 MB      4 MB      16 MB
//     plain, one cache           9         50         53       172      1500
//     plain, not                33        180       1400      2100      9600
//     past the caches, either    6         23      62-79   230-310      1700
//
// Neither sleeping, nor the place of the pages, nor addresses that are equal modulo 4096 had a part in it.
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
