// Elements of a tensor, 16 bytes at a time, at any address and of any number; and the sum of the ranks' packets.
#pragma once

#include <cstring>
#include <type_traits>

#include "comm/signals.cuh"
#include "common/packet.cuh"

namespace fastpar {
namespace device {

template <typename T>
__device__ inline int64_t packets_of(int64_t count) {
  return (count + kPacketSize<T> - 1) / kPacketSize<T>;
}

__device__ inline uint4 poison_packet() { return make_uint4(kPoisonWord, kPoisonWord, kPoisonWord, kPoisonWord); }

// `count` adjacent elements. Packet p holds elements p * kPacketSize onward; the last may be short.
template <typename T>
struct Span {
  using Element = std::remove_const_t<T>;
  static constexpr int kPacket = kPacketSize<T>;

  T* data;
  int64_t count;
  bool is_aligned;

  __device__ Span(T* data_, int64_t count_)
      : data(data_), count(count_), is_aligned(reinterpret_cast<uintptr_t>(data_) % kPacketBytes == 0) {}

  __device__ int64_t packets() const { return packets_of<T>(count); }

  // Zeros beyond the end.
  __device__ uint4 load(int64_t packet) const {
    const int64_t first = packet * kPacket;
    if (is_aligned && first + kPacket <= count) return load_packet(data + first);
    Element elements[kPacket];
    uint4 bytes = make_uint4(0, 0, 0, 0);
    memcpy(elements, &bytes, sizeof bytes);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) {
      if (first + j < count) elements[j] = data[first + j];
    }
    memcpy(&bytes, elements, sizeof bytes);
    return bytes;
  }

  __device__ void store(int64_t packet, const uint4& bytes) const {
    const int64_t first = packet * kPacket;
    if (is_aligned && first + kPacket <= count) {
      store_packet(data + first, bytes);
      return;
    }
    Element elements[kPacket];
    memcpy(elements, &bytes, sizeof bytes);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) {
      if (first + j < count) data[first + j] = elements[j];
    }
  }
};

// load(rank) of all ranks, added in the order of ranks in float32 and rounded once: the bits do not depend on who adds
// them. Loads are asked for before the first is used; arrive(rank, &bytes) may then look again.
template <typename T, typename F, typename G>
__device__ inline uint4 sum_over_ranks(int size, bool average, const F& load, const G& arrive) {
  constexpr int kPacket = kPacketSize<T>, kAhead = 8;
  float sum[kPacket];
  for (int first = 0; first < size; first += kAhead) {
    uint4 bytes[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (first + u < size) bytes[u] = load(first + u);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (first + u >= size) break;
      arrive(first + u, &bytes[u]);
      float values[kPacket];
      unpack<T>(bytes[u], values);
#pragma unroll
      for (int j = 0; j < kPacket; ++j) sum[j] = first + u == 0 ? values[j] : sum[j] + values[j];
    }
  }
  if (average) {
    const float ranks = static_cast<float>(size);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) sum[j] /= ranks;
  }
  return pack<T>(sum);
}

template <typename T, typename F>
__device__ inline uint4 sum_over_ranks(int size, bool average, const F& load) {
  return sum_over_ranks<T>(size, average, load, [](int, uint4*) {});
}

}  // namespace device
}  // namespace fastpar
