#include "attention/attention_kernel.h"

namespace fastpar {

extern const AttentionKernels kAttentionPortable[4] = {
    attention_kernels<Float32Engine, float>(),
    attention_kernels<Float32Engine, bfloat16>(),
    attention_kernels<Float32Engine, float16>(),
    attention_kernels<Float64Engine, double>(),
};

}  // namespace fastpar
