// Device code of cross-entropy that visits a row once: forward_backward, and stats_exp_. Run on the emulated device;
// not measured yet.
//
// Where a row fits, the blocks of a cluster share it. Each copies its part from memory to its own shared memory on the
// way of summing it up, sends (maximum, sum) to all others, and writes its part of the gradient from what it kept. So
// the row is read from memory once and written once, 4 bytes an element in bfloat16. The cluster is the smallest that
// leaves room for several blocks on a multiprocessor, which cover each other's phases. float64, and rows too long for
// the largest cluster, are read twice by one block.
//
// The sum of exponentials leaves the target out: with s_y = exp(z_y - M) and s the rest, p_y - 1 = -s / (s + s_y) and
// lse - z_y = log(1 + s / s_y) keep all their digits as p_y approaches 1.
//
// Worked example: a row [0, log 3] with target 1 has M = log 3, s = 1/3, s_y = 1; loss log(4/3), gradient (1/4, -1/4).
#pragma once

#include "cross_entropy/cross_entropy.cuh"

namespace fastpar {
namespace device {

// ---- config ---------------------------------------------------------------------------------------------------------

struct ResidentPlan {
  bool is_resident;
  LaunchConfig config;
};

// The first of these that the row fits in. A multiprocessor has the shared memory of three blocks with 64 KiB or of two
// with 112; registers may allow fewer (kMinBlocks).
struct ResidentChoice {
  unsigned cluster;
  size_t shared_bytes;
};
constexpr ResidentChoice kResidentChoices[] = {
    {1, 64 << 10}, {2, 64 << 10}, {4, 64 << 10}, {8, 64 << 10}, {8, 112 << 10}, {16, 112 << 10}, {16, 224 << 10},
};

template <typename T>
ResidentPlan plan_resident(int64_t rows, int64_t vocab) {
  const int64_t packets = vocab / kPacketSize<T>;
  for (const ResidentChoice& choice : kResidentChoices) {
    const int64_t share = (packets + choice.cluster - 1) / choice.cluster;
    const size_t bytes = static_cast<size_t>(share) * kPacketBytes;
    if (sizeof(T) > 4 || bytes > choice.shared_bytes) continue;
    return {true, {rows * choice.cluster, threads_for<T>(share), bytes, choice.cluster}};
  }
  return {false, {rows, threads_for<T>(packets)}};
}

// ---- device functions -----------------------------------------------------------------------------------------------

// The blocks that hold a row, as one of them sees it.
template <typename T, bool kPlain, bool kResident>
struct RowVisit {
  using C = Compute<T>;

  Row<T> row;
  uint4* kept;  // this block's packets

  __device__ RowVisit(const T* x, int64_t vocab, unsigned rank, unsigned num_blocks, unsigned char* shared)
      : row(x, vocab, rank, num_blocks), kept(reinterpret_cast<uint4*>(shared)) {}

  // Of the whole row, in every thread of every block, once all have read it. `exchange` has room for every block of the
  // cluster; blocks call cluster_arrive once before, so that none sends to one that has not started.
  __device__ Summary<C> summarize(const LossTerms& terms, bool smoothing, int64_t vocab_start, int skip,
                                  Summary<C>* scratch, Summary<C>* exchange, unsigned num_blocks) const {
    const Summary<C> own = device::summarize<T, kPlain>(row, terms, smoothing, vocab_start, skip, scratch,
                                                        [&](int packet, const uint4& bytes) {
                                                          if constexpr (kResident) kept[packet - row.first] = bytes;
                                                        });
    if (num_blocks == 1) return own;
    cluster_wait();
    if (threadIdx.x < num_blocks) map_to_peer(exchange, threadIdx.x)[cluster_rank()] = own;
    cluster_arrive();
    cluster_wait();
    return combine_shared(exchange, num_blocks, !kPlain && smoothing);
  }

  // body(column, the 16 bytes), for the packets of this thread, a second time.
  template <typename F>
  __device__ void revisit(const F& body) const {
    if constexpr (kResident) {
      for (int packet = row.first + static_cast<int>(threadIdx.x); packet < row.last; packet += blockDim.x) {
        body(row.column_of(packet), kept[packet - row.first]);
      }
    } else {
      row.template for_each_packet<kPlain>([&](int packet, const uint4& bytes) { body(row.column_of(packet), bytes); });
    }
  }
};

// Everything about a row that its gradient and its loss need, from the sum without the target.
template <typename C>
struct Normalizer {
  C reference;      // M: the maximum of the row, 0 if there is none
  C others;         // sum of exp(z - M) without the target
  C target_exp;     // exp(z_y - M), 0 where there is no target
  bool is_highest;  // z_y = M

  __device__ Normalizer(const Partial<C>& partial, bool has_target, C target_z) {
    C highest = partial.maximum;
    if (has_target) highest = maximum_of(highest, target_z);
    reference = highest == negative_infinity<C>() ? C(0) : highest;
    others = partial.sum * exponential(partial.maximum - reference);
    target_exp = has_target ? exponential(target_z - reference) : C(0);
    is_highest = has_target && target_z == reference;
  }

  __device__ C sum() const { return others + target_exp; }
  __device__ double log_sum() const {
    const double rest = static_cast<double>(others);
    return is_highest ? log1p(rest) : log(rest + static_cast<double>(target_exp));
  }
};

// ---- kernels --------------------------------------------------------------------------------------------------------

template <typename T, bool kPlain, bool kResident>
__global__ void __launch_bounds__(kMaxThreads<T>, kMinBlocks) forward_backward_kernel(FusedArguments a) {
  using C = Compute<T>;
  FASTPAR_DYNAMIC_SHARED(shared);
  FASTPAR_SHARED_ARRAY(Summary<C>, scratch, 32);
  FASTPAR_SHARED_ARRAY(Summary<C>, exchange, 16);
  const unsigned num_blocks = kResident ? cluster_size() : 1, rank = kResident ? cluster_rank() : 0;
  if (num_blocks > 1) cluster_arrive();
  const int64_t n = blockIdx.x / num_blocks;
  const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, n);
  const RowOut<T> out(static_cast<T*>(a.grad) + row_offset(a.grad_rows, n), x);
  const RowVisit<T, kPlain, kResident> visit(x, a.vocab, rank, num_blocks, shared);
  const Target target(a.target[n], a.ignore_index, 0, a.vocab, a.vocab);
  const C z_target = target_z<T, kPlain>(a.terms, target, x);  // before anybody writes over it

  const bool smoothing = a.terms.label_smoothing > 0.0;
  const Summary<C> all = visit.summarize(a.terms, smoothing, 0, target.column, scratch, exchange, num_blocks);
  const Normalizer<C> normalizer(all.partial, target.is_owned(), z_target);
  if (rank == 0 && threadIdx.x == 0) {
    const double reference = static_cast<double>(normalizer.reference), log_sum = normalizer.log_sum();
    const double distance = (reference - static_cast<double>(z_target)) + log_sum;
    const double weight = static_cast<double>(target_weight<C>(a.terms, target));
    const double loss = target.is_outside ? static_cast<double>(NAN)
                                          : loss_of(a.terms, weight, distance, reference, log_sum, all.weighted);
    a.lse[n] = join_lse<C>(reference, log_sum);
    static_cast<C*>(a.loss)[n] = target.is_ignored ? C(0) : static_cast<C>(loss);
  }
  if (target.is_ignored) return fill_zero(visit.row, out);

  const C reciprocal = C(1) / normalizer.sum();
  const C lse = normalizer.reference + logarithm(normalizer.sum());
  const C grad_loss = static_cast<const C*>(a.grad_loss)[n * a.grad_loss_stride];
  const Coefficients<C> c(a.terms, target, grad_loss, C(0), lse);
  const C at_target = c.at_target(normalizer.target_exp * reciprocal, -normalizer.others * reciprocal);
  const GradientWriter<T, kPlain> writer(a.terms, c, target, Exponent<T>(normalizer.reference), reciprocal, at_target,
                                         0, out);
  writer.edge(visit.row);
  visit.revisit([&](int column, const uint4& bytes) { writer.packet(bytes, column); });
}

// Statistics, and E over the logits: exp(z - maximum) times dz / d(logit_scale x), 0 in the target's column.
template <typename T, bool kPlain, bool kResident>
__global__ void __launch_bounds__(kMaxThreads<T>, kMinBlocks) stats_exp_kernel(StatsArguments a) {
  using C = Compute<T>;
  FASTPAR_DYNAMIC_SHARED(shared);
  FASTPAR_SHARED_ARRAY(Summary<C>, scratch, 32);
  FASTPAR_SHARED_ARRAY(Summary<C>, exchange, 16);
  const unsigned num_blocks = kResident ? cluster_size() : 1, rank = kResident ? cluster_rank() : 0;
  if (num_blocks > 1) cluster_arrive();
  const int64_t n = blockIdx.x / num_blocks;
  const T* x = static_cast<const T*>(a.logits) + row_offset(a.rows, n);
  const RowOut<T> out(static_cast<T*>(a.exp_out) + row_offset(a.exp_rows, n), x);
  const RowVisit<T, kPlain, kResident> visit(x, a.vocab, rank, num_blocks, shared);
  const Target target(a.target[n], a.ignore_index, a.vocab_start, a.vocab, a.terms.vocab_total);
  const C z_target = target_z<T, kPlain>(a.terms, target, x);  // before anybody writes over it
  const Summary<C> all = visit.summarize(a.terms, a.smoothing, a.vocab_start, -1, scratch, exchange, num_blocks);
  if (rank == 0 && threadIdx.x == 0) write_stats(a, n, all, z_target);
  if (n == 0 && rank == 0) write_header<C>(a);
  if (target.is_ignored || all.partial.maximum == negative_infinity<C>()) return fill_zero(visit.row, out);

  const Transform<C, kPlain> transform(a.terms);
  const Exponent<T> exponent(all.partial.maximum);
  const auto value = [&](C x_v, int column) {
    C slope;
    const C z = transform(x_v, &slope);
    return column == target.column ? C(0) : exponent(z) * exponent.correction * slope;
  };
  const int edge = visit.row.own_edge;
  if (edge >= 0) narrow(value(widen(x[edge]), edge), out.columns + edge);
  visit.revisit([&](int column, const uint4& bytes) {
    C values[kPacketSize<T>];
    unpack<T>(bytes, values);
#pragma unroll
    for (int j = 0; j < kPacketSize<T>; ++j) values[j] = value(values[j], column + j);
    out.store(column, values);
  });
}

// ---- launch ---------------------------------------------------------------------------------------------------------

inline void launch_forward_backward(LogitsType type, const FusedArguments& a, int64_t rows, cudaStream_t stream) {
  check_vocab(a.vocab);
  dispatch(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const ResidentPlan plan = plan_resident<T>(rows, a.vocab);
    auto kernel = &forward_backward_kernel<T, false, false>;
    if constexpr (sizeof(T) <= 4) {
      const bool plain = is_plain(a.terms, a.terms.label_smoothing > 0.0);
      if (plan.is_resident) {
        kernel = plain ? &forward_backward_kernel<T, true, true> : &forward_backward_kernel<T, false, true>;
      }
    }
    launch(kernel, plan.config, stream, a);
  });
}

inline void launch_stats_exp(LogitsType type, const StatsArguments& a, cudaStream_t stream) {
  check_vocab(a.vocab);
  dispatch(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const ResidentPlan plan = plan_resident<T>(a.num_rows, a.vocab);
    auto kernel = &stats_exp_kernel<T, false, false>;
    if constexpr (sizeof(T) <= 4) {
      if (plan.is_resident) {
        kernel = is_plain(a.terms, a.smoothing) ? &stats_exp_kernel<T, true, true> : &stats_exp_kernel<T, false, true>;
      }
    }
    launch(kernel, plan.config, stream, a);
  });
}

}  // namespace device
}  // namespace fastpar
