// Received tensors as DLPack, the C interface by which torch takes over memory of others: it calls the deleter when the
// last view is gone, on any thread, without the interpreter. (github.com/dmlc/dlpack, ABI version 0.)
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "comm/mailbox.h"
#include "common/checks.h"

namespace fastpar {

struct DlType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t dims;
  DlType type;
  int64_t* sizes;
  int64_t* strides;  // null: contiguous
  uint64_t byte_offset;
};

struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};

// Whether a tensor with this number of torch's for its dtype can be sent.
inline bool is_sendable(uint8_t dtype) {
  return dtype <= 7 || (dtype >= 9 && dtype <= 11) || dtype == 15 || (dtype >= 23 && dtype <= 29);
}

// By torch's number of a dtype. Throws for those that cannot be sent.
inline DlType dl_type(uint8_t dtype) {
  constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kComplex = 5, kBool = 6;
  constexpr uint8_t kFloat8E4m3fn = 10, kFloat8E4m3fnuz = 11, kFloat8E5m2 = 12, kFloat8E5m2fnuz = 13;
  switch (dtype) {
    case 0:
      return {kUInt, 8, 1};
    case 1:
      return {kInt, 8, 1};
    case 2:
      return {kInt, 16, 1};
    case 3:
      return {kInt, 32, 1};
    case 4:
      return {kInt, 64, 1};
    case 5:
      return {kFloat, 16, 1};
    case 6:
      return {kFloat, 32, 1};
    case 7:
      return {kFloat, 64, 1};
    case 9:
      return {kComplex, 64, 1};
    case 10:
      return {kComplex, 128, 1};
    case 11:
      return {kBool, 8, 1};
    case 15:
      return {kBFloat, 16, 1};
    case 23:
      return {kFloat8E5m2, 8, 1};
    case 24:
      return {kFloat8E4m3fn, 8, 1};
    case 25:
      return {kFloat8E5m2fnuz, 8, 1};
    case 26:
      return {kFloat8E4m3fnuz, 8, 1};
    case 27:
      return {kUInt, 16, 1};
    case 28:
      return {kUInt, 32, 1};
    case 29:
      return {kUInt, 64, 1};
    default:
      FASTPAR_CHECK(false, "dtype number ", int{dtype}, " cannot be sent");
  }
}

// The caller has to see that the deleter is called.
inline DlManagedTensor* to_dlpack(std::unique_ptr<Loan> loan) {
  struct Managed {
    DlManagedTensor tensor;
    std::unique_ptr<Loan> loan;
  };
  constexpr int32_t kCpu = 1;
  auto* const made = new Managed{{}, std::move(loan)};
  std::vector<int64_t>& sizes = made->loan->sizes();
  made->tensor.tensor = {made->loan->address(),        kCpu,         0,       static_cast<int32_t>(sizes.size()),
                         dl_type(made->loan->dtype()), sizes.data(), nullptr, 0};
  made->tensor.context = made;
  made->tensor.deleter = [](DlManagedTensor* tensor) { delete static_cast<Managed*>(tensor->context); };
  return &made->tensor;
}

}  // namespace fastpar
