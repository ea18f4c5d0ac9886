// The CPU kernels of the optimizer steps, written once over Vec and compiled per instruction set.
//
// A kernel runs along a part of one tensor: load parameter, gradient and states as float32, apply the rule, store. What
// they are stored in is looked up at every register, by branches that always go the same way; kernels for all 108
// combinations would be 20 times the code and are no faster, since the loop waits for memory.
//
// Note: same instructions. The results of an element must not depend on whether it is one of the last of a tensor, so
// those are copied to a padded piece of memory, and the same function that runs along whole registers runs there.
// Products that are added are either explicit FMAs or rounded(), so that no copy of the code contracts others.
//
// 8-bit states need the largest new value of a block before the first can be stored: a block's 256 new states wait in
// the first-level cache.
#pragma once

#include "common/vec_loop.h"
#include "optimizer/formats.h"

namespace fastpar {
namespace {

// ---- rules ----------------------------------------------------------------------------------------------------------

struct AdamwRule {
  using Numbers = AdamwNumbers;
  static constexpr int kStates = 2;
  static constexpr bool kSigned[2] = {true, false};
  Vec decay, grad_weight, beta2, square_weight, inverse_root, eps, minus_step;

  explicit AdamwRule(const Numbers& n)
      : decay(Vec::set(n.decay)),
        grad_weight(Vec::set(n.grad_weight)),
        beta2(Vec::set(n.beta2)),
        square_weight(Vec::set(n.square_weight)),
        inverse_root(Vec::set(n.inverse_root)),
        eps(Vec::set(n.eps)),
        minus_step(Vec::set(-n.step_size)) {}

  Vec operator()(Vec p, Vec g, Vec* s) const {
    s[0] = Vec::fma(grad_weight, (g - s[0]).rounded(), s[0]);
    s[1] = Vec::fma(beta2, s[1], (g * square_weight * g).rounded());
    const Vec divisor = Vec::fma(square_root(s[1]), inverse_root, eps);
    return Vec::fma(minus_step, (s[0] / divisor).rounded(), (p * decay).rounded());
  }
};

template <bool kMomentum>
struct SgdRule {
  using Numbers = SgdNumbers;
  static constexpr int kStates = kMomentum ? 1 : 0;
  static constexpr bool kSigned[2] = {true, true};
  Vec minus_lr, momentum, grad_weight, weight_decay;
  bool nesterov, first;

  explicit SgdRule(const Numbers& n)
      : minus_lr(Vec::set(-n.lr)),
        momentum(Vec::set(n.momentum)),
        grad_weight(Vec::set(n.grad_weight)),
        weight_decay(Vec::set(n.weight_decay)),
        nesterov(n.nesterov),
        first(n.first) {}

  Vec operator()(Vec p, Vec grad, Vec* s) const {
    const Vec g = Vec::fma(weight_decay, p, grad).rounded();
    if (!kMomentum) return Vec::fma(minus_lr, g, p);
    s[0] = first ? g : Vec::fma(momentum, s[0], (g * grad_weight).rounded());
    const Vec direction = nesterov ? Vec::fma(momentum, s[0], g) : s[0];
    return Vec::fma(minus_lr, direction.rounded(), p);
  }
};

struct LionRule {
  using Numbers = LionNumbers;
  static constexpr int kStates = 1;
  static constexpr bool kSigned[2] = {true, true};
  Vec decay, beta1, direction_weight, grad_weight, lr;

  explicit LionRule(const Numbers& n)
      : decay(Vec::set(n.decay)),
        beta1(Vec::set(n.beta1)),
        direction_weight(Vec::set(n.direction_weight)),
        grad_weight(Vec::set(n.grad_weight)),
        lr(Vec::set(n.lr)) {}

  Vec operator()(Vec p, Vec g, Vec* s) const {
    const Vec zero = Vec::set(0.0f);
    const Vec direction = Vec::fma(beta1, s[0], (g * direction_weight).rounded());
    s[0] = Vec::fma(grad_weight, (g - s[0]).rounded(), s[0]);
    const Vec decayed = (p * decay).rounded();
    // Where the direction is 0 or NaN, that is what is added.
    const Vec other = Vec::select_less(direction, zero, decayed + lr, decayed + direction);
    return Vec::select_less(zero, direction, decayed - lr, other);
  }
};

// Inlined without fail: a call would store every register that the loop keeps.
#define FASTPAR_INLINE inline __attribute__((always_inline))

// ---- loads and stores -----------------------------------------------------------------------------------------------

// Where a piece of a tensor is.
struct Piece {
  char* param;
  const char* grad;
  char* states[kMaxOptimizerStates];
  float* scales[kMaxOptimizerStates];
  char* output;
  int16_t* remainder;
  ParamType param_type;
  GradType grad_type;
  OutputType output_type;
  bool stream_output;
  int64_t first;  // its first element's index in the tensor
};

FASTPAR_INLINE Vec load_param(const Piece& a, int64_t i) {
  switch (a.param_type) {
    case ParamType::kFloat32:
      return Vec::load(reinterpret_cast<const float*>(a.param) + i);
    case ParamType::kBFloat16:
      return Vec::load(reinterpret_cast<const bfloat16*>(a.param) + i);
    case ParamType::kFloat16:
      return Vec::load(reinterpret_cast<const float16*>(a.param) + i);
    default:
      return load_split(reinterpret_cast<const bfloat16*>(a.param) + i, a.remainder + i);
  }
}

template <bool kStochastic>
FASTPAR_INLINE void store_param(const Piece& a, Vec p, const RandomBits& random, int64_t i) {
  switch (a.param_type) {
    case ParamType::kFloat32:
      p.store(reinterpret_cast<float*>(a.param) + i);
      break;
    case ParamType::kBFloat16: {
      bfloat16* out = reinterpret_cast<bfloat16*>(a.param) + i;
      if (kStochastic) {
        store_stochastically(p, random.param, out);
      } else {
        p.store(out);
      }
      break;
    }
    case ParamType::kFloat16:
      p.store(reinterpret_cast<float16*>(a.param) + i);
      break;
    default:
      store_split(p, reinterpret_cast<bfloat16*>(a.param) + i, a.remainder + i);
  }
}

FASTPAR_INLINE Vec load_grad(const Piece& a, int64_t i) {
  switch (a.grad_type) {
    case GradType::kFloat32:
      return Vec::load(reinterpret_cast<const float*>(a.grad) + i);
    case GradType::kBFloat16:
      return Vec::load(reinterpret_cast<const bfloat16*>(a.grad) + i);
    default:
      return Vec::load(reinterpret_cast<const float16*>(a.grad) + i);
  }
}

template <typename T>
FASTPAR_INLINE void store_output_as(const Piece& a, Vec p, int64_t i) {
  T* out = reinterpret_cast<T*>(a.output) + i;
  if (a.stream_output) {
    p.stream(out);
  } else {
    p.store(out);
  }
}

FASTPAR_INLINE void store_output(const Piece& a, Vec p, int64_t i) {
  if (a.output_type == OutputType::kBFloat16) store_output_as<bfloat16>(a, p, i);
  if (a.output_type == OutputType::kFloat16) store_output_as<float16>(a, p, i);
}

// ---- one piece ------------------------------------------------------------------------------------------------------

// The k-th state of register i of the piece, as it is stored or, for 8-bit blocks, in the block's scale.
template <typename Rule, StateType kType>
FASTPAR_INLINE Vec load_state(const Piece& a, int k, Vec scale, int64_t i) {
  if (kType == StateType::kFloat32) return Vec::load(reinterpret_cast<const float*>(a.states[k]) + i);
  if (kType == StateType::kBFloat16) return Vec::load(reinterpret_cast<const bfloat16*>(a.states[k]) + i);
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(a.states[k]) + i;
  return Rule::kSigned[k] ? load_codes<true>(codes, scale) : load_codes<false>(codes, scale);
}

template <typename Rule>
void store_blocks(const Piece& a, const float (*waiting)[kOptimizerBlock], const Lanes* largest, int64_t count) {
  for (int k = 0; k < Rule::kStates; ++k) {
    const float scale = scale_of(largest[k]);
    const Vec inverse = Vec::set(1.0f / scale);
    uint8_t* codes = reinterpret_cast<uint8_t*>(a.states[k]);
    for (int64_t i = 0; i < count; i += Vec::kWidth) {
      const Vec x = Vec::load(waiting[k] + i);
      if (Rule::kSigned[k]) {
        store_codes<true>(x, inverse, codes + i);
      } else {
        store_codes<false>(x, inverse, codes + i);
      }
    }
    *a.scales[k] = scale;
  }
}

// Whole registers; with 8-bit states at most one block. `count` is a multiple of Vec::kWidth.
template <typename Rule, StateType kType, bool kStochastic>
__attribute__((noinline)) void run_piece(const Rule& rule_in, float factor_in, RandomSource* source, const Piece& piece,
                                         int64_t count) {
  constexpr bool kIs8Bit = kType == StateType::k8Bit;
  const Rule rule = rule_in;
  const Piece a = piece;
  const Vec factor = Vec::set(factor_in);
  alignas(64) float waiting[kMaxOptimizerStates][kIs8Bit ? kOptimizerBlock : 1];
  Vec scales[kMaxOptimizerStates] = {};
  Lanes largest[kMaxOptimizerStates] = {};
  if constexpr (kIs8Bit) {
    for (int k = 0; k < Rule::kStates; ++k) {
      scales[k] = Vec::set(*a.scales[k]);
      largest[k] = Lanes::set(0u);
    }
  }
  for (int64_t i = 0; i < count; i += Vec::kWidth) {
    Vec states[kMaxOptimizerStates];
    for (int k = 0; k < Rule::kStates; ++k) states[k] = load_state<Rule, kType>(a, k, scales[k], i);
    RandomBits random{};
    if (kStochastic) random = source->at(a.first + i);
    const Vec p = rule(load_param(a, i), (load_grad(a, i) * factor).rounded(), states);
    for (int k = 0; k < Rule::kStates; ++k) {
      if constexpr (kIs8Bit) {
        states[k].store(waiting[k] + i);
        largest[k] = Lanes::max(largest[k], Lanes::bits_of(states[k].abs()));
      } else if constexpr (kType == StateType::kFloat32) {
        states[k].store(reinterpret_cast<float*>(a.states[k]) + i);
      } else if constexpr (kStochastic) {
        store_stochastically(states[k], random.states[k], reinterpret_cast<bfloat16*>(a.states[k]) + i);
      } else {
        states[k].store(reinterpret_cast<bfloat16*>(a.states[k]) + i);
      }
    }
    store_param<kStochastic>(a, p, random, i);
    store_output(a, p, i);
  }
  if constexpr (kIs8Bit) store_blocks<Rule>(a, waiting, largest, count);
}

// ---- parts of tensors -----------------------------------------------------------------------------------------------

constexpr int kParamBytes[4] = {4, 2, 2, 2};
constexpr int kGradBytes[3] = {4, 2, 2};
constexpr int kStateBytes[kNumStateTypes] = {4, 2, 1};

inline Piece piece_at(const OptimizerTensor& t, int state_bytes, int num_states, int64_t begin) {
  Piece a{};
  a.param = static_cast<char*>(t.param) + begin * kParamBytes[static_cast<int>(t.param_type)];
  a.grad = static_cast<const char*>(t.grad) + begin * kGradBytes[static_cast<int>(t.grad_type)];
  for (int k = 0; k < num_states; ++k) {
    a.states[k] = static_cast<char*>(t.states[k]) + begin * state_bytes;
    if (t.scales[k] != nullptr) a.scales[k] = t.scales[k] + begin / kOptimizerBlock;
  }
  if (t.output != nullptr) a.output = static_cast<char*>(t.output) + begin * 2;
  if (t.remainder != nullptr) a.remainder = t.remainder + begin;
  a.param_type = t.param_type;
  a.grad_type = t.grad_type;
  a.output_type = t.output_type;
  a.stream_output = t.stream_output && elements_to_alignment(reinterpret_cast<const uint16_t*>(a.output)) == 0;
  a.first = begin;
  return a;
}

// Memory for up to a block of everything that a tensor has.
struct Padded {
  alignas(64) char param[kOptimizerBlock * 4];
  alignas(64) char grad[kOptimizerBlock * 4];
  alignas(64) char states[kMaxOptimizerStates][kOptimizerBlock * 4];
  alignas(64) char output[kOptimizerBlock * 2];
  alignas(64) int16_t remainder[kOptimizerBlock];
};

// The last elements of a tensor, fewer than a register or (8-bit states) than a block: padded with zeros to `padded`.
template <typename Rule, StateType kType, bool kStochastic>
void run_padded(const Rule& rule, float factor, RandomSource* source, const Piece& a, int64_t count, int64_t padded) {
  Padded memory;
  memset(&memory, 0, sizeof memory);
  const size_t n = static_cast<size_t>(count);
  const size_t param_bytes = n * static_cast<size_t>(kParamBytes[static_cast<int>(a.param_type)]);
  const size_t grad_bytes = n * static_cast<size_t>(kGradBytes[static_cast<int>(a.grad_type)]);
  const size_t state_bytes = n * static_cast<size_t>(kStateBytes[static_cast<int>(kType)]);
  Piece copy = a;
  copy.param = memory.param;
  copy.grad = memory.grad;
  copy.output = memory.output;
  copy.remainder = memory.remainder;
  copy.stream_output = false;
  memcpy(memory.param, a.param, param_bytes);
  memcpy(memory.grad, a.grad, grad_bytes);
  if (a.remainder != nullptr) memcpy(memory.remainder, a.remainder, n * 2);
  for (int k = 0; k < Rule::kStates; ++k) {
    copy.states[k] = memory.states[k];
    memcpy(memory.states[k], a.states[k], state_bytes);
  }
  run_piece<Rule, kType, kStochastic>(rule, factor, source, copy, padded);
  memcpy(a.param, memory.param, param_bytes);
  if (a.remainder != nullptr) memcpy(a.remainder, memory.remainder, n * 2);
  for (int k = 0; k < Rule::kStates; ++k) memcpy(a.states[k], memory.states[k], state_bytes);
  if (a.output != nullptr) memcpy(a.output, memory.output, n * 2);
}

template <typename Rule, StateType kType, bool kStochastic>
void update_part(const typename Rule::Numbers& numbers, float factor, const OptimizerTensor& t, int64_t begin,
                 int64_t end) {
  constexpr int64_t W = Vec::kWidth;
  const Rule rule(numbers);
  RandomSource source(t.rounding_key, t.first_index);
  const int state_bytes = kStateBytes[static_cast<int>(kType)];
  // 8-bit states go block by block, others in one piece, and then what does not fill a register.
  const int64_t longest = kType == StateType::k8Bit ? kOptimizerBlock : end - begin;
  for (int64_t at = begin; at < end;) {
    const int64_t left = end - at;
    int64_t count = left < longest ? left : longest;
    if (kType != StateType::k8Bit && count >= W) count -= count % W;
    const Piece a = piece_at(t, state_bytes, Rule::kStates, at);
    const int64_t padded = (count + W - 1) / W * W;
    if (padded == count) {
      run_piece<Rule, kType, kStochastic>(rule, factor, &source, a, count);
    } else {
      run_padded<Rule, kType, kStochastic>(rule, factor, &source, a, count, padded);
    }
    at += count;
  }
  if (t.stream_output) fence_streamed_stores();
}

// ---- tables ---------------------------------------------------------------------------------------------------------

template <typename Rule>
constexpr OptimizerTable<typename Rule::Numbers> table_of() {
  return {{
      {update_part<Rule, StateType::kFloat32, false>, update_part<Rule, StateType::kFloat32, true>},
      {update_part<Rule, StateType::kBFloat16, false>, update_part<Rule, StateType::kBFloat16, true>},
      {update_part<Rule, StateType::k8Bit, false>, update_part<Rule, StateType::k8Bit, true>},
  }};
}

constexpr OptimizerKernels optimizer_kernels() {
  using PlainSgd = SgdRule<false>;
  return {
      table_of<AdamwRule>(),
      table_of<SgdRule<true>>(),
      table_of<LionRule>(),
      {update_part<PlainSgd, StateType::kFloat32, false>, update_part<PlainSgd, StateType::kFloat32, true>},
  };
}

}  // namespace
}  // namespace fastpar
