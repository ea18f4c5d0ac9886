// How a call of csrc/comm says that it did not succeed, and how a rank that waits learns that it should give up.
#pragma once

#include <atomic>
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

// Tells somebody when a rank has waited for long: at `seconds`, and then whenever the wait has doubled.
class LateReporter {
 public:
  using Function = void (*)(const char* text);

  void set(Function function, double seconds) {
    seconds_.store(seconds, std::memory_order_relaxed);
    function_.store(function, std::memory_order_release);
  }

  // `waited`: seconds, growing from call to call of one wait; `text` is asked only where there is something to say.
  template <typename Text>
  void report_if_due(double waited, Text&& text) {
    thread_local double due = 0.0, last = 0.0;
    const double first = seconds_.load(std::memory_order_relaxed);
    if (waited < last || waited < first) due = first;  // another wait
    last = waited;
    if (waited < due || first <= 0.0) return;
    due = 2 * waited;
    const Function function = function_.load(std::memory_order_acquire);
    if (function != nullptr) function(text().c_str());
  }

 private:
  std::atomic<Function> function_{nullptr};
  std::atomic<double> seconds_{60.0};
};

inline LateReporter& late_reporter() {
  static LateReporter reporter;
  return reporter;
}

}  // namespace fastpar
