#include "optimizer/optimizer_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const OptimizerKernels kOptimizerAvx512 = optimizer_kernels();

}  // namespace fastpar

#endif
