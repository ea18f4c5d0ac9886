// The version for any processor, and float64, which exists for tests and small checks.
#include "rotary_embedding/rotary_embedding_kernel.h"

namespace fastpar {
namespace {

// `step`: between the elements of a pair; `stride`: between pairs.
void rotate_float64(const RotaryArguments& a, int64_t begin, int64_t end, int64_t step, int64_t stride) {
  for (int64_t index = begin; index < end; ++index) {
    const int64_t batch = index / a.positions, position = index % a.positions;
    const int64_t row = batch * a.table_batch_stride + position * a.half;
    const double* cos = static_cast<const double*>(a.cos) + row;
    const double* sin = static_cast<const double*>(a.sin) + row;
    for (int64_t head = 0; head < a.heads; ++head) {
      const double* x =
          static_cast<const double*>(a.x) + batch * a.x_strides[0] + position * a.x_strides[1] + head * a.x_strides[2];
      double* out = static_cast<double*>(a.out) + batch * a.out_strides[0] + position * a.out_strides[1] +
                    head * a.out_strides[2];
      for (int64_t i = 0; i < a.half; ++i) {
        const double first = x[i * stride], second = x[i * stride + step], s = a.inverse ? -sin[i] : sin[i];
        out[i * stride] = first * cos[i] - second * s;
        out[i * stride + step] = second * cos[i] + first * s;
      }
      copy_rest(a, x, out);
    }
  }
}

void rotate_halves_float64(const RotaryArguments& a, int64_t begin, int64_t end) {
  rotate_float64(a, begin, end, a.half, 1);
}

void rotate_interleaved_float64(const RotaryArguments& a, int64_t begin, int64_t end) {
  rotate_float64(a, begin, end, 1, 2);
}

}  // namespace

extern const RotaryKernels kRotaryPortable = {
    {rotate_halves<float>, rotate_halves<bfloat16>, rotate_halves<float16>, rotate_halves_float64},
    {rotate_interleaved<float>, rotate_interleaved<bfloat16>, rotate_interleaved<float16>, rotate_interleaved_float64},
};

}  // namespace fastpar
