// What the op layer (square_sum.cpp) and the instruction-set versions (square_sum_<isa>.cpp) agree on.
#pragma once

#include <cstdint>

namespace fastpar {

// A sum of squares in units of 2^kLowest, as an integer cut into digits of 32 bits. While it is added to, a digit may
// be any int64_t; carrying makes all but the last fit 32 bits. fastpar/contracts/gradients.py has the same numbers.
struct SquareSum {
  static constexpr int kDigits = 19;
  static constexpr int kLowest = -298;  // the square of the smallest float32 is 2^-298

  int64_t nans = 0;
  int64_t infinities = 0;
  int64_t digits[kDigits] = {};
};

constexpr int kSquareSumLength = 2 + SquareSum::kDigits;
static_assert(sizeof(SquareSum) == sizeof(int64_t) * kSquareSumLength, "a SquareSum is copied from and to a tensor");

// Elements of a task; kernels cut them into blocks of their own.
constexpr int64_t kSquareSumBlock = 4096;

// Adds the squares of `count` elements. The thread must not flush subnormal numbers to zero.
using SquareSumKernel = void (*)(const void* x, int64_t count, SquareSum* sum);

// By FloatType. Entries may be null: float64 exists in the portable table only.
struct SquareSumKernels {
  SquareSumKernel of[4];
};

extern const SquareSumKernels kSquareSumPortable;
#if FASTPAR_X86
extern const SquareSumKernels kSquareSumAvx2;
extern const SquareSumKernels kSquareSumAvx512;
#endif

}  // namespace fastpar
