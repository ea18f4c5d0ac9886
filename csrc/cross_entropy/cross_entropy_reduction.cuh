// Device code around cross-entropy's one visit to the rows: what a mean divides by, before it; the sum of the rows'
// losses, after it.
//
// A block each, which is for batches whose targets it reads in a few microseconds: eight elementwise and reducing calls
// of torch took longer on the host than the loss of 8192 rows on the device (H200: 0.2 ms a call, now one op).
//
// Worked example: targets [3, -100, 0] with ignore_index -100 have the divisor 2, and every row's loss the gradient
// 1/2.
#pragma once

#include <cstdint>

#include "cross_entropy/cross_entropy.cuh"

namespace fastpar {
namespace device {

constexpr unsigned kReductionThreads = 1024;

struct DivisorArguments {
  const int64_t* target;
  int64_t rows;
  int64_t ignore_index;
  bool is_mean;             // of the rows that count, if no denominator is given; else nothing is divided
  const void* denominator;  // [1] of the losses' type, or nullptr
  void* divisor;            // [1]
  void* grad_loss;          // [1]: 1 / divisor, the gradient of every row's loss
};

struct LossSumArguments {
  const void* loss;
  int64_t rows;
  const void* divisor;  // [1]
  void* out;            // [1]
};

// In thread 0; by all threads, in the same order every time. `parts` has room for every warp.
template <typename V>
__device__ inline V sum_over_block(V value, V* parts) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(kAllLanes, value, distance);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  V sum = V(0);
  if (threadIdx.x == 0) {
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += parts[warp];
  }
  return sum;
}

template <typename C>
__global__ void __launch_bounds__(kReductionThreads) divisor_kernel(DivisorArguments a) {
  FASTPAR_SHARED_ARRAY(int, parts, kReductionThreads / 32);
  int own = 0;
  if (a.is_mean && a.denominator == nullptr) {
#pragma unroll 4
    for (int64_t row = threadIdx.x; row < a.rows; row += kReductionThreads) own += a.target[row] != a.ignore_index;
  }
  const int counted = sum_over_block(own, parts);
  if (threadIdx.x != 0) return;
  const C divisor = a.denominator != nullptr ? *static_cast<const C*>(a.denominator) : C(counted > 0 ? counted : 1);
  *static_cast<C*>(a.divisor) = divisor;
  *static_cast<C*>(a.grad_loss) = C(1) / divisor;
}

template <typename C>
__global__ void __launch_bounds__(kReductionThreads) loss_sum_kernel(LossSumArguments a) {
  FASTPAR_SHARED_ARRAY(double, parts, kReductionThreads / 32);
  double own = 0.0;
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < a.rows; row += kReductionThreads) own += static_cast<const C*>(a.loss)[row];
  const double sum = sum_over_block(own, parts);
  if (threadIdx.x == 0) *static_cast<C*>(a.out) = static_cast<C>(sum) / *static_cast<const C*>(a.divisor);
}

// ---- launch ---------------------------------------------------------------------------------------------------------

inline void launch_divisor(bool is_double, const DivisorArguments& a, cudaStream_t stream) {
  launch(is_double ? &divisor_kernel<double> : &divisor_kernel<float>, {1, kReductionThreads}, stream, a);
}

inline void launch_loss_sum(bool is_double, const LossSumArguments& a, cudaStream_t stream) {
  launch(is_double ? &loss_sum_kernel<double> : &loss_sum_kernel<float>, {1, kReductionThreads}, stream, a);
}

}  // namespace device
}  // namespace fastpar
