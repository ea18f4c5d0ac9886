// CPU op layer of rows on their way to experts and back: check, return early on empty, choose the kernel, launch.
// What they mean is in fastpar/reference/moe_rows.py, the numerics in moe_rows_kernel.h.
#include "moe/moe_rows.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/large_buffer.h"
#include "common/tensor_rows.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Without the version for AVX512-BF16, whose conversion flushes subnormal numbers: all give the same bits.
const MoeRowsKernels& kernels(FloatType type) {
#if FASTPAR_X86
  if (type != FloatType::kFloat64) {
    if (cpu_capability() >= CpuCapability::kAvx512) return kMoeRowsAvx512;
    if (cpu_capability() == CpuCapability::kAvx2) return kMoeRowsAvx2;
  }
#endif
  return kMoeRowsPortable;
}

// Bytes between rows.
int64_t row_stride(const Tensor& x) {
  return (x.size(0) > 1 ? x.stride(0) : x.size(1)) * static_cast<int64_t>(x.element_size());
}

// Tables, checked, whose memory lives as long as this does.
class Tables {
 public:
  explicit Tables(const std::vector<Tensor>& tables) {
    FASTPAR_CHECK(!tables.empty(), "tables must not be empty");
    begins_.push_back(0);
    for (const Tensor& x : tables) {
      FASTPAR_CHECK(x.dim() == 2, "tables must be [n, H], got ", x.dim(), " dims");
      FASTPAR_CHECK(x.size(1) == tables[0].size(1), "tables must have rows of one width, got ", tables[0].size(1),
                    " and ", x.size(1));
      FASTPAR_CHECK(x.scalar_type() == tables[0].scalar_type(), "tables must have one dtype");
      kept_.push_back(with_dense_rows(x));
      data_.push_back(static_cast<const char*>(kept_.back().const_data_ptr()));
      strides_.push_back(row_stride(kept_.back()));
      begins_.push_back(begins_.back() + x.size(0));
    }
  }

  RowTables view() const { return {static_cast<int>(kept_.size()), data_.data(), strides_.data(), begins_.data()}; }
  const Tensor& first() const { return kept_[0]; }
  int64_t rows() const { return begins_.back(); }
  int64_t width() const { return kept_[0].size(1); }
  int64_t row_bytes() const { return width() * static_cast<int64_t>(kept_[0].element_size()); }

 private:
  std::vector<Tensor> kept_;
  std::vector<const char*> data_;
  std::vector<int64_t> strides_, begins_;
};

Tensor checked_index(const Tensor& index, int64_t dims) {
  FASTPAR_CHECK(index.scalar_type() == ScalarType::Long, "index must be int64");
  FASTPAR_CHECK(index.dim() == dims, "index must have ", dims, " dims, got ", index.dim());
  return index.is_contiguous() ? index : torch::stable::contiguous(index);
}

void check_out(const Tensor& out, int64_t rows, int64_t width) {
  FASTPAR_CHECK(out.dim() == 2 && out.size(0) == rows && out.size(1) == width, "out must be [", rows, ", ", width, "]");
  FASTPAR_CHECK(width <= 1 || out.stride(1) == 1, "the rows of out must be contiguous");
}

// Of pairs or rows: float32, or float64 where the tables are.
std::optional<Tensor> checked_factors(const std::optional<Tensor>& factors, const Tensor& index, FloatType type,
                                      const char* name) {
  if (!factors.has_value()) return factors;
  const ScalarType wanted = type == FloatType::kFloat64 ? ScalarType::Double : ScalarType::Float;
  FASTPAR_CHECK(factors->scalar_type() == wanted, name, " must be float32, or float64 for float64 tables");
  FASTPAR_CHECK(shape_of(*factors) == shape_of(index), name, " must have the shape of index");
  return factors->is_contiguous() ? factors : torch::stable::contiguous(*factors);
}

const void* data_of(const std::optional<Tensor>& x) { return x.has_value() ? x->const_data_ptr() : nullptr; }

[[noreturn]] void throw_bad_index(const Tensor& index, int64_t rows) {
  const int64_t* values = index.const_data_ptr<int64_t>();
  const int64_t bad = *std::find_if(values, values + index.numel(), [&](int64_t value) { return value >= rows; });
  FASTPAR_CHECK(false, "index has ", bad, ", but the tables have ", rows, " rows");
}

bool is_streamed(const Tensor& out) {
  return out.numel() * static_cast<int64_t>(out.element_size()) > kStreamedOutputBytes;
}

// kernel(begin, end) over all rows in parallel.
template <typename Kernel>
void launch(const Tensor& index, int64_t rows, int64_t row_elements, const Tables& tables, const Kernel& kernel) {
  std::atomic<bool> all_within{true};
  torch::stable::parallel_for(0, rows, row_grain(row_elements), [&](int64_t begin, int64_t end) {
    if (!kernel(begin, end)) all_within.store(false, std::memory_order_relaxed);
  });
  if (!all_within) throw_bad_index(index, tables.rows());
}

void gather_rows_cpu(std::vector<Tensor> list, const Tensor& index_in, const std::optional<Tensor>& scale_in,
                     Tensor out) {
  const Tables tables(list);
  const Tensor index = checked_index(index_in, 1);
  const int64_t rows = index.numel(), width = tables.width();
  check_out(out, rows, width);
  if (out.numel() == 0) return;
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t stride = row_stride(out);
  if (!scale_in.has_value() && out.scalar_type() == tables.first().scalar_type()) {
    const CopyRows arguments{tables.view(),   index.const_data_ptr<int64_t>(), tables.row_bytes(), to, stride,
                             is_streamed(out)};
    const CopyRowsKernel kernel = kernels(FloatType::kFloat32).copy;
    launch(index, rows, width, tables, [&](int64_t begin, int64_t end) { return kernel(arguments, begin, end); });
    return;
  }
  const FloatType type = float_type(tables.first(), "tables"), out_type = float_type(out, "out");
  const GatherRowsKernel kernel = kernels(type).gather[static_cast<int>(type)][static_cast<int>(out_type)];
  FASTPAR_CHECK(kernel != nullptr, "out must be float64 where the tables are, and only there");
  const std::optional<Tensor> scale = checked_factors(scale_in, index, type, "scale");
  const GatherRows arguments{tables.view(),   index.const_data_ptr<int64_t>(), data_of(scale), width, to, stride,
                             is_streamed(out)};
  launch(index, rows, width, tables, [&](int64_t begin, int64_t end) { return kernel(arguments, begin, end); });
}

void sum_rows_cpu(std::vector<Tensor> list, const Tensor& index_in, const std::optional<Tensor>& weights_in,
                  const std::optional<Tensor>& add_in, Tensor out) {
  const Tables tables(list);
  const Tensor index = checked_index(index_in, 2);
  const int64_t rows = index.size(0), choices = index.size(1), width = tables.width();
  check_out(out, rows, width);
  const FloatType type = float_type(tables.first(), "tables"), out_type = float_type(out, "out");
  const SumRowsKernel kernel = kernels(type).sum[static_cast<int>(type)][static_cast<int>(out_type)];
  FASTPAR_CHECK(kernel != nullptr, "out must be float64 where the tables are, and only there");
  const std::optional<Tensor> weights = checked_factors(weights_in, index, type, "weights");
  FloatType add_type = type;
  std::optional<Tensor> add;
  if (add_in.has_value()) {
    FASTPAR_CHECK(shape_of(*add_in) == shape_of(out), "add must have the shape of out");
    add_type = float_type(*add_in, "add");
    FASTPAR_CHECK((add_type == FloatType::kFloat64) == (type == FloatType::kFloat64),
                  "add must be float64 where the tables are, and only there");
    add = with_dense_rows(*add_in);
  }
  if (out.numel() == 0) return;
  const SumRows arguments{tables.view(),
                          index.const_data_ptr<int64_t>(),
                          choices,
                          data_of(weights),
                          static_cast<const char*>(data_of(add)),
                          add.has_value() ? row_stride(*add) : 0,
                          static_cast<int>(add_type),
                          width,
                          static_cast<char*>(out.mutable_data_ptr()),
                          row_stride(out),
                          is_streamed(out)};
  launch(index, rows, width * (choices + 1), tables, [&](int64_t begin, int64_t end) {
    std::vector<Choice> scratch(static_cast<size_t>(2 * choices));
    return kernel(arguments, begin, end, scratch.data());
  });
}

Tensor dot_rows_cpu(const Tensor& rows_in, std::vector<Tensor> list, const Tensor& index_in) {
  const Tables tables(list);
  const Tensor index = checked_index(index_in, 1);
  FASTPAR_CHECK(rows_in.dim() == 2 && rows_in.size(0) == index.numel() && rows_in.size(1) == tables.width(),
                "rows must be [", index.numel(), ", ", tables.width(), "]");
  const FloatType rows_type = float_type(rows_in, "rows"), type = float_type(tables.first(), "tables");
  const DotRowsKernel kernel = kernels(type).dot[static_cast<int>(rows_type)][static_cast<int>(type)];
  FASTPAR_CHECK(kernel != nullptr, "rows must be float64 where the tables are, and only there");
  Tensor out = empty_cpu({index.numel()}, type == FloatType::kFloat64 ? ScalarType::Double : ScalarType::Float);
  if (out.numel() == 0) return out;
  const Tensor rows = with_dense_rows(rows_in);
  const DotRows arguments{static_cast<const char*>(rows.const_data_ptr()),
                          row_stride(rows),
                          tables.view(),
                          index.const_data_ptr<int64_t>(),
                          tables.width(),
                          out.mutable_data_ptr()};
  launch(index, index.numel(), 2 * tables.width(), tables,
         [&](int64_t begin, int64_t end) { return kernel(arguments, begin, end); });
  return out;
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("moe_gather_rows", TORCH_BOX(&fastpar::gather_rows_cpu));
  m.impl("moe_sum_rows", TORCH_BOX(&fastpar::sum_rows_cpu));
  m.impl("moe_dot_rows", TORCH_BOX(&fastpar::dot_rows_cpu));
}
