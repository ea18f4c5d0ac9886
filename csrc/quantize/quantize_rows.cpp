// CPU op layer of block-quantised tensors: codes and scales of blocks along the last dim, as tensors of their own.
// The algebra is in quantize_kernel.h, the contract in fastpar/ops/quantize.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
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

constexpr int64_t kGrainElements = 1 << 15;

// A tensor as runs of whole blocks but for the last one of each. Where rows are whole blocks and adjacent, all of it is
// one run: short rows then share tasks, and long ones are shared between threads.
struct Runs {
  int64_t count, elements, blocks;
};

Runs runs_of(const Tensor& x, int64_t block, bool adjacent) {
  const int64_t rows = count_rows(x), columns = last_size(x), blocks = (columns + block - 1) / block;
  if (adjacent && columns % block == 0) return {1, rows * columns, rows * blocks};
  return {rows, columns, blocks};
}

// `work` gets a run and blocks of it.
template <typename F>
void for_runs(const Runs& runs, int64_t block, const F& work) {
  if (runs.count == 0 || runs.elements == 0) return;
  if (runs.count == 1) {
    torch::stable::parallel_for(0, runs.blocks, kGrainElements / block + 1,
                                [&](int64_t begin, int64_t end) { work(0, begin, end); });
    return;
  }
  torch::stable::parallel_for(0, runs.count, row_grain(runs.elements), [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) work(run, 0, runs.blocks);
  });
}

// (codes [..., K] as bytes, scales [..., ceil(K / block)] float32)
std::tuple<Tensor, Tensor> quantize_rows_cpu(const Tensor& x_in, int64_t block, int64_t format_in, int64_t seed) {
  const int format = check_code_format(block, format_in);
  const FloatType type = float_type(x_in, "x");
  FASTPAR_CHECK(type != FloatType::kFloat64, "x must be float32, bfloat16 or float16");
  FASTPAR_CHECK(x_in.dim() >= 1, "x must have at least one dim, the one that is cut into blocks");
  const Tensor x = with_dense_rows(x_in);
  const Runs runs = runs_of(x, block, x.is_contiguous());
  std::vector<int64_t> scale_shape = shape_of(x);
  scale_shape.back() = (last_size(x) + block - 1) / block;
  Tensor codes = empty_cpu(shape_of(x), ScalarType::Byte), scales = empty_cpu(scale_shape, ScalarType::Float);
  const QuantizeKernel kernel = quantize_kernels().quantize[format][static_cast<int>(type)];
  const StridedRows rows = strided_rows(x);
  const char* source = static_cast<const char*>(x.const_data_ptr());
  uint8_t* code = static_cast<uint8_t*>(codes.mutable_data_ptr());
  float* scale = static_cast<float*>(scales.mutable_data_ptr());
  const int64_t element = static_cast<int64_t>(x.element_size());
  for_runs(runs, block, [&](int64_t run, int64_t begin, int64_t end) {
    const int64_t offset = runs.count == 1 ? 0 : row_start(rows, run);
    const QuantizeArguments arguments{source + offset * element,
                                      nullptr,
                                      runs.elements,
                                      block,
                                      scale + run * runs.blocks,
                                      code + run * runs.elements,
                                      seed >= 0,
                                      static_cast<uint64_t>(seed),
                                      run * runs.blocks};
    kernel(arguments, begin, end);
  });
  return {codes, scales};
}

Tensor dequantize_rows_cpu(const Tensor& codes_in, const Tensor& scales_in, int64_t block, int64_t format_in,
                           ScalarType dtype) {
  const int format = check_code_format(block, format_in);
  FASTPAR_CHECK(codes_in.scalar_type() == ScalarType::Byte, "codes must be uint8");
  FASTPAR_CHECK(scales_in.scalar_type() == ScalarType::Float, "scales must be float32");
  FASTPAR_CHECK(codes_in.dim() >= 1, "codes must have at least one dim");
  std::vector<int64_t> scale_shape = shape_of(codes_in);
  scale_shape.back() = (last_size(codes_in) + block - 1) / block;
  FASTPAR_CHECK(shape_of(scales_in) == scale_shape, "scales must have one number for every ", block, " codes of a row");
  FASTPAR_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                "dtype must be float32, bfloat16 or float16");
  const Tensor codes = codes_in.is_contiguous() ? codes_in : torch::stable::contiguous(codes_in);
  const Tensor scales = scales_in.is_contiguous() ? scales_in : torch::stable::contiguous(scales_in);
  const Runs runs = runs_of(codes, block, true);
  Tensor out = empty_cpu(shape_of(codes), dtype);
  const DecodeKernel kernel = quantize_kernels().decode[format][static_cast<int>(float_type(out, "out"))];
  const int64_t element = static_cast<int64_t>(out.element_size());
  const float* scale = static_cast<const float*>(scales.const_data_ptr());
  const uint8_t* code = static_cast<const uint8_t*>(codes.const_data_ptr());
  char* target = static_cast<char*>(out.mutable_data_ptr());
  for_runs(runs, block, [&](int64_t run, int64_t begin, int64_t end) {
    kernel({scale + run * runs.blocks, code + run * runs.elements, runs.elements, block,
            target + run * runs.elements * element},
           begin, end);
  });
  return out;
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("quantize_rows", TORCH_BOX(&fastpar::quantize_rows_cpu));
  m.impl("dequantize_rows", TORCH_BOX(&fastpar::dequantize_rows_cpu));
}
