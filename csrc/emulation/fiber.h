// Fibers: stacks that one operating-system thread switches between by hand.
//
// A CUDA thread of the emulation is one of them. ucontext would do, but swapcontext makes two system calls to save a
// signal mask that never changes; on x86-64 a switch is sixteen instructions instead. AddressSanitizer has to be told
// of every switch, or it takes the new stack for an overflow of the old one.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace fastpar {
namespace emulation {

struct Fiber {
  void* context = nullptr;  // where it goes on: a stack pointer, or a ucontext_t
  char* stack = nullptr;
  void* sanitizer_stack = nullptr;
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
};

constexpr size_t kStackBytes = size_t{64} << 10;

// Runs entry(argument) on `fiber`'s own stack, from the next resume on.
void prepare(Fiber* fiber, void (*entry)(void*), void* argument);

// Called by the scheduler: returns when the fiber suspends or its entry returns.
void resume(Fiber* fiber);

// Called on a fiber: back to the scheduler.
void suspend();

// Gives stacks back. `abandoned`: the fiber was left in the middle, with frames that will never return.
void release(Fiber* fiber, bool abandoned);

}  // namespace emulation
}  // namespace fastpar
