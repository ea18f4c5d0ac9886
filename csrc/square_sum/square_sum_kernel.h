// The CPU kernels of the exact sum of squares, written once over Vec and compiled per instruction set.
//
// Note: exact sums in doubles. The square of a float has 48 bits, and is exact in a double. An accumulator that starts
// at 1.5 * 2^(52+u) has a last bit of 2^u, and keeps it while less than 2^(51+u) is added. Adding a square to it rounds
// the square to a multiple of 2^u, without another error; what was rounded off is exact in a double again, and goes to
// a second accumulator with a smaller u:
//
//     next = fma(x, x, sum);   taken = next - sum;   rest = fma(x, x, -taken);   sum = next
//
// Nothing is lost where the last accumulator's 2^u divides all squares. (Demmel and Nguyen 2013, Fast reproducible
// floating-point summation, keep a fixed number of accumulators and the rounding error of the last.) A block of
// elements is looked at first: the largest magnitude gives the u of the first accumulator, the smallest (but 0) says
// how many are needed. With n elements to an accumulator, each has 51 - log2(n) bits that the one before has not. One
// accumulator holds bfloat16 squares of magnitudes that differ by up to 2^13, two hold float32 squares of magnitudes
// that differ by 2^18 (a block of normally distributed numbers: 2^14), three by 2^40. Blocks of wider ranges are gone
// through several times, a window of magnitudes at a time.
//
// Measured on Zen 4, one thread, from memory, while other processes ran: float32 20 GB/s where a plain read gets 24;
// with three accumulators 14. bfloat16 13, half of its conversion to doubles. Prefetching the next block while this one
// is added up is worth a quarter.
//
// An accumulator's value is an integer times 2^u, read from its bits. Integers are added without an error, so nothing
// depends on how elements are spread over accumulators, blocks and threads.
//
// Worked example: 3 and 4, both below 2^3: the first accumulator has u = 2 * 2 + 2 + log2(n) - 50, which divides the
// squares; its sum is 25 * 2^-u units, and 25 / 2^-298 has the digit 25 << 10 = 25600 at 2^(9*32).
#pragma once

#include "common/vec_loop.h"
#include "square_sum/square_sum.h"

namespace fastpar {
namespace {

// ---- a register of doubles -----------------------------------------------------------------------------------------

#if defined(__AVX512F__)

struct Doubles {
  static constexpr int kWidth = 8;
  __m512d v;

  static Doubles set(double value) { return {_mm512_set1_pd(value)}; }
  static Doubles low(Vec x) { return {_mm512_cvtps_pd(_mm512_castps512_ps256(x.v))}; }
  static Doubles high(Vec x) { return {_mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1))}; }
  void store(double* p) const { _mm512_storeu_pd(p, v); }
  Doubles operator+(Doubles o) const { return {_mm512_add_pd(v, o.v)}; }
  Doubles operator-(Doubles o) const { return {_mm512_sub_pd(v, o.v)}; }
  // x * x + this and x * x - this; x * x is exact, so that it does not matter whether it is rounded before.
  Doubles plus_square(Doubles x) const { return {_mm512_fmadd_pd(x.v, x.v, v)}; }
  Doubles from_square(Doubles x) const { return {_mm512_fmsub_pd(x.v, x.v, v)}; }
};

#elif defined(__AVX2__)

struct Doubles {
  static constexpr int kWidth = 4;
  __m256d v;

  static Doubles set(double value) { return {_mm256_set1_pd(value)}; }
  static Doubles low(Vec x) { return {_mm256_cvtps_pd(_mm256_castps256_ps128(x.v))}; }
  static Doubles high(Vec x) { return {_mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1))}; }
  void store(double* p) const { _mm256_storeu_pd(p, v); }
  Doubles operator+(Doubles o) const { return {_mm256_add_pd(v, o.v)}; }
  Doubles operator-(Doubles o) const { return {_mm256_sub_pd(v, o.v)}; }
  Doubles plus_square(Doubles x) const { return {_mm256_fmadd_pd(x.v, x.v, v)}; }
  Doubles from_square(Doubles x) const { return {_mm256_fmsub_pd(x.v, x.v, v)}; }
};

#else

struct Doubles {
  static constexpr int kWidth = 4;
  double v[kWidth];

  template <typename F>
  static Doubles make(F&& element) {
    Doubles out;
    for (int i = 0; i < kWidth; ++i) out.v[i] = element(i);
    return out;
  }
  static Doubles set(double value) {
    return make([&](int) { return value; });
  }
  static Doubles low(Vec x) {
    return make([&](int i) { return static_cast<double>(x.v[i]); });
  }
  static Doubles high(Vec x) {
    return make([&](int i) { return static_cast<double>(x.v[kWidth + i]); });
  }
  void store(double* p) const { memcpy(p, v, sizeof v); }
  Doubles operator+(Doubles o) const {
    return make([&](int i) { return v[i] + o.v[i]; });
  }
  Doubles operator-(Doubles o) const {
    return make([&](int i) { return v[i] - o.v[i]; });
  }
  Doubles plus_square(Doubles x) const {
    return make([&](int i) { return x.v[i] * x.v[i] + v[i]; });
  }
  Doubles from_square(Doubles x) const {
    return make([&](int i) { return x.v[i] * x.v[i] - v[i]; });
  }
};

#endif

// ---- units ---------------------------------------------------------------------------------------------------------

template <typename T>
struct Format;
template <>
struct Format<float> {
  using Word = int32_t;
  static constexpr Word kInfinity = 0x7f800000;
  static constexpr int kDigits = 24, kLowest = -149;  // of the significand; the smallest number is 2^kLowest
};
template <>
struct Format<bfloat16> {
  using Word = int16_t;
  static constexpr Word kInfinity = 0x7f80;
  static constexpr int kDigits = 8, kLowest = -133;
};
template <>
struct Format<float16> {
  using Word = int16_t;
  static constexpr Word kInfinity = 0x7c00;
  static constexpr int kDigits = 11, kLowest = -24;
};

constexpr int kSets = 4;  // of accumulators, so that sums need not wait for each other
constexpr int log2_of(int64_t n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }

// Elements of a block, a power of two: more of them cost less a block, but differ more in magnitude.
template <typename T>
constexpr int64_t kBlock = sizeof(T) == 4 ? 4096 : 2048;
// Fewer than 2^(kLogAdds + 1) numbers go to one accumulator, as `unit` leaves room for twice as many.
template <typename T>
constexpr int kLogAdds = log2_of(kBlock<T> / (2 * Vec::kWidth));
constexpr int kMaxLevels = 3;

inline double power_of_two(int exponent) {  // a normal number
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// floor(log2(x)) of a finite float > 0
inline int exponent_of(float x) {
  const int biased = static_cast<int>(float_bits(x) >> 23);
  return biased > 0 ? biased - 127 : 31 - __builtin_clz(float_bits(x)) - 149;
}

inline int larger_of(int a, int b) { return a > b ? a : b; }

// The u of accumulator `level` for magnitudes below 2^(exponent + 1).
template <typename T>
int unit(int exponent, int level) {
  return larger_of(2 * exponent + 2 + kLogAdds<T> - 50 - level * (51 - kLogAdds<T>), SquareSum::kLowest);
}

// value * 2^exponent, where that is a multiple of 2^kLowest
inline void add_scaled(SquareSum* sum, int64_t value, int exponent) {
  const int position = exponent - SquareSum::kLowest, index = position / 32;
  const __int128 shifted = static_cast<__int128>(value) * (int64_t{1} << (position % 32));
  sum->digits[index] += static_cast<int64_t>(static_cast<uint32_t>(shifted));
  sum->digits[index + 1] += static_cast<int64_t>(static_cast<uint32_t>(shifted >> 32));
  sum->digits[index + 2] += static_cast<int64_t>(shifted >> 64);
}

// ---- a block -------------------------------------------------------------------------------------------------------

// Of the magnitudes' bits, which are ordered as the magnitudes are.
template <typename Word>
struct Bounds {
  Word largest;
  Word smallest;  // but 0; larger than `largest` where all are 0
};

template <typename T>
Bounds<typename Format<T>::Word> bounds_of(const T* x, int64_t count) {
  using Word = typename Format<T>::Word;
  constexpr Word kMagnitude = static_cast<Word>(~(Word{1} << (8 * sizeof(Word) - 1)));
  Word largest = 0, smallest = kMagnitude;  // smallest is 1 less than what it stands for, so that 0 becomes the largest
  for (int64_t i = 0; i < count; ++i) {
    Word magnitude;
    memcpy(&magnitude, x + i, sizeof magnitude);
    magnitude = static_cast<Word>(magnitude & kMagnitude);
    const Word less = static_cast<Word>(static_cast<Word>(magnitude - 1) & kMagnitude);
    largest = magnitude > largest ? magnitude : largest;
    smallest = less < smallest ? less : smallest;
  }
  return {largest, smallest == kMagnitude ? kMagnitude : static_cast<Word>(smallest + 1)};
}

// Counts what is not finite, and finds the largest finite magnitude.
template <typename T>
typename Format<T>::Word count_nonfinite(const T* x, int64_t count, SquareSum* sum) {
  using Word = typename Format<T>::Word;
  constexpr Word kMagnitude = static_cast<Word>(~(Word{1} << (8 * sizeof(Word) - 1)));
  constexpr Word kInfinity = Format<T>::kInfinity;
  Word largest = 0;
  int32_t nans = 0, infinities = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word magnitude;
    memcpy(&magnitude, x + i, sizeof magnitude);
    magnitude = static_cast<Word>(magnitude & kMagnitude);
    nans += magnitude > kInfinity;
    infinities += magnitude == kInfinity;
    const Word finite = magnitude < kInfinity ? magnitude : Word{0};
    largest = finite > largest ? finite : largest;
  }
  sum->nans += nans;
  sum->infinities += infinities;
  return largest;
}

template <typename T>
float magnitude_of(typename Format<T>::Word word) {
  T value;
  memcpy(&value, &word, sizeof value);
  return to_float(value);
}

// Adds the squares of the elements with low <= |x| < high (kWindow), or of all, which are below 2^(exponent + 1).
template <typename T, int kLevels, bool kWindow>
void add_squares(const T* x, int64_t count, int exponent, float low, float high, SquareSum* sum) {
  double start[kLevels];
  Doubles sums[kSets][kLevels];
  for (int level = 0; level < kLevels; ++level) {
    start[level] = 1.5 * power_of_two(52 + unit<T>(exponent, level));
    for (int set = 0; set < kSets; ++set) sums[set][level] = Doubles::set(start[level]);
  }
  const Vec lowest = Vec::set(low), limit = Vec::set(high), zero = Vec::set(0.0f);
  const auto add = [&](Doubles value, int set) __attribute__((always_inline)) {
    Doubles* s = sums[set];
    const Doubles next = s[0].plus_square(value);
    if (kLevels > 1) {
      const Doubles taken = next - s[0];
      Doubles rest = taken.from_square(value);
      for (int level = 1; level < kLevels; ++level) {
        const Doubles after = s[level] + rest;
        if (level + 1 < kLevels) rest = rest - (after - s[level]);
        s[level] = after;
      }
    }
    s[0] = next;
  };
  for_each_vec(count, [&](int64_t i, auto access, int u) __attribute__((always_inline)) {
    prefetch(x + i + kBlock<T>);  // the next block, while this one keeps the core busy
    Vec value = access.load(x + i);
    if (kWindow) {
      value = Vec::select_less(value.abs(), limit, value, zero);  // NaN is not less
      value = Vec::select_less(value.abs(), lowest, zero, value);
    }
    add(Doubles::low(value), 2 * (u % 2));
    add(Doubles::high(value), 2 * (u % 2) + 1);
  });
  for (int level = 0; level < kLevels; ++level) {
    int64_t first, total = 0;
    memcpy(&first, &start[level], sizeof first);
    for (int set = 0; set < kSets; ++set) {
      double lanes[Doubles::kWidth];
      sums[set][level].store(lanes);
      for (int lane = 0; lane < Doubles::kWidth; ++lane) {
        int64_t bits;
        memcpy(&bits, &lanes[lane], sizeof bits);
        total += bits - first;
      }
    }
    add_scaled(sum, total, unit<T>(exponent, level));
  }
}

// Magnitudes of any range, a window at a time: `word` is the largest, what is not finite is passed over.
template <typename T>
void add_windows(const T* x, int64_t count, typename Format<T>::Word word, int lowest_bit, SquareSum* sum) {
  int exponent = exponent_of(magnitude_of<T>(word));
  for (;;) {
    const int last = unit<T>(exponent, kMaxLevels - 1);
    // The smallest magnitude whose last bit, squared, is a multiple of 2^last.
    const int low = (last + (last > 0)) / 2 + Format<T>::kDigits - 1;
    const float high = exponent == 127 ? __builtin_inff() : static_cast<float>(power_of_two(exponent + 1));
    const bool is_last = last <= 2 * lowest_bit;
    add_squares<T, kMaxLevels, true>(x, count, exponent, is_last ? 0.0f : static_cast<float>(power_of_two(low)), high,
                                     sum);
    if (is_last) return;
    exponent = low - 1;
  }
}

template <typename T>
void square_sum_block(const T* x, int64_t count, SquareSum* sum) {
  auto bounds = bounds_of(x, count);
  if (bounds.smallest > bounds.largest) return;
  const bool is_finite = bounds.largest < Format<T>::kInfinity;
  if (!is_finite) {
    bounds.largest = count_nonfinite(x, count, sum);
    if (bounds.largest == 0) return;
  }
  const int exponent = exponent_of(magnitude_of<T>(bounds.largest));
  const int smallest = exponent_of(magnitude_of<T>(bounds.smallest));
  const int lowest_bit = larger_of(smallest - Format<T>::kDigits + 1, Format<T>::kLowest);
  if (is_finite && unit<T>(exponent, 0) <= 2 * lowest_bit) {
    add_squares<T, 1, false>(x, count, exponent, 0.0f, 0.0f, sum);
  } else if (is_finite && unit<T>(exponent, 1) <= 2 * lowest_bit) {
    add_squares<T, 2, false>(x, count, exponent, 0.0f, 0.0f, sum);
  } else if (is_finite && unit<T>(exponent, 2) <= 2 * lowest_bit) {
    add_squares<T, 3, false>(x, count, exponent, 0.0f, 0.0f, sum);
  } else {
    add_windows(x, count, bounds.largest, lowest_bit, sum);
  }
}

template <typename T>
void square_sum(const void* x, int64_t count, SquareSum* sum) {
  const T* values = static_cast<const T*>(x);
  for (int64_t i = 0; i < count; i += kBlock<T>) {
    square_sum_block(values + i, count - i < kBlock<T> ? count - i : kBlock<T>, sum);
  }
}

}  // namespace
}  // namespace fastpar
