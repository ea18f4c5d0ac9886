#include "attention/attention_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const AttentionKernels kAttentionAvx512Bf16 = attention_kernels<BFloat16Engine, bfloat16>();

}  // namespace fastpar

#endif
