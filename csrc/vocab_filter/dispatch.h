// Calls a generic lambda with a value of the C++ type of a tensor's elements.
#pragma once

#include "common/dtypes.h"
#include "common/tensor_rows.h"

namespace fastpar {

template <typename F>
void dispatch_float(const torch::stable::Tensor& x, const F& body) {
  switch (float_type(x, "logits")) {
    case FloatType::kFloat32:
      body(float{});
      break;
    case FloatType::kBFloat16:
      body(bfloat16{});
      break;
    case FloatType::kFloat16:
      body(float16{});
      break;
    case FloatType::kFloat64:
      body(double{});
      break;
  }
}

}  // namespace fastpar
