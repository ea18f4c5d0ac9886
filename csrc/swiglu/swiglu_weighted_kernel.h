// SwiGLU of rows that have a weight each, as those of experts do, into memory that is there.
//
//   a = g / (1 + exp(-g)) * u
//   forward    out = w * a                                       two reads, one write
//   backward   out = w * a, once more                            three reads, three writes
//              du = w * dout * g * s    dg = w * dout * u * s * (1 + g * (1 - s))
//              dw = sum over the row of dout * a
//
// Backward writes out again because the product that takes it was not saved, and everything that it needs is at hand.
//
// Numerics: as swiglu_kernel.h. dw is summed in 4 registers of floats, whose lanes are then added in double.
//
// Worked example: gate [0, 1], up [2, 3], w 2: a = [0, 2.19318], out = [0, 4.38635]; with grad_out [1, 1], grad_gate =
// [2, 5.56602], grad_up = [0, 1.46212], dw = 2.19318.
#pragma once

#include "common/dtypes.h"
#include "common/vec_loop.h"
#include "swiglu/swiglu.h"
#include "swiglu/swiglu_kernel.h"

namespace fastpar {
namespace {

template <typename T>
void swiglu_weighted_rows(const SwigluWeightedArguments& a, int64_t row_begin, int64_t row_end) {
  const Sigmoid<T> sigmoid;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* gate = static_cast<const T*>(a.gate_up) + row * a.gate_up_stride;
    const T* up = gate + a.features;
    T* out = static_cast<T*>(a.out) + row * a.out_stride;
    const Vec weight = Vec::set(a.weights == nullptr ? 1.0f : a.weights[row]);
    for_each_vec(a.features, [&](int64_t i, auto access, int) __attribute__((always_inline)) {
      const Vec g = access.load(gate + i);
      access.store(g * sigmoid(g) * access.load(up + i) * weight, out + i);
    });
  }
}

template <typename T>
void swiglu_weighted_backward_rows(const SwigluWeightedArguments& a, int64_t row_begin, int64_t row_end) {
  const Sigmoid<T> sigmoid;
  const Vec one = Vec::set(1.0f), zero = Vec::set(0.0f);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* gate = static_cast<const T*>(a.gate_up) + row * a.gate_up_stride;
    const T* up = gate + a.features;
    const T* grad_out = static_cast<const T*>(a.grad_out) + row * a.grad_out_stride;
    T* out = static_cast<T*>(a.out) + row * a.out_stride;
    T* grad_gate = static_cast<T*>(a.grad_gate_up) + row * a.grad_gate_up_stride;
    T* grad_up = grad_gate + a.features;
    const Vec weight = Vec::set(a.weights == nullptr ? 1.0f : a.weights[row]);
    Vec sums[4] = {zero, zero, zero, zero};
    for_each_vec(a.features, [&](int64_t i, auto access, int unrolled) __attribute__((always_inline)) {
      const Vec g = access.load(gate + i), u = access.load(up + i), dout = access.load(grad_out + i);
      const Vec s = sigmoid(g);
      const Vec activation = g * s * u;
      sums[unrolled] = Vec::fma(dout, activation, sums[unrolled]);
      access.store(activation * weight, out + i);
      const Vec dout_s = dout * weight * s;
      access.store(dout_s * u * Vec::fma(g, one - s, one), grad_gate + i);
      access.store(dout_s * g, grad_up + i);
    });
    if (a.dots != nullptr) {
      a.dots[row] = static_cast<float>(reduce_sum(sums[0] + sums[1]) + reduce_sum(sums[2] + sums[3]));
    }
  }
}

}  // namespace
}  // namespace fastpar
