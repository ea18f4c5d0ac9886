// CPU op layer of tensors that are gathered as 8-bit codes: parts with one scale each, which is given (delayed
// scaling), and values of any message where they are wanted. The use is in fastpar/comm/scaled_codes.py and
// block_codes.py.
//
// A part in a message of scaled codes: the float32 scale, the codes, zeros up to a whole word of 8 bytes. A part
// without elements has no words.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/large_buffer.h"
#include "common/tensor_rows.h"
#include "quantize/quantize.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kWordBytes = 8;
constexpr int64_t kScaleBytes = sizeof(float);
constexpr int64_t kGrainChunks = 8;  // 2^15 elements
constexpr float kLargestCodes[kNumCodeFormats] = {127.0f, 448.0f, 57344.0f};

int64_t chunks_of(int64_t count) { return (count + kMaxBlock - 1) / kMaxBlock; }
int64_t words_of(int64_t count) { return count == 0 ? 0 : (kScaleBytes + count + kWordBytes - 1) / kWordBytes; }

float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

FloatType coded_type(const Tensor& x, const char* name) {
  const FloatType type = float_type(x, name);
  FASTPAR_CHECK(type != FloatType::kFloat64, name, " must be float32, bfloat16 or float16");
  FASTPAR_CHECK(x.is_contiguous(), name, " must be contiguous");
  return type;
}

uint32_t largest_of(const char* x, int64_t count, int64_t itemsize, LargestKernel kernel) {
  std::vector<uint32_t> largest(static_cast<size_t>(chunks_of(count)), 0);
  torch::stable::parallel_for(0, chunks_of(count), kGrainChunks, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kMaxBlock;
    largest[static_cast<size_t>(begin)] = kernel(x + first * itemsize, std::min(end * kMaxBlock, count) - first);
  });
  return *std::max_element(largest.begin(), largest.end());
}

struct Met {
  float largest;  // NaN if anything is not finite
  int64_t saturated;
};

// Writes one part of a message.
Met write_part(const char* x, int64_t count, int64_t itemsize, float scale, int format, int type, char* target) {
  const QuantizeKernels& kernels = quantize_kernels();
  if (!(scale > 0.0f)) {
    const uint32_t bits = largest_of(x, count, itemsize, kernels.largest[type]);
    scale = bits < kInfinityBits ? float_of(bits) / kLargestCodes[format] : kSmallestScale;
  }
  scale = std::max(scale, kSmallestScale);
  const int64_t chunks = chunks_of(count);
  std::vector<uint32_t> largest(static_cast<size_t>(chunks));
  std::vector<int32_t> saturated(static_cast<size_t>(chunks));
  uint8_t* const codes = reinterpret_cast<uint8_t*>(target + kScaleBytes);
  const ScaledArguments arguments{x, count, scale, codes, largest.data(), saturated.data()};
  const ScaledKernel kernel = kernels.scaled[format][type];
  torch::stable::parallel_for(0, chunks, kGrainChunks,
                              [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  const uint32_t bits = *std::max_element(largest.begin(), largest.end());
  const bool is_finite = bits < kInfinityBits;
  if (!is_finite) {  // visible at every receiver
    scale = std::nanf("");
    memset(codes, 0, static_cast<size_t>(count));
  }
  memcpy(target, &scale, sizeof scale);
  memset(codes + count, 0, static_cast<size_t>(words_of(count) * kWordBytes - kScaleBytes - count));
  if (!is_finite) return {scale, 0};
  return {float_of(bits), std::accumulate(saturated.begin(), saturated.end(), int64_t{0})};
}

// (message, largest |x| of each part, elements that saturated of each part)
std::tuple<Tensor, Tensor, Tensor> quantize_scaled_cpu(const Tensor& x, const Tensor& scales,
                                                       std::vector<int64_t> sizes, int64_t format_in) {
  const int format = check_code_format(kBlockUnit, format_in);
  const int type = static_cast<int>(coded_type(x, "x"));
  const int64_t parts = static_cast<int64_t>(sizes.size());
  FASTPAR_CHECK(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == x.numel(), "sizes must add up to the ",
                x.numel(), " elements of x");
  FASTPAR_CHECK(scales.scalar_type() == ScalarType::Float && scales.is_contiguous() && scales.numel() == parts,
                "scales must be ", parts, " contiguous float32 numbers, one for each part, got ", scales.numel());
  int64_t words = 0;
  for (const int64_t count : sizes) words += words_of(count);
  Tensor message = empty_cpu({words}, ScalarType::Long);
  Tensor largest = empty_cpu({parts}, ScalarType::Float);
  Tensor saturated = empty_cpu({parts}, ScalarType::Long);
  const char* source = static_cast<const char*>(x.const_data_ptr());
  char* target = static_cast<char*>(message.mutable_data_ptr());
  const float* const given = static_cast<const float*>(scales.const_data_ptr());
  float* const amax = static_cast<float*>(largest.mutable_data_ptr());
  int64_t* const beyond = static_cast<int64_t*>(saturated.mutable_data_ptr());
  const int64_t itemsize = static_cast<int64_t>(x.element_size());
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t count = sizes[static_cast<size_t>(part)];
    const Met met = count == 0 ? Met{0.0f, 0} : write_part(source, count, itemsize, given[part], format, type, target);
    amax[part] = met.largest;
    beyond[part] = met.saturated;
    source += count * itemsize;
    target += words_of(count) * kWordBytes;
  }
  return {message, largest, saturated};
}

// The parts of a message go to `outs`, which have as many elements as they; block 0: parts with one scale each.
void dequantize_into_cpu(const Tensor& message, std::vector<Tensor> outs, int64_t block, int64_t format_in) {
  const int format = check_code_format(block == 0 ? kBlockUnit : block, format_in);
  const auto scales_of = [&](int64_t count) {
    return block == 0 ? std::min<int64_t>(count, 1) : (count + block - 1) / block;
  };
  const auto words = [&](int64_t count) {
    return (scales_of(count) * kScaleBytes + count + kWordBytes - 1) / kWordBytes;
  };
  int64_t total = 0;
  for (const Tensor& out : outs) total += words(out.numel());
  FASTPAR_CHECK(message.scalar_type() == ScalarType::Long && message.is_contiguous() && message.numel() == total,
                "message must be ", total, " contiguous int64 words, got ", message.numel());
  const char* source = static_cast<const char*>(message.const_data_ptr());
  std::vector<float> same;
  for (const Tensor& out : outs) {
    const int type = static_cast<int>(coded_type(out, "outs"));
    const int64_t count = out.numel(), size = block == 0 ? kMaxBlock : block, blocks = (count + size - 1) / size;
    if (count == 0) continue;
    const float* scales = reinterpret_cast<const float*>(source);
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(source + scales_of(count) * kScaleBytes);
    if (block == 0) {
      same.assign(static_cast<size_t>(blocks), scales[0]);
      scales = same.data();
    }
    const DecodeArguments arguments{scales, codes, count, size, out.mutable_data_ptr()};
    const DecodeKernel kernel = quantize_kernels().decode[format][type];
    torch::stable::parallel_for(0, blocks, kGrainChunks * kMaxBlock / size,
                                [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
    source += words(count) * kWordBytes;
  }
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("quantize_scaled", TORCH_BOX(&fastpar::quantize_scaled_cpu));
  m.impl("dequantize_into", TORCH_BOX(&fastpar::dequantize_into_cpu));
}
