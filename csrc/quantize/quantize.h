// What the op layer (quantize.cpp) and the instruction-set versions (quantize_<isa>.cpp) agree on.
#pragma once

#include <cstdint>

namespace fastpar {

enum class CodeFormat { kInt8 = 0, kFloat8E4M3 = 1, kFloat8E5M2 = 2 };
constexpr int kNumCodeFormats = 3;

constexpr int64_t kBlockUnit = 64;  // sizes of blocks are multiples of it
constexpr int64_t kMaxBlock = 4096;
constexpr int64_t kMaxParts = 1024;
constexpr float kSmallestScale = 0x1p-126f;  // its reciprocal is finite
constexpr uint32_t kInfinityBits = 0x7f800000u;

// One part: `count` elements in blocks of `block`, the last of which may have fewer.
struct QuantizeArguments {
  const void* x;
  float* residual;  // of the same elements, or null; read and written
  int64_t count, block;
  float* scales;   // of each block
  uint8_t* codes;  // of each element
  bool stochastic;
  uint64_t seed;
  int64_t seed_offset;  // of the first block: its random numbers are those of (seed, seed_offset)
};

struct DequantizeArguments {
  const float* const* scales;  // by source
  const uint8_t* const* codes;
  int num_sources;
  int64_t count, block;
  bool average;
  float* out;
};

// One part with a scale that is given: chunks of kMaxBlock elements, each of which says what it has met.
struct ScaledArguments {
  const void* x;
  int64_t count;
  float scale;
  uint8_t* codes;
  uint32_t* largest;   // of each chunk: the bits of its largest |x|
  int32_t* saturated;  // of each chunk: elements that went to the largest code from beyond what rounds to it
};

// The values of one source, as float32, bfloat16 or float16.
struct DecodeArguments {
  const float* scales;
  const uint8_t* codes;
  int64_t count, block;
  void* out;
};

using QuantizeKernel = void (*)(const QuantizeArguments&, int64_t block_begin, int64_t block_end);
using DequantizeKernel = void (*)(const DequantizeArguments&, int64_t block_begin, int64_t block_end);
using ScaledKernel = void (*)(const ScaledArguments&, int64_t chunk_begin, int64_t chunk_end);
using LargestKernel = uint32_t (*)(const void* x, int64_t count);
using DecodeKernel = void (*)(const DecodeArguments&, int64_t block_begin, int64_t block_end);

// By CodeFormat, and FloatType up to float16.
struct QuantizeKernels {
  QuantizeKernel quantize[kNumCodeFormats][3];
  DequantizeKernel sum[kNumCodeFormats];
  DecodeKernel decode[kNumCodeFormats][3];
  ScaledKernel scaled[kNumCodeFormats][3];
  LargestKernel largest[3];  // the bits of the largest |x|
};

const QuantizeKernels& quantize_kernels();
// The format as an index of the tables above; throws for a block or a format that there is none of.
int check_code_format(int64_t block, int64_t format);

extern const QuantizeKernels kQuantizePortable;
#if FASTPAR_X86
extern const QuantizeKernels kQuantizeAvx2;
extern const QuantizeKernels kQuantizeAvx512;
#endif

}  // namespace fastpar
