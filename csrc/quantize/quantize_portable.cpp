#include "quantize/quantize_kernel.h"

namespace fastpar {

extern const QuantizeKernels kQuantizePortable = FASTPAR_QUANTIZE_KERNELS;

}  // namespace fastpar
