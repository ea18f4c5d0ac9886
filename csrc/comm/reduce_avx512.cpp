// There is no avx512bf16 version: its conversion flushes subnormal numbers, and a collective must not change a value.
#include "comm/reduce_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const ReduceKernels kReduceAvx512 = FASTPAR_REDUCE_KERNELS;

}  // namespace fastpar

#endif
