// Device code of cross-entropy that visits a row once: forward_backward, and stats_exp_.
//
// Where a row fits, the blocks of a cluster share it. Each has its part copied to its own shared memory, sums it up as
// it arrives, sends (maximum, sum) to all others, and writes its part of the gradient from what it kept. So the row is
// read from memory once and written once, 4 bytes an element in bfloat16. There are as many clusters as the device has
// room for, and each takes one row after another; three blocks on a multiprocessor cover each other's phases. float64,
// and rows too long for the largest cluster, are read twice by one block.
//
// Measured on an H200, 8192 rows of 128256 bfloat16 (a copy runs at 4.28 TB/s there), before host time:
//
//     1.55 ms   a block of 512 threads for each part of each row, two on a multiprocessor, loads through registers
//     1.42      256 threads, three on a multiprocessor, and one warp-wide maximum in the place of five shuffles
//     1.32      the same blocks, staying for one row after another, with asynchronous copies of 16 bytes
//     1.55      with a second buffer, to which the next row is copied meanwhile, so that parts are half as large
//     1.88      the same of 512 threads: what a warp does once a row is as much work as its packets are
//     1.44      two buffers, 256 threads, no exponentials; 1.43 without waiting for the cluster (both are wrong)
//
// and later, in turns, 8192 rows of each but 4096 of 262144 (a copy: 0.98, 0.25, 1.01, 1.16 ms):
//
//     128256   32000  262144  151936
//     1.32 ms  0.312   1.38    1.71   copies of 16 bytes, the cluster's barrier: where this began
//     1.34     0.312   1.39    1.70   sums of a row in four batches, as they arrive
//     1.27     0.310   1.34    1.73   sums sent to a barrier that counts bytes, which is no fence of a block's stores
//     1.25     0.307   1.32    1.67   both, two batches; 1.28 four, 1.34 eight
//     1.23     0.304   1.28    1.59   both, four bulk copies of one thread: this; 1.26 eight
//     1.28     0.315   1.33    1.63   and the next row asked for batch by batch, while this one is written
//     1.26     0.320   1.31    1.67   and an L2 policy that evicts them first
//     1.22     0.298   1.28    1.58   and clusters that start 7000 cycles apart
//     1.32     0.332   1.56    1.51   and four blocks with 51 KiB: better only where 69 KiB leave few clusters room
//
// Again, as CUDA graphs, after that (what is kept: 1.227, 0.304, 1.282, 1.585 ms):
//
//     128256   32000  262144  151936
//     1.234 ms  0.301   1.341   1.599   six blocks of 128 threads and 34 KiB, in clusters twice as large
//     1.501     0.379   1.518   1.756   and the next row asked into L2 when this one is asked for
//     1.275     0.311   1.326   1.631   when its sums are known, and it is written
//     1.296     0.308   1.359   1.631   that, of 128 threads
//
// With batches of 16-byte copies nothing came of L2 sectors of 256 bytes (1.28), nor of stores that write back (1.27)
// or stay in L2 (1.28).
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

// Few threads with many packets each: what a warp does once a row (the sums over threads, the row's coefficients) costs
// as much as a dozen packets.
template <typename T>
constexpr int kResidentThreads = 256;
template <typename T>
constexpr int kResidentBlocks = sizeof(T) == 8 ? 2 : 3;  // on a multiprocessor

constexpr unsigned kMaxCluster = 16;
constexpr int kCopies = 4;                   // in which a block's packets of a row arrive
constexpr size_t kPartBytes = 69 << 10;      // of a row in each of three blocks of a multiprocessor
constexpr size_t kMaxPartBytes = 210 << 10;  // in the only one, for the longest rows

struct ResidentPlan {
  bool is_resident;
  LaunchConfig config;  // with a cluster for every row
};

// The smallest cluster whose blocks hold the row.
template <typename T>
ResidentPlan plan_resident(int64_t rows, int64_t vocab) {
  const int64_t packets = vocab / kPacketSize<T>;
  const auto part_of = [&](unsigned cluster) { return (packets + cluster - 1) / cluster; };
  const auto fits = [&](unsigned cluster, size_t bytes) {
    return sizeof(T) <= 4 && static_cast<size_t>(part_of(cluster)) * kPacketBytes <= bytes;
  };
  unsigned cluster = 1;
  while (cluster < kMaxCluster && !fits(cluster, kPartBytes)) ++cluster;
  if (!fits(cluster, kMaxPartBytes)) return {false, {rows, threads_for<T>(packets, kResidentThreads<T>)}};
  const int64_t part = part_of(cluster);
  return {
      true,
      {rows * cluster, threads_for<T>(part, kResidentThreads<T>), static_cast<size_t>(part) * kPacketBytes, cluster}};
}

// ---- device functions -----------------------------------------------------------------------------------------------

// Where the warps of all blocks of a cluster say what they have found, in turns: a warp may be a row ahead of others.
// Its barriers count the summaries, and the packets of each copy.
template <typename C>
struct Exchange {
  Summary<C> of_warps[2][(sizeof(C) == 8 ? 1 : kMaxCluster) * kResidentThreads<C> / 32];
  ByteBarrier sent[2], copied[kCopies];
};

// One row, as one of the blocks that hold it sees it.
template <typename T, bool kPlain, bool kResident>
struct RowVisit {
  using C = Compute<T>;

  Row<T> row;
  const uint4* kept;  // this block's packets
  int copy;           // packets of each copy; all but the last have as many, a multiple of the number of threads

  // Of the whole row, in every thread of every block, once all have read it.
  __device__ Summary<C> summarize(const LossTerms& terms, bool smoothing, int64_t vocab_start, int skip,
                                  Exchange<C>& exchange, unsigned num_blocks, unsigned turn) const {
    const Summary<C> own = summarize_warp<T, kPlain>(row, terms, smoothing, vocab_start, skip, [&](const auto& body) {
      if constexpr (kResident) {
        for_each_copied_packet(exchange.copied, turn, body);
      } else {
        for_each_packet(body);
      }
    });
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    Summary<C>* const all = exchange.of_warps[turn % 2];
    if (num_blocks == 1) {
      if (lane == 0) all[warp] = own;
      __syncthreads();
    } else {
      if (turn == 0) cluster_wait();  // until all blocks have started
      if constexpr (kResident) {
        ByteBarrier* const sent = &exchange.sent[turn % 2];
        uint4 packet;
        static_assert(sizeof own == sizeof packet, "a summary is sent at once");
        memcpy(&packet, &own, sizeof packet);
        if (threadIdx.x == 0) expect_bytes(sent, num_blocks * warps * kPacketBytes);
        if (lane < num_blocks) send_packet(&all[cluster_rank() * warps + warp], packet, sent, lane);
        wait_for_bytes(sent, turn / 2);
      }
    }
    return combine_shared(all, num_blocks * warps, !kPlain && smoothing);
  }

  // The same, of each copy once it is there: sums begin while the rest of the row is on its way.
  template <typename F>
  __device__ void for_each_copied_packet(ByteBarrier* copied, unsigned turn, const F& body) const {
    const int stride = static_cast<int>(blockDim.x);
    int packet = row.first + static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      wait_for_bytes(copied + i, turn);
      const int end = min(row.last, row.first + (i + 1) * copy);
#pragma unroll 2
      for (; packet < end; packet += stride) body(row.column_of(packet), kept[packet - row.first]);
    }
  }

  // body(column, the 16 bytes), for the packets of this thread, any number of times once they are there.
  template <typename F>
  __device__ void for_each_packet(const F& body) const {
    if constexpr (kResident) {
      const int stride = static_cast<int>(blockDim.x);
#pragma unroll 2
      for (int packet = row.first + static_cast<int>(threadIdx.x); packet < row.last; packet += stride) {
        body(row.column_of(packet), kept[packet - row.first]);
      }
    } else {
      row.template for_each_packet<kPlain>([&](int packet, const uint4& bytes) { body(row.column_of(packet), bytes); });
    }
  }
};

// The rows that a cluster takes, one after another. One thread asks for the block's packets of the next row when all
// threads have written this one. Packets of a row are aligned wherever it begins (see Row), and so are the copies.
template <typename T, bool kPlain, bool kResident>
struct RowQueue {
  const void* logits;
  const RowLayout& layout;
  int64_t vocab;
  unsigned num_blocks, rank;
  uint4* kept;
  ByteBarrier* copied;
  int num_rows, row, step;  // rows between two of this cluster
  int part, copy;           // packets of a block, and of each of its copies
  unsigned turn = 0;
  const T *x, *next_x;  // this row and, where there is one, the next

  __device__ RowQueue(const void* logits_, const RowLayout& layout_, int64_t num_rows_, int64_t vocab_,
                      unsigned char* shared, Exchange<Compute<T>>& exchange)
      : logits(logits_),
        layout(layout_),
        vocab(vocab_),
        num_blocks(kResident ? cluster_size() : 1),
        rank(kResident ? cluster_rank() : 0),
        kept(reinterpret_cast<uint4*>(shared)),
        copied(exchange.copied),
        num_rows(static_cast<int>(num_rows_)),
        row(static_cast<int>(blockIdx.x / num_blocks)),
        step(static_cast<int>(gridDim.x / num_blocks)),
        part(kResident ? divide_up(static_cast<int>(vocab / kPacketSize<T>), static_cast<int>(num_blocks)) : kAll),
        copy(divide_up(part, static_cast<int>(kCopies * blockDim.x)) * static_cast<int>(blockDim.x)) {
    if (kResident && threadIdx.x == 0) {
      for (ByteBarrier& barrier : exchange.sent) init_byte_barrier(&barrier);
      for (ByteBarrier& barrier : exchange.copied) init_byte_barrier(&barrier);
    }
    if (num_blocks > 1) cluster_arrive();
    x = next_x = address(row);
    fetch_next();
  }

  __device__ bool has_row() const { return row < num_rows; }
  __device__ bool is_last() const { return !kResident || row >= num_rows - step; }

  // This row, whose packets are on their way.
  __device__ RowVisit<T, kPlain, kResident> visit() {
    if (!is_last()) next_x = address(row + step);
    return {Row<T>(x, vocab, rank, part), kept, copy};
  }

  // From a row that this thread has written; by all threads.
  __device__ void advance() {
    if (!is_last()) fetch_next();
    row = is_last() ? num_rows : row + step;
    x = next_x;
    ++turn;
  }

 private:
  static constexpr int kAll = 1 << 30;

  __device__ static int divide_up(int x, int y) { return (x + y - 1) / y; }
  __device__ const T* address(int n) const { return static_cast<const T*>(logits) + row_offset(layout, n); }

  __device__ void fetch_next() const {
    if constexpr (kResident) {
      __syncthreads();  // the barriers are there, and nobody reads this row any more
      if (threadIdx.x != 0) return;
      const Row<T> next(next_x, vocab, rank, part);
#pragma unroll 1
      for (int i = 0; i < kCopies; ++i) {
        const int packet = min(next.last, next.first + i * copy);
        const int bytes = (min(next.last, packet + copy) - packet) * kPacketBytes;
        expect_bytes(copied + i, bytes);
        if (bytes == 0) continue;  // a copy has some
        copy_bytes_async(kept + (packet - next.first), next_x + next.column_of(packet), bytes, copied + i);
      }
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

  Normalizer() = default;
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

// What the loss of a row is made of. It takes logarithms in double, of one thread a row: a warp makes those of 32 rows
// together, which take no longer than one.
template <typename C>
struct PendingLoss {
  int64_t row;
  Normalizer<C> normalizer;
  C target_z;
  double weighted;

  __device__ void write(const FusedArguments& a) const {
    const Target target(a.target[row], a.ignore_index, 0, a.vocab, a.vocab);
    const double reference = static_cast<double>(normalizer.reference), log_sum = normalizer.log_sum();
    const double distance = (reference - static_cast<double>(target_z)) + log_sum;
    const double weight = static_cast<double>(target_weight<C>(a.terms, target));
    const double loss =
        target.is_outside ? static_cast<double>(NAN) : loss_of(a.terms, weight, distance, reference, log_sum, weighted);
    a.lse[row] = join_lse<C>(reference, log_sum);
    static_cast<C*>(a.loss)[row] = target.is_ignored ? C(0) : static_cast<C>(loss);
  }
};

// ---- kernels --------------------------------------------------------------------------------------------------------

template <typename T, bool kPlain, bool kResident>
__global__ void __launch_bounds__(kResidentThreads<T>, kResidentBlocks<T>)
    forward_backward_kernel(FusedArguments a, int64_t num_rows) {
  using C = Compute<T>;
  constexpr unsigned kTogether = 32;
  FASTPAR_DYNAMIC_SHARED(shared);
  FASTPAR_SHARED(Exchange<C>, exchange);
  FASTPAR_SHARED_ARRAY(PendingLoss<C>, pending, kTogether);
  const bool smoothing = a.terms.label_smoothing > 0.0;
  RowQueue<T, kPlain, kResident> queue(a.logits, a.rows, num_rows, a.vocab, shared, exchange);
  if (!queue.has_row()) return;

  // What a row needs beside its columns is read a row ahead, and its target, which says where to look, two: a block
  // that waits for memory between its phases holds up the cluster.
  const auto logit_at = [&](const T* x, int64_t id) {
    return id >= 0 && id < a.vocab && id != a.ignore_index ? x[id] : T();
  };
  const auto grad_loss_of = [&](int n) { return static_cast<const C*>(a.grad_loss)[n * a.grad_loss_stride]; };
  int64_t id = a.target[queue.row], next_id = queue.is_last() ? 0 : a.target[queue.row + queue.step];
  T target_x = logit_at(queue.x, id);
  C grad_loss = grad_loss_of(queue.row);
  for (; queue.has_row(); queue.advance()) {
    const int n = queue.row;
    const RowOut<T> out(static_cast<T*>(a.grad) + row_offset(a.grad_rows, n), queue.x);
    const Target target(id, a.ignore_index, 0, a.vocab, a.vocab);
    const C z_target = target.is_outside   ? static_cast<C>(NAN)
                       : target.is_owned() ? Transform<C, kPlain>(a.terms)(widen(target_x))
                                           : C(0);
    const C g = grad_loss;
    const RowVisit<T, kPlain, kResident> visit = queue.visit();
    if (!queue.is_last()) {
      id = next_id;
      target_x = logit_at(queue.next_x, id);
      grad_loss = grad_loss_of(n + queue.step);
      if (n < queue.num_rows - 2 * queue.step) next_id = a.target[n + 2 * queue.step];
    }

    const Summary<C> all =
        visit.summarize(a.terms, smoothing, 0, target.column, exchange, queue.num_blocks, queue.turn);
    const Normalizer<C> normalizer(all.partial, target.is_owned(), z_target);
    if (queue.rank == 0 && threadIdx.x == 0) {
      pending[queue.turn % kTogether] = {n, normalizer, z_target, all.weighted};
    }
    if (target.is_ignored) {
      fill_zero(visit.row, out);
    } else {
      const C reciprocal = C(1) / normalizer.sum();
      const C lse = normalizer.reference + logarithm(normalizer.sum());
      const Coefficients<C> c(a.terms, target, g, C(0), lse);
      const C at_target = c.at_target(normalizer.target_exp * reciprocal, -normalizer.others * reciprocal);
      const GradientWriter<T, kPlain> writer(a.terms, c, target, Exponent<C>(normalizer.reference), reciprocal,
                                             at_target, 0, out);
      writer.edge(visit.row);
      visit.for_each_packet([&](int column, const uint4& bytes) { writer.packet(bytes, column); });
    }
    if (queue.rank == 0 && threadIdx.x < 32 && (queue.turn % kTogether == kTogether - 1 || queue.is_last())) {
      __syncwarp();
      if (threadIdx.x <= queue.turn % kTogether) pending[threadIdx.x].write(a);
      __syncwarp();  // before they are written over
    }
  }
}

// Statistics, and E over the logits: exp(z - maximum) times dz / d(logit_scale x), 0 in the target's column.
template <typename T, bool kPlain, bool kResident>
__global__ void __launch_bounds__(kResidentThreads<T>, kResidentBlocks<T>) stats_exp_kernel(StatsArguments a) {
  using C = Compute<T>;
  FASTPAR_DYNAMIC_SHARED(shared);
  FASTPAR_SHARED(Exchange<C>, exchange);
  for (RowQueue<T, kPlain, kResident> queue(a.logits, a.rows, a.num_rows, a.vocab, shared, exchange); queue.has_row();
       queue.advance()) {
    const int n = queue.row;
    const T* x = queue.x;
    const RowOut<T> out(static_cast<T*>(a.exp_out) + row_offset(a.exp_rows, n), x);
    const Target target(a.target[n], a.ignore_index, a.vocab_start, a.vocab, a.terms.vocab_total);
    const C z_target = target_z<T, kPlain>(a.terms, target, x);  // before anybody writes over it
    const RowVisit<T, kPlain, kResident> visit = queue.visit();
    const Summary<C> all =
        visit.summarize(a.terms, a.smoothing, a.vocab_start, -1, exchange, queue.num_blocks, queue.turn);
    if (queue.rank == 0 && threadIdx.x == 0) write_stats(a, n, all, z_target);
    if (n == 0 && queue.rank == 0) write_header<C>(a);
    if (target.is_ignored || all.partial.maximum == negative_infinity<C>()) {
      fill_zero(visit.row, out);
      continue;
    }

    const Transform<C, kPlain> transform(a.terms);
    const Exponent<C> exponent(all.partial.maximum);
    const auto value = [&](C x_v, int column) {
      C slope;
      const C z = transform(x_v, &slope);
      return column == target.column ? C(0) : exponent(z) * exponent.correction * slope;
    };
    const int edge = visit.row.own_edge;
    if (edge >= 0) narrow(value(widen(x[edge]), edge), out.columns + edge);
    visit.for_each_packet([&](int column, const uint4& bytes) {
      C values[kPacketSize<T>];
      unpack<T>(bytes, values);
#pragma unroll
      for (int j = 0; j < kPacketSize<T>; ++j) values[j] = value(values[j], column + j);
      out.store(column, values);
    });
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------

// With no more clusters than are resident at once, each of which takes the same number of rows, or one less.
template <typename... Parameters, typename... Arguments>
void launch_over_rows(void (*kernel)(Parameters...), const ResidentPlan& plan, cudaStream_t stream,
                      const Arguments&... arguments) {
  LaunchConfig config = plan.config;
  FASTPAR_CHECK(config.blocks <= 0x7fffffff, "cannot visit ", config.blocks / config.cluster, " rows");
  if (plan.is_resident) {
    const int64_t rows = config.blocks / config.cluster, most = resident_clusters(kernel, config);
    const int64_t turns = (rows + most - 1) / most;
    config.blocks = (rows + turns - 1) / turns * config.cluster;
  }
  launch(kernel, config, stream, arguments...);
}

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
    launch_over_rows(kernel, plan, stream, a, rows);
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
    launch_over_rows(kernel, plan, stream, a);
  });
}

}  // namespace device
}  // namespace fastpar
