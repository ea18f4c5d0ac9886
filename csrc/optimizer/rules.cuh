// The update rules, element by element, as csrc/optimizer/optimizer_kernel.h has them for CPU.
//
// Every operation is named: the compiler joins no product and sum of its own choice, and an element gets the bits that
// the CPU kernels with FMA instructions give it (division and square root are correctly rounded on both).
#pragma once

#include <cmath>

#include "common/device.cuh"
#include "optimizer/optimizer.h"

namespace fastpar {
namespace device {

struct AdamwCorrections {
  float inverse_root, step_size;
};

// In double precision; powers near 1 lose digits in float32.
__host__ __device__ inline AdamwCorrections adamw_corrections(double step, double lr, double beta1, double beta2) {
  return {static_cast<float>(1.0 / sqrt(1.0 - pow(beta2, step))), static_cast<float>(lr / (1.0 - pow(beta1, step)))};
}

struct AdamwRule {
  using Numbers = AdamwNumbers;
  static constexpr int kStates = 2;
  __host__ __device__ static constexpr bool is_signed(int state) { return state == 0; }

  Numbers n;
  const float* corrections;  // [inverse_root, step_size] in place of those in `n`, where the device counts the steps

  __device__ inline void prepare() {
    if (corrections == nullptr) return;
    n.inverse_root = __ldg(corrections);
    n.step_size = __ldg(corrections + 1);
  }

  __device__ inline void operator()(float& p, float g, float (&s)[2]) const {
    s[0] = __fmaf_rn(n.grad_weight, __fsub_rn(g, s[0]), s[0]);
    s[1] = __fmaf_rn(n.beta2, s[1], __fmul_rn(__fmul_rn(g, n.square_weight), g));
    const float divisor = __fmaf_rn(__fsqrt_rn(s[1]), n.inverse_root, n.eps);
    p = __fmaf_rn(-n.step_size, __fdiv_rn(s[0], divisor), __fmul_rn(p, n.decay));
  }
};

template <bool kMomentum>
struct SgdRule {
  using Numbers = SgdNumbers;
  static constexpr int kStates = kMomentum ? 1 : 0;
  __host__ __device__ static constexpr bool is_signed(int) { return true; }

  Numbers n;

  __device__ inline void prepare() {}

  __device__ inline void operator()(float& p, float grad, float (&s)[1]) const {
    const float g = __fmaf_rn(n.weight_decay, p, grad);
    float direction = g;
    if (kMomentum) {
      s[0] = n.first ? g : __fmaf_rn(n.momentum, s[0], __fmul_rn(g, n.grad_weight));
      direction = n.nesterov ? __fmaf_rn(n.momentum, s[0], g) : s[0];
    }
    p = __fmaf_rn(-n.lr, direction, p);
  }
};

struct LionRule {
  using Numbers = LionNumbers;
  static constexpr int kStates = 1;
  __host__ __device__ static constexpr bool is_signed(int) { return true; }

  Numbers n;

  __device__ inline void prepare() {}

  __device__ inline void operator()(float& p, float g, float (&s)[1]) const {
    const float direction = __fmaf_rn(n.beta1, s[0], __fmul_rn(g, n.direction_weight));
    s[0] = __fmaf_rn(n.grad_weight, __fsub_rn(g, s[0]), s[0]);
    // Where the direction is 0 or NaN, that is what is added.
    const float step = direction > 0.0f ? -n.lr : direction < 0.0f ? n.lr : direction;
    p = __fadd_rn(__fmul_rn(p, n.decay), step);
  }
};

}  // namespace device
}  // namespace fastpar
