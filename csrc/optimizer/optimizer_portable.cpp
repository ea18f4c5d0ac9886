// The version for any processor.
#include "optimizer/optimizer_kernel.h"

namespace fastpar {

extern const OptimizerKernels kOptimizerPortable = optimizer_kernels();

}  // namespace fastpar
