// The algebra of one row of cross-entropy in double, for merge, for the kernels of every instruction set, and for
// float64.
//
// With target y, class weights w (all 1 if there are none), their sum W, V classes, label smoothing a, z-loss factor c:
//
//     loss = (1 - a) w_y (lse - z_y) + a/V (W lse - S) + c lse^2                   S = sum_v w_v z_v
//     dz_v = (gamma + delta) p_v - beta w_v                                        v != y
//     dz_y = delta p_y + gamma (p_y - 1) - beta w_y
//
//     gamma = g (1 - a) w_y      delta = g (a W/V + 2 c lse) + l      beta = g a/V
//
// for g the gradient of the row's loss (0 if it is ignored) and l the gradient that arrives at lse. A term whose factor
// is 0 is not evaluated, because the other factor may be infinite.
//
// Everything is in an anonymous namespace, and in plain arithmetic, for the reason given in common/simd.h.
#pragma once

#include "common/far_rows.h"
#include "cross_entropy/cross_entropy.h"

namespace fastpar {
namespace {

inline bool is_class(const LossTerms& terms, int64_t id) { return id >= 0 && id < terms.vocab_total; }

// w_y. An id that is no class gives NaN, which makes the row's loss and gradient NaN, and reads nothing.
template <typename W>
double target_weight(const LossTerms& terms, int64_t id) {
  if (!is_class(terms, id)) return __builtin_nan("");
  return terms.weight == nullptr ? 1.0 : static_cast<double>(static_cast<const W*>(terms.weight)[id]);
}

// a W / V
inline double smoothing_share(const LossTerms& terms) {
  const double total = static_cast<double>(terms.vocab_total);
  return terms.label_smoothing * (terms.weight_sum == nullptr ? total : *terms.weight_sum) / total;
}

// The row's lse in two parts, `maximum + log_sum`: the maximum is as large as the logits, and the target's logit is
// close to it where the loss is small. W maximum - S is exact for equal logits, of whatever size.
inline double row_loss(const LossTerms& terms, double maximum, double log_sum, double target_logit, double weighted_sum,
                       double weight_of_target) {
  const double a = terms.label_smoothing, lse = maximum + log_sum;
  double loss = 0.0;
  if (a != 1.0) loss = (1.0 - a) * weight_of_target * ((maximum - target_logit) + log_sum);
  if (a != 0.0) {
    const double classes = static_cast<double>(terms.vocab_total);
    const double all = terms.weight_sum == nullptr ? classes : *terms.weight_sum;
    loss += a / classes * (all * maximum - weighted_sum) + smoothing_share(terms) * log_sum;
  }
  if (terms.z_loss != 0.0) loss += terms.z_loss * lse * lse;
  // With a = 1 the first term, which a target that is no class would make NaN, is not there.
  return weight_of_target == weight_of_target ? loss : weight_of_target;
}

struct RowFactors {
  double gamma;
  double delta;
  double beta;
  bool is_zero;  // the row has no gradient, whatever its logits are
};

inline RowFactors row_factors(const LossTerms& terms, bool is_ignored, double g, double l, double lse,
                              double weight_of_target) {
  if (is_ignored) return {0.0, l, 0.0, l == 0.0};
  const double a = terms.label_smoothing;
  RowFactors factors{g * (1.0 - a) * weight_of_target, l, 0.0, false};
  if (a != 0.0) {
    factors.delta += g * smoothing_share(terms);
    factors.beta = g * a / static_cast<double>(terms.vocab_total);
  }
  if (terms.z_loss != 0.0) factors.delta += g * 2.0 * terms.z_loss * lse;
  return factors;
}

// z of a float logit: a far one as it is written; see Note: far rows.
inline double written(double z) { return is_far(z) ? static_cast<double>(static_cast<float>(z)) : z; }

// log p of float logits.
inline double log_probability(double z, double lse) {
  const SplitLse normalizer(lse);
  return is_far(normalizer.high) ? normalizer.below(static_cast<double>(static_cast<float>(z))) : z - lse;
}

// Sums of logits travel multiplied by this: a sum of logits of 1e38 would not be a float.
constexpr double kSumUnit = 0x1p-32;

// dz_y; p_y - 1 is never a subtraction, which would cancel as p_y approaches 1.
inline double target_gradient(const RowFactors& factors, double log_probability, double weight_of_target) {
  double gradient = factors.gamma * __builtin_expm1(log_probability);
  if (factors.delta != 0.0) gradient += factors.delta * __builtin_exp(log_probability);
  if (factors.beta != 0.0) gradient -= factors.beta * weight_of_target;
  return gradient;
}

}  // namespace
}  // namespace fastpar
