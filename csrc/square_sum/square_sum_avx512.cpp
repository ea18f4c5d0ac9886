#include "square_sum/square_sum_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const SquareSumKernels kSquareSumAvx512 = {
    {square_sum<float>, square_sum<bfloat16>, square_sum<float16>, nullptr},
};

}  // namespace fastpar

#endif
