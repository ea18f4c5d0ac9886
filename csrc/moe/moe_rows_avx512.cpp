#include "moe/moe_rows_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const MoeRowsKernels kMoeRowsAvx512 = FASTPAR_MOE_ROWS_KERNELS(nullptr, nullptr, nullptr);

}  // namespace fastpar

#endif
