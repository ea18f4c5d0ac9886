// Device code of vocab-parallel cross-entropy: stats, merge, backward. In place, stats and backward together
// move 3.88 TB/s on an H200, whose copy moves 4.28.
//
// One block of threads per row; what a block does with a row is in row.cuh. `stats` reads the row once and `backward`
// reads and writes it once, 16 bytes at a time, with one exponential per element (and one more with a softcap).
//
// Worked example: a row [0, log 3] gives maximum log 3 and sum 1/3 + 1; lse = log 4.
#pragma once

#include "cross_entropy/row.cuh"

namespace fastpar {
namespace device {

constexpr int kHeaderRows = 3;
constexpr int kMergeThreads = 128;

struct MergeArguments {
  const void* gathered;  // [ranks, rows + 3, columns] float or double
  int64_t ranks;
  int64_t rank_stride;  // elements
  int64_t columns;
  int64_t rows;
  const int64_t* target;
  int64_t ignore_index;
  LossTerms terms;
  void* loss;
  double* lse;
};

// ---- device functions -----------------------------------------------------------------------------------------------

template <typename C>
__device__ inline const C* shard_weight(const LossTerms& terms, int64_t vocab_start) {
  return terms.weight == nullptr ? nullptr : static_cast<const C*>(terms.weight) + vocab_start;
}

// 1 without weights; NaN for a target outside of the vocabulary.
template <typename C>
__device__ inline C target_weight(const LossTerms& terms, const Target& target) {
  if (target.is_outside) return static_cast<C>(NAN);
  return terms.weight == nullptr || target.is_ignored ? C(1) : static_cast<const C*>(terms.weight)[target.id];
}

__device__ inline double smoothing_per_class(const LossTerms& terms) {
  return terms.label_smoothing / static_cast<double>(terms.vocab_total > 0 ? terms.vocab_total : 1);
}

__device__ inline double sum_of_weights(const LossTerms& terms) {
  return terms.weight_sum == nullptr ? static_cast<double>(terms.vocab_total) : *terms.weight_sum;
}

// Sums of logits travel multiplied by this: a sum of logits of 1e38 would not be a float.
constexpr double kSumUnit = 0x1p-32;

// The loss of a row that is not ignored, its lse in two parts. `distance` is lse - z_y, in whatever way it is known
// best; `weighted` is S, and W maximum - S is exact for equal logits.
__device__ inline double loss_of(const LossTerms& terms, double weight, double distance, double maximum, double log_sum,
                                 double weighted) {
  const double lse = maximum + log_sum;
  double loss = 0.0;
  if (terms.label_smoothing < 1.0) loss = (1.0 - terms.label_smoothing) * weight * distance;
  if (terms.label_smoothing > 0.0) {
    const double all = sum_of_weights(terms);
    loss += smoothing_per_class(terms) * ((all * maximum - weighted) + all * log_sum);
  }
  if (terms.z_loss > 0.0) loss += terms.z_loss * lse * lse;
  return loss;
}

// dz_v = probability p_v - beta w_v, and dz_y = delta p_y + gamma (p_y - 1) - beta w_y, for one row.
template <typename C>
struct Coefficients {
  C gamma, delta, beta, target_weight;

  __device__ Coefficients(const LossTerms& terms, const Target& target, C grad_loss, C grad_lse, C lse) {
    const C g = target.is_ignored ? C(0) : grad_loss;
    target_weight = device::target_weight<C>(terms, target);
    gamma = g * static_cast<C>(1.0 - terms.label_smoothing) * target_weight;
    beta = C(0);
    delta = grad_lse;
    if (terms.label_smoothing > 0.0) {
      const double per_class = smoothing_per_class(terms);
      beta = g * static_cast<C>(per_class);
      delta += g * static_cast<C>(per_class * sum_of_weights(terms));
    }
    if (terms.z_loss > 0.0) delta += g * static_cast<C>(2.0 * terms.z_loss) * lse;
  }

  __device__ C at_target(C probability, C probability_minus_1) const {
    // Without these terms 0 * probability would still be a rounding away.
    C value = gamma * probability_minus_1;
    if (delta != C(0)) value += delta * probability;
    if (beta != C(0)) value -= beta * target_weight;
    return value;
  }
};

template <typename T>
__device__ inline void fill_zero(const Row<T>& row, const RowOut<T>& out) {
  const Compute<T> zeros[kPacketSize<T>] = {};
  if (row.own_edge >= 0) narrow(zeros[0], out.columns + row.own_edge);
  for (int packet = row.first + static_cast<int>(threadIdx.x); packet < row.last; packet += blockDim.x) {
    out.store(row.column_of(packet), zeros);
  }
}

// Writes the gradient of a row, element by element from its logits; the logit of the target gives `at_target`.
template <typename T, bool kPlain>
struct GradientWriter {
  using C = Compute<T>;
  static constexpr int kPacket = kPacketSize<T>;

  Transform<C, kPlain> transform;
  Exponent<C> exponent;
  C probability, uniform, at_target;  // factors of exp(z - reference) and of the weights, logit_scale included
  const C* weight;                    // null: all 1
  int target_column;                  // -1: not here
  RowOut<T> out;

  __device__ GradientWriter(const LossTerms& terms, const Coefficients<C>& c, const Target& target,
                            const Exponent<C>& exponent_, C factor, C at_target_, int64_t vocab_start,
                            const RowOut<T>& out_)
      : transform(terms), exponent(exponent_), out(out_) {
    const C scale = static_cast<C>(terms.logit_scale);
    probability = (c.gamma + c.delta) * exponent.correction * factor * scale;
    uniform = c.beta * scale;
    at_target = at_target_ * scale;
    weight = terms.label_smoothing > 0.0 ? shard_weight<C>(terms, vocab_start) : nullptr;
    target_column = target.column;
  }

  __device__ C value(C x, int column) const {
    C slope;
    const C z = transform(x, &slope);
    C result = probability * exponent(z);
    if constexpr (!kPlain) result -= weight == nullptr ? uniform : uniform * weight[column];
    return (column == target_column ? at_target : result) * slope;
  }

  __device__ void edge(const Row<T>& row) const {
    const int column = row.own_edge;
    if (column >= 0) narrow(value(widen(row.columns[column]), column), out.columns + column);
  }

  __device__ void packet(const uint4& bytes, int column) const {
    C values[kPacket];
    unpack<T>(bytes, values);
    if constexpr (kPlain) {
      exponent.apply(values);
#pragma unroll
      for (int j = 0; j < kPacket; ++j) values[j] *= probability;
      const int target = target_column - column;  // one packet of a row has it: not a comparison an element
      if (target_column >= 0 && target >= 0 && target < kPacket) {
#pragma unroll
        for (int j = 0; j < kPacket; ++j) values[j] = j == target ? at_target : values[j];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) values[j] = value(values[j], column + j);
    }
    out.store(column, values);
  }
};

// What the columns of this warp add up to, in lane 0. `visit(body)` calls body(column, the 16 bytes) for the packets of
// this thread; the target's column is left out of the sum of exponentials where `skip` is its column.
template <typename T, bool kPlain, typename F>
__device__ inline Summary<Compute<T>> summarize_warp(const Row<T>& row, const LossTerms& terms, bool smoothing,
                                                     int64_t vocab_start, int skip, const F& visit) {
  using C = Compute<T>;
  constexpr int kPacket = kPacketSize<T>;
  const Transform<C, kPlain> transform(terms);
  const C* weight = shard_weight<C>(terms, vocab_start);
  const bool with_weighted = !kPlain && smoothing;
  Running<C> running;
  double weighted = 0.0;
  const int edge = row.own_edge;
  if (edge >= 0) {
    C z[1] = {transform(widen(row.columns[edge]))};
    if (with_weighted) weighted += weighted_sum(z, weight == nullptr ? nullptr : weight + edge);
    if (edge != skip) running.add(z);
  }
  visit([&](int column, const uint4& bytes) {
    C z[kPacket];
    unpack<T>(bytes, z);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) z[j] = transform(z[j]);
    if (with_weighted) weighted += weighted_sum(z, weight == nullptr ? nullptr : weight + column);
    const int skipped = skip - column;
    if (skip >= 0 && skipped >= 0 && skipped < kPacket) {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) z[j] = j == skipped ? negative_infinity<C>() : z[j];
    }
    running.add(z);
  });
  return combine_over_warp(Summary<C>{running.finish(), weighted}, with_weighted);
}

// The last rows of the statistics: what this rank's columns are, for the check on the other side.
template <typename C>
__device__ inline void write_header(const StatsArguments& a) {
  const int64_t words = kHeaderRows * a.columns * static_cast<int64_t>(sizeof(C) / sizeof(uint32_t));
  auto* out = reinterpret_cast<uint32_t*>(static_cast<C*>(a.stats) + a.num_rows * a.columns);
  for (int64_t word = threadIdx.x; word < words; word += blockDim.x) {
    int64_t value = 0;  // the fourth number too: no bad row, since looking for one would need the host to wait
    if (word < 6) value = a.terms.vocab_total;
    if (word < 4) value = a.vocab_start;
    if (word < 2) value = a.vocab;
    out[word] = static_cast<uint32_t>(static_cast<uint64_t>(value) >> (32 * (word % 2)));
  }
}

template <typename C>
__device__ inline void write_stats(const StatsArguments& a, int64_t row, const Summary<C>& all, C target_z) {
  C* out = static_cast<C*>(a.stats) + a.columns * row;
  out[0] = all.partial.maximum;
  out[1] = all.partial.sum;
  out[2] = target_z;
  if (!a.smoothing) return;
  const double sum = all.weighted * kSumUnit;
  const C high = static_cast<C>(sum);
  const bool is_finite = fabs(high) < static_cast<C>(INFINITY);
  out[3] = high;
  out[4] = is_finite ? static_cast<C>(sum - static_cast<double>(high)) : C(0);
}

// The target's z: 0 where it is another shard's or ignored, NaN where it is nobody's. Raising would need the host to
// wait.
template <typename T, bool kPlain>
__device__ inline Compute<T> target_z(const LossTerms& terms, const Target& target, const T* x) {
  using C = Compute<T>;
  if (target.is_outside) return static_cast<C>(NAN);
  return target.is_owned() ? Transform<C, kPlain>(terms)(widen(x[target.column])) : C(0);
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// Block n: row n. One more block writes the header.
template <typename T, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads<T>, kMinBlocks) stats_kernel(StatsArguments a) {
  using C = Compute<T>;
  FASTPAR_SHARED_ARRAY(Summary<C>, scratch, 32);
  const int64_t n = blockIdx.x;
  if (n == a.num_rows) {
    write_header<C>(a);
    return;
  }
  const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, n);
  const Row<T> row(x, a.vocab);
  const Target target(a.target[n], a.ignore_index, a.vocab_start, a.vocab, a.terms.vocab_total);
  const auto visit = [&](const auto& body) {
    row.template for_each_packet<kPlain>([&](int packet, const uint4& bytes) { body(row.column_of(packet), bytes); });
  };
  const Summary<C> warp = summarize_warp<T, kPlain>(row, a.terms, a.smoothing, a.vocab_start, -1, visit);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = warp;
  __syncthreads();
  const Summary<C> all = combine_shared(scratch, blockDim.x / 32, !kPlain && a.smoothing);
  if (threadIdx.x == 0) write_stats(a, n, all, target_z<T, kPlain>(a.terms, target, x));
}

// One thread per row; the ranks always in the same order.
template <typename C>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(MergeArguments a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= a.rows) return;
  const C* first = static_cast<const C*>(a.gathered) + row * a.columns;
  double maximum = negative_infinity<double>();
  for (int64_t rank = 0; rank < a.ranks; ++rank) {
    maximum = fmax(maximum, static_cast<double>(first[rank * a.rank_stride]));
  }
  const double reference = maximum == negative_infinity<double>() ? 0.0 : maximum;
  double sum = 0.0, target_z = 0.0, weighted = 0.0;
  for (int64_t rank = 0; rank < a.ranks; ++rank) {
    const C* stats = first + rank * a.rank_stride;
    sum += static_cast<double>(stats[1]) * exp(static_cast<double>(stats[0]) - reference);
    target_z += static_cast<double>(stats[2]);
    if (a.columns == 5) weighted += static_cast<double>(stats[3]) + static_cast<double>(stats[4]);
  }
  const Target target(a.target[row], a.ignore_index, 0, a.terms.vocab_total, a.terms.vocab_total);
  const double log_sum = log(sum);
  a.lse[row] = join_lse<C>(reference, log_sum);
  double loss = 0.0;
  if (target.is_outside) {
    loss = static_cast<double>(NAN);
  } else if (!target.is_ignored) {
    // Not lse - target_z: the maximum and the target's z are close where the loss is small.
    const double distance = (reference - target_z) + log_sum;
    loss = loss_of(a.terms, static_cast<double>(target_weight<C>(a.terms, target)), distance, reference, log_sum,
                   weighted / kSumUnit);
  }
  static_cast<C*>(a.loss)[row] = static_cast<C>(loss);
}

template <typename T, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads<T>, kMinBlocks) backward_kernel(BackwardArguments a) {
  using C = Compute<T>;
  const int64_t n = blockIdx.x;
  const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, n);
  const Row<T> row(x, a.vocab);
  const RowOut<T> out(static_cast<T*>(a.grad) + row_offset(a.grad_rows, n), x);
  const Target target(a.target[n], a.ignore_index, a.vocab_start, a.vocab, a.terms.vocab_total);
  if (target.is_ignored && a.grad_lse == nullptr) return fill_zero(row, out);

  const double lse = a.lse[n];
  const C grad_lse = a.grad_lse == nullptr ? C(0) : static_cast<const C*>(a.grad_lse)[n * a.grad_lse_stride];
  const C grad_loss = static_cast<const C*>(a.grad_loss)[n * a.grad_loss_stride];
  const Coefficients<C> c(a.terms, target, grad_loss, grad_lse, static_cast<C>(lse));
  const Exponent<C> exponent = Exponent<C>::of_lse(lse);
  // The thread that writes the target's column is the only one to use this, so that the row may be written over: it
  // reads here before it writes.
  C at_target = C(0);
  if (target.is_owned()) {
    const int in_packets = target.column - row.head;
    const bool is_edge = in_packets < 0 || in_packets >= row.packets * Row<T>::kPacket;
    const bool is_mine =
        is_edge ? target.column == row.own_edge : in_packets / Row<T>::kPacket % blockDim.x == threadIdx.x;
    if (is_mine) {
      const C z = target_z<T, kPlain>(a.terms, target, x);
      const C log_p = log_probability(z, lse);
      at_target = c.at_target(exponential(log_p), exponential_minus_1(log_p));
    }
  }
  const GradientWriter<T, kPlain> writer(a.terms, c, target, exponent, C(1), at_target, a.vocab_start, out);
  writer.edge(row);
  row.template for_each_packet<kPlain>(
      [&](int packet, const uint4& bytes) { writer.packet(bytes, row.column_of(packet)); });
}

// ---- launch ---------------------------------------------------------------------------------------------------------

// Calls body with a null pointer of the logits' type.
template <typename F>
void dispatch(LogitsType type, const F& body) {
  switch (type) {
    case LogitsType::kFloat32:
      return body(static_cast<float*>(nullptr));
    case LogitsType::kBFloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    case LogitsType::kFloat16:
      return body(static_cast<__half*>(nullptr));
    case LogitsType::kFloat64:
      return body(static_cast<double*>(nullptr));
  }
}

// No option that changes an element: weights alone change a row.
inline bool is_plain(const LossTerms& terms, bool smoothing) {
  return !smoothing && terms.softcap == 0.0 && terms.logit_scale == 1.0;
}

// Columns are counted in int on the device, up to a few blocks beyond the row.
inline void check_vocab(int64_t vocab) {
  FASTPAR_CHECK(vocab < (int64_t{1} << 31) - (1 << 20), "a row has ", vocab, " columns, and at most 2^31 - 2^20 work");
}

// Enough threads for kUnroll packets each, and no more than `most`.
template <typename T>
unsigned threads_for(int64_t packets, unsigned most = kMaxThreads<T>) {
  unsigned threads = 128;
  while (threads < most && packets > int64_t{kUnroll} * threads) threads *= 2;
  return threads;
}

inline void launch_stats(LogitsType type, const StatsArguments& a, cudaStream_t stream) {
  check_vocab(a.vocab);
  dispatch(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const LaunchConfig config{a.num_rows + 1, threads_for<T>(a.vocab / kPacketSize<T>)};
    const auto kernel = is_plain(a.terms, a.smoothing) ? &stats_kernel<T, true> : &stats_kernel<T, false>;
    launch(kernel, config, stream, a);
  });
}

inline void launch_merge(bool is_double, const MergeArguments& a, cudaStream_t stream) {
  const LaunchConfig config{(a.rows + kMergeThreads - 1) / kMergeThreads, kMergeThreads};
  launch(is_double ? &merge_kernel<double> : &merge_kernel<float>, config, stream, a);
}

inline void launch_backward(LogitsType type, const BackwardArguments& a, int64_t rows, cudaStream_t stream) {
  check_vocab(a.vocab);
  dispatch(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const LaunchConfig config{rows, threads_for<T>(a.vocab / kPacketSize<T>)};
    const bool plain = is_plain(a.terms, a.terms.label_smoothing > 0.0);
    launch(plain ? &backward_kernel<T, true> : &backward_kernel<T, false>, config, stream, a);
  });
}

}  // namespace device
}  // namespace fastpar
