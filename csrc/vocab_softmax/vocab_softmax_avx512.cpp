#include "vocab_softmax/vocab_softmax_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const SoftmaxKernels kSoftmaxAvx512 =
    FASTPAR_SOFTMAX_KERNELS(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);

}  // namespace fastpar

#endif
