// One row of logits on the device: how threads share it, and the arithmetic that all kernels of cross-entropy have in
// common.
//
// A row is an aligned run of 16-byte packets with up to 7 columns before it and up to 7 after it, whatever its address
// and length. Packet p belongs to thread p mod (number of threads); the columns at the ends go to one thread each. A
// thread that reads a column is the one that writes it, so that the output may be the row itself.
//
// Note: exact folding. exp(z - m) is 2^(z L - m L) with L = log2(e): one FMA and one MUFU instruction, if m L is
// rounded to a float `offset` beforehand. That rounding, 5e-4 at |m| = 1e4, is the same for all z, and is made good by
// one factor, 2^(offset - m L), whose exponent an FMA gives exactly. What remains is the error of L itself, 1e-8 of
// z - m.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/packet.cuh"
#include "cross_entropy/cross_entropy.h"

namespace fastpar {
namespace device {

template <typename T>
constexpr int kMaxThreads = sizeof(T) == 8 ? 256 : 512;  // float64 needs twice the registers

// Blocks that a multiprocessor has registers for: of 512 threads, 2 leave 64 registers to a thread, 3 leave 42. More
// blocks cover each other's phases, fewer registers may spill; 3 were not tried. NVCC_APPEND_FLAGS can define
// another. (Kernels that keep a row have numbers of their own.)
#if !defined(FASTPAR_CROSS_ENTROPY_BLOCKS)
#define FASTPAR_CROSS_ENTROPY_BLOCKS 2
#endif
constexpr int kMinBlocks = FASTPAR_CROSS_ENTROPY_BLOCKS;
constexpr int kUnroll = 4;  // packets that a thread asks for before it uses the first; half as many with options, which
                            // need registers of their own
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLog2E = 1.44269504088896340736f;

// ---- arithmetic -----------------------------------------------------------------------------------------------------

template <typename C>
__device__ inline C negative_infinity() {
  return -static_cast<C>(INFINITY);
}

__device__ inline float maximum_of(float x, float y) { return fmaxf(x, y); }
__device__ inline double maximum_of(double x, double y) { return fmax(x, y); }
__device__ inline float exponential(float x) { return exp2_approx(x * kLog2E); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float exponential_minus_1(float x) { return expm1f(x); }
__device__ inline double exponential_minus_1(double x) { return expm1(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

// The normaliser of a row of float logits as one double; see Note: far rows in common/far_rows.h.
__device__ inline bool is_far(double maximum) {
  return fabs(maximum) >= 0x1p30 && fabs(maximum) < static_cast<double>(INFINITY);
}
__device__ inline double far_unit(double maximum) { return ldexp(1.0, ilogb(maximum) - 30); }
template <typename C>
__device__ inline double join_lse(double maximum, double log_sum) {
  return sizeof(C) == 4 && is_far(maximum) ? maximum + log_sum * far_unit(maximum) : maximum + log_sum;
}

// lse = high + low, high being the maximum of a far row. In floats and without a branch: 2^(30 - k) by its bits, the k
// of rows that are not far being 30.
struct SplitLse {
  float high, low;

  __device__ explicit SplitLse(double lse)
      : high(static_cast<float>(lse)), low(static_cast<float>(lse - static_cast<double>(high))) {
    constexpr uint32_t kOne = 127u << 23;
    const uint32_t bits = __float_as_uint(fmaxf(fabsf(high), 0x1p30f)) & 0x7f800000u;
    low *= __uint_as_float(2u * kOne + (30u << 23) - bits);
  }
};

__device__ inline float log_probability(float z, double lse) {
  const SplitLse split(lse);
  return (z - split.high) - split.low;
}
__device__ inline double log_probability(double z, double lse) { return z - lse; }

// From here on the rounding of an offset, half of its last place, leaves the range of exponentials: such a reference is
// subtracted first, which costs the others a subtraction of 0.
constexpr float kLargeReference = 0x1p24f;

// exp(z - reference) = (*this)(z) * correction. See Note: exact folding; float64 needs none.
template <typename C>
struct Exponent {
  static constexpr bool kIsFolded = sizeof(C) == 4;

  C first, offset, correction;  // what is subtracted before and after the multiplication; one of them is 0

  __device__ explicit Exponent(C reference) : first(reference), offset(C(0)), correction(C(1)) {
    if constexpr (kIsFolded) {
      if (fabsf(reference) < kLargeReference) {
        first = 0.0f;
        offset = reference * kLog2E;
        correction = exp2_approx(-fmaf(reference, kLog2E, -offset));
      }
    }
  }

  __device__ static Exponent of_lse(double lse) {
    Exponent result(static_cast<C>(lse));
    if constexpr (kIsFolded) {
      if (fabs(lse) < static_cast<double>(kLargeReference)) {
        const double product = lse * static_cast<double>(kLog2E);
        result.offset = static_cast<C>(product);
        result.correction = exp2_approx(static_cast<float>(static_cast<double>(result.offset) - product));
      } else {
        result.correction = exponential(-SplitLse(lse).low);
      }
    }
    return result;
  }

  __device__ C operator()(C z) const {
    if constexpr (kIsFolded) {
      return exp2_approx(fmaf(z - first, kLog2E, -offset));
    } else {
      return exponential(z - first);
    }
  }

  // Of several z, in place. The branch is the same for a whole row, and saves a subtraction of 0 an element.
  template <int kCount>
  __device__ void apply(C (&z)[kCount]) const {
    if (kIsFolded && first == C(0)) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) z[j] = exp2_approx(fmaf(z[j], kLog2E, -offset));
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) z[j] = (*this)(z[j]);
    }
  }
};

// tanh(u) and its derivative from one exponential. 1 - tanh^2 would cancel where tanh is close to 1, and
// (1 - e) / (1 + e) where u is close to 0: there the series is exact to 1e-8.
__device__ inline void tanh_and_slope(float u, float* value, float* slope) {
  const float magnitude = fabsf(u), e = exp2_approx(-2.0f * kLog2E * magnitude);
  const float reciprocal = 1.0f / (1.0f + e), square = u * u;
  const float series =
      fmaf(square * u,
           fmaf(square, fmaf(square, fmaf(square, 62.0f / 2835.0f, -17.0f / 315.0f), 2.0f / 15.0f), -1.0f / 3.0f), u);
  *value = magnitude < 0.25f ? series : copysignf((1.0f - e) * reciprocal, u);
  *slope = 4.0f * e * reciprocal * reciprocal;
}
__device__ inline void tanh_and_slope(double u, double* value, double* slope) {
  const double e = exp(-2.0 * fabs(u));
  *value = tanh(u);
  *slope = 4.0 * e / ((1.0 + e) * (1.0 + e));
}

// z of a logit, and dz / d(logit_scale x). kPlain: z = x.
template <typename C, bool kPlain>
struct Transform {
  C scale, cap, scale_over_cap;

  __device__ explicit Transform(const LossTerms& terms)
      : scale(static_cast<C>(terms.logit_scale)),
        cap(static_cast<C>(terms.softcap)),
        scale_over_cap(static_cast<C>(terms.softcap == 0.0 ? 0.0 : terms.logit_scale / terms.softcap)) {}

  __device__ C operator()(C x, C* slope) const {
    *slope = C(1);
    if constexpr (kPlain) return x;
    if (cap == C(0)) return x * scale;
    C value;
    tanh_and_slope(x * scale_over_cap, &value, slope);
    return cap * value;
  }
  __device__ C operator()(C x) const {
    C slope;
    return (*this)(x, &slope);
  }
};

// ---- the row and its threads ----------------------------------------------------------------------------------------

__device__ inline int64_t row_offset(const RowLayout& rows, int64_t row) {
  int64_t offset = 0;
  for (int d = rows.num_dims - 1; d > 0; --d) {
    offset += (row % rows.sizes[d]) * rows.strides[d];
    row /= rows.sizes[d];
  }
  return rows.num_dims > 0 ? offset + row * rows.strides[0] : 0;
}

template <typename T>
struct Row {
  static constexpr int kPacket = kPacketSize<T>;

  const T* columns;
  int head;         // columns before the first packet
  int packets;      // of the whole row
  int first, last;  // packets of this block
  int own_edge;     // the column outside of all packets that this thread takes, or -1

  // `share`: packets of a block
  __device__ Row(const T* x, int64_t vocab, unsigned rank = 0, int share = 1 << 30) : columns(x) {
    const int count = static_cast<int>(vocab);
    const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(x) % kPacketBytes / sizeof(T));
    head = misaligned == 0 ? 0 : kPacket - misaligned;
    if (head > count) head = count;
    packets = (count - head) / kPacket;
    const int begin = static_cast<int>(rank) * share;
    first = begin < packets ? begin : packets;
    last = share < packets - first ? first + share : packets;
    const int thread = static_cast<int>(threadIdx.x), column = thread < head ? thread : thread + packets * kPacket;
    own_edge = rank == 0 && column < count ? column : -1;
  }

  __device__ int column_of(int packet) const { return head + packet * kPacket; }

  // body(packet, the 16 bytes), for the packets of this thread.
  template <bool kPlain, typename F>
  __device__ void for_each_packet(const F& body) const {
    constexpr int kAhead = kPlain && sizeof(T) <= 4 ? kUnroll : kUnroll / 2;
    const int stride = static_cast<int>(blockDim.x);
    for (int packet = first + static_cast<int>(threadIdx.x); packet < last; packet += kAhead * stride) {
      uint4 bytes[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (packet + u * stride < last) bytes[u] = load_packet(columns + column_of(packet + u * stride));
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (packet + u * stride < last) body(packet + u * stride, bytes[u]);
      }
    }
  }
};

// Where a row's packets are written. The output's packets lie as the row's do, unless their addresses differ modulo 16.
template <typename T>
struct RowOut {
  T* columns;
  bool is_aligned;

  __device__ RowOut(T* out, const T* x)
      : columns(out),
        is_aligned((reinterpret_cast<uintptr_t>(out) - reinterpret_cast<uintptr_t>(x)) % kPacketBytes == 0) {}

  template <typename C>
  __device__ void store(int column, const C* values) const {
    if (is_aligned) {
      store_packet(columns + column, pack<T>(values));
    } else {
#pragma unroll
      for (int j = 0; j < kPacketSize<T>; ++j) narrow(values[j], columns + column + j);
    }
  }
};

// What a row's target means to this shard.
struct Target {
  int64_t id;
  int column;  // -1 where this shard does not have it, or the row is ignored
  bool is_ignored, is_outside;

  __device__ Target(int64_t id_, int64_t ignore_index, int64_t vocab_start, int64_t vocab, int64_t vocab_total)
      : id(id_), column(-1) {
    is_ignored = id == ignore_index;
    is_outside = !is_ignored && (id < 0 || id >= vocab_total);
    const int64_t here = id - vocab_start;
    if (!is_ignored && !is_outside && here >= 0 && here < vocab) column = static_cast<int>(here);
  }

  __device__ bool is_owned() const { return column >= 0; }
};

// ---- sums over a row ------------------------------------------------------------------------------------------------

// The maximum and the sum of exp(z - maximum) of some columns. (-inf, 0) of none.
template <typename C>
struct Partial {
  C maximum, sum;

  __device__ void add(const Partial& other) {
    const C highest = maximum_of(maximum, other.maximum);
    const C reference = highest == negative_infinity<C>() ? C(0) : highest;
    sum = sum * exponential(maximum - reference) + other.sum * exponential(other.maximum - reference);
    maximum = highest;
  }
};

// The same while it grows, packet by packet.
template <typename C>
struct Running {
  C maximum, sum;
  Exponent<C> exponent;  // of the maximum; of 0 where that is -inf, so that terms of -inf are 0 and not NaN

  __device__ Running() : maximum(negative_infinity<C>()), sum(C(0)), exponent(C(0)) {}

  template <int kCount>
  __device__ void add(C (&z)[kCount]) {  // z is overwritten
    C highest = z[0];
#pragma unroll
    for (int j = 1; j < kCount; ++j) highest = maximum_of(highest, z[j]);
    if (highest > maximum) {
      sum *= exponential(maximum - highest);  // 0 where there has been nothing but -inf
      maximum = highest;
      exponent = Exponent<C>(maximum);
    }
    exponent.apply(z);
#pragma unroll
    for (int distance = kCount / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int j = 0; j < distance; ++j) z[j] += z[j + distance];
    }
    sum += z[0] * exponent.correction;
  }

  __device__ Partial<C> finish() const { return {maximum, sum}; }
};

// Of one packet, for label smoothing: the sum of w z in double. Without weights, differences from the packet's own
// maximum are summed in the compute dtype, so that large logits keep their digits at one double operation a packet;
// where those do not fit it, in double.
template <typename C, int kCount>
__device__ inline double weighted_sum(const C (&z)[kCount], const C* weight) {
  if (weight != nullptr) {
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum += static_cast<double>(weight[j]) * static_cast<double>(z[j]);
    return sum;
  }
  C highest = z[0];
#pragma unroll
  for (int j = 1; j < kCount; ++j) highest = maximum_of(highest, z[j]);
  if (!(fabs(highest) < static_cast<C>(INFINITY))) highest = C(0);
  C differences = C(0);
#pragma unroll
  for (int j = 0; j < kCount; ++j) differences += z[j] - highest;
  if (fabs(differences) < static_cast<C>(INFINITY)) {
    return static_cast<double>(differences) + kCount * static_cast<double>(highest);
  }
  double sum = 0.0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) sum += static_cast<double>(z[j]);
  return sum;
}

// ---- reductions, always in the same order, so that a row's result does not depend on the run ------------------------

// What one block knows of its part of a row.
template <typename C>
struct Summary {
  Partial<C> partial;
  double weighted;  // sum of w z

  __device__ static Summary none() { return {{negative_infinity<C>(), C(0)}, 0.0}; }

  __device__ void add(const Summary& other) {
    partial.add(other.partial);
    weighted += other.weighted;
  }
};

// In every lane. Of floats the maximum is one instruction, of integers in the same order; sums then refer to it.
template <typename C>
__device__ inline Summary<C> combine_over_warp(Summary<C> value, bool with_weighted) {
  C highest = value.partial.maximum;
  if constexpr (sizeof(C) == 4) {
    const int bits = __float_as_int(highest), ordered = bits ^ ((bits >> 31) & 0x7fffffff);
    const int most = __reduce_max_sync(kAllLanes, ordered);
    highest = __int_as_float(most ^ ((most >> 31) & 0x7fffffff));
  } else {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      highest = maximum_of(highest, __shfl_xor_sync(kAllLanes, highest, distance));
    }
  }
  const C reference = highest == negative_infinity<C>() ? C(0) : highest;
  C sum = value.partial.sum * exponential(value.partial.maximum - reference);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  if (with_weighted) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      value.weighted += __shfl_xor_sync(kAllLanes, value.weighted, distance);
    }
  }
  return {{highest, sum}, value.weighted};
}

// Of `count` summaries in shared memory, in every lane; every warp calls it.
template <typename C>
__device__ inline Summary<C> combine_shared(const Summary<C>* summaries, unsigned count, bool with_weighted) {
  Summary<C> value = Summary<C>::none();
  for (unsigned i = threadIdx.x % 32; i < count; i += 32) value.add(summaries[i]);
  return combine_over_warp(value, with_weighted);
}

}  // namespace device
}  // namespace fastpar
