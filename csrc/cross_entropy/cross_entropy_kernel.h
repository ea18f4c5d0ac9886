// The CPU kernels of vocab-parallel cross-entropy, written once over Vec and compiled per instruction set.
//
// stats:     one read of the logits. A row is taken in blocks that stay in the first-level cache: the block's maximum,
//            then the sum of exp(x - m) with the running maximum m, the earlier sum being rescaled when m rises.
// backward:  one read, one write. grad = (exp(x - lse) - [column is the target]) * grad_loss.
//
// Numerics. x - m is taken before scaling to base 2, because folding the scale in (x * log2e - m * log2e) would put the
// rounding error of m * log2e, 5e-4 at |m| = 1e4, on every term. The normaliser arrives in double for the same reason,
// and is split into two floats. The target's entry is expm1(x - lse) in double: p - 1 would cancel as p approaches 1.
//
// Measured on one core of Zen 4 with 256 MiB of float32 logits, CPU time of the thread, milliseconds:
//   stats     15.3 plain; 13.2 with the next block prefetched while this one is summed, since maximum and sum would
//             otherwise take turns in waiting for memory; 11.5 with blocks of 4 KiB instead of 8 (12.8 with 2 KiB,
//             13.6 with 32 KiB)
//   backward  9.7 in place; 15 into other memory, 12 with stores past the caches
// bfloat16 is bound by arithmetic: 24 and 22 for the same bytes. The backward took 26 with degree 5 and a separate
// multiplication by grad_loss; in cache, the instruction for rounding gives 4.8 elements a nanosecond against 3.5.
#pragma once

#include "common/simd.h"
#include "cross_entropy/cross_entropy.h"

namespace fastpar {
namespace {

constexpr int64_t kBlockBytes = 4096;  // 8192 and up, and 2048, measured 10 to 20% slower
constexpr int kUnroll = 4;             // independent accumulators

inline int64_t row_offset(const RowLayout& rows, int64_t row) {
  int64_t offset = 0;
  for (int d = rows.num_dims - 1; d > 0; --d) {
    offset += (row % rows.sizes[d]) * rows.strides[d];
    row /= rows.sizes[d];
  }
  return rows.num_dims > 0 ? offset + row * rows.strides[0] : 0;
}

template <typename T>
float block_max(const T* x, int64_t count) {
  constexpr int W = Vec::kWidth;
  Vec best[kUnroll];
  for (int u = 0; u < kUnroll; ++u) best[u] = Vec::set(kNegativeInfinity);
  int64_t i = 0;
  for (; i + kUnroll * W <= count; i += kUnroll * W) {
    for (int u = 0; u < kUnroll; u += 2) {
      Vec a, b;
      Vec::load_pair(x + i + u * W, &a, &b);
      best[u] = Vec::max(a, best[u]);
      best[u + 1] = Vec::max(b, best[u + 1]);
    }
  }
  for (; i + W <= count; i += W) best[0] = Vec::max(Vec::load(x + i), best[0]);
  if (i < count) best[1] = Vec::max(Vec::load_first(x + i, static_cast<int>(count - i), kNegativeInfinity), best[1]);
  return reduce_max(Vec::max(Vec::max(best[0], best[1]), Vec::max(best[2], best[3])));
}

// `next` is where the row goes on: its lines are fetched while the exponentials of this block keep the core busy.
template <typename T>
double block_sum_exp(const T* x, int64_t count, float maximum, const T* next) {
  constexpr int W = Vec::kWidth;
  const Vec m = Vec::set(maximum), log2e = Vec::set(kLog2E);
  const ScaledExp2<5> exp2(1.0f);
  Vec sum[kUnroll];
  for (int u = 0; u < kUnroll; ++u) sum[u] = Vec::set(0.0f);
  int64_t i = 0;
  for (; i + kUnroll * W <= count; i += kUnroll * W) {
    constexpr int kLine = 64 / static_cast<int>(sizeof(T));
    for (int j = 0; j < kUnroll * W; j += kLine) prefetch(next + i + j);
    for (int u = 0; u < kUnroll; u += 2) {
      Vec a, b;
      Vec::load_pair(x + i + u * W, &a, &b);
      sum[u] = sum[u] + exp2((a - m) * log2e);
      sum[u + 1] = sum[u + 1] + exp2((b - m) * log2e);
    }
  }
  for (; i + W <= count; i += W) sum[0] = sum[0] + exp2((Vec::load(x + i) - m) * log2e);
  if (i < count) {
    const Vec tail = Vec::load_first(x + i, static_cast<int>(count - i), kNegativeInfinity);
    sum[1] = sum[1] + exp2((tail - m) * log2e);
  }
  return reduce_sum(sum[0] + sum[1]) + reduce_sum(sum[2] + sum[3]);
}

template <typename T>
void stats_rows(const StatsArguments& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, row);
    float maximum = kNegativeInfinity;
    double sum = 0.0;
    constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(T));
    for (int64_t begin = 0; begin < a.vocab; begin += kBlock) {
      const int64_t count = a.vocab - begin < kBlock ? a.vocab - begin : kBlock;
      const float candidate = block_max(x + begin, count);
      if (candidate > maximum) {
        sum *= __builtin_exp(static_cast<double>(maximum) - static_cast<double>(candidate));
        maximum = candidate;
      }
      // A row of -inf so far has no finite maximum to subtract; with 0 its terms are exp(-inf) = 0, and NaN stays NaN.
      sum += block_sum_exp(x + begin, count, maximum == kNegativeInfinity ? 0.0f : maximum, x + begin + count);
    }
    const int64_t id = a.target[row];
    const int64_t column = id - a.vocab_start;
    const bool is_owned = id != a.ignore_index && column >= 0 && column < a.vocab;
    float* out = static_cast<float*>(a.stats) + 3 * row;
    out[0] = maximum;
    out[1] = static_cast<float>(sum);
    out[2] = is_owned ? to_float(x[column]) : 0.0f;
  }
}

template <typename T>
void fill_zero(T* out, int64_t count) {
  memset(static_cast<void*>(out), 0, sizeof(T) * static_cast<size_t>(count));
}

// out = exp(x - lse) * scale for one row; x and out may be the same row.
template <typename T, bool kStream>
void scaled_softmax_row(const T* x, T* out, int64_t count, double lse, float scale) {
  constexpr int W = Vec::kWidth;
  const float high = static_cast<float>(lse);
  const Vec offset = Vec::set(high), log2e = Vec::set(kLog2E);
  const Vec low = Vec::set(-static_cast<float>(lse - static_cast<double>(high)) * kLog2E);
  const ScaledExp2<sizeof(T) == 2 ? 4 : 5> scaled_exp2(scale);
  const auto value = [&](Vec v) { return scaled_exp2(Vec::fma(v - offset, log2e, low)); };
  int64_t i = 0;
  if (kStream) {
    constexpr uintptr_t kBytes = sizeof(T) * W;
    const uintptr_t misaligned = reinterpret_cast<uintptr_t>(out) % kBytes;
    const int64_t to_aligned = misaligned == 0 ? 0 : static_cast<int64_t>((kBytes - misaligned) / sizeof(T));
    const int64_t head = to_aligned < count ? to_aligned : count;
    if (head > 0) {
      const int lanes = static_cast<int>(head);
      value(Vec::load_first(x, lanes, 0.0f)).store_first(out, lanes);
      i = head;
    }
  }
  for (; i + kUnroll * W <= count; i += kUnroll * W) {
    Vec result[kUnroll];
    for (int u = 0; u < kUnroll; ++u) result[u] = value(Vec::load(x + i + u * W));
    for (int u = 0; u < kUnroll; ++u) {
      if (kStream) {
        result[u].stream(out + i + u * W);
      } else {
        result[u].store(out + i + u * W);
      }
    }
  }
  for (; i + W <= count; i += W) value(Vec::load(x + i)).store(out + i);
  if (i < count) {
    const int lanes = static_cast<int>(count - i);
    value(Vec::load_first(x + i, lanes, 0.0f)).store_first(out + i, lanes);
  }
}

template <typename T, bool kStream>
void backward_rows_as(const BackwardArguments& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, row);
    T* out = static_cast<T*>(a.grad) + row_offset(a.grad_rows, row);
    const int64_t id = a.target[row];
    if (id == a.ignore_index) {
      fill_zero(out, a.vocab);
      continue;
    }
    const float scale = static_cast<const float*>(a.grad_loss)[row * a.grad_loss_stride];
    const int64_t column = id - a.vocab_start;
    const bool is_owned = column >= 0 && column < a.vocab;
    // Read before the row is overwritten.
    const double target_logit = is_owned ? static_cast<double>(to_float(x[column])) : 0.0;
    scaled_softmax_row<T, kStream>(x, out, a.vocab, a.lse[row], scale);
    if (is_owned) {
      from_float(static_cast<float>(__builtin_expm1(target_logit - a.lse[row]) * static_cast<double>(scale)),
                 out + column);
    }
  }
  if (kStream) fence_streamed_stores();
}

template <typename T>
void backward_rows(const BackwardArguments& a, int64_t row_begin, int64_t row_end) {
  if (a.stream) {
    backward_rows_as<T, true>(a, row_begin, row_end);
  } else {
    backward_rows_as<T, false>(a, row_begin, row_end);
  }
}

}  // namespace
}  // namespace fastpar
