// The CPU kernels of softmax, log-softmax, log-probability and entropy over a shard of the vocabulary, written once
// over Vec and compiled per instruction set.
//
// The normaliser arrives in double and is split into two floats, so that z - lse keeps its digits at |lse| = 1e4. What
// is written in 16 bits uses the polynomial of degree 4.
#pragma once

#include "common/far_rows.h"
#include "common/simd.h"
#include "common/softmax_blocks.h"
#include "vocab_softmax/vocab_softmax.h"

namespace fastpar {
namespace {

struct WholeLoad {
  template <typename T>
  Vec operator()(const T* p) const {
    return Vec::load(p);
  }
  template <typename T>
  Vec existing(const T* p) const {
    return Vec::load(p);
  }
};

// The first elements of a register; the others read as 0.
struct PartLoad {
  int count;
  template <typename T>
  Vec operator()(const T* p) const {
    return Vec::load_first(p, count, 0.0f);
  }
  // The others are elements of the row too: 0 may be far above a row's normaliser.
  template <typename T>
  Vec existing(const T* p) const {
    return Vec::load_first(p, count, to_float(*p));
  }
};

// out[i...] = body(i, load) for a row, a register at a time, past the caches with kStream.
template <bool kStream, typename O, typename Body>
void write_row(O* out, int64_t count, const Body& body) {
  constexpr int W = Vec::kWidth;
  int64_t i = 0;
  if (kStream) {
    constexpr uintptr_t kBytes = sizeof(O) * W;
    const uintptr_t misaligned = reinterpret_cast<uintptr_t>(out) % kBytes;
    const int64_t to_aligned = misaligned == 0 ? 0 : static_cast<int64_t>((kBytes - misaligned) / sizeof(O));
    i = to_aligned < count ? to_aligned : count;
    if (i > 0) body(0, PartLoad{static_cast<int>(i)}).store_first(out, static_cast<int>(i));
  }
  for (; i + 4 * W <= count; i += 4 * W) {
    Vec result[4];
    for (int u = 0; u < 4; ++u) result[u] = body(i + u * W, WholeLoad{});
    for (int u = 0; u < 4; ++u) {
      if (kStream) {
        result[u].stream(out + i + u * W);
      } else {
        result[u].store(out + i + u * W);
      }
    }
  }
  for (; i + W <= count; i += W) body(i, WholeLoad{}).store(out + i);
  if (i < count) {
    const int lanes = static_cast<int>(count - i);
    body(i, PartLoad{lanes}).store_first(out + i, lanes);
  }
  if (kStream) fence_streamed_stores();
}

// z - lse, in natural units or in those of exp2.
class Normalizer {
 public:
  explicit Normalizer(const SplitLse& lse)
      : high_(Vec::set(static_cast<float>(lse.high))),
        low_(Vec::set(static_cast<float>(lse.low))),
        low2_(Vec::set(-static_cast<float>(lse.low) * kLog2E)),
        log2e_(Vec::set(kLog2E)) {}

  Vec log(Vec z) const { return (z - high_) - low_; }
  Vec log2(Vec z) const { return Vec::fma(z - high_, log2e_, low2_); }

 private:
  Vec high_, low_, low2_, log2e_;
};

// A run-time choice as a constant of the body that is called.
template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

template <typename Body>
void choose(bool condition, const Body& body) {
  if (condition) {
    body(Constant<true>{});
  } else {
    body(Constant<false>{});
  }
}

template <typename T, bool kEntropy>
SoftmaxSums row_sums(const LogitsRow& row) {
  const T* x = static_cast<const T*>(row.x);
  SoftmaxSums sums;
  if (is_identity(row.transform)) {
    constexpr int64_t kBlock = kSoftmaxBlockBytes / static_cast<int64_t>(sizeof(T));
    for (int64_t begin = 0; begin < row.vocab; begin += kBlock) {
      const int64_t count = row.vocab - begin < kBlock ? row.vocab - begin : kBlock;
      sums.add<kEntropy>(x + begin, count, x + begin + count);
    }
    return sums;
  }
  // z is computed once, and read from this buffer for the maximum and the sum.
  constexpr int64_t kBlock = kSoftmaxBlockBytes / static_cast<int64_t>(sizeof(float));
  alignas(64) float z[kBlock];
  const VecTransform<true> transform(row.transform);
  for (int64_t begin = 0; begin < row.vocab; begin += kBlock) {
    const int64_t count = row.vocab - begin < kBlock ? row.vocab - begin : kBlock;
    write_row<false>(z, count, [&](int64_t i, auto load) { return transform.z(load(x + begin + i)); });
    sums.add<kEntropy>(z, count, z);
  }
  return sums;
}

// The same bits as the element has in its row.
template <typename T>
double element_z(const LogitsRow& row, int64_t column) {
  const Vec x = Vec::set(to_float(static_cast<const T*>(row.x)[column]));
  float lanes[Vec::kWidth];
  (is_identity(row.transform) ? x : VecTransform<true>(row.transform).z(x)).store(lanes);
  return static_cast<double>(lanes[0]);
}

template <typename T>
void sums_row(const LogitsRow& row, bool entropy, double* out) {
  const SoftmaxSums sums = entropy ? row_sums<T, true>(row) : row_sums<T, false>(row);
  out[0] = static_cast<double>(sums.maximum);
  out[1] = sums.sum;
  out[2] = sums.weighted;
}

template <typename T, typename O>
void normalize_row(const LogitsRow& row, bool log, bool stream, void* out) {
  const T* x = static_cast<const T*>(row.x);
  const Normalizer normalizer(SplitLse(row.lse));
  const ScaledExp2<sizeof(O) == 2 ? 4 : 5> exp2(1.0f);
  choose(!is_identity(row.transform), [&](auto transformed) {
    const VecTransform<decltype(transformed)::value> transform(row.transform);
    choose(stream, [&](auto streamed) {
      choose(log, [&](auto logarithm) {
        write_row<decltype(streamed)::value>(static_cast<O*>(out), row.vocab, [&](int64_t i, auto load) {
          const Vec z = transform.z(load(x + i));
          return decltype(logarithm)::value ? normalizer.log(z) : exp2(normalizer.log2(z));
        });
      });
    });
  });
}

template <typename T, typename G>
double dot_row(const LogitsRow& row, const void* grad_out, bool log) {
  constexpr int W = Vec::kWidth;
  constexpr int64_t kBlock = 1024;  // added up in float32; blocks in double
  const T* x = static_cast<const T*>(row.x);
  const G* grad = static_cast<const G*>(grad_out);
  const Normalizer normalizer(SplitLse(row.lse));
  const ScaledExp2<5> exp2(1.0f);
  double total = 0.0;
  choose(!is_identity(row.transform), [&](auto transformed) {
    const VecTransform<decltype(transformed)::value> transform(row.transform);
    choose(log, [&](auto logarithm) {
      const auto term = [&](int64_t i, auto load) {
        const Vec dy = load(grad + i);
        return decltype(logarithm)::value ? dy : exp2(normalizer.log2(transform.z(load.existing(x + i)))) * dy;
      };
      for (int64_t begin = 0; begin < row.vocab; begin += kBlock) {
        const int64_t end = row.vocab - begin < kBlock ? row.vocab : begin + kBlock;
        Vec sum[4];
        for (int u = 0; u < 4; ++u) sum[u] = Vec::set(0.0f);
        int64_t i = begin;
        for (; i + 4 * W <= end; i += 4 * W) {
          for (int u = 0; u < 4; ++u) sum[u] = sum[u] + term(i + u * W, WholeLoad{});
        }
        for (; i + W <= end; i += W) sum[0] = sum[0] + term(i, WholeLoad{});
        // What is not there has dy = 0 and a finite p.
        if (i < end) sum[1] = sum[1] + term(i, PartLoad{static_cast<int>(end - i)});
        total += reduce_sum(sum[0] + sum[1]) + reduce_sum(sum[2] + sum[3]);
      }
    });
  });
  return total;
}

template <typename T, typename G>
void backward_row(const LogitsRow& row, const void* grad_out, double dot, bool log, bool stream, void* out) {
  const T* x = static_cast<const T*>(row.x);
  const G* grad = static_cast<const G*>(grad_out);
  const Normalizer normalizer(SplitLse(row.lse));
  const ScaledExp2<5> exp2(log ? -static_cast<float>(dot) : 1.0f);  // 1 exactly for a class that is certain
  const Vec subtracted = Vec::set(static_cast<float>(dot));
  choose(!is_identity(row.transform), [&](auto transformed) {
    constexpr bool kTransform = decltype(transformed)::value;
    const VecTransform<kTransform> transform(row.transform);
    choose(stream, [&](auto streamed) {
      choose(log, [&](auto logarithm) {
        write_row<decltype(streamed)::value>(static_cast<T*>(out), row.vocab, [&](int64_t i, auto load) {
          Vec slope;
          const Vec z = transform.z_and_slope(load(x + i), &slope);
          const Vec p = exp2(normalizer.log2(z)), dy = load(grad + i);
          const Vec dz = decltype(logarithm)::value ? dy + p : p * (dy - subtracted);
          return kTransform ? dz * slope : dz;
        });
      });
    });
  });
}

template <typename T>
void log_prob_backward_row(const LogitsRow& row, double base, double slope, bool stream, void* out) {
  const T* x = static_cast<const T*>(row.x);
  const Normalizer normalizer(SplitLse(row.lse));
  const ScaledExp2<sizeof(T) == 2 ? 4 : 5> exp2(slope == 0.0 ? static_cast<float>(base) : 1.0f);
  constexpr double kLn2 = 0.69314718055994530942;
  const Vec base_vec = Vec::set(static_cast<float>(base)), slope2 = Vec::set(static_cast<float>(slope * kLn2));
  const Vec lowest = Vec::set(-300.0f);  // where p is 0: keeps 0 * inf away
  choose(!is_identity(row.transform), [&](auto transformed) {
    constexpr bool kTransform = decltype(transformed)::value;
    const VecTransform<kTransform> transform(row.transform);
    choose(stream, [&](auto streamed) {
      choose(slope != 0.0, [&](auto sloped) {
        write_row<decltype(streamed)::value>(static_cast<T*>(out), row.vocab, [&](int64_t i, auto load) {
          Vec dzdx;
          const Vec z = transform.z_and_slope(load(x + i), &dzdx);
          const Vec t = normalizer.log2(z);
          Vec dz = exp2(t);
          if (decltype(sloped)::value) dz = dz * Vec::fma(Vec::max(lowest, t), slope2, base_vec);
          return kTransform ? dz * dzdx : dz;
        });
      });
    });
  });
}

#define FASTPAR_SOFTMAX_KERNELS(element64, sums64, normalize64, dot64, backward64, log_prob_backward64) \
  {                                                                                                     \
    {element_z<float>, element_z<bfloat16>, element_z<float16>, element64},                             \
        {sums_row<float>, sums_row<bfloat16>, sums_row<float16>, sums64},                               \
        {{normalize_row<float, float>, normalize_row<float, float>},                                    \
         {normalize_row<bfloat16, bfloat16>, normalize_row<bfloat16, float>},                           \
         {normalize_row<float16, float16>, normalize_row<float16, float>},                              \
         {normalize64, normalize64}},                                                                   \
        {{dot_row<float, float>, dot_row<float, float>},                                                \
         {dot_row<bfloat16, bfloat16>, dot_row<bfloat16, float>},                                       \
         {dot_row<float16, float16>, dot_row<float16, float>},                                          \
         {dot64, dot64}},                                                                               \
        {{backward_row<float, float>, backward_row<float, float>},                                      \
         {backward_row<bfloat16, bfloat16>, backward_row<bfloat16, float>},                             \
         {backward_row<float16, float16>, backward_row<float16, float>},                                \
         {backward64, backward64}},                                                                     \
    {                                                                                                   \
      log_prob_backward_row<float>, log_prob_backward_row<bfloat16>, log_prob_backward_row<float16>,    \
          log_prob_backward64                                                                           \
    }                                                                                                   \
  }

}  // namespace
}  // namespace fastpar
