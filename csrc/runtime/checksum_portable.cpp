#include "runtime/checksum_kernel.h"

namespace fastpar {

extern const ChecksumKernels kChecksumPortable = {checksum_of, copy_and_checksum};

}  // namespace fastpar
