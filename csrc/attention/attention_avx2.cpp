#include "attention/attention_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const AttentionKernels kAttentionAvx2[3] = {
    attention_kernels<Float32Engine, float>(),
    attention_kernels<Float32Engine, bfloat16>(),
    attention_kernels<Float32Engine, float16>(),
};

}  // namespace fastpar

#endif
