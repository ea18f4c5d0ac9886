// Storage types of the vector kernels. They are plain bits, so that files compiled for one instruction set need no
// torch header: an inline function of such a header, emitted there with AVX-512, could be the copy that the linker
// keeps for all.
#pragma once

#include <cstdint>

namespace fastpar {

struct bfloat16 {
  uint16_t bits;
};

struct float16 {
  uint16_t bits;
};

}  // namespace fastpar
