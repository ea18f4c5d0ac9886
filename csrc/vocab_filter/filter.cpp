// The two passes of sampling filters over a shard of the vocabulary: a histogram of probability mass by value, which
// finds the value where the nucleus ends, and the copy that leaves the rest out.
//
// Mass is counted in integers, exp(z - maximum) in units of 2^-mass_bits, so that sums do not depend on their order:
// the same cut for any number of ranks. mass_bits leaves room for the whole vocabulary in 63 bits.
//
// The exponential is the C library's in double. Most elements need it in the first pass only; later ones read keys.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/checks.h"
#include "common/large_buffer.h"
#include "vocab_filter/dispatch.h"
#include "vocab_filter/ordered_key.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kDigitBits = 8;
constexpr int64_t kBins = int64_t{1} << kDigitBits;

// Adds every element whose key begins with `prefix` to the bin of its next digit: its mass, and one to the count.
template <typename T>
void histogram_row(const T* x, int64_t vocab, double maximum, uint64_t prefix, int digit, int mass_bits,
                   int64_t* masses, int64_t* counts) {
  constexpr int kKeyBits = 8 * sizeof(T);
  const int shift = kKeyBits - kDigitBits * (digit + 1);
  const double lowest = -0.7 * (mass_bits + 1);  // below, a mass rounds to 0
  const double unit = std::ldexp(1.0, mass_bits);
  for (int64_t i = 0; i < vocab; ++i) {
    const uint64_t key = ordered_key(x[i]);
    if (digit > 0 && key >> (shift + kDigitBits) != prefix) continue;
    const double below = to_wide(x[i]) - maximum;
    if (!(below > lowest)) continue;
    const uint64_t bin = (key >> shift) & (kBins - 1);
    masses[bin] += static_cast<int64_t>(std::exp(below) * unit + 0.5);
    ++counts[bin];
  }
}

Tensor histogram_cpu(const Tensor& logits_in, const Tensor& maximum_in, const Tensor& prefix_in, int64_t digit,
                     int64_t mass_bits) {
  FASTPAR_CHECK(logits_in.dim() >= 1, "logits must have at least one dim, the vocabulary");
  const Tensor logits = with_dense_rows(logits_in);
  const int64_t vocab = last_size(logits), rows = count_rows(logits);
  FASTPAR_CHECK(maximum_in.scalar_type() == ScalarType::Double && maximum_in.numel() == rows,
                "maximum must be float64 [", rows, "]");
  FASTPAR_CHECK(prefix_in.scalar_type() == ScalarType::Long && prefix_in.numel() == rows, "prefix must be int64 [",
                rows, "]");
  FASTPAR_CHECK(digit >= 0 && digit < static_cast<int64_t>(logits.element_size()), "digit must be one of the ",
                logits.element_size(), " bytes of a logit, got ", digit);
  FASTPAR_CHECK(mass_bits > 0 && mass_bits < 62, "mass_bits must be between 1 and 61, got ", mass_bits);
  const Tensor maximum = maximum_in.is_contiguous() ? maximum_in : torch::stable::contiguous(maximum_in);
  const Tensor prefix = prefix_in.is_contiguous() ? prefix_in : torch::stable::contiguous(prefix_in);
  Tensor histogram = empty_cpu({rows, 2, kBins}, ScalarType::Long);
  int64_t* out = histogram.mutable_data_ptr<int64_t>();
  const double* highest = maximum.const_data_ptr<double>();
  const int64_t* begins_with = prefix.const_data_ptr<int64_t>();
  const StridedRows layout = strided_rows(logits);
  dispatch_float(logits, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(logits.const_data_ptr());
    torch::stable::parallel_for(0, rows, row_grain(vocab), [&](int64_t begin, int64_t end) {
      memset(out + begin * 2 * kBins, 0, sizeof(int64_t) * static_cast<size_t>((end - begin) * 2 * kBins));
      for (int64_t row = begin; row < end; ++row) {
        if (!std::isfinite(highest[row])) continue;
        histogram_row(from + row_start(layout, row), vocab, highest[row], static_cast<uint64_t>(begins_with[row]),
                      static_cast<int>(digit), static_cast<int>(mass_bits), out + row * 2 * kBins,
                      out + (row * 2 + 1) * kBins);
      }
    });
  });
  return histogram;
}

// out = the logits above the cut, the first `ties` that equal it, and NaN; `removed` for all others.
template <typename T>
void apply_row(const T* x, int64_t vocab, double cut, int64_t ties, T removed, T* out) {
  for (int64_t i = 0; i < vocab; ++i) {
    const double value = to_wide(x[i]);
    const bool is_tie = value == cut;
    const bool keep = !(value < cut) && (!is_tie || ties > 0);
    ties -= is_tie;
    out[i] = keep ? x[i] : removed;
  }
}

Tensor apply_cpu(const Tensor& logits_in, const Tensor& cut_in, const Tensor& ties_in, double filter_value) {
  FASTPAR_CHECK(logits_in.dim() >= 1, "logits must have at least one dim, the vocabulary");
  const Tensor logits = with_dense_rows(logits_in);
  const int64_t vocab = last_size(logits), rows = count_rows(logits);
  FASTPAR_CHECK(cut_in.scalar_type() == ScalarType::Double && cut_in.numel() == rows, "cut must be float64 [", rows,
                "]");
  FASTPAR_CHECK(ties_in.scalar_type() == ScalarType::Long && ties_in.numel() == rows, "ties must be int64 [", rows,
                "]");
  const Tensor cut = cut_in.is_contiguous() ? cut_in : torch::stable::contiguous(cut_in);
  const Tensor ties = ties_in.is_contiguous() ? ties_in : torch::stable::contiguous(ties_in);
  Tensor out = empty_cpu(shape_of(logits), logits.scalar_type());
  const double* cuts = cut.const_data_ptr<double>();
  const int64_t* tie_counts = ties.const_data_ptr<int64_t>();
  const StridedRows layout = strided_rows(logits);
  dispatch_float(logits, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(logits.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    T removed;
    if constexpr (sizeof(T) == sizeof(double)) {
      removed = filter_value;
    } else {
      from_float(static_cast<float>(filter_value), &removed);
    }
    torch::stable::parallel_for(0, rows, row_grain(vocab), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        apply_row(from + row_start(layout, row), vocab, cuts[row], tie_counts[row], removed, to + row * vocab);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("vocab_filter_histogram", TORCH_BOX(&fastpar::histogram_cpu));
  m.impl("vocab_filter_apply", TORCH_BOX(&fastpar::apply_cpu));
}
