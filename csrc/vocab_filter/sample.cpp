// Sampling by the Gumbel maximum: the token with the largest z + g, where g = -log(-log u) and u is a hash of the seed,
// the row and the token's global id. A shard needs no other to draw its noise; see fastpar/reference/vocab_sample.py.
//
// Two logarithms an element would be most of the time. -log(-log u) <= -log(1 - u), and the number of leading ones of u
// bounds that, so all but a few dozen elements a row are passed over after the hash and one comparison.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/large_buffer.h"
#include "vocab_filter/dispatch.h"
#include "vocab_filter/ordered_key.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr uint64_t kGoldenGamma = 0x9E3779B97F4A7C15;  // SplitMix64 (Steele et al. 2014)
constexpr double kLn2 = 0.6931471805599453;

inline uint64_t splitmix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// Not below -log(-log u): 1 - u is at least half the power of two below its top bit. A hair is added for rounding.
inline double noise_bound(uint64_t hash) {
  const uint64_t complement = ~hash >> 12;  // (1 - u) * 2^52, less a half
  const int bits = complement == 0 ? 0 : 64 - __builtin_clzll(complement);
  return (53 - bits) * kLn2 + 1e-6;
}

inline double noise(uint64_t hash) {
  const double u = (static_cast<double>(hash >> 12) + 0.5) * 0x1p-52;
  return -std::log(-std::log(u));
}

// The best score and its column, -1 without one; (NaN, -1) if there is a NaN.
template <typename T>
void sample_row(const T* x, int64_t vocab, uint64_t row_seed, int64_t vocab_start, double temperature, double* score,
                int64_t* id) {
  double best = -std::numeric_limits<double>::infinity();
  int64_t chosen = -1;
  bool has_nan = false;
  for (int64_t i = 0; i < vocab; ++i) {
    const double z = to_wide(x[i]) / temperature;
    has_nan |= z != z;
    const uint64_t hash = splitmix(row_seed + (static_cast<uint64_t>(vocab_start + i) + 1) * kGoldenGamma);
    if (!(z + noise_bound(hash) > best)) continue;
    const double candidate = z + noise(hash);
    if (candidate > best) {
      best = candidate;
      chosen = i;
    }
  }
  *score = has_nan ? std::numeric_limits<double>::quiet_NaN() : best;
  *id = has_nan || chosen < 0 ? -1 : vocab_start + chosen;
}

std::tuple<Tensor, Tensor> gumbel_argmax_cpu(const Tensor& logits_in, int64_t seed, int64_t vocab_start,
                                             int64_t first_row, double temperature) {
  FASTPAR_CHECK(logits_in.dim() >= 1, "logits must have at least one dim, the vocabulary");
  const Tensor logits = with_dense_rows(logits_in);
  const int64_t vocab = last_size(logits), rows = count_rows(logits);
  Tensor scores = empty_cpu({rows}, ScalarType::Double), ids = empty_cpu({rows}, ScalarType::Long);
  double* score_out = scores.mutable_data_ptr<double>();
  int64_t* id_out = ids.mutable_data_ptr<int64_t>();
  const StridedRows layout = strided_rows(logits);
  dispatch_float(logits, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(logits.const_data_ptr());
    torch::stable::parallel_for(0, rows, row_grain(vocab), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const uint64_t row_seed =
            splitmix(static_cast<uint64_t>(seed) + (static_cast<uint64_t>(first_row + row) + 1) * kGoldenGamma);
        sample_row(from + row_start(layout, row), vocab, row_seed, vocab_start, temperature, score_out + row,
                   id_out + row);
      }
    });
  });
  return {scores, ids};
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) { m.impl("vocab_gumbel_argmax", TORCH_BOX(&fastpar::gumbel_argmax_cpu)); }
