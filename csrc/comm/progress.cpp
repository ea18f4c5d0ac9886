#include "comm/progress.h"

#include <sched.h>

#include <chrono>

namespace fastpar {
namespace {

constexpr int kYieldsBeforeSleep = 50;

}  // namespace

Progress::~Progress() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  world_.close();
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  world_.leave(sequence_);
}

void Progress::run(const Call& call, InterruptCheck check) {
  std::unique_lock<std::mutex> lock(mutex_);
  finish_begun(lock, check);
  if (busy_ || !queue_.empty()) {
    const uint64_t ticket = enqueue(call);
    lock.unlock();
    return wait_for(ticket, check);
  }
  busy_ = true;
  const uint64_t sequence = sequence_++;
  lock.unlock();
  const auto release = [&] {
    lock.lock();
    busy_ = false;
    const bool waited_for = !queue_.empty() || thread_.joinable();
    lock.unlock();
    if (waited_for) changed_.notify_all();
  };
  world_.set_interrupt_check(check);
  try {
    run_collective(world_, sequence, call);
  } catch (...) {
    world_.set_interrupt_check(nullptr);
    release();
    throw;
  }
  world_.set_interrupt_check(nullptr);
  release();
}

uint64_t Progress::begin(const Call& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  finish_begun(lock, nullptr);
  if (busy_ || !queue_.empty()) return enqueue(call);
  begun_ = std::make_unique<StartedCall>(world_, sequence_, call);  // throws where the world cannot be used
  ++sequence_;
  busy_ = true;
  return begun_ticket_ = ++submitted_;
}

void Progress::finish(uint64_t ticket, InterruptCheck check) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (begun_ != nullptr && begun_ticket_ == ticket) finish_begun(lock, check);
  }
  wait_for(ticket, check);
}

// With the mutex held, which it lets go of meanwhile. A failure is kept for the ticket.
void Progress::finish_begun(std::unique_lock<std::mutex>& lock, InterruptCheck check) {
  if (begun_ == nullptr) return;
  const std::unique_ptr<StartedCall> call = std::move(begun_);
  const uint64_t ticket = begun_ticket_;
  lock.unlock();
  world_.set_interrupt_check(check);
  try {
    call->finish();
    lock.lock();
  } catch (const CommFailure& failure) {
    lock.lock();
    failures_.emplace(ticket, failure);
  } catch (const std::exception& error) {
    lock.lock();
    failures_.emplace(ticket, CommFailure(CommStatus::kError, error.what()));
  }
  world_.set_interrupt_check(nullptr);
  busy_ = false;
  finished_.store(ticket, std::memory_order_release);
  changed_.notify_all();
}

void Progress::wait_for(uint64_t ticket, InterruptCheck check) {
  while (!wait(ticket, 0.1)) {
    if (check == nullptr || !check()) continue;
    // The caller's buffers must not be written any more once this has returned, so the call has to end first.
    world_.close();
    try {
      while (!wait(ticket, 0.1)) {
      }
    } catch (const CommFailure&) {
    }
    throw CommFailure(CommStatus::kInterrupted, "interrupted");
  }
}

uint64_t Progress::submit(const Call& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  finish_begun(lock, nullptr);
  return enqueue(call);
}

// With the mutex held.
uint64_t Progress::enqueue(const Call& call) {
  Job job{call, {}, {}, ++submitted_};
  const size_t ranks = static_cast<size_t>(world_.size());
  if (call.sizes != nullptr) job.sizes.assign(call.sizes, call.sizes + ranks);
  if (call.output_sizes != nullptr) job.output_sizes.assign(call.output_sizes, call.output_sizes + ranks);
  queue_.push_back(std::move(job));
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  changed_.notify_all();
  return submitted_;
}

bool Progress::wait(uint64_t ticket, double seconds) {
  for (int i = 0; i < kYieldsBeforeSleep && !done(ticket); ++i) sched_yield();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto limit = std::chrono::duration<double>(seconds);
  if (!changed_.wait_for(lock, limit, [&] { return done(ticket); })) return false;
  throw_failure_of(ticket);
  return true;
}

// With the mutex held.
void Progress::throw_failure_of(uint64_t ticket) {
  const auto failure = failures_.find(ticket);
  if (failure == failures_.end()) return;
  const CommFailure copy = failure->second;
  failures_.erase(failure);
  throw copy;
}

void Progress::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || (!queue_.empty() && !busy_); });
    if (stopping_) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    const uint64_t sequence = sequence_++;
    lock.unlock();
    job.call.sizes = job.sizes.data();
    job.call.output_sizes = job.output_sizes.data();
    try {
      run_collective(world_, sequence, job.call);
      lock.lock();
    } catch (const CommFailure& failure) {
      lock.lock();
      failures_.emplace(job.ticket, failure);
    } catch (const std::exception& error) {
      lock.lock();
      failures_.emplace(job.ticket, CommFailure(CommStatus::kError, error.what()));
    }
    busy_ = false;
    finished_.store(job.ticket, std::memory_order_release);
    changed_.notify_all();
  }
}

}  // namespace fastpar
