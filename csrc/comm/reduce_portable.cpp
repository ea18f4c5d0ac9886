// The version for any processor.
#include "comm/reduce_kernel.h"

namespace fastpar {

extern const ReduceKernels kReducePortable = FASTPAR_REDUCE_KERNELS;

}  // namespace fastpar
