// The CUDA stream and the error check for launches, without a link-time dependency on a CUDA build of torch.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

#include "common/checks.h"

// Weak, because the CPU-only torch does not have it and torch.ops.load_library resolves every strong symbol at once.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

#define FASTPAR_CUDA_CHECK(expression)                                                     \
  do {                                                                                     \
    const cudaError_t status_ = (expression);                                              \
    FASTPAR_CHECK(status_ == cudaSuccess, #expression, ": ", cudaGetErrorString(status_)); \
  } while (0)

namespace fastpar {

// torch's current stream of the device: the only one that kernels are launched on.
inline cudaStream_t current_cuda_stream(int32_t device) {
  FASTPAR_CHECK(&aoti_torch_get_current_cuda_stream != nullptr, "the torch in this process has no CUDA");
  void* stream = nullptr;
  FASTPAR_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == AOTI_TORCH_SUCCESS,
                "no current stream on cuda:", device);
  return static_cast<cudaStream_t>(stream);
}

}  // namespace fastpar
