// The version for any processor, and float64.
#include "square_sum/square_sum_kernel.h"

namespace fastpar {
namespace {

// Magnitudes are cut to multiples of 2^-149, whose squares the sum can hold; from 2^128 on they count as infinite.
void square_sum_float64(const void* x, int64_t count, SquareSum* sum) {
  const double* values = static_cast<const double*>(x);
  for (int64_t i = 0; i < count; ++i) {
    const double magnitude = __builtin_fabs(values[i]);
    if (!(magnitude < 0x1p128)) {
      ++(magnitude != magnitude ? sum->nans : sum->infinities);
      continue;
    }
    if (magnitude < 0x1p-149) continue;
    uint64_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    const int exponent = static_cast<int>(bits >> 52) - 1075;  // magnitude = significand * 2^exponent
    const int below = larger_of(-149 - exponent, 0);
    const uint64_t significand = ((bits & ((uint64_t{1} << 52) - 1)) | (uint64_t{1} << 52)) >> below;
    const unsigned __int128 square = static_cast<unsigned __int128>(significand) * significand;  // below 2^106
    constexpr uint64_t kPart = (uint64_t{1} << 56) - 1;
    const int unit = 2 * (exponent + below);
    add_scaled(sum, static_cast<int64_t>(static_cast<uint64_t>(square) & kPart), unit);
    add_scaled(sum, static_cast<int64_t>(static_cast<uint64_t>(square >> 56)), unit + 56);
  }
}

}  // namespace

extern const SquareSumKernels kSquareSumPortable = {
    {square_sum<float>, square_sum<bfloat16>, square_sum<float16>, square_sum_float64},
};

}  // namespace fastpar
