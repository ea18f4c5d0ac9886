// The formats of fastpar/contracts/optimizer_formats.py over Vec and Lanes: random bits and stochastic rounding,
// bfloat16 with a remainder, 8-bit blocks.
#pragma once

#include "optimizer/lanes.h"
#include "optimizer/optimizer.h"

namespace fastpar {
namespace {

// ---- random bits ----------------------------------------------------------------------------------------------------

inline Lanes mix_lanes(Lanes x) {
  x = (x ^ x.right<16>()) * Lanes::set(0x7FEB352Du);
  x = (x ^ x.right<15>()) * Lanes::set(0x846CA68Bu);
  return x ^ x.right<16>();
}

// 16 random bits per element for the parameter and each of two states.
struct RandomBits {
  Lanes param, states[kMaxOptimizerStates];
};

class RandomSource {
 public:
  RandomSource(uint64_t key, uint64_t first) : key_(key), first_(first) { set_high(first >> 32); }

  // For elements first + i and the following ones.
  RandomBits at(int64_t i) {
    const uint64_t index = first_ + static_cast<uint64_t>(i);
    if (index >> 32 != high_ || (index + Vec::kWidth - 1) >> 32 != high_) return across(index);
    return of(Lanes::count_from(static_cast<uint32_t>(index)));
  }

 private:
  void set_high(uint64_t high) {
    const uint64_t k = splitmix64(key_ + high);
    high_ = high;
    k0_ = static_cast<uint32_t>(k);
    k1_ = static_cast<uint32_t>(k >> 32);
    k2_ = static_cast<uint32_t>(splitmix64(k));
  }
  // The upper half of the index is another one than before, perhaps not the same in all lanes.
  __attribute__((noinline)) RandomBits across(uint64_t index) {
    const Lanes lanes = Lanes::count_from(static_cast<uint32_t>(index));
    set_high(index >> 32);
    RandomBits out = of(lanes);
    const uint64_t next = (index >> 32) + 1;
    if ((index + Vec::kWidth - 1) >> 32 != next) return out;
    set_high(next);
    const RandomBits behind = of(lanes);
    const Lanes lane = Lanes::count_from(0);
    const Lanes last_before = Lanes::set(~static_cast<uint32_t>(index));
    out.param = Lanes::select_greater(lane, last_before, behind.param, out.param);
    for (int k = 0; k < kMaxOptimizerStates; ++k) {
      out.states[k] = Lanes::select_greater(lane, last_before, behind.states[k], out.states[k]);
    }
    return out;
  }
  RandomBits of(Lanes low) const {
    const Lanes a = mix_lanes(mix_lanes(low ^ Lanes::set(k0_)) + Lanes::set(k1_));
    const Lanes b = mix_lanes(a ^ Lanes::set(k2_));
    return {a & Lanes::set(0xffffu), {a.right<16>(), b & Lanes::set(0xffffu)}};
  }

  uint64_t key_, first_, high_;
  uint32_t k0_, k1_, k2_;
};

inline void store_stochastically(Vec x, Lanes random, bfloat16* p) {
  const Lanes bits = Lanes::bits_of(x);
  const Lanes magnitude = bits & Lanes::set(0x7fffffffu);
  const Lanes rounded =
      Lanes::select_greater(magnitude, Lanes::set(0x7f800000u), Lanes::set(0x7fc00000u), bits + random);
  rounded.right<16>().store(reinterpret_cast<uint16_t*>(p));
}

// ---- bfloat16 and a remainder ---------------------------------------------------------------------------------------

inline Vec load_split(const bfloat16* p, const int16_t* remainder) {
  return (Lanes::load(reinterpret_cast<const uint16_t*>(p)).left<16>() + Lanes::load(remainder)).as_floats();
}

inline void store_split(Vec x, bfloat16* p, int16_t* remainder) {
  const Lanes raw = Lanes::bits_of(x);
  const Lanes is_nan_above = Lanes::set(0x7f800000u);
  const Lanes bits = Lanes::select_greater(raw & Lanes::set(0x7fffffffu), is_nan_above, Lanes::set(0x7fc00000u), raw);
  // The upper half of bits - remainder, where the remainder is the lower half with its sign.
  (bits + Lanes::set(0x8000u)).right<16>().store(reinterpret_cast<uint16_t*>(p));
  bits.store(reinterpret_cast<uint16_t*>(remainder));
}

// ---- 8-bit blocks ---------------------------------------------------------------------------------------------------

// Taken from exponent and 3 bits of mantissa, so that 1 has the largest code.
constexpr uint32_t lowest_code(bool is_signed) { return 1016u - (is_signed ? 127u : 255u); }

template <bool kSigned>
Vec load_codes(const uint8_t* p, Vec scale) {
  const Lanes code = Lanes::load(p);
  const Lanes size = kSigned ? code & Lanes::set(127u) : code;
  const Lanes zero = Lanes::set(0u);
  const Lanes shifted = (size + Lanes::set(lowest_code(kSigned))).template left<20>();
  Lanes magnitude = Lanes::select_greater(size, zero, shifted, zero);
  if (kSigned) magnitude = magnitude | (code & Lanes::set(128u)).template left<24>();
  return magnitude.as_floats() * scale;
}

template <bool kSigned>
void store_codes(Vec x, Vec inverse_scale, uint8_t* p) {
  const Lanes ratio = Lanes::bits_of(x.abs() * inverse_scale);
  const Lanes one = Lanes::set(1u);
  const Lanes rounded = (ratio + Lanes::set(0x7ffffu) + (ratio.template right<20>() & one)).template right<20>();
  Lanes code = Lanes::min(Lanes::max(rounded - Lanes::set(lowest_code(kSigned)), Lanes::set(0u)),
                          Lanes::set(kSigned ? 127u : 255u));
  if (kSigned) {
    code = code | Lanes::bits_of(x).template right<31>().template left<7>();
  } else {
    code = Lanes::max(code, Lanes::min(ratio, one));  // what is not zero stays so
  }
  code.store(p);
}

// The scale of a block whose magnitudes, as bits, are at most `largest` in each lane.
inline float scale_of(Lanes largest) {
  uint32_t lanes[Lanes::kWidth];
  largest.store(lanes);
  uint32_t bits = 0;
  for (int i = 0; i < Lanes::kWidth; ++i) bits = lanes[i] > bits ? lanes[i] : bits;
  constexpr uint32_t kSmallest = 0x00800000u, kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
  return bits_float(bits >= kInfinity ? kNan : bits > kSmallest ? bits : kSmallest);
}

}  // namespace
}  // namespace fastpar
