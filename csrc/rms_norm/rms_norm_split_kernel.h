// RMSNorm of rows that are split over ranks, of which each has `hidden` elements: what comes before the collective of
// forward, and what comes after it. Those of backward are the kernels of rms_norm_kernel.h, stopped and resumed.
//
//   squares    h = x + residual, rounded to x's type and written; sum of h^2
//   scale      out = h * rstd * w, with the rstd of the whole row
//
// Worked example, the row [3, 4] on two ranks with one element each: squares 9 and 16; of their sum rstd = 0.282843
// with eps 0, and with weight [1, 2] out = [0.848528] and [2.262742].
#pragma once

#include "rms_norm/rms_norm_kernel.h"

namespace fastpar {
namespace {

template <typename T, bool kResidual>
void rms_norm_squares_as(const RmsNormArguments& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row_start(a.x_rows, row);
    const T* residual = kResidual ? static_cast<const T*>(a.residual) + row_start(a.residual_rows, row) : nullptr;
    T* sum = static_cast<T*>(a.sum) + (kResidual ? row * a.hidden : 0);
    Sums squares;
    for_each_vec(a.hidden, [&](int64_t i, auto access, int u) __attribute__((always_inline)) {
      Vec h = access.load(x + i);
      if (kResidual) {
        h = rounded_to<T>(h + access.load(residual + i));
        access.store(h, sum + i);
      }
      squares.parts[u] = Vec::fma(h, h, squares.parts[u]);
    });
    static_cast<float*>(a.rstd)[row] = static_cast<float>(squares.total());
  }
}

template <typename T>
void rms_norm_squares(const RmsNormArguments& a, int64_t row_begin, int64_t row_end) {
  a.residual != nullptr ? rms_norm_squares_as<T, true>(a, row_begin, row_end)
                        : rms_norm_squares_as<T, false>(a, row_begin, row_end);
}

template <typename T, bool kStream>
void rms_norm_scale_as(const RmsNormArguments& a, int64_t row_begin, int64_t row_end) {
  const float* weight = static_cast<const float*>(a.weight);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row_start(a.x_rows, row);
    const Vec scale = Vec::set(static_cast<const float*>(a.rstd)[row]);
    T* out = static_cast<T*>(a.out) + row * a.hidden;
    const auto body = [&](int64_t i, auto access, int) __attribute__((always_inline)) {
      access.store(access.load(x + i) * scale * access.load(weight + i), out + i);
    };
    if (kStream) {
      for_each_streamed_vec(elements_to_alignment(out), a.hidden, body);
    } else {
      for_each_vec(a.hidden, body);
    }
  }
  if (kStream) fence_streamed_stores();
}

template <typename T>
void rms_norm_scale(const RmsNormArguments& a, int64_t row_begin, int64_t row_end) {
  a.stream ? rms_norm_scale_as<T, true>(a, row_begin, row_end) : rms_norm_scale_as<T, false>(a, row_begin, row_end);
}

}  // namespace
}  // namespace fastpar
