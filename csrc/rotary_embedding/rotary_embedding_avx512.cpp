#include "rotary_embedding/rotary_embedding_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const RotaryKernels kRotaryAvx512 = {
    {rotate_halves<float>, rotate_halves<bfloat16>, rotate_halves<float16>, nullptr},
    {rotate_interleaved<float>, rotate_interleaved<bfloat16>, rotate_interleaved<float16>, nullptr},
};

}  // namespace fastpar

#endif
