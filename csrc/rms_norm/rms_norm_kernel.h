// The CPU kernels of RMSNorm, written once over Vec and compiled per instruction set.
//
//   h = x + residual, rounded to x's type        rstd = 1 / sqrt(mean(h^2) + eps)
//   forward    out = h * rstd * w                one read of x (and residual), one write of out (and h)
//   backward   g  = dout * w      c = mean(g * h) * rstd^2
//              dh = rstd * (g - h * c) + dsum    one read of dout, h (and dsum), one write
//              dw = sum over rows of dout * h * rstd
//
// A row is visited twice: the first visit brings it from memory and leaves one number, the second finds it in the
// cache. h is computed in both, so that its stores, too, can go past the caches. While the second visit writes, the
// next row is fetched.
//
// Numerics. Squares and products are summed in 4 registers of floats, whose lanes are then added in double. dw of a
// block of rows is summed over at most kRunRows rows at a time before it is added to the block's result: the error of a
// float sum grows with the number of its terms.
//
// Worked example: x [3, 4], weight [1, 2], eps 0: rstd = 0.282843, out = [0.848528, 2.262742]; with grad_out [1, 0]:
// g = [1, 0], c = 0.12, dx = [0.181019, -0.135765], dw = [0.848528, 0].
#pragma once

#include "common/dtypes.h"
#include "common/vec_loop.h"
#include "rms_norm/rms_norm.h"

namespace fastpar {
namespace {

constexpr int64_t kRunRows = 64;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Independent sums, one for each register of an unrolled loop.
struct Sums {
  Vec parts[4] = {Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f)};

  double total() const { return reduce_sum(parts[0] + parts[1]) + reduce_sum(parts[2] + parts[3]); }
};

template <typename T, bool kResidual, bool kStream>
void rms_norm_rows_as(const RmsNormArguments& a, int64_t row_begin, int64_t row_end) {
  const float* weight = static_cast<const float*>(a.weight);
  const auto x_of = [&](int64_t row) { return static_cast<const T*>(a.x) + row_start(a.x_rows, row); };
  const auto residual_of = [&](int64_t row) {
    return kResidual ? static_cast<const T*>(a.residual) + row_start(a.residual_rows, row) : nullptr;
  };
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = x_of(row);
    const T* residual = residual_of(row);
    const auto load = [&](int64_t i, auto access) __attribute__((always_inline)) {
      return kResidual ? rounded_to<T>(access.load(x + i) + access.load(residual + i)) : access.load(x + i);
    };
    Sums squares;
    for_each_vec(a.hidden, [&](int64_t i, auto access, int u) __attribute__((always_inline)) {
      const Vec h = load(i, access);
      squares.parts[u] = Vec::fma(h, h, squares.parts[u]);
    });
    const double rstd = 1.0 / __builtin_sqrt(squares.total() / static_cast<double>(a.hidden) + a.eps);
    static_cast<float*>(a.rstd)[row] = static_cast<float>(rstd);

    const Vec scale = Vec::set(static_cast<float>(rstd));
    const int64_t next = smaller(row + 1, row_end - 1);
    const T* next_x = x_of(next);
    const T* next_residual = residual_of(next);
    T* out = static_cast<T*>(a.out) + row * a.hidden;
    T* sum = static_cast<T*>(a.sum) + (kResidual ? row * a.hidden : 0);
    const auto body = [&](int64_t i, auto access, int) __attribute__((always_inline)) {
      prefetch(next_x + i);
      if (kResidual) prefetch(next_residual + i);
      const Vec h = load(i, access);
      if (kResidual) access.store(h, sum + i);
      access.store(h * scale * access.load(weight + i), out + i);
    };
    const int64_t head = elements_to_alignment(out);
    if (kStream && (!kResidual || head == elements_to_alignment(sum))) {
      for_each_streamed_vec(head, a.hidden, body);
    } else {
      for_each_vec(a.hidden, body);
    }
  }
  if (kStream) fence_streamed_stores();
}

template <typename T>
void rms_norm_rows(const RmsNormArguments& a, int64_t row_begin, int64_t row_end) {
  if (a.residual != nullptr) {
    a.stream ? rms_norm_rows_as<T, true, true>(a, row_begin, row_end)
             : rms_norm_rows_as<T, true, false>(a, row_begin, row_end);
  } else {
    a.stream ? rms_norm_rows_as<T, false, true>(a, row_begin, row_end)
             : rms_norm_rows_as<T, false, false>(a, row_begin, row_end);
  }
}

// The pointers of one row of a backward pass.
template <typename T>
struct BackwardRow {
  const T *grad_out, *x, *grad_sum;
  Vec rstd;

  BackwardRow(const RmsNormBackwardArguments& a, int64_t row)
      : grad_out(static_cast<const T*>(a.grad_out) + row_start(a.grad_out_rows, row)),
        x(static_cast<const T*>(a.x) + row_start(a.x_rows, row)),
        grad_sum(a.grad_sum == nullptr ? nullptr : static_cast<const T*>(a.grad_sum) + row_start(a.grad_sum_rows, row)),
        rstd(Vec::set(static_cast<const float*>(a.rstd)[row])) {}
};

// First visit: adds the row's share to dw, and returns the sum of g * h.
template <typename T, bool kWeight>
double rms_norm_backward_sums(const BackwardRow<T>& r, const float* weight, int64_t hidden, float* grad_weight) {
  Sums products;
  for_each_vec(hidden, [&](int64_t i, auto access, int u) __attribute__((always_inline)) {
    const Vec product = access.load(r.grad_out + i) * access.load(r.x + i);
    if (kWeight) access.store(Vec::fma(product, r.rstd, access.load(grad_weight + i)), grad_weight + i);
    products.parts[u] = Vec::fma(product, access.load(weight + i), products.parts[u]);
  });
  return products.total();
}

template <typename T, bool kStream, bool kSum>
void rms_norm_grad_x(const BackwardRow<T>& r, const BackwardRow<T>& next, const float* weight, int64_t hidden, float c,
                     T* out) {
  const Vec minus_c = Vec::set(-c);
  const auto body = [&](int64_t i, auto access, int) __attribute__((always_inline)) {
    prefetch(next.grad_out + i);
    prefetch(next.x + i);
    const Vec g = access.load(r.grad_out + i) * access.load(weight + i);
    const Vec grad = Vec::fma(access.load(r.x + i), minus_c, g);
    if (kSum) {
      prefetch(next.grad_sum + i);
      access.store(Vec::fma(grad, r.rstd, access.load(r.grad_sum + i)), out + i);
    } else {
      access.store(grad * r.rstd, out + i);
    }
  };
  if (kStream) {
    for_each_streamed_vec(elements_to_alignment(out), hidden, body);
  } else {
    for_each_vec(hidden, body);
  }
}

template <typename T, bool kStream, bool kSum>
void rms_norm_backward_blocks_as(const RmsNormBackwardArguments& a, int64_t block_begin, int64_t block_end) {
  const float* weight = static_cast<const float*>(a.weight);
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t row_begin = block * a.block_rows, row_end = smaller(row_begin + a.block_rows, a.rows);
    float* result = static_cast<float*>(a.grad_weight) + (a.grad_weight == nullptr ? 0 : block * 2 * a.hidden);
    float* run = result + (a.grad_weight == nullptr ? 0 : a.hidden);
    const size_t bytes = sizeof(float) * static_cast<size_t>(a.hidden);
    if (a.grad_weight != nullptr) memset(result, 0, 2 * bytes);
    for (int64_t row = row_begin; row < row_end; ++row) {
      const BackwardRow<T> r(a, row);
      double sum = 0.0;
      if (a.grad_weight != nullptr) {
        sum = rms_norm_backward_sums<T, true>(r, weight, a.hidden, run);
      } else if (a.factor == nullptr) {
        sum = rms_norm_backward_sums<T, false>(r, weight, a.hidden, nullptr);
      }
      if (a.products != nullptr) static_cast<float*>(a.products)[row] = static_cast<float>(sum);
      if (a.grad_x != nullptr) {
        const BackwardRow<T> next(a, smaller(row + 1, a.rows - 1));
        const double rstd = static_cast<double>(static_cast<const float*>(a.rstd)[row]);
        const float c = a.factor != nullptr ? static_cast<const float*>(a.factor)[row]
                                            : static_cast<float>(sum / static_cast<double>(a.hidden) * rstd * rstd);
        rms_norm_grad_x<T, kStream, kSum>(r, next, weight, a.hidden, c, static_cast<T*>(a.grad_x) + row * a.hidden);
      }
      const bool ends_run = (row - row_begin) % kRunRows == kRunRows - 1 || row == row_end - 1;
      if (a.grad_weight != nullptr && ends_run) {
        for_each_vec(a.hidden, [&](int64_t i, auto access, int) __attribute__((always_inline)) {
          access.store(access.load(result + i) + access.load(run + i), result + i);
        });
        memset(run, 0, bytes);
      }
    }
  }
  if (kStream) fence_streamed_stores();
}

template <typename T>
void rms_norm_backward_blocks(const RmsNormBackwardArguments& a, int64_t block_begin, int64_t block_end) {
  if (a.grad_sum != nullptr) {
    a.stream ? rms_norm_backward_blocks_as<T, true, true>(a, block_begin, block_end)
             : rms_norm_backward_blocks_as<T, false, true>(a, block_begin, block_end);
  } else {
    a.stream ? rms_norm_backward_blocks_as<T, true, false>(a, block_begin, block_end)
             : rms_norm_backward_blocks_as<T, false, false>(a, block_begin, block_end);
  }
}

}  // namespace
}  // namespace fastpar
