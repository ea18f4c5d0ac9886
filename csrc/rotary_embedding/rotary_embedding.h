// What the op layer (rotary_embedding.cpp) and the instruction-set versions (rotary_embedding_<isa>.cpp) agree on.
#pragma once

#include <cstdint>

namespace fastpar {

// x and out are [batch, positions, heads, dim] in any order of the first three dims; strides in elements, by batch,
// position and head. `half` angles turn the first 2 * half elements of a head; the others are copied.
struct RotaryArguments {
  const void* x;
  int64_t x_strides[3];
  void* out;  // x itself, or memory that does not overlap it
  int64_t out_strides[3];
  const void* cos;  // [batch or 1, positions, half] float, or double for float64 x
  const void* sin;
  int64_t table_batch_stride;  // 0: one table for all
  int64_t positions, heads, dim, half;
  bool inverse;  // by -angle
  bool stream;
};

// `begin` and `end` count batch * positions.
using RotaryKernel = void (*)(const RotaryArguments&, int64_t begin, int64_t end);

// By FloatType. Entries may be null: float64 exists in the portable table only.
struct RotaryKernels {
  RotaryKernel halves[4];       // pairs (i, i + half)
  RotaryKernel interleaved[4];  // pairs (2i, 2i + 1)
};

extern const RotaryKernels kRotaryPortable;
#if FASTPAR_X86
extern const RotaryKernels kRotaryAvx2;
extern const RotaryKernels kRotaryAvx512;
extern const RotaryKernels kRotaryAvx512Bf16;
#endif

}  // namespace fastpar
