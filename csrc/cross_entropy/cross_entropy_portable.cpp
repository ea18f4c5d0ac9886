// The version for any processor, and float64.
#include "cross_entropy/float64_kernel.h"
#include "cross_entropy/row_kernels.h"

namespace fastpar {

extern const CrossEntropyKernels kCrossEntropyPortable = {
    {stats_rows<float>, stats_rows<bfloat16>, stats_rows<float16>, stats_rows_float64},
    {backward_rows<float>, backward_rows<bfloat16>, backward_rows<float16>, backward_rows_float64},
    {fused_rows<float>, fused_rows<bfloat16>, fused_rows<float16>, fused_rows_float64},
};

}  // namespace fastpar
