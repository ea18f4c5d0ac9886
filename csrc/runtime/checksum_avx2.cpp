#include "runtime/checksum_kernel.h"

#if FASTPAR_X86

namespace fastpar {

extern const ChecksumKernels kChecksumAvx2 = {checksum_of, copy_and_checksum};

}  // namespace fastpar

#endif
