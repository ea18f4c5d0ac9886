// How a call of csrc/comm says that it did not succeed, and how a rank that waits learns that it should give up.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace fastpar {

enum class CommStatus : int32_t { kOk, kTimeout, kPeerLost, kMismatch, kInterrupted, kClosed, kError, kPeerFailed };

// After a mismatch, and after a message was waited for in vain, the world can be used further; after the rest it
// cannot.
class CommFailure : public std::exception {
 public:
  CommFailure(CommStatus status, std::string text) : status_(status), text_(std::move(text)) {}
  CommStatus status() const { return status_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  CommStatus status_;
  std::string text_;
};

// Called now and then by a rank that waits for long; true means give up (a signal has come).
using InterruptCheck = bool (*)();

}  // namespace fastpar
