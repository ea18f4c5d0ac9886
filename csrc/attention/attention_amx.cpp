#include "attention/attention_split.h"
// After the engine that it is instantiated with.
#include "attention/attention_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const AttentionKernels kAttentionAmx[3] = {
    attention_kernels<AmxSplitEngine, float>(),
    attention_kernels<AmxEngine, bfloat16>(),
    attention_kernels<AmxSplitEngine, float16>(),
};

}  // namespace fastpar

#endif
