#include "comm/reduce_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const ReduceKernels kReduceAvx2 = FASTPAR_REDUCE_KERNELS;

}  // namespace fastpar

#endif
