#include "runtime/checksum.h"

#include "common/cpu_capability.h"

namespace fastpar {
namespace {

const ChecksumKernels& kernels() {
#if FASTPAR_X86
  if (cpu_capability() >= CpuCapability::kAvx2) return kChecksumAvx2;
#endif
  return kChecksumPortable;
}

}  // namespace

uint32_t checksum(const void* data, size_t bytes) { return kernels().read(data, bytes); }

uint32_t copy_with_checksum(void* target, const void* source, size_t bytes) {
  return kernels().copy(target, source, bytes);
}

}  // namespace fastpar
