// What the op layer (optimizer.cpp) and the instruction-set versions (optimizer_<isa>.cpp) agree on.
// The algebra is in fastpar/ops/optimizer.py, the formats in fastpar/contracts/optimizer_formats.py.
#pragma once

#include <cstdint>

namespace fastpar {

constexpr int64_t kOptimizerBlock = 256;  // elements that share a scale; threads divide tensors at multiples of it
constexpr int kMaxOptimizerStates = 2;

// How a parameter is stored. kSplit: bfloat16 and a remainder.
enum class ParamType { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kSplit = 3 };
enum class GradType { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum class OutputType { kNone = 0, kBFloat16 = 1, kFloat16 = 2 };
enum class StateType { kFloat32 = 0, kBFloat16 = 1, k8Bit = 2 };
constexpr int kNumStateTypes = 3;

// One tensor of a call. Pointers that do not apply are null.
struct OptimizerTensor {
  void* param;
  const void* grad;
  void* states[kMaxOptimizerStates];
  float* scales[kMaxOptimizerStates];
  void* output;
  int16_t* remainder;
  int64_t count;
  ParamType param_type;
  GradType grad_type;
  OutputType output_type;
  bool stream_output;     // past the caches
  uint64_t rounding_key;  // of the tensor and the step, for stochastic rounding
  uint64_t first_index;   // of its first element in the whole tensor
};

struct AdamwNumbers {
  float decay, grad_weight, beta2, square_weight, inverse_root, eps, step_size;
};

struct SgdNumbers {
  float lr, momentum, grad_weight, weight_decay;
  bool nesterov, first;
};

struct LionNumbers {
  float decay, beta1, direction_weight, grad_weight, lr;
};

// Elements [begin, end) of a tensor; begin is a multiple of kOptimizerBlock, and so is end, unless it is the tensor's.
template <typename Numbers>
using OptimizerKernel = void (*)(const Numbers&, float factor, const OptimizerTensor&, int64_t begin, int64_t end);

// By StateType, and whether what is stored as bfloat16 is rounded stochastically.
template <typename Numbers>
struct OptimizerTable {
  OptimizerKernel<Numbers> kernels[kNumStateTypes][2];
};

struct OptimizerKernels {
  OptimizerTable<AdamwNumbers> adamw;
  OptimizerTable<SgdNumbers> sgd;  // with momentum
  OptimizerTable<LionNumbers> lion;
  OptimizerKernel<SgdNumbers> plain_sgd[2];  // without
};

extern const OptimizerKernels kOptimizerPortable;
#if FASTPAR_X86
extern const OptimizerKernels kOptimizerAvx2;
extern const OptimizerKernels kOptimizerAvx512;
extern const OptimizerKernels kOptimizerAvx512Bf16;
#endif

// SplitMix64 (Steele et al. 2014), as in fastpar/contracts/optimizer_formats.py.
inline constexpr uint64_t splitmix64(uint64_t z) {
  z += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

}  // namespace fastpar
