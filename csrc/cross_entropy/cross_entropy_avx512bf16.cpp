#include "cross_entropy/row_kernels.h"

#if FASTPAR_X86

namespace fastpar {

extern const CrossEntropyKernels kCrossEntropyAvx512Bf16 = {
    {stats_rows<float>, stats_rows<bfloat16>, stats_rows<float16>, nullptr},
    {backward_rows<float>, backward_rows<bfloat16>, backward_rows<float16>, nullptr},
    {fused_rows<float>, fused_rows<bfloat16>, fused_rows<float16>, nullptr},
};

}  // namespace fastpar

#endif
