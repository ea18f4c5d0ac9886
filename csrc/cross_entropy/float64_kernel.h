// Cross-entropy of float64 logits, which exists for tests and small checks and uses the C library's functions.
#pragma once

#include "cross_entropy/cross_entropy_kernel.h"

namespace fastpar {
namespace {

struct Coordinate64 {
  const LossTerms& terms;

  // z, and dz/dx / logit_scale.
  double operator()(double x, double* derivative) const {
    *derivative = 1.0;
    if (terms.softcap == 0.0) return terms.logit_scale * x;
    const double y = terms.logit_scale * x / terms.softcap, e = __builtin_exp(-2.0 * __builtin_fabs(y));
    *derivative = 4.0 * e / ((1.0 + e) * (1.0 + e));
    return terms.softcap * __builtin_tanh(y);
  }
  double operator()(double x) const {
    double derivative;
    return (*this)(x, &derivative);
  }
};

struct RowStats64 {
  double maximum, sum, weighted_sum;
};

inline RowStats64 row_stats_float64(const double* x, int64_t count, const LossTerms& terms, const double* weight,
                                    bool smoothing) {
  const Coordinate64 z{terms};
  RowStats64 stats{-__builtin_inf(), 0.0, 0.0};
  for (int64_t i = 0; i < count; ++i) {
    const double candidate = z(x[i]);
    if (candidate > stats.maximum) stats.maximum = candidate;
  }
  const double reference = stats.maximum == -__builtin_inf() ? 0.0 : stats.maximum;
  double deviation = 0.0, mass = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double difference = z(x[i]) - reference, w = weight == nullptr ? 1.0 : weight[i];
    stats.sum += __builtin_exp(difference);
    if (!smoothing) continue;
    deviation += w * difference;
    mass += w;
  }
  if (smoothing) stats.weighted_sum = deviation + reference * mass;
  return stats;
}

// out = (factor exp(z - reference) - beta w) dz/dx / logit_scale; x and out may be the same row.
inline void gradient_row_float64(const double* x, double* out, int64_t count, const LossTerms& terms, double reference,
                                 double factor, double beta, const double* weight) {
  const Coordinate64 coordinate{terms};
  for (int64_t i = 0; i < count; ++i) {
    double derivative;
    const double z = coordinate(x[i], &derivative);
    double value = factor * __builtin_exp(z - reference);
    if (beta != 0.0) value -= beta * (weight == nullptr ? 1.0 : weight[i]);
    out[i] = value * derivative;
  }
}

inline void finish_row_float64(const double* x, double* out, int64_t count, const LossTerms& terms,
                               const RowFactors& factors, double lse, int64_t column, double weight_of_target,
                               const double* weight) {
  if (factors.is_zero) {
    fill_zero(out, count);
    return;
  }
  const Coordinate64 coordinate{terms};
  const bool is_owned = column >= 0 && column < count;
  double derivative = 0.0;
  const double logit = is_owned ? coordinate(x[column], &derivative) : 0.0, scale = terms.logit_scale;
  gradient_row_float64(x, out, count, terms, lse, (factors.gamma + factors.delta) * scale, factors.beta * scale,
                       weight);
  if (is_owned) out[column] = target_gradient(factors, logit - lse, weight_of_target) * scale * derivative;
}

inline void stats_rows_float64(const StatsArguments& a, int64_t row_begin, int64_t row_end) {
  const double* weight =
      a.terms.weight == nullptr ? nullptr : static_cast<const double*>(a.terms.weight) + a.vocab_start;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double* x = static_cast<const double*>(a.logits) + row_offset(a.rows, row);
    const RowStats64 stats = row_stats_float64(x, a.vocab, a.terms, weight, a.smoothing);
    const int64_t id = a.target[row], column = id - a.vocab_start;
    const bool is_ignored = id == a.ignore_index;
    const bool is_owned = !is_ignored && is_class(a.terms, id) && column >= 0 && column < a.vocab;
    double* out = static_cast<double*>(a.stats) + a.columns * row;
    out[0] = stats.maximum;
    out[1] = stats.sum;
    out[2] = is_owned ? Coordinate64{a.terms}(x[column]) : 0.0;
    if (!is_ignored && !is_class(a.terms, id)) out[2] = __builtin_nan("");
    if (a.smoothing) {
      out[3] = stats.weighted_sum * kSumUnit;
      out[4] = 0.0;
    }
    if (a.exp_out == nullptr) continue;
    double* e = static_cast<double*>(a.exp_out) + row_offset(a.exp_rows, row);
    if (is_ignored || stats.maximum == -__builtin_inf()) {
      fill_zero(e, a.vocab);
      continue;
    }
    gradient_row_float64(x, e, a.vocab, a.terms, stats.maximum, 1.0, 0.0, nullptr);
    if (is_owned) e[column] = 0.0;
  }
}

inline void backward_rows_float64(const BackwardArguments& a, int64_t row_begin, int64_t row_end) {
  const double* weight =
      a.terms.weight == nullptr ? nullptr : static_cast<const double*>(a.terms.weight) + a.vocab_start;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double* x = static_cast<const double*>(a.logits) + row_offset(a.rows, row);
    double* out = static_cast<double*>(a.grad) + row_offset(a.grad_rows, row);
    const int64_t id = a.target[row];
    const bool is_ignored = id == a.ignore_index;
    const double weight_of_target = is_ignored ? 0.0 : target_weight<double>(a.terms, id);
    const double g = static_cast<const double*>(a.grad_loss)[row * a.grad_loss_stride];
    const double l = a.grad_lse == nullptr ? 0.0 : static_cast<const double*>(a.grad_lse)[row * a.grad_lse_stride];
    const RowFactors factors = row_factors(a.terms, is_ignored, g, l, a.lse[row], weight_of_target);
    finish_row_float64(x, out, a.vocab, a.terms, factors, a.lse[row], is_ignored ? -1 : id - a.vocab_start,
                       weight_of_target, weight);
  }
}

inline void fused_rows_float64(const FusedArguments& a, int64_t row_begin, int64_t row_end) {
  const double* weight = static_cast<const double*>(a.terms.weight);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double* x = static_cast<const double*>(a.logits) + row_offset(a.rows, row);
    double* out = static_cast<double*>(a.grad) + row_offset(a.grad_rows, row);
    const int64_t id = a.target[row];
    const bool is_ignored = id == a.ignore_index;
    const RowStats64 stats = row_stats_float64(x, a.vocab, a.terms, weight, a.terms.label_smoothing != 0.0);
    const double maximum = stats.maximum == -__builtin_inf() ? 0.0 : stats.maximum;
    const double log_sum = __builtin_log(stats.sum), lse = maximum + log_sum;
    const double weight_of_target = is_ignored ? 0.0 : target_weight<double>(a.terms, id);
    const double target_logit = is_ignored ? 0.0 : Coordinate64{a.terms}(x[id]);
    a.lse[row] = lse;
    static_cast<double*>(a.loss)[row] =
        is_ignored ? 0.0 : row_loss(a.terms, maximum, log_sum, target_logit, stats.weighted_sum, weight_of_target);
    const double g = static_cast<const double*>(a.grad_loss)[row * a.grad_loss_stride];
    const RowFactors factors = row_factors(a.terms, is_ignored, g, 0.0, lse, weight_of_target);
    finish_row_float64(x, out, a.vocab, a.terms, factors, lse, is_ignored ? -1 : id, weight_of_target, weight);
  }
}

}  // namespace
}  // namespace fastpar
