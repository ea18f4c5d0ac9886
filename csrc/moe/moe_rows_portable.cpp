// The version for any processor, and float64, which exists for tests and small checks.
#include "moe/moe_rows_kernel.h"

namespace fastpar {
namespace {

bool gather_rows_float64(const GatherRows& a, int64_t begin, int64_t end) {
  RowFinder find(a.tables);
  const double* scale = static_cast<const double*>(a.scale);
  for (int64_t i = begin; i < end; ++i) {
    const double* from = reinterpret_cast<const double*>(find(a.index[i]));
    double* to = reinterpret_cast<double*>(a.out + i * a.out_stride);
    const double factor = scale == nullptr ? 1.0 : scale[i];
    for (int64_t c = 0; c < a.width; ++c) to[c] = from == nullptr ? 0.0 : from[c] * factor;
  }
  return find.all_within();
}

bool sum_rows_float64(const SumRows& a, int64_t begin, int64_t end, Choice* scratch) {
  RowFinder find(a.tables);
  for (int64_t i = begin; i < end; ++i) {
    const int count = list_choices<double>(a, i, find, scratch);
    const double* add = a.add == nullptr ? nullptr : reinterpret_cast<const double*>(a.add + i * a.add_stride);
    double* to = reinterpret_cast<double*>(a.out + i * a.out_stride);
    for (int64_t c = 0; c < a.width; ++c) {
      double total = add == nullptr ? 0.0 : add[c];
      for (int k = 0; k < count; ++k) total += reinterpret_cast<const double*>(scratch[k].row)[c] * scratch[k].weight;
      to[c] = total;
    }
  }
  return find.all_within();
}

bool dot_rows_float64(const DotRows& a, int64_t begin, int64_t end) {
  RowFinder find(a.tables);
  double* out = static_cast<double*>(a.out);
  for (int64_t i = begin; i < end; ++i) {
    const double* row = reinterpret_cast<const double*>(a.rows + i * a.stride);
    const double* other = reinterpret_cast<const double*>(find(a.index[i]));
    double total = 0.0;
    for (int64_t c = 0; other != nullptr && c < a.width; ++c) total += row[c] * other[c];
    out[i] = total;
  }
  return find.all_within();
}

}  // namespace

extern const MoeRowsKernels kMoeRowsPortable =
    FASTPAR_MOE_ROWS_KERNELS(gather_rows_float64, sum_rows_float64, dot_rows_float64);

}  // namespace fastpar
