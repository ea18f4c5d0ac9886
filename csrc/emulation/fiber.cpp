#include "emulation/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace fastpar {
namespace emulation {
namespace {

struct Scheduler {
  void* context = nullptr;
  void* sanitizer_stack = nullptr;
  const void* stack = nullptr;  // as AddressSanitizer knows it
  size_t stack_bytes = 0;
  Fiber* running = nullptr;
  std::vector<char*> free_stacks;
};

Scheduler& scheduler() {
  static Scheduler instance;
  return instance;
}

// A stack above a page that nothing may touch: running over the end is a fault, not a corruption.
char* map_stack() {
  constexpr size_t kGuardBytes = 4096;
  void* memory =
      mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("emulation: no memory for the stack of a thread");
  mprotect(memory, kGuardBytes, PROT_NONE);
  return static_cast<char*>(memory) + kGuardBytes;
}

void leave_scheduler(const Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler().sanitizer_stack, fiber.stack, kStackBytes);
#else
  (void)fiber;
#endif
}

void enter_scheduler() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler().sanitizer_stack, nullptr, nullptr);
#endif
}

void leave_fiber(void** sanitizer_stack) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(sanitizer_stack, scheduler().stack, scheduler().stack_bytes);
#else
  (void)sanitizer_stack;
#endif
}

void enter_fiber(void* sanitizer_stack) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(sanitizer_stack, &scheduler().stack, &scheduler().stack_bytes);
#else
  (void)sanitizer_stack;
#endif
}

extern "C" void fastpar_emulation_fiber_main();

#if defined(__x86_64__)

// Saves the registers that a call preserves, and the stack pointer; then the same in reverse on the other stack.
extern "C" void fastpar_emulation_switch(void** save, void* load);
asm(R"(
.text
.type fastpar_emulation_switch, @function
fastpar_emulation_switch:
  endbr64
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fastpar_emulation_switch, .-fastpar_emulation_switch
)");

void make_context(Fiber* fiber) {
  auto** top = reinterpret_cast<void**>(fiber->stack + kStackBytes);
  *--top = nullptr;  // the return address of the first function: nobody returns there, and it ends every backtrace
  *--top =
      reinterpret_cast<void*>(&fastpar_emulation_fiber_main);  // 16-byte aligned: so is the stack after `ret`, plus 8
  for (int preserved = 0; preserved < 6; ++preserved) *--top = nullptr;
  fiber->context = top;
}

void switch_context(void** save, void* load) { fastpar_emulation_switch(save, load); }

void free_context(Fiber*) {}

#else

void make_context(Fiber* fiber) {
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = fiber->stack;
  context->uc_stack.ss_size = kStackBytes;
  context->uc_link = nullptr;
  makecontext(context, &fastpar_emulation_fiber_main, 0);
  fiber->context = context;
}

void switch_context(void** save, void* load) {
  if (*save == nullptr) *save = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(*save), static_cast<const ucontext_t*>(load));
}

void free_context(Fiber* fiber) { delete static_cast<ucontext_t*>(fiber->context); }

#endif

extern "C" void fastpar_emulation_fiber_main() {
  enter_fiber(nullptr);
  Fiber* self = scheduler().running;
  self->entry(self->argument);
  leave_fiber(nullptr);  // null: this stack is done with
  switch_context(&self->context, scheduler().context);
  std::abort();
}

}  // namespace

void prepare(Fiber* fiber, void (*entry)(void*), void* argument) {
  auto& free_stacks = scheduler().free_stacks;
  if (free_stacks.empty()) {
    fiber->stack = map_stack();
  } else {
    fiber->stack = free_stacks.back();
    free_stacks.pop_back();
  }
  fiber->entry = entry;
  fiber->argument = argument;
  make_context(fiber);
}

void resume(Fiber* fiber) {
  scheduler().running = fiber;
  leave_scheduler(*fiber);
  switch_context(&scheduler().context, fiber->context);
  enter_scheduler();
}

void suspend() {
  Fiber* self = scheduler().running;
  leave_fiber(&self->sanitizer_stack);
  switch_context(&self->context, scheduler().context);
  enter_fiber(self->sanitizer_stack);
}

void release(Fiber* fiber, bool abandoned) {
#if defined(__SANITIZE_ADDRESS__)
  if (abandoned) __asan_unpoison_memory_region(fiber->stack, kStackBytes);
#else
  (void)abandoned;
#endif
  free_context(fiber);
  scheduler().free_stacks.push_back(fiber->stack);
  fiber->stack = nullptr;
}

}  // namespace emulation
}  // namespace fastpar
