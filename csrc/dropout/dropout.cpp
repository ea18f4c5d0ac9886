// Dropout on a block of a larger tensor; the mask is a hash of the seed and the element's global index.
// The formula is in fastpar/reference/dropout.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Dispatch_v2.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/checks.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr uint64_t kGoldenGamma = 0x9E3779B97F4A7C15;  // SplitMix64 (Steele et al. 2014)
constexpr int64_t kGrainElements = 16384;

inline uint64_t splitmix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// Where the rows (runs along the last dim) of the block start in the global tensor.
struct BlockIndex {
  std::vector<int64_t> sizes, offset, global_shape;

  uint64_t row_start(int64_t row) const {
    const int64_t dims = static_cast<int64_t>(sizes.size());
    uint64_t index = static_cast<uint64_t>(offset[dims - 1]);
    uint64_t stride = static_cast<uint64_t>(global_shape[dims - 1]);
    for (int64_t d = dims - 2; d >= 0; --d) {
      index += static_cast<uint64_t>(offset[d] + row % sizes[d]) * stride;
      stride *= static_cast<uint64_t>(global_shape[d]);
      row /= sizes[d];
    }
    return index;
  }
};

template <typename T>
void dropout_row(const T* x, T* out, int64_t n, uint64_t start, uint64_t seed, uint64_t threshold, double scale) {
  using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;
  uint64_t z = seed + (start + 1) * kGoldenGamma;
  for (int64_t i = 0; i < n; ++i, z += kGoldenGamma) {
    const bool keep = (splitmix(z) >> 40) >= threshold;
    out[i] = keep ? static_cast<T>(static_cast<Accumulate>(x[i]) * static_cast<Accumulate>(scale)) : static_cast<T>(0);
  }
}

Tensor sharded_dropout_cpu(const Tensor& x_in, double p, int64_t seed, std::vector<int64_t> offset,
                           std::vector<int64_t> global_shape) {
  FASTPAR_CHECK(p >= 0.0 && p <= 1.0, "p must be between 0 and 1, got ", p);
  FASTPAR_CHECK(static_cast<int64_t>(offset.size()) == x_in.dim() && offset.size() == global_shape.size(),
                "offset and global_shape need ", x_in.dim(), " entries, got ", offset.size(), " and ",
                global_shape.size());
  const Tensor x = x_in.is_contiguous() ? x_in : torch::stable::contiguous(x_in);
  Tensor out = torch::stable::new_empty(x, {x.sizes().begin(), x.sizes().end()});
  const int64_t numel = x.numel();
  if (numel == 0) return out;
  const uint64_t threshold = static_cast<uint64_t>(std::nearbyint(p * (1 << 24)));
  const double scale = p < 1.0 ? 1.0 / (1.0 - p) : 0.0;
  BlockIndex index{{x.sizes().begin(), x.sizes().end()}, offset, global_shape};
  if (index.sizes.empty()) index = {{1}, {0}, {1}};
  const int64_t columns = index.sizes.back(), rows = numel / columns;
  const int64_t grain = columns >= kGrainElements ? 1 : kGrainElements / columns;
  THO_DISPATCH_V2(x.scalar_type(), "sharded_dropout", AT_WRAP([&] {
                    const scalar_t* in = x.const_data_ptr<scalar_t>();
                    scalar_t* o = out.mutable_data_ptr<scalar_t>();
                    torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
                      for (int64_t row = begin; row < end; ++row) {
                        dropout_row(in + row * columns, o + row * columns, columns, index.row_start(row),
                                    static_cast<uint64_t>(seed), threshold, scale);
                      }
                    });
                  }),
                  ScalarType::Float, ScalarType::Double, ScalarType::BFloat16, ScalarType::Half);
  return out;
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) { m.impl("sharded_dropout", TORCH_BOX(&fastpar::sharded_dropout_cpu)); }
