#include "quantize/quantize_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const QuantizeKernels kQuantizeAvx2 = FASTPAR_QUANTIZE_KERNELS;

}  // namespace fastpar

#endif
