#include "rms_norm/rms_norm_kernel.h"
#include "rms_norm/rms_norm_split_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const RmsNormKernels kRmsNormAvx512Bf16 = {
    {rms_norm_rows<float>, rms_norm_rows<bfloat16>, rms_norm_rows<float16>, nullptr},
    {rms_norm_backward_blocks<float>, rms_norm_backward_blocks<bfloat16>, rms_norm_backward_blocks<float16>, nullptr},
    {rms_norm_squares<float>, rms_norm_squares<bfloat16>, rms_norm_squares<float16>, nullptr},
    {rms_norm_scale<float>, rms_norm_scale<bfloat16>, rms_norm_scale<float16>, nullptr},
};

}  // namespace fastpar

#endif
