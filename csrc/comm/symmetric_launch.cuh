// Launches of the collectives over symmetric memory: which kernel, with how many blocks and threads, in how many pieces
// where the tensor does not fit the inboxes. The same on every rank, because it depends on the sizes alone.
#pragma once

#include <algorithm>

#include "comm/symmetric_fused.cuh"

namespace fastpar {
namespace device {

enum class ReduceType { kFloat32, kBFloat16, kFloat16 };

// Of one rank. Few blocks for few bytes, because every block meets every peer.
struct LaunchLimits {
  int blocks;
  int threads;
};
constexpr LaunchLimits kLatencyLimits{8, kCollectiveThreads};
constexpr LaunchLimits kBandwidthLimits{kMaxBlocks, kCollectiveThreads};

// Blocks of ranks that share a launch wait for each other, so all of them have to be resident at once. Those of a rank
// that has its device for itself are, with kMaxBlocks of them, unless another stream's kernel keeps its multiprocessors
// for good: a collective must not run beside a persistent kernel that waits for it.
template <typename... Parameters>
LaunchConfig plan(void (*kernel)(Parameters...), const PeerGroup& group, int64_t packets, const LaunchLimits& limits) {
  FASTPAR_CHECK(limits.threads % 32 == 0 && limits.threads >= group.size && limits.threads <= kCollectiveThreads,
                "a block needs a thread for each rank, whole warps, and at most ", kCollectiveThreads, ": ",
                limits.threads, " threads, ", group.size, " ranks");
  int64_t most = std::min(limits.blocks, kMaxBlocks);
  if (group.local_ranks > 1) {
    const int64_t room = resident_blocks(kernel, static_cast<unsigned>(limits.threads));
    FASTPAR_CHECK(room >= group.local_ranks, group.local_ranks, " ranks that share a device need ", group.local_ranks,
                  " blocks of it at once, and it has room for ", room);
    most = std::min(most, room / group.local_ranks);
  }
  const int64_t needed = (packets + limits.threads - 1) / limits.threads;
  const int64_t blocks = std::max<int64_t>(1, std::min(needed, most));
  LaunchConfig config{blocks * group.local_ranks, static_cast<unsigned>(limits.threads)};
  config.is_cooperative = group.local_ranks > 1;
  return config;
}

// kernel(group, arguments...), with as many blocks as `packets` of each rank need.
template <typename... Parameters, typename... Arguments>
void launch_for(const PeerGroup& group, int64_t packets, const LaunchLimits& limits, cudaStream_t stream,
                void (*kernel)(Parameters...), const Arguments&... arguments) {
  launch(kernel, plan(kernel, group, packets, limits), stream, group, arguments...);
}

template <typename F>
void dispatch(ReduceType type, const F& body) {
  switch (type) {
    case ReduceType::kFloat32:
      return body(static_cast<float*>(nullptr));
    case ReduceType::kBFloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    case ReduceType::kFloat16:
      return body(static_cast<__half*>(nullptr));
  }
}

// Elements that fit, in whole packets.
template <typename T>
int64_t capacity(int64_t bytes) {
  const int64_t elements = bytes / kPacketBytes * kPacketSize<T>;
  FASTPAR_CHECK(elements > 0, "an inbox of ", bytes, " bytes holds no packet");
  return elements;
}

// Of every local rank, `stride` elements apart.
struct RankPointer {
  void* data;
  int64_t stride;

  template <typename T>
  RankTensor<T> at(int64_t offset) const {
    return {data == nullptr ? nullptr : static_cast<T*>(data) + offset, stride};
  }
};

// ---- all-reduce -----------------------------------------------------------------------------------------------------

enum class AllReduceAlgorithm { kOneShot, kTwoShot, kMailbox, kMultimem };

// multicast: 0 unless the algorithm is kMultimem.
inline void launch_all_reduce(ReduceType type, AllReduceAlgorithm algorithm, const PeerGroup& group, uint64_t multicast,
                              RankPointer x, RankPointer out, int64_t count, bool average, const LaunchLimits& limits,
                              cudaStream_t stream) {
  const bool is_two_shot = algorithm == AllReduceAlgorithm::kTwoShot || algorithm == AllReduceAlgorithm::kMultimem;
  const int64_t bytes = algorithm == AllReduceAlgorithm::kMailbox ? group.mailbox_bytes
                                                                  : group.region_bytes * (is_two_shot ? group.size : 1);
  dispatch(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int64_t most = capacity<T>(bytes);
    for (int64_t first = 0; first < count; first += most) {
      const int64_t elements = std::min(most, count - first);
      const int64_t packets = (elements + kPacketSize<T> - 1) / kPacketSize<T>;
      const int64_t each = is_two_shot ? (packets + group.size - 1) / group.size : packets;
      const auto go = [&](auto kernel, const auto&... arguments) {
        launch_for(group, each, limits, stream, kernel, arguments...);
      };
      const auto in = x.at<const T>(first);
      const auto result = out.at<T>(first);
      switch (algorithm) {
        case AllReduceAlgorithm::kOneShot:
          go(&all_reduce_one_shot<T>, in, result, elements, average);
          break;
        case AllReduceAlgorithm::kTwoShot:
          go(&all_reduce_two_shot<T>, in, result, elements, average);
          break;
        case AllReduceAlgorithm::kMailbox:
          go(&all_reduce_mailbox<T>, in, result, elements, average);
          break;
        case AllReduceAlgorithm::kMultimem:
          FASTPAR_CHECK(multicast != 0, "the buffer has no multicast address");
          FASTPAR_CHECK(!average, "the switch adds and rounds: it has no average");
          go(&all_reduce_multimem<T>, multicast, in, result, elements);
          break;
      }
    }
  });
}

// ---- reduce-scatter and all-gather ----------------------------------------------------------------------------------

// Piece by piece, `most` elements of every part at a time: body(elements before the piece, the piece of every part, the
// longest of these).
template <typename F>
void for_each_piece(const Parts& parts, int size, int64_t most, const F& body) {
  const int64_t longest = *std::max_element(parts.count, parts.count + size);
  for (int64_t first = 0; first < longest; first += most) {
    Parts piece{};
    for (int rank = 0; rank < size; ++rank) {
      piece.begin[rank] = parts.begin[rank] + first;
      piece.count[rank] = std::clamp<int64_t>(parts.count[rank] - first, 0, most);
    }
    body(first, piece, std::min(most, longest - first));
  }
}

inline void launch_reduce_scatter(ReduceType type, const PeerGroup& group, RankPointer x, RankPointer out,
                                  const Parts& parts, bool average, const LaunchLimits& limits, cudaStream_t stream) {
  dispatch(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for_each_piece(parts, group.size, capacity<T>(group.region_bytes),
                   [&](int64_t first, const Parts& piece, int64_t longest) {
                     launch_for(group, longest / kPacketSize<T> + 1, limits, stream, &reduce_scatter<T>,
                                x.at<const T>(0), out.at<T>(first), piece, average);
                   });
  });
}

template <typename T>
void launch_all_gather_of(const PeerGroup& group, RankPointer x, RankPointer out, const Parts& parts,
                          const LaunchLimits& limits, cudaStream_t stream) {
  for_each_piece(parts, group.size, capacity<T>(group.region_bytes),
                 [&](int64_t first, const Parts& piece, int64_t longest) {
                   launch_for(group, longest / kPacketSize<T> + 1, limits, stream, &all_gather<T>, x.at<const T>(first),
                              out.at<T>(0), piece);
                 });
}

// unit: bytes of an element, 1, 2, 4 or 8.
inline void launch_all_gather(int64_t unit, const PeerGroup& group, RankPointer x, RankPointer out, const Parts& parts,
                              const LaunchLimits& limits, cudaStream_t stream) {
  switch (unit) {
    case 1:
      return launch_all_gather_of<uint8_t>(group, x, out, parts, limits, stream);
    case 2:
      return launch_all_gather_of<uint16_t>(group, x, out, parts, limits, stream);
    case 4:
      return launch_all_gather_of<uint32_t>(group, x, out, parts, limits, stream);
    case 8:
      return launch_all_gather_of<uint64_t>(group, x, out, parts, limits, stream);
    default:
      FASTPAR_CHECK(false, "no all-gather of elements of ", unit, " bytes");
  }
}

// ---- all-reduce and RMSNorm -----------------------------------------------------------------------------------------

struct NormPointers {
  RankPointer residual, weight, out, sum, rstd;  // residual and weight may be null
  int64_t rows, hidden;
  float eps, weight_offset;
};

inline void launch_all_reduce_rms_norm(ReduceType type, const PeerGroup& group, RankPointer x, const NormPointers& norm,
                                       const LaunchLimits& limits, cudaStream_t stream) {
  dispatch(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int64_t row_packets = (norm.hidden + kPacketSize<T> - 1) / kPacketSize<T>;
    const int64_t most = group.region_bytes / (row_packets * kPacketBytes);
    FASTPAR_CHECK(most > 0, "a row of ", norm.hidden, " elements does not fit a region of ", group.region_bytes,
                  " bytes");
    for (int64_t first = 0; first < norm.rows; first += most) {
      const int64_t rows = std::min(most, norm.rows - first), offset = first * norm.hidden;
      const NormArguments<T> a{norm.residual.at<const T>(offset),
                               norm.weight.at<const T>(0).data,
                               norm.out.at<T>(offset),
                               norm.sum.at<T>(offset),
                               norm.rstd.at<float>(first),
                               rows,
                               norm.hidden,
                               norm.eps,
                               norm.weight_offset};
      // a block has whole rows
      launch_for(group, rows * limits.threads, limits, stream, &all_reduce_rms_norm<T>, x.at<const T>(offset), a);
    }
  });
}

}  // namespace device
}  // namespace fastpar
