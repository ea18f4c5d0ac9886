#include "attention/attention_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const AttentionKernels kAttentionAmx = attention_kernels<AmxEngine, bfloat16>();

}  // namespace fastpar

#endif
