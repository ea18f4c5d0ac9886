// The kernels that the tables of cross_entropy_<isa>.cpp hold: each runs over rows and is compiled for every
// combination of the options that changes what happens to an element. No kernel is compiled for what only changes a
// row: class weights without smoothing, z-loss, logit_scale.
#pragma once

#include "cross_entropy/gradient_kernel.h"
#include "cross_entropy/stats_kernel.h"

namespace fastpar {
namespace {

// Exponentials are kept, and computed by blocks, if a row has no more of them than this.
constexpr int kMaxRuns = 512;

template <typename T>
struct StatsRows {
  const StatsArguments& a;
  int64_t row_begin, row_end;

  template <bool kSoftcap, Smoothing kSmoothing>
  void run() const {
    const Coordinate<kSoftcap> coordinate(a.terms);
    const float* weight =
        kSmoothing == Smoothing::kWeighted ? static_cast<const float*>(a.terms.weight) + a.vocab_start : nullptr;
    for (int64_t row = row_begin; row < row_end; ++row) {
      const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, row);
      const RowStats stats =
          row_stats<T, kSoftcap, kSmoothing, Keep::kNothing>(x, a.vocab, coordinate, weight, nullptr, nullptr, nullptr);
      const int64_t id = a.target[row], column = id - a.vocab_start;
      const bool is_ignored = id == a.ignore_index;
      const bool is_owned = !is_ignored && is_class(a.terms, id) && column >= 0 && column < a.vocab;
      float* out = static_cast<float*>(a.stats) + a.columns * row;
      const float maximum = static_cast<float>(stats.maximum);
      // The sum refers to the maximum as it is written; where that is infinite, they are the same. In a far row, where
      // the rounding may be beyond all exponents, it refers to all elements that are written like this one.
      const double rounding = stats.maximum - static_cast<double>(maximum);
      const bool is_near = rounding == rounding && !is_far(stats.maximum);
      out[0] = maximum;
      out[1] = static_cast<float>(is_near ? stats.sum * __builtin_exp(rounding) : stats.sum);
      out[2] = is_owned ? static_cast<float>(coordinate.z(to_float(x[column]))) : 0.0f;
      if (!is_ignored && !is_class(a.terms, id)) out[2] = __builtin_nanf("");
      if (kSmoothing != Smoothing::kNone) {
        const double sum = stats.weighted_sum * kSumUnit;
        out[3] = static_cast<float>(sum);
        out[4] = __builtin_isfinite(out[3]) ? static_cast<float>(sum - static_cast<double>(out[3])) : 0.0f;
      }
      if (a.exp_out == nullptr) continue;
      T* e = static_cast<T*>(a.exp_out) + row_offset(a.exp_rows, row);
      if (is_ignored || maximum == kNegativeInfinity) {
        fill_zero(e, a.vocab);
        continue;
      }
      gradient_row<T, kSoftcap, Smoothing::kNone>(x, e, a.vocab, coordinate, static_cast<double>(maximum), 1.0, 0.0,
                                                  nullptr, false);
      if (is_owned) from_float(0.0f, e + column);
    }
  }
};

template <typename T>
void stats_rows(const StatsArguments& a, int64_t row_begin, int64_t row_end) {
  dispatch_options(a.terms, a.smoothing, StatsRows<T>{a, row_begin, row_end});
}

// What is known of a row's target before the row is overwritten.
struct RowTarget {
  int64_t column;  // -1 if it is ignored or another rank's
  float logit;
  double weight;
  bool is_ignored;
};

template <typename T>
RowTarget row_target(const T* x, int64_t vocab, const LossTerms& terms, int64_t id, int64_t vocab_start,
                     int64_t ignore_index) {
  RowTarget target{-1, 0.0f, 0.0, id == ignore_index};
  if (target.is_ignored) return target;
  target.weight = target_weight<float>(terms, id);
  const int64_t column = id - vocab_start;
  if (column >= 0 && column < vocab) {
    target.column = column;
    target.logit = to_float(x[column]);
  }
  return target;
}

template <typename T, bool kSoftcap>
void write_target(T* out, const Coordinate<kSoftcap>& coordinate, const LossTerms& terms, const RowFactors& factors,
                  const RowTarget& target, double lse) {
  if (target.column < 0) return;
  const double log_p = log_probability(coordinate.z(target.logit), lse);
  const double gradient = target_gradient(factors, log_p, target.weight);
  from_float(static_cast<float>(gradient * terms.logit_scale * coordinate.derivative(target.logit)),
             out + target.column);
}

template <typename T>
struct BackwardRows {
  const BackwardArguments& a;
  int64_t row_begin, row_end;

  template <bool kSoftcap, Smoothing kSmoothing>
  void run() const {
    const Coordinate<kSoftcap> coordinate(a.terms);
    const float* weight =
        kSmoothing == Smoothing::kWeighted ? static_cast<const float*>(a.terms.weight) + a.vocab_start : nullptr;
    for (int64_t row = row_begin; row < row_end; ++row) {
      const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, row);
      T* out = static_cast<T*>(a.grad) + row_offset(a.grad_rows, row);
      const RowTarget target = row_target(x, a.vocab, a.terms, a.target[row], a.vocab_start, a.ignore_index);
      const double lse = a.lse[row];
      const double g = static_cast<double>(static_cast<const float*>(a.grad_loss)[row * a.grad_loss_stride]);
      double l = 0.0;
      if (a.grad_lse != nullptr)
        l = static_cast<double>(static_cast<const float*>(a.grad_lse)[row * a.grad_lse_stride]);
      const RowFactors factors = row_factors(a.terms, target.is_ignored, g, l, lse, target.weight);
      if (factors.is_zero) {
        fill_zero(out, a.vocab);
        continue;
      }
      const double scale = a.terms.logit_scale;
      gradient_row<T, kSoftcap, kSmoothing>(x, out, a.vocab, coordinate, lse, (factors.gamma + factors.delta) * scale,
                                            factors.beta * scale, weight, a.stream);
      write_target(out, coordinate, a.terms, factors, target, lse);
    }
    if (a.stream) fence_streamed_stores();
  }
};

template <typename T>
void backward_rows(const BackwardArguments& a, int64_t row_begin, int64_t row_end) {
  dispatch_options(a.terms, a.terms.label_smoothing != 0.0, BackwardRows<T>{a, row_begin, row_end});
}

// Exponentials of float32 logits whose row is overwritten anyway wait in it for the row's sum. All others are computed
// a second time, from logits that are in a cache by then; see the measurements in cross_entropy_kernel.h.
template <typename T>
struct FusedRows {
  const FusedArguments& a;
  int64_t row_begin, row_end;

  template <bool kSoftcap, Smoothing kSmoothing>
  void run() const {
    const Coordinate<kSoftcap> coordinate(a.terms);
    const float* weight = kSmoothing == Smoothing::kWeighted ? static_cast<const float*>(a.terms.weight) : nullptr;
    for (int64_t row = row_begin; row < row_end; ++row) {
      const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, row);
      T* out = static_cast<T*>(a.grad) + row_offset(a.grad_rows, row);
      const RowTarget target = row_target(x, a.vocab, a.terms, a.target[row], 0, a.ignore_index);
      if (target.is_ignored) {
        finish(row,
               row_stats<T, kSoftcap, kSmoothing, Keep::kNothing>(x, a.vocab, coordinate, weight, nullptr, nullptr,
                                                                  nullptr),
               coordinate, target);
        fill_zero(out, a.vocab);
        continue;
      }
      const RowFactors factors = row_gradient<kSmoothing>(row, x, out, coordinate, weight, target);
      write_target(out, coordinate, a.terms, factors, target, a.lse[row]);
    }
    if (a.stream) fence_streamed_stores();
  }

 private:
  struct Finished {
    RowFactors factors;
    double maximum, log_sum;
  };

  // Writes loss and lse.
  template <bool kSoftcap>
  Finished finish(int64_t row, const RowStats& stats, const Coordinate<kSoftcap>& coordinate,
                  const RowTarget& target) const {
    const double maximum = stats.maximum == -__builtin_inf() ? 0.0 : stats.maximum;
    const double log_sum = __builtin_log(stats.sum), lse = join_lse(written(maximum), log_sum);
    a.lse[row] = lse;
    double loss = 0.0;
    if (!target.is_ignored) {
      loss = row_loss(a.terms, written(maximum), log_sum, written(coordinate.z(target.logit)), stats.weighted_sum,
                      target.weight);
    }
    static_cast<float*>(a.loss)[row] = static_cast<float>(loss);
    const double g = static_cast<double>(static_cast<const float*>(a.grad_loss)[row * a.grad_loss_stride]);
    return {row_factors(a.terms, target.is_ignored, g, 0.0, lse, target.weight), maximum, log_sum};
  }

  // Everything but the target's entry.
  template <Smoothing kSmoothing, bool kSoftcap>
  RowFactors row_gradient(int64_t row, const T* x, T* out, const Coordinate<kSoftcap>& coordinate, const float* weight,
                          const RowTarget& target) const {
    const double scale = a.terms.logit_scale;
    // The derivative of a softcap would have to be kept too.
    if constexpr (!kSoftcap && sizeof(T) == sizeof(float)) {
      if (a.vocab <= kMaxRuns * (kBlockBytes / static_cast<int64_t>(sizeof(float)))) {
        const bool is_kept = x == out;
        Run runs[kMaxRuns];
        int num_runs = 0;
        const RowStats stats = is_kept ? row_stats<T, kSoftcap, kSmoothing, Keep::kExponentials>(
                                             x, a.vocab, coordinate, weight, out, runs, &num_runs)
                                       : row_stats<T, kSoftcap, kSmoothing, Keep::kReferences>(
                                             x, a.vocab, coordinate, weight, nullptr, runs, &num_runs);
        const Finished finished = finish(row, stats, coordinate, target);
        const RowFactors& factors = finished.factors;
        for (int r = 0; r < num_runs; ++r) {
          const int64_t begin = runs[r].begin, end = r + 1 < num_runs ? runs[r + 1].begin : a.vocab;
          const double to_probability =
              __builtin_exp((runs[r].maximum - finished.maximum) - finished.log_sum) / runs[r].unit;
          run_gradient<T, kSmoothing>(is_kept, x + begin, out + begin, end - begin, coordinate, runs[r].maximum,
                                      (factors.gamma + factors.delta) * scale * to_probability, factors.beta * scale,
                                      weight == nullptr ? nullptr : weight + begin, a.stream);
        }
        return factors;
      }
    }
    const RowFactors factors = finish(row,
                                      row_stats<T, kSoftcap, kSmoothing, Keep::kNothing>(x, a.vocab, coordinate, weight,
                                                                                         nullptr, nullptr, nullptr),
                                      coordinate, target)
                                   .factors;
    gradient_row<T, kSoftcap, kSmoothing>(x, out, a.vocab, coordinate, a.lse[row],
                                          (factors.gamma + factors.delta) * scale, factors.beta * scale, weight,
                                          a.stream);
    return factors;
  }
};

template <typename T>
void fused_rows(const FusedArguments& a, int64_t row_begin, int64_t row_end) {
  dispatch_options(a.terms, a.terms.label_smoothing != 0.0, FusedRows<T>{a, row_begin, row_end});
}

}  // namespace
}  // namespace fastpar
