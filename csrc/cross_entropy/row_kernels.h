// The kernels that the tables of cross_entropy_<isa>.cpp hold: each runs over rows and is compiled for every
// combination of the options that changes what happens to an element. No kernel is compiled for what only changes a
// row: class weights without smoothing, z-loss, logit_scale.
#pragma once

#include "cross_entropy/gradient_kernel.h"
#include "cross_entropy/stats_kernel.h"

namespace fastpar {
namespace {

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
      const RowStats stats = row_stats<T, kSoftcap, kSmoothing>(x, a.vocab, coordinate, weight);
      const int64_t id = a.target[row], column = id - a.vocab_start;
      const bool is_ignored = id == a.ignore_index;
      const bool is_owned = !is_ignored && is_class(a.terms, id) && column >= 0 && column < a.vocab;
      float* out = static_cast<float*>(a.stats) + a.columns * row;
      const float maximum = static_cast<float>(stats.maximum);
      // The sum refers to the maximum as it is written; where that is infinite, they are the same.
      const double rounding = stats.maximum - static_cast<double>(maximum);
      out[0] = maximum;
      out[1] = static_cast<float>(rounding == rounding ? stats.sum * __builtin_exp(rounding) : stats.sum);
      out[2] = is_owned ? static_cast<float>(coordinate.z(to_float(x[column]))) : 0.0f;
      if (!is_ignored && !is_class(a.terms, id)) out[2] = __builtin_nanf("");
      if (kSmoothing != Smoothing::kNone) {
        out[3] = static_cast<float>(stats.weighted_sum);
        out[4] =
            __builtin_isfinite(out[3]) ? static_cast<float>(stats.weighted_sum - static_cast<double>(out[3])) : 0.0f;
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

// The gradient of one row, the target's entry included.
template <typename T, bool kSoftcap, Smoothing kSmoothing>
void finish_row(const T* x, T* out, int64_t vocab, const Coordinate<kSoftcap>& coordinate, const LossTerms& terms,
                const RowFactors& factors, double lse, int64_t column, double weight_of_target, const float* weight,
                bool stream) {
  if (factors.is_zero) {
    fill_zero(out, vocab);
    return;
  }
  const bool is_owned = column >= 0 && column < vocab;
  // Read before the row is overwritten.
  const float logit = is_owned ? to_float(x[column]) : 0.0f;
  const double scale = terms.logit_scale;
  gradient_row<T, kSoftcap, kSmoothing>(x, out, vocab, coordinate, lse,
                                        (factors.gamma + factors.delta) * (kSoftcap ? scale : coordinate.slope()),
                                        factors.beta * scale, weight, stream);
  if (is_owned) {
    const double gradient = target_gradient(factors, coordinate.z(logit), lse, weight_of_target);
    from_float(static_cast<float>(gradient * scale * coordinate.derivative(logit)), out + column);
  }
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
      const int64_t id = a.target[row];
      const bool is_ignored = id == a.ignore_index;
      const double weight_of_target = is_ignored ? 0.0 : target_weight<float>(a.terms, id);
      const double g = static_cast<double>(static_cast<const float*>(a.grad_loss)[row * a.grad_loss_stride]);
      const double l = a.grad_lse == nullptr
                           ? 0.0
                           : static_cast<double>(static_cast<const float*>(a.grad_lse)[row * a.grad_lse_stride]);
      const RowFactors factors = row_factors(a.terms, is_ignored, g, l, a.lse[row], weight_of_target);
      finish_row<T, kSoftcap, kSmoothing>(x, out, a.vocab, coordinate, a.terms, factors, a.lse[row],
                                          is_ignored ? -1 : id - a.vocab_start, weight_of_target, weight, a.stream);
    }
    if (a.stream) fence_streamed_stores();
  }
};

template <typename T>
void backward_rows(const BackwardArguments& a, int64_t row_begin, int64_t row_end) {
  dispatch_options(a.terms, a.terms.label_smoothing != 0.0, BackwardRows<T>{a, row_begin, row_end});
}

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
      const int64_t id = a.target[row];
      const bool is_ignored = id == a.ignore_index;
      const RowStats stats = row_stats<T, kSoftcap, kSmoothing>(x, a.vocab, coordinate, weight);
      const double maximum = stats.maximum == -__builtin_inf() ? 0.0 : stats.maximum;
      const double log_sum = __builtin_log(stats.sum), lse = maximum + log_sum;
      const double weight_of_target = is_ignored ? 0.0 : target_weight<float>(a.terms, id);
      const double target_logit = is_ignored ? 0.0 : coordinate.z(to_float(x[id]));
      a.lse[row] = lse;
      static_cast<float*>(a.loss)[row] = is_ignored
                                             ? 0.0f
                                             : static_cast<float>(row_loss(a.terms, maximum, log_sum, target_logit,
                                                                           stats.weighted_sum, weight_of_target));
      const double g = static_cast<double>(static_cast<const float*>(a.grad_loss)[row * a.grad_loss_stride]);
      const RowFactors factors = row_factors(a.terms, is_ignored, g, 0.0, lse, weight_of_target);
      finish_row<T, kSoftcap, kSmoothing>(x, out, a.vocab, coordinate, a.terms, factors, lse, is_ignored ? -1 : id,
                                          weight_of_target, weight, a.stream);
    }
    if (a.stream) fence_streamed_stores();
  }
};

template <typename T>
void fused_rows(const FusedArguments& a, int64_t row_begin, int64_t row_end, float* scratch) {
  dispatch_options(a.terms, a.terms.label_smoothing != 0.0, FusedRows<T>{a, row_begin, row_end});
}

}  // namespace
}  // namespace fastpar
