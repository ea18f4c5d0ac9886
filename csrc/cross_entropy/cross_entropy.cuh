// Device code of vocab-parallel cross-entropy. Compiled, not measured yet.
//
// One block of threads per row. Every thread keeps its own running (maximum, sum) over a strided part of the row, and
// the block combines them once at the end. The row is read once by `stats` and once by `backward`, with scalar loads;
// wider ones, and rows kept on chip, are to be measured first.
//
// Worked example: a row [0, log 3] gives maximum log 3 and sum 1/3 + 1; lse = log 4.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cross_entropy/cross_entropy.h"

namespace fastpar {
namespace device {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

// ---- device functions -----------------------------------------------------------------------------------------------

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline double widen(double x) { return x; }

__device__ inline void narrow(float x, float* out) { *out = x; }
__device__ inline void narrow(float x, __nv_bfloat16* out) { *out = __float2bfloat16_rn(x); }
__device__ inline void narrow(float x, __half* out) { *out = __float2half_rn(x); }
__device__ inline void narrow(double x, double* out) { *out = x; }

__device__ inline float exponential(float x) { return exp2f(x * 1.44269504088896340736f); }
__device__ inline double exponential(double x) { return exp(x); }

__device__ inline int64_t row_offset(const RowLayout& rows, int64_t row) {
  int64_t offset = 0;
  for (int d = rows.num_dims - 1; d > 0; --d) {
    offset += (row % rows.sizes[d]) * rows.strides[d];
    row /= rows.sizes[d];
  }
  return rows.num_dims > 0 ? offset + row * rows.strides[0] : 0;
}

template <typename C>
__device__ inline C negative_infinity() {
  return -static_cast<C>(INFINITY);
}

// A running maximum and the sum of exp(x - maximum).
template <typename C>
struct Partial {
  C maximum;
  C sum;

  __device__ void add(C x) {
    if (x > maximum) {
      sum = sum * exponential(maximum - x) + C(1);
      maximum = x;
    } else if (x != negative_infinity<C>()) {  // -inf adds nothing; NaN arrives here and stays
      sum += exponential(x - maximum);
    }
  }

  __device__ void add(const Partial& other) {
    const C highest = other.maximum > maximum ? other.maximum : maximum;
    const C reference = highest == negative_infinity<C>() ? C(0) : highest;
    sum = sum * exponential(maximum - reference) + other.sum * exponential(other.maximum - reference);
    maximum = highest;
  }
};

// Always in the same order, so that a row's result does not depend on the run. Valid in thread 0.
template <typename C>
__device__ Partial<C> combine_over_block(Partial<C> value, Partial<C>* scratch) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const Partial<C> other{__shfl_down_sync(0xffffffffu, value.maximum, distance),
                           __shfl_down_sync(0xffffffffu, value.sum, distance)};
    value.add(other);
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) value.add(scratch[warp]);
  }
  return value;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// T: dtype of the logits; C: float, or double for double.
template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) stats_kernel(StatsArguments a, int64_t vocab_total) {
  __shared__ Partial<C> scratch[kWarps];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, row);
  Partial<C> mine{negative_infinity<C>(), C(0)};
  for (int64_t i = threadIdx.x; i < a.vocab; i += kThreads) mine.add(widen(x[i]));
  const Partial<C> all = combine_over_block(mine, scratch);
  if (threadIdx.x != 0) return;

  const int64_t id = a.target[row], column = id - a.vocab_start;
  C target_logit = C(0);
  if (id != a.ignore_index) {
    // Raising would need a synchronisation: a target outside the vocabulary makes this row's loss NaN.
    if (id < 0 || id >= vocab_total)
      target_logit = static_cast<C>(NAN);
    else if (column >= 0 && column < a.vocab)
      target_logit = widen(x[column]);
  }
  C* out = static_cast<C*>(a.stats) + 3 * row;
  out[0] = all.maximum;
  out[1] = all.sum;
  out[2] = target_logit;
}

// One thread per row; the ranks always in the same order.
template <typename C>
__global__ void merge_kernel(const C* gathered, int64_t ranks, int64_t rank_stride, int64_t rows, const int64_t* target,
                             int64_t ignore_index, C* loss, double* lse) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  double maximum = negative_infinity<double>();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const double candidate = static_cast<double>(gathered[rank * rank_stride + 3 * row]);
    if (candidate > maximum) maximum = candidate;
  }
  const double reference = maximum == negative_infinity<double>() ? 0.0 : maximum;
  double sum = 0.0, target_logit = 0.0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const C* stats = gathered + rank * rank_stride + 3 * row;
    sum += static_cast<double>(stats[1]) * exp(static_cast<double>(stats[0]) - reference);
    target_logit += static_cast<double>(stats[2]);
  }
  lse[row] = reference + log(sum);
  loss[row] = target[row] == ignore_index ? C(0) : static_cast<C>((reference - target_logit) + log(sum));
}

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) backward_kernel(BackwardArguments a) {
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, row);
  T* out = static_cast<T*>(a.grad) + row_offset(a.grad_rows, row);
  const int64_t id = a.target[row], column = id - a.vocab_start;
  const bool is_ignored = id == a.ignore_index;
  const C scale = static_cast<const C*>(a.grad_loss)[row * a.grad_loss_stride];
  const double lse = a.lse[row];
  const C high = static_cast<C>(lse), low = static_cast<C>(lse - static_cast<double>(high));
  for (int64_t i = threadIdx.x; i < a.vocab; i += kThreads) {
    const C logit = widen(x[i]);
    C value = exponential((logit - high) - low);
    if (i == column) value = static_cast<C>(expm1(static_cast<double>(logit) - lse));
    narrow(is_ignored ? C(0) : value * scale, out + i);
  }
}

}  // namespace device
}  // namespace fastpar
