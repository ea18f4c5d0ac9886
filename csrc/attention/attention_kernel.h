// The table of one engine and input dtype.
#pragma once

#include "attention/attention_backward.h"
#include "attention/attention_forward.h"

namespace fastpar {
namespace {

template <typename Engine, typename T>
constexpr AttentionKernels attention_kernels() {
  return {sizeof(typename Engine::Element),
          sizeof(typename Engine::Real),
          Engine::kMultiple,
          Engine::kKeyGroup,
          forward_scratch<Engine>,
          backward_scratch<Engine>,
          pack_forward<Engine, T>,
          forward<Engine, T>,
          pack_keys<Engine, T>,
          pack_queries<Engine, T>,
          backward<Engine, T>,
          finish<Engine, T>};
}

}  // namespace
}  // namespace fastpar
