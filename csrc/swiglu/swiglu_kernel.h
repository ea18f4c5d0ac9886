// The CPU kernels of SwiGLU, written once over Vec and compiled per instruction set.
//
//   s = 1 / (1 + exp(-g))
//   forward    out = g * s * u                          two reads, one write
//   backward   du  = dout * g * s                       three reads, two writes
//              dg  = dout * u * s * (1 + g * (1 - s))
//
// Numerics. Where exp(-g) overflows, s is 0, and -inf * 0 is NaN, as in torch. Rounding -g * log2(e) to float32 puts a
// relative error of up to 4e-6 on exp(-g) at g = -80: nothing for 16-bit results, but float32 ones are corrected by
// what the rounding dropped. 1 - s by subtraction is off by 6e-8, and stands next to a 1.
//
// Worked example: gate [0, 1], up [2, 3]: s = [1/2, 0.73106], out = [0, 2.19318]; with grad_out [1, 1], grad_gate =
// [1, 2.78301] and grad_up = [0, 0.73106].
#pragma once

#include "common/dtypes.h"
#include "common/vec_loop.h"
#include "swiglu/swiglu.h"

namespace fastpar {
namespace {

template <typename T>
class Sigmoid {
 public:
  Vec operator()(Vec g) const {
    const Vec one = Vec::set(1.0f);
    if (sizeof(T) == 2) return Vec::reciprocal(one + exp2_(Vec::min(largest_, g * minus_log2e_)));
    const Vec x = Vec::max(Vec::set(-128.0f), Vec::min(Vec::set(128.0f), g));  // this operand order lets NaN through
    const Vec t = x * minus_log2e_;
    const Vec dropped = Vec::fma(x, minus_log2e_, Vec::set(0.0f) - t);
    const Vec low = Vec::fma(x, Vec::set(kMinusLog2ELow), dropped);
    const Vec e = exp2_(Vec::min(largest_, t));
    return Vec::reciprocal(Vec::fma(e, Vec::fma(low, Vec::set(kLn2), one), one));
  }

 private:
  static constexpr float kMinusLog2ELow = -0x1.4ae0cp-26f;  // -(log2(e) - kLog2E)
  static constexpr float kLn2 = 0x1.62e43p-1f;
  const ScaledExp2<sizeof(T) == 2 ? 4 : 5> exp2_{1.0f};
  const Vec minus_log2e_ = Vec::set(-kLog2E);
  const Vec largest_ = Vec::set(128.0f);  // 2^128 is infinity
};

template <typename T, bool kStream>
void swiglu_rows_as(const SwigluArguments& a, int64_t row_begin, int64_t row_end) {
  const Sigmoid<T> sigmoid;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* gate = static_cast<const T*>(a.gate) + row_start(a.gate_rows, row);
    const T* up = static_cast<const T*>(a.up) + row_start(a.up_rows, row);
    T* out = static_cast<T*>(a.out) + row * a.features;
    const auto body = [&](int64_t i, auto access, int) __attribute__((always_inline)) {
      const Vec g = access.load(gate + i);
      access.store(g * sigmoid(g) * access.load(up + i), out + i);
    };
    if (kStream) {
      for_each_streamed_vec(elements_to_alignment(out), a.features, body);
    } else {
      for_each_vec(a.features, body);
    }
  }
  if (kStream) fence_streamed_stores();
}

template <typename T>
void swiglu_rows(const SwigluArguments& a, int64_t row_begin, int64_t row_end) {
  if (a.stream) {
    swiglu_rows_as<T, true>(a, row_begin, row_end);
  } else {
    swiglu_rows_as<T, false>(a, row_begin, row_end);
  }
}

template <typename T, bool kStream>
void swiglu_backward_rows_as(const SwigluBackwardArguments& a, int64_t row_begin, int64_t row_end) {
  const Sigmoid<T> sigmoid;
  const Vec one = Vec::set(1.0f);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* grad_out = static_cast<const T*>(a.grad_out) + row_start(a.grad_out_rows, row);
    const T* gate = static_cast<const T*>(a.gate) + row_start(a.gate_rows, row);
    const T* up = static_cast<const T*>(a.up) + row_start(a.up_rows, row);
    T* grad_gate = static_cast<T*>(a.grad_gate) + row * a.grad_stride;
    T* grad_up = static_cast<T*>(a.grad_up) + row * a.grad_stride;
    const auto body = [&](int64_t i, auto access, int) __attribute__((always_inline)) {
      const Vec g = access.load(gate + i), dout = access.load(grad_out + i);
      const Vec s = sigmoid(g);
      const Vec dout_s = dout * s;
      access.store(dout_s * access.load(up + i) * Vec::fma(g, one - s, one), grad_gate + i);
      access.store(dout_s * g, grad_up + i);
    };
    const int64_t head = elements_to_alignment(grad_gate);
    if (kStream && head == elements_to_alignment(grad_up)) {
      for_each_streamed_vec(head, a.features, body);
    } else {
      for_each_vec(a.features, body);
    }
  }
  if (kStream) fence_streamed_stores();
}

template <typename T>
void swiglu_backward_rows(const SwigluBackwardArguments& a, int64_t row_begin, int64_t row_end) {
  if (a.stream) {
    swiglu_backward_rows_as<T, true>(a, row_begin, row_end);
  } else {
    swiglu_backward_rows_as<T, false>(a, row_begin, row_end);
  }
}

}  // namespace
}  // namespace fastpar
