// From a step's hyperparameters to the float32 numbers that its kernels use; in double precision until the end.
#pragma once

#include <cmath>

#include "optimizer/optimizer.h"

namespace fastpar {

inline AdamwNumbers adamw_numbers(double step, double lr, double beta1, double beta2, double eps, double weight_decay) {
  return {static_cast<float>(1.0 - lr * weight_decay),
          static_cast<float>(1.0 - beta1),
          static_cast<float>(beta2),
          static_cast<float>(1.0 - beta2),
          static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, step))),
          static_cast<float>(eps),
          static_cast<float>(lr / (1.0 - std::pow(beta1, step)))};
}

inline SgdNumbers sgd_numbers(double lr, double momentum, double dampening, double weight_decay, bool nesterov,
                              bool first) {
  return {static_cast<float>(lr),
          static_cast<float>(momentum),
          static_cast<float>(1.0 - dampening),
          static_cast<float>(weight_decay),
          nesterov,
          first};
}

inline LionNumbers lion_numbers(double lr, double beta1, double beta2, double weight_decay) {
  return {static_cast<float>(1.0 - lr * weight_decay), static_cast<float>(beta1), static_cast<float>(1.0 - beta1),
          static_cast<float>(1.0 - beta2), static_cast<float>(lr)};
}

}  // namespace fastpar
