// CPU op layer of block-quantised gradients: check, choose the kernel, launch.
// The algebra is in quantize_kernel.h, the use in fastpar/comm/wire_formats.py.
//
// A message holds parts one after another, each in whole words of 8 bytes: the scales of its blocks, the codes of its
// elements, zeros.
#include "quantize/quantize.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/large_buffer.h"
#include "common/tensor_rows.h"

namespace fastpar {

const QuantizeKernels& quantize_kernels() {
#if FASTPAR_X86
  if (cpu_capability() >= CpuCapability::kAvx512) return kQuantizeAvx512;
  if (cpu_capability() == CpuCapability::kAvx2) return kQuantizeAvx2;
#endif
  return kQuantizePortable;
}

int check_code_format(int64_t block, int64_t format) {
  FASTPAR_CHECK(block > 0 && block <= kMaxBlock && block % kBlockUnit == 0, "block must be a multiple of ", kBlockUnit,
                " up to ", kMaxBlock, ", got ", block);
  FASTPAR_CHECK(format >= 0 && format < kNumCodeFormats,
                "format must be 0 (int8), 1 (float8_e4m3fn) or 2 (float8_e5m2), got ", format);
  return static_cast<int>(format);
}

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kWordBytes = 8;
constexpr int64_t kGrainElements = 1 << 15;

int64_t blocks_of(int64_t count, int64_t block) { return (count + block - 1) / block; }
int64_t scale_bytes(int64_t count, int64_t block) {
  return blocks_of(count, block) * static_cast<int64_t>(sizeof(float));
}
int64_t words_of(int64_t count, int64_t block) {
  return (scale_bytes(count, block) + count + kWordBytes - 1) / kWordBytes;
}
int64_t words_of(const std::vector<int64_t>& sizes, int64_t block) {
  int64_t words = 0;
  for (const int64_t count : sizes) words += words_of(count, block);
  return words;
}

void check_message(const Tensor& message, int64_t words) {
  FASTPAR_CHECK(message.scalar_type() == ScalarType::Long && message.is_contiguous() && message.numel() == words,
                "message must be ", words, " contiguous int64 words, got ", message.numel());
}

template <typename F>
void for_blocks(int64_t count, int64_t block, const F& work) {
  if (count == 0) return;
  torch::stable::parallel_for(0, blocks_of(count, block), kGrainElements / block + 1, work);
}

Tensor quantize_blocks_cpu(const Tensor& x, const std::optional<Tensor>& residual, std::vector<int64_t> sizes,
                           int64_t block, int64_t format_in, int64_t seed) {
  const int format = check_code_format(block, format_in);
  const FloatType type = float_type(x, "x");
  FASTPAR_CHECK(type != FloatType::kFloat64, "x must be float32, bfloat16 or float16");
  FASTPAR_CHECK(x.is_contiguous(), "x must be contiguous");
  FASTPAR_CHECK(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == x.numel(), "sizes must add up to the ",
                x.numel(), " elements of x");
  float* rest = nullptr;
  if (residual.has_value()) {
    FASTPAR_CHECK(
        residual->scalar_type() == ScalarType::Float && residual->is_contiguous() && residual->numel() == x.numel(),
        "residual must be contiguous float32 with as many elements as x");
    rest = static_cast<float*>(residual->mutable_data_ptr());
  }
  Tensor message = empty_cpu({words_of(sizes, block)}, ScalarType::Long);
  const QuantizeKernel kernel = quantize_kernels().quantize[format][static_cast<int>(type)];
  const char* source = static_cast<const char*>(x.const_data_ptr());
  char* target = static_cast<char*>(message.mutable_data_ptr());
  int64_t blocks_before = 0;
  for (const int64_t count : sizes) {
    const int64_t scales = scale_bytes(count, block), bytes = words_of(count, block) * kWordBytes;
    const QuantizeArguments arguments{source,
                                      rest,
                                      count,
                                      block,
                                      reinterpret_cast<float*>(target),
                                      reinterpret_cast<uint8_t*>(target + scales),
                                      seed >= 0,
                                      static_cast<uint64_t>(seed),
                                      blocks_before};
    for_blocks(count, block, [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
    if (count > 0) memset(target + scales + count, 0, static_cast<size_t>(bytes - scales - count));
    source += count * static_cast<int64_t>(x.element_size());
    if (rest != nullptr) rest += count;
    target += bytes;
    blocks_before += blocks_of(count, block);
  }
  return message;
}

// From `parts` sources, each of which has `count` elements at `message`; to `out`.
void sum_into(float* out, const char* message, int64_t count, int64_t parts, int64_t block, int format, bool average) {
  std::vector<const float*> scales;
  std::vector<const uint8_t*> codes;
  const int64_t bytes = words_of(count, block) * kWordBytes;
  for (int64_t part = 0; part < parts; ++part) {
    const char* start = message + part * bytes;
    scales.push_back(reinterpret_cast<const float*>(start));
    codes.push_back(reinterpret_cast<const uint8_t*>(start + scale_bytes(count, block)));
  }
  const DequantizeArguments arguments{scales.data(), codes.data(), static_cast<int>(parts), count, block, average, out};
  const DequantizeKernel kernel = quantize_kernels().sum[format];
  for_blocks(count, block, [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
}

Tensor sum_quantized_cpu(const Tensor& message, int64_t count, int64_t parts, int64_t block, int64_t format_in,
                         bool average) {
  const int format = check_code_format(block, format_in);
  FASTPAR_CHECK(parts > 0 && parts <= kMaxParts, "parts must be in 1..", kMaxParts, ", got ", parts);
  FASTPAR_CHECK(count >= 0, "count must not be negative, got ", count);
  check_message(message, parts * words_of(count, block));
  Tensor out = empty_cpu({count}, ScalarType::Float);
  sum_into(static_cast<float*>(out.mutable_data_ptr()), static_cast<const char*>(message.const_data_ptr()), count,
           parts, block, format, average);
  return out;
}

Tensor dequantize_parts_cpu(const Tensor& message, std::vector<int64_t> sizes, int64_t block, int64_t format_in) {
  const int format = check_code_format(block, format_in);
  check_message(message, words_of(sizes, block));
  Tensor out = empty_cpu({std::accumulate(sizes.begin(), sizes.end(), int64_t{0})}, ScalarType::Float);
  float* target = static_cast<float*>(out.mutable_data_ptr());
  const char* source = static_cast<const char*>(message.const_data_ptr());
  for (const int64_t count : sizes) {
    sum_into(target, source, count, 1, block, format, false);
    target += count;
    source += words_of(count, block) * kWordBytes;
  }
  return out;
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("quantize_blocks", TORCH_BOX(&fastpar::quantize_blocks_cpu));
  m.impl("sum_quantized", TORCH_BOX(&fastpar::sum_quantized_cpu));
  m.impl("dequantize_parts", TORCH_BOX(&fastpar::dequantize_parts_cpu));
}
