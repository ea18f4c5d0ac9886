#include "swiglu/swiglu_kernel.h"
#include "swiglu/swiglu_weighted_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const SwigluKernels kSwigluAvx512Bf16 = {
    {swiglu_rows<float>, swiglu_rows<bfloat16>, swiglu_rows<float16>, nullptr},
    {swiglu_backward_rows<float>, swiglu_backward_rows<bfloat16>, swiglu_backward_rows<float16>, nullptr},
    {swiglu_weighted_rows<float>, swiglu_weighted_rows<bfloat16>, swiglu_weighted_rows<float16>},
    {swiglu_weighted_backward_rows<float>, swiglu_weighted_backward_rows<bfloat16>,
     swiglu_weighted_backward_rows<float16>},
};

}  // namespace fastpar

#endif
