// Collectives over symmetric memory, by pushing into the peers' inboxes (peer_group.h). count elements of T; tensors of
// several local ranks lie `stride` elements apart. Every `out` may be the input itself, but for all_gather and
// reduce_scatter.
#pragma once

#include "comm/spans.cuh"

namespace fastpar {
namespace device {

template <typename T>
struct RankTensor {
  T* data;
  int64_t stride;

  __device__ T* of(const Block& block) const { return data + block.local * stride; }
};

// ---- all-reduce -----------------------------------------------------------------------------------------------------

// One exchange: everybody sends everything to everybody, and adds it all. For few bytes.
//
//   rank 0 has [1, 2], rank 1 has [10, 20]: inbox of 0 <- [10, 20], of 1 <- [1, 2]; both give [11, 22]
template <typename T>
__global__ void __launch_bounds__(kCollectiveThreads, 1)
    all_reduce_one_shot(PeerGroup group, RankTensor<const T> x, RankTensor<T> out, int64_t count, bool average) {
  const Block block(group, Collective::kAllReduceOneShot);
  const Span<const T> in(x.of(block), count);
  const Span<T> result(out.of(block), count);
  if (!block.is_broken) {
    block.for_each(in.packets(), [&](int64_t packet) {
      const uint4 bytes = in.load(packet);
      block.for_each_peer(
          [&](int peer) { store_peer_packet(block.inbox(peer, 0, block.rank) + packet * kPacketBytes, bytes); });
    });
  }
  const bool is_there = !block.is_broken && block.meet(0);
  block.for_each(in.packets(), [&](int64_t packet) {
    const auto load = [&](int rank) {
      return rank == block.rank ? in.load(packet)
                                : load_packet(block.inbox(block.rank, 0, rank) + packet * kPacketBytes);
    };
    result.store(packet, is_there ? sum_over_ranks<T>(group.size, average, load) : poison_packet());
  });
  block.finish();
}

// Two exchanges: rank p adds part p of all, and sends the sum to all. For many bytes; the same bits.
//
//   rank 0 has [1, 2], rank 1 has [10, 20]: inbox of 0 <- [10], of 1 <- [2]; 0 sends 11 and 1 sends 22
template <typename T>
__global__ void __launch_bounds__(kCollectiveThreads, 1)
    all_reduce_two_shot(PeerGroup group, RankTensor<const T> x, RankTensor<T> out, int64_t count, bool average) {
  const Block block(group, Collective::kAllReduceTwoShot);
  const Span<const T> in(x.of(block), count);
  const Span<T> result(out.of(block), count);
  const int64_t packets = in.packets(), part = (packets + group.size - 1) / group.size;
  const auto packets_of_part = [&](int rank) {
    const int64_t left = packets - rank * part;
    return left < 0 ? int64_t{0} : left < part ? left : part;
  };
  bool is_there = !block.is_broken;
  if (is_there) {
    block.for_each_peer([&](int peer) {
      block.for_each(packets_of_part(peer), [&](int64_t packet) {
        store_peer_packet(block.inbox(peer, 0, block.rank) + packet * kPacketBytes, in.load(peer * part + packet));
      });
    });
    is_there = block.meet(0);
  }
  if (is_there) {
    const int64_t first = block.rank * part;
    block.for_each(packets_of_part(block.rank), [&](int64_t packet) {
      const uint4 sum = sum_over_ranks<T>(group.size, average, [&](int rank) {
        return rank == block.rank ? in.load(first + packet)
                                  : load_packet(block.inbox(block.rank, 0, rank) + packet * kPacketBytes);
      });
      result.store(first + packet, sum);
      block.for_each_peer(
          [&](int peer) { store_peer_packet(block.inbox(peer, 1, block.rank) + packet * kPacketBytes, sum); });
    });
    is_there = block.meet(1);
  }
  for (int rank = 0; rank < group.size; ++rank) {
    if (is_there && rank == block.rank) continue;
    block.for_each(packets_of_part(rank), [&](int64_t packet) {
      const uint4 bytes =
          is_there ? load_packet(block.inbox(block.rank, 1, rank) + packet * kPacketBytes) : poison_packet();
      result.store(rank * part + packet, bytes);
    });
  }
  block.finish();
}

// ---- reduce-scatter and all-gather ----------------------------------------------------------------------------------

// out: part `rank` of x, added over the ranks. Parts of any lengths.
//
//   parts of 1 and 2 elements, rank 0 has [1, 2, 3], rank 1 has [10, 20, 30]: 0 gives [11], 1 gives [22, 33]
template <typename T>
__global__ void __launch_bounds__(kCollectiveThreads, 1)
    reduce_scatter(PeerGroup group, RankTensor<const T> x, RankTensor<T> out, Parts parts, bool average) {
  const Block block(group, Collective::kReduceScatter);
  const T* in = x.of(block);
  const auto part_of = [&](int rank) { return Span<const T>(in + parts.begin[rank], parts.count[rank]); };
  if (!block.is_broken) {
    block.for_each_peer([&](int peer) {
      const Span<const T> part = part_of(peer);
      block.for_each(part.packets(), [&](int64_t packet) {
        store_peer_packet(block.inbox(peer, 0, block.rank) + packet * kPacketBytes, part.load(packet));
      });
    });
  }
  const bool is_there = !block.is_broken && block.meet(0);
  const Span<const T> own = part_of(block.rank);
  const Span<T> result(out.of(block), own.count);
  block.for_each(own.packets(), [&](int64_t packet) {
    const auto load = [&](int rank) {
      return rank == block.rank ? own.load(packet)
                                : load_packet(block.inbox(block.rank, 0, rank) + packet * kPacketBytes);
    };
    result.store(packet, is_there ? sum_over_ranks<T>(group.size, average, load) : poison_packet());
  });
  block.finish();
}

// out: the x of all ranks, in their order; parts says where each goes, and how long it is. T: any type of the size of
// what is moved.
template <typename T>
__global__ void __launch_bounds__(kCollectiveThreads, 1)
    all_gather(PeerGroup group, RankTensor<const T> x, RankTensor<T> out, Parts parts) {
  const Block block(group, Collective::kAllGather);
  const Span<const T> in(x.of(block), parts.count[block.rank]);
  if (!block.is_broken) {
    block.for_each(in.packets(), [&](int64_t packet) {
      const uint4 bytes = in.load(packet);
      block.for_each_peer(
          [&](int peer) { store_peer_packet(block.inbox(peer, 0, block.rank) + packet * kPacketBytes, bytes); });
    });
  }
  const bool is_there = !block.is_broken && block.meet(0);
  for (int rank = 0; rank < group.size; ++rank) {
    const Span<T> result(out.of(block) + parts.begin[rank], parts.count[rank]);
    block.for_each(result.packets(), [&](int64_t packet) {
      const uint4 bytes = rank == block.rank ? in.load(packet)
                          : is_there         ? load_packet(block.inbox(block.rank, 0, rank) + packet * kPacketBytes)
                                             : poison_packet();
      result.store(packet, bytes);
    });
  }
  block.finish();
}

}  // namespace device
}  // namespace fastpar
