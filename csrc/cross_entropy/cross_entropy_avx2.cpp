#include "cross_entropy/cross_entropy_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const CrossEntropyKernels kCrossEntropyAvx2 = {
    {stats_rows<float>, stats_rows<bfloat16>, stats_rows<float16>, nullptr},
    {backward_rows<float>, backward_rows<bfloat16>, backward_rows<float16>, nullptr},
};

}  // namespace fastpar

#endif
