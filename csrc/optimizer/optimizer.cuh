// Device code of the multi-tensor optimizer steps; run on the emulated device, not measured yet.
//
// One pass over memory: gradients are unscaled and clipped (times a factor that is read on the device), states and
// parameters are updated in float32, and what is kept in fewer bits is rounded and written. A warp takes tiles of 256
// elements (tile.cuh), a block eight times four of them, and the tensors of a call come in one table
// (tensor_table.cuh).
//
// Bytes per element, read and written, of AdamW: 28 in float32; 28 with a float32 master and states, a bfloat16
// gradient and a bfloat16 copy to write; 26 with a master split into bfloat16 and remainder; 14 in bfloat16; 10.06 with
// 8-bit states beside bfloat16 parameters and gradients.
//
// Worked example, AdamW: parameter 1, gradient 2 times the factor 0.5, states 0, step 1, lr 0.1, no weight decay, eps
// 0: exp_avg 0.1, exp_avg_sq 0.001; corrected both are 1, and the parameter is 0.9.
#pragma once

#include "optimizer/rules.cuh"
#include "optimizer/tensor_table.cuh"

namespace fastpar {
namespace device {

// What all tensors of a call share, besides the rule.
struct StepOptions {
  const float* grad_factor;  // null: `factor`
  float factor;
  const float* found_inf;  // null, or: where it is not 0, nothing changes
  StateType state_type;
  bool is_stochastic;  // in rounding to bfloat16, of parameters and states
};

// ---- device functions -----------------------------------------------------------------------------------------------

// Of one tile: where it is in its tensor, and the lane that looks at it.
struct Place {
  int64_t base;
  int lane, count;
};

__device__ inline Storage storage_of_states(StateType type) {
  return type == StateType::kBFloat16 ? Storage::kBFloat16 : Storage::kFloat32;
}

__device__ inline Storage storage_of_param(ParamType type) {
  return type == ParamType::kSplit ? Storage::kBFloat16 : static_cast<Storage>(type);
}

template <bool kPacked>
__device__ inline void decode_blocks(const Words& words, float scale, bool is_signed, float (&values)[kLaneElements]) {
  Words codes;
  separate<kPacked, 8>(words, codes);
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) values[j] = decode_block(codes[j], scale, is_signed);
}

// The lanes of a warp share the scale of their tile; beyond the end of the tensor there are zeros.
template <bool kPacked>
__device__ inline void store_blocks(const OptimizerTensor& t, int s, bool is_signed, const Place& at,
                                    const float (&values)[kLaneElements]) {
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) {
    const uint32_t magnitude = __float_as_uint(values[j]) & 0x7fffffffu;
    largest = largest > magnitude ? largest : magnitude;
  }
  const float scale = scale_of_block(warp_maximum(largest)), inverse = __fdiv_rn(1.0f, scale);
  Words codes;
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) codes[j] = encode_block(values[j], inverse, is_signed);
  store_words1<kPacked>(t.states[s], at.base, at.lane, at.count, codes);
  if (at.lane == 0) t.scales[s][at.base / kTileElements] = scale;
}

template <bool kPacked>
__device__ inline void join_tile(const Words& param, const Words& remainder, float (&values)[kLaneElements]) {
  Words high, low;
  separate<kPacked, 16>(param, high);
  separate<kPacked, 16>(remainder, low);
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) values[j] = join_master(high[j], low[j]);
}

template <bool kPacked>
__device__ inline void store_split(const OptimizerTensor& t, const Place& at, const float (&master)[kLaneElements]) {
  Words high, low;
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) split_master(master[j], &high[j], &low[j]);
  store_words2<kPacked>(t.param, at.base, at.lane, at.count, high);
  store_words2<kPacked>(t.remainder, at.base, at.lane, at.count, low);
}

template <bool kPacked>
__device__ inline void store_floats(void* data, Storage storage, const Place& at,
                                    const float (&values)[kLaneElements]) {
  Words bits;
  round_to_nearest(storage, values, bits);
  store_bits<kPacked>(data, storage, at.base, at.lane, at.count, bits);
}

// What is stored as bfloat16 becomes a number that bfloat16 holds.
template <bool kPacked, int kCount>
__device__ inline void round_tile(const OptimizerTensor& t, StateType state_type, const Place& at,
                                  float (&param)[kLaneElements], float (&states)[kCount][kLaneElements]) {
  const bool rounds_param = t.param_type == ParamType::kBFloat16, rounds_states = state_type == StateType::kBFloat16;
  if (!rounds_param && !rounds_states) return;
  const uint64_t first = t.first_index + static_cast<uint64_t>(at.base);
  const RoundingKeys keys = RoundingKeys::of(t.rounding_key, static_cast<uint32_t>(first >> 32));
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) {
    const uint3 random = random_bits(t.rounding_key, keys, first + element_of<kPacked>(at.lane, j));
    if (rounds_param) param[j] = round_stochastically(param[j], random.x);
    if (rounds_states) {
      states[0][j] = round_stochastically(states[0][j], random.y);
      if (kCount > 1) states[kCount - 1][j] = round_stochastically(states[kCount - 1][j], random.z);
    }
  }
}

template <bool kPacked, bool kIs8Bit, typename Rule>
__device__ inline void update_tile(const Rule& rule, const StepOptions& options, float factor, const OptimizerTensor& t,
                                   const Place& at) {
  constexpr int kStates = Rule::kStates, kAtLeastOne = kStates > 0 ? kStates : 1;
  const Storage param_storage = storage_of_param(t.param_type), grad_storage = static_cast<Storage>(t.grad_type);
  const Storage state_storage = storage_of_states(options.state_type);
  const bool is_split = t.param_type == ParamType::kSplit;

  Words param_words, grad_words, remainder_words, state_words[kAtLeastOne];
  float scales[kAtLeastOne] = {};
  load_words<kPacked>(t.param, param_storage, at.base, at.lane, at.count, param_words);
  load_words<kPacked>(t.grad, grad_storage, at.base, at.lane, at.count, grad_words);
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if constexpr (kIs8Bit) {
      load_words1<kPacked>(t.states[s], at.base, at.lane, at.count, state_words[s]);
      scales[s] = t.scales[s][at.base / kTileElements];
    } else {
      load_words<kPacked>(t.states[s], state_storage, at.base, at.lane, at.count, state_words[s]);
    }
  }
  if (is_split) load_words2<kPacked>(t.remainder, at.base, at.lane, at.count, remainder_words);

  float param[kLaneElements], grad[kLaneElements], states[kAtLeastOne][kLaneElements];
  decode<kPacked>(grad_words, grad_storage, grad);
  if (is_split) {
    join_tile<kPacked>(param_words, remainder_words, param);
  } else {
    decode<kPacked>(param_words, param_storage, param);
  }
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if constexpr (kIs8Bit) {
      decode_blocks<kPacked>(state_words[s], scales[s], Rule::is_signed(s), states[s]);
    } else {
      decode<kPacked>(state_words[s], state_storage, states[s]);
    }
  }

#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) {
    float own[kAtLeastOne];
#pragma unroll
    for (int s = 0; s < kStates; ++s) own[s] = states[s][j];
    rule(param[j], __fmul_rn(grad[j], factor), own);
#pragma unroll
    for (int s = 0; s < kStates; ++s) states[s][j] = own[s];
  }
  if (options.is_stochastic) round_tile<kPacked>(t, options.state_type, at, param, states);

#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    if constexpr (kIs8Bit) {
      store_blocks<kPacked>(t, s, Rule::is_signed(s), at, states[s]);
    } else {
      store_floats<kPacked>(t.states[s], state_storage, at, states[s]);
    }
  }
  if (is_split) {
    store_split<kPacked>(t, at, param);
  } else {
    store_floats<kPacked>(t.param, param_storage, at, param);
  }
  if (t.output_type != OutputType::kNone) {
    const bool is_bfloat16 = t.output_type == OutputType::kBFloat16;
    store_floats<kPacked>(t.output, is_bfloat16 ? Storage::kBFloat16 : Storage::kFloat16, at, param);
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <typename Rule, bool kIs8Bit, int kCapacity>
__global__ void __launch_bounds__(kBlockThreads)
    optimizer_kernel(Rule rule, const __grid_constant__ StepOptions options,
                     const __grid_constant__ TensorTable<kCapacity> table) {
  if (options.found_inf != nullptr && __ldg(options.found_inf) != 0.0f) return;
  const float factor = options.grad_factor != nullptr ? __ldg(options.grad_factor) : options.factor;
  const int64_t chunk = blockIdx.x;
  const int tensor = tensor_of_chunk(table, chunk);
  const OptimizerTensor& t = table.entries[tensor].tensor;
  const bool is_packed = table.entries[tensor].is_packed;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t base = (chunk - table.first_chunk[tensor]) * kChunkElements + warp * kTileElements;
  rule.prepare();
#pragma unroll 1
  for (int i = 0; i < kTilesPerWarp && base < t.count; ++i, base += kBlockThreads / kWarp * kTileElements) {
    const int64_t left = t.count - base;
    if (is_packed && left >= kTileElements) {
      update_tile<true, kIs8Bit>(rule, options, factor, t, {base, lane, kTileElements});
    } else {
      const int count = static_cast<int>(left < kTileElements ? left : kTileElements);
      update_tile<false, kIs8Bit>(rule, options, factor, t, {base, lane, count});
    }
  }
}

// The two numbers of AdamW that depend on the step, where that is a tensor: out[0] = inverse_root, out[1] = step_size.
template <typename Step>
__global__ void adamw_corrections_kernel(const Step* step, double lr, double beta1, double beta2, float* out) {
  const AdamwCorrections found = adamw_corrections(static_cast<double>(*step), lr, beta1, beta2);
  out[0] = found.inverse_root;
  out[1] = found.step_size;
}

// ---- launch ---------------------------------------------------------------------------------------------------------

template <typename Rule, bool kIs8Bit, int kCapacity>
void launch_tables(const Rule& rule, const StepOptions& options, const std::vector<OptimizerTensor>& tensors,
                   int64_t max_blocks, cudaStream_t stream) {
  static_assert(sizeof(Rule) + sizeof(StepOptions) + sizeof(TensorTable<kCapacity>) + 32 <= kMaxParameterBytes,
                "the table does not fit the parameters of a launch");
  const auto launch_table = [&](const TensorTable<kCapacity>& table, int64_t chunks) {
    launch(optimizer_kernel<Rule, kIs8Bit, kCapacity>, LaunchConfig{chunks, kBlockThreads}, stream, rule, options,
           table);
  };
  for_each_table<kCapacity>(tensors, options.state_type, max_blocks, launch_table);
}

template <typename Rule, bool kIs8Bit>
void launch_step_of(const Rule& rule, const StepOptions& options, const std::vector<OptimizerTensor>& tensors,
                    int64_t max_blocks, cudaStream_t stream) {
  if (tensors.size() <= static_cast<size_t>(kFewTensors)) {
    launch_tables<Rule, kIs8Bit, kFewTensors>(rule, options, tensors, max_blocks, stream);
  } else {
    launch_tables<Rule, kIs8Bit, kManyTensors>(rule, options, tensors, max_blocks, stream);
  }
}

template <typename Rule>
void launch_step(const Rule& rule, const StepOptions& options, const std::vector<OptimizerTensor>& tensors,
                 cudaStream_t stream, int64_t max_blocks = kMaxBlocks) {
  if constexpr (Rule::kStates > 0) {
    if (options.state_type == StateType::k8Bit) {
      return launch_step_of<Rule, true>(rule, options, tensors, max_blocks, stream);
    }
  }
  launch_step_of<Rule, false>(rule, options, tensors, max_blocks, stream);
}

}  // namespace device
}  // namespace fastpar
