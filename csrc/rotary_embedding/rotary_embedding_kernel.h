// The CPU kernels of rotary embeddings, written once over Vec and compiled per instruction set.
//
//   a' = a * c - b * s        for every pair (a, b) of a head and its angle's c = cos, s = sin (-sin for the inverse)
//   b' = b * c + a * s
//
// One read and one write of x. The angles of a position serve all its heads, from the first-level cache.
//
// Interleaved pairs. A register holds whole pairs: out = x * C + swapped(x) * S, with C = [c0, c0, c1, c1, ...] and S =
// [-s0, s0, -s1, s1, ...], which are made once a position, in pieces of kPiece pairs.
//
// Numerics. A product is rounded before the other is added by an FMA, in float32, and the result once to x's type.
//
// Worked example: the head [1, 2, 3, 4] and two angles with cos [0, 1] and sin [1, 0]: halves are the pairs (1, 3) and
// (2, 4), so [-3, 2, 1, 4]; interleaved ones (1, 2) and (3, 4), so [-2, 1, 3, 4].
#pragma once

#include "common/dtypes.h"
#include "common/vec_loop.h"
#include "rotary_embedding/rotary_embedding.h"

namespace fastpar {
namespace {

constexpr int64_t kPiece = 256;

// The elements of every pair in the other order.
inline Vec swapped_pairs(Vec x) {
#if defined(__AVX512F__)
  return {_mm512_permute_ps(x.v, 0xb1)};
#elif defined(__AVX2__)
  return {_mm256_permute_ps(x.v, 0xb1)};
#else
  return Vec::make([&](int i) { return x.v[i ^ 1]; });
#endif
}

// Where the heads of one position are.
template <typename T>
struct RotaryPosition {
  const T* x;
  T* out;
  const float *cos, *sin;

  RotaryPosition(const RotaryArguments& a, int64_t index) {
    const int64_t batch = index / a.positions, position = index % a.positions;
    x = static_cast<const T*>(a.x) + batch * a.x_strides[0] + position * a.x_strides[1];
    out = static_cast<T*>(a.out) + batch * a.out_strides[0] + position * a.out_strides[1];
    const int64_t row = batch * a.table_batch_stride + position * a.half;
    cos = static_cast<const float*>(a.cos) + row;
    sin = static_cast<const float*>(a.sin) + row;
  }
};

template <typename T>
void copy_rest(const RotaryArguments& a, const T* x, T* out) {
  const int64_t first = 2 * a.half;
  if (x == out || first == a.dim) return;
  memcpy(out + first, x + first, sizeof(T) * static_cast<size_t>(a.dim - first));
}

template <bool kStream, typename T, typename Body>
void for_each_vec_of(const T* target, bool aligned_alike, int64_t count, const Body& body) {
  if (kStream && aligned_alike) {
    for_each_streamed_vec(elements_to_alignment(target), count, body);
  } else {
    for_each_vec(count, body);
  }
}

template <typename T, bool kStream>
void rotate_halves_as(const RotaryArguments& a, int64_t begin, int64_t end) {
  const Vec sign = Vec::set(a.inverse ? -1.0f : 1.0f);
  for (int64_t index = begin; index < end; ++index) {
    const RotaryPosition<T> p(a, index);
    for (int64_t head = 0; head < a.heads; ++head) {
      const T* x = p.x + head * a.x_strides[2];
      T* out = p.out + head * a.out_strides[2];
      const auto body = [&](int64_t i, auto access, int) __attribute__((always_inline)) {
        const Vec first = access.load(x + i), second = access.load(x + a.half + i);
        const Vec c = access.load(p.cos + i), s = access.load(p.sin + i) * sign;
        access.store(Vec::fma(first, c, Vec::set(0.0f) - (second * s).rounded()), out + i);
        access.store(Vec::fma(second, c, (first * s).rounded()), out + a.half + i);
      };
      const bool alike = elements_to_alignment(out) == elements_to_alignment(out + a.half);
      for_each_vec_of<kStream>(out, alike, a.half, body);
      copy_rest(a, x, out);
    }
  }
  if (kStream) fence_streamed_stores();
}

template <typename T>
void rotate_halves(const RotaryArguments& a, int64_t begin, int64_t end) {
  a.stream ? rotate_halves_as<T, true>(a, begin, end) : rotate_halves_as<T, false>(a, begin, end);
}

template <typename T, bool kStream>
void rotate_interleaved_as(const RotaryArguments& a, int64_t begin, int64_t end) {
  alignas(64) float cos[2 * kPiece], sin[2 * kPiece];
  const float sign = a.inverse ? -1.0f : 1.0f;
  for (int64_t index = begin; index < end; ++index) {
    const RotaryPosition<T> p(a, index);
    for (int64_t piece = 0; piece < a.half; piece += kPiece) {
      const int64_t pairs = a.half - piece < kPiece ? a.half - piece : kPiece;
      for (int64_t i = 0; i < pairs; ++i) {
        cos[2 * i] = cos[2 * i + 1] = p.cos[piece + i];
        sin[2 * i] = -sign * p.sin[piece + i];
        sin[2 * i + 1] = sign * p.sin[piece + i];
      }
      for (int64_t head = 0; head < a.heads; ++head) {
        const T* x = p.x + head * a.x_strides[2] + 2 * piece;
        T* out = p.out + head * a.out_strides[2] + 2 * piece;
        // A part of a register before an aligned address has to hold whole pairs.
        const bool is_even = elements_to_alignment(out) % 2 == 0;
        for_each_vec_of<kStream>(
            out, is_even, 2 * pairs, [&](int64_t i, auto access, int) __attribute__((always_inline)) {
              const Vec v = access.load(x + i);
              access.store(Vec::fma(v, access.load(cos + i), (swapped_pairs(v) * access.load(sin + i)).rounded()),
                           out + i);
            });
      }
    }
    for (int64_t head = 0; head < a.heads; ++head) {
      copy_rest(a, p.x + head * a.x_strides[2], p.out + head * a.out_strides[2]);
    }
  }
  if (kStream) fence_streamed_stores();
}

template <typename T>
void rotate_interleaved(const RotaryArguments& a, int64_t begin, int64_t end) {
  a.stream ? rotate_interleaved_as<T, true>(a, begin, end) : rotate_interleaved_as<T, false>(a, begin, end);
}

}  // namespace
}  // namespace fastpar
