// All-reduces with less in their way: without flags, added by NVLink's switch, or with RMSNorm behind it.
#pragma once

#include "comm/symmetric_collectives.cuh"

namespace fastpar {
namespace device {

// ---- without flags --------------------------------------------------------------------------------------------------

__device__ inline unsigned without_poison(unsigned word) { return word == kPoisonWord ? 0x7fffffffu : word; }
__device__ inline uint4 without_poison(uint4 packet) {
  return make_uint4(without_poison(packet.x), without_poison(packet.y), without_poison(packet.z),
                    without_poison(packet.w));
}
__device__ inline bool has_poison(const uint4& packet) {
  return packet.x == kPoisonWord || packet.y == kPoisonWord || packet.z == kPoisonWord || packet.w == kPoisonWord;
}

// One exchange, in which the data are their own flags: a word that is still poison has not come. See Note: without
// flags, in peer_group.h. NaNs stay NaNs, with other bits.
template <typename T>
__global__ void __launch_bounds__(kCollectiveThreads, 1)
    all_reduce_mailbox(PeerGroup group, RankTensor<const T> x, RankTensor<T> out, int64_t count, bool average) {
  const Block block(group, Collective::kAllReduceMailbox);
  const Span<const T> in(x.of(block), count);
  const Span<T> result(out.of(block), count);
  const uint64_t turn = block.state->turn + 1;
  const int now = static_cast<int>(turn % kNumTurns), before = static_cast<int>((turn + kNumTurns - 1) % kNumTurns);
  const auto mailbox = [&](int of_rank, int which, int source) {
    const int64_t inboxes = int64_t{2 * kNumPhases} * group.size * group.region_bytes;
    return block.buffer(of_rank) + inboxes + (int64_t{which} * group.size + source) * group.mailbox_bytes;
  };
  bool is_lost = block.is_broken;
  if (!is_lost) {
    block.for_each(in.packets(), [&](int64_t packet) {
      const uint4 bytes = without_poison(in.load(packet));
      block.for_each_peer(
          [&](int peer) { store_relaxed_system(mailbox(peer, now, block.rank) + packet * kPacketBytes, bytes); });
    });
    const auto used = static_cast<int64_t>(block.state->mailbox_packets[before]);
    block.for_each_peer([&](int peer) {
      block.for_each(used, [&](int64_t packet) {
        store_peer_packet(mailbox(block.rank, before, peer) + packet * kPacketBytes, poison_packet());
      });
    });
  }
  block.for_each(in.packets(), [&](int64_t packet) {
    const auto load = [&](int rank) {
      return rank == block.rank ? without_poison(in.load(packet))
                                : load_relaxed_system(mailbox(block.rank, now, rank) + packet * kPacketBytes);
    };
    const auto arrive = [&](int rank, uint4* bytes) {
      if (is_lost || !has_poison(*bytes)) return;
      const auto is_there = [&] { return !has_poison(*bytes = load(rank)); };
      if (wait_until(is_there, group.timeout_nanoseconds)) return;
      is_lost = true;
      block.give_up(rank, 0, turn, static_cast<uint64_t>(packet));
    };
    const uint4 sum = sum_over_ranks<T>(group.size, average, load, arrive);
    result.store(packet, is_lost ? poison_packet() : sum);
  });
  const auto packets = static_cast<unsigned long long>(in.packets());
  block.finish([&](RankState* state) {
    state->turn = turn;
    state->mailbox_packets[now] = packets;
  });
}

// ---- added by the switch --------------------------------------------------------------------------------------------

// Two exchanges, through `multicast`: the address that stands for every rank's buffer. Rank p asks the switch for part
// p of all, added, and has it sent to all. All ranks have the same bits; which ones depends on the switch's order.
template <typename T>
__global__ void __launch_bounds__(kCollectiveThreads, 1)
    all_reduce_multimem(PeerGroup group, uint64_t multicast, RankTensor<const T> x, RankTensor<T> out, int64_t count) {
  const Block block(group, Collective::kAllReduceMultimem);
  const Span<const T> in(x.of(block), count);
  const Span<T> result(out.of(block), count);
  const int64_t packets = in.packets(), part = (packets + group.size - 1) / group.size;
  const auto packets_of_part = [&](int rank) {
    const int64_t left = packets - rank * part;
    return left < 0 ? int64_t{0} : left < part ? left : part;
  };
  auto* const everywhere = reinterpret_cast<unsigned char*>(multicast);
  unsigned char* const own = block.buffer(block.rank);
  const int64_t inputs = block.inbox_offset(0, 0), sums = block.inbox_offset(1, 0);
  bool is_there = !block.is_broken;
  if (is_there) {
    for (int rank = 0; rank < group.size; ++rank) {
      block.for_each(packets_of_part(rank), [&](int64_t packet) {
        const int64_t p = rank * part + packet;
        store_peer_packet(own + inputs + p * kPacketBytes, in.load(p));
      });
    }
    is_there = block.meet(0);
  }
  if (is_there) {
    block.for_each(packets_of_part(block.rank), [&](int64_t packet) {
      const int64_t p = block.rank * part + packet;
      const T* type = nullptr;
      const uint4 sum = multimem_add(everywhere + inputs + p * kPacketBytes, type);
      multimem_store(everywhere + sums + p * kPacketBytes, sum);
      result.store(p, sum);
    });
    is_there = block.meet(1);
  }
  for (int rank = 0; rank < group.size; ++rank) {
    if (is_there && rank == block.rank) continue;
    block.for_each(packets_of_part(rank), [&](int64_t packet) {
      const int64_t p = rank * part + packet;
      result.store(p, is_there ? load_packet(own + sums + p * kPacketBytes) : poison_packet());
    });
  }
  block.finish();
}

// ---- with RMSNorm ---------------------------------------------------------------------------------------------------

// The sum over the block, in an order that depends on the number of threads alone; every thread has it.
__device__ inline float sum_over_block(float value) {
  FASTPAR_SHARED_ARRAY(float, warps, 32);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
  __syncthreads();  // the sum before has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += warps[warp];
  return sum;
}

template <typename T>
struct NormArguments {
  RankTensor<const T> residual;  // null: none
  const T* weight;               // [hidden], or null: ones
  RankTensor<T> out, sum;        // [rows, hidden]
  RankTensor<float> rstd;        // [rows]
  int64_t rows, hidden;
  float eps, weight_offset;
};

// h = all_reduce(x) + residual, rounded after each; out = h * rstd * (weight_offset + weight). A block has whole rows:
// block b takes rows b, b + num_blocks, ...
template <typename T>
__global__ void __launch_bounds__(kCollectiveThreads, 1)
    all_reduce_rms_norm(PeerGroup group, RankTensor<const T> x, NormArguments<T> a) {
  constexpr int kPacket = kPacketSize<T>;
  const Block block(group, Collective::kAllReduceRmsNorm);
  const int64_t row_packets = packets_of<T>(a.hidden), threads = blockDim.x;
  const auto row_of = [&](const auto& tensor, int64_t row) {
    using Element = std::remove_reference_t<decltype(*tensor.data)>;
    return Span<Element>(tensor.of(block) + row * a.hidden, a.hidden);
  };
  if (!block.is_broken) {
    for (int64_t row = block.index; row < a.rows; row += block.num_blocks) {
      const Span<const T> in = row_of(x, row);
      for (int64_t packet = threadIdx.x; packet < row_packets; packet += threads) {
        const uint4 bytes = in.load(packet);
        const int64_t offset = (row * row_packets + packet) * kPacketBytes;
        block.for_each_peer([&](int peer) { store_peer_packet(block.inbox(peer, 0, block.rank) + offset, bytes); });
      }
    }
  }
  const bool is_there = !block.is_broken && block.meet(0);
  for (int64_t row = block.index; row < a.rows; row += block.num_blocks) {
    const Span<const T> in = row_of(x, row);
    const Span<T> sum = row_of(a.sum, row), out = row_of(a.out, row);
    float squares = 0.0f;
    for (int64_t packet = threadIdx.x; packet < row_packets; packet += threads) {
      const int64_t offset = (row * row_packets + packet) * kPacketBytes;
      const auto load = [&](int rank) {
        return rank == block.rank ? in.load(packet) : load_packet(block.inbox(block.rank, 0, rank) + offset);
      };
      uint4 bytes = is_there ? sum_over_ranks<T>(group.size, false, load) : poison_packet();
      float h[kPacket];
      unpack<T>(bytes, h);
      if (a.residual.data != nullptr) {
        float residual[kPacket];
        unpack<T>(row_of(a.residual, row).load(packet), residual);
#pragma unroll
        for (int j = 0; j < kPacket; ++j) h[j] += residual[j];
        bytes = pack<T>(h);
        unpack<T>(bytes, h);  // the statistics are those of the rounded h
      }
      sum.store(packet, bytes);
#pragma unroll
      for (int j = 0; j < kPacket; ++j) squares = fmaf(h[j], h[j], squares);
    }
    const float mean = sum_over_block(squares) / static_cast<float>(a.hidden);
    const float rstd = 1.0f / sqrtf(mean + a.eps);
    if (threadIdx.x == 0) a.rstd.of(block)[row] = rstd;
    for (int64_t packet = threadIdx.x; packet < row_packets; packet += threads) {  // what this thread has stored
      float h[kPacket], weight[kPacket];
      unpack<T>(sum.load(packet), h);
      if (a.weight != nullptr) unpack<T>(Span<const T>(a.weight, a.hidden).load(packet), weight);
#pragma unroll
      for (int j = 0; j < kPacket; ++j) h[j] *= rstd * (a.weight != nullptr ? a.weight_offset + weight[j] : 1.0f);
      out.store(packet, pack<T>(h));
    }
  }
  block.finish();
}

}  // namespace device
}  // namespace fastpar
