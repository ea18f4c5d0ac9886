#include "optimizer/optimizer_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const OptimizerKernels kOptimizerAvx2 = optimizer_kernels();

}  // namespace fastpar

#endif
