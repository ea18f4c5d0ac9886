#include "runtime/io_ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>) && defined(SYS_io_uring_setup)
#include <linux/io_uring.h>
#define FASTPAR_IO_URING 1
#endif
#endif

namespace fastpar {
namespace {

[[noreturn]] void refuse(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

#if FASTPAR_IO_URING
// Since 5.6, as are IORING_OP_READ and IORING_OP_WRITE; older headers lack the name.
constexpr unsigned kFeatureReadWrite = 1u << 3;

unsigned load_acquire(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void store_release(unsigned* at, unsigned value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
#endif

}  // namespace

#if FASTPAR_IO_URING

IoRing::Mapping IoRing::map(int descriptor, size_t bytes, int64_t what) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, what);
  if (address == MAP_FAILED) refuse(errno, "cannot map an io_uring");
  return {address, bytes};
}

std::unique_ptr<IoRing> IoRing::create(unsigned entries) {
  io_uring_params params{};
  const int descriptor = static_cast<int>(syscall(SYS_io_uring_setup, entries, &params));
  if (descriptor < 0) refuse(errno, "io_uring_setup");
  std::unique_ptr<IoRing> ring(new IoRing());
  ring->descriptor_ = descriptor;
  if ((params.features & kFeatureReadWrite) == 0) refuse(ENOSYS, "this kernel's io_uring is older than 5.6");
  ring->submissions_ = map(descriptor, params.sq_off.array + params.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
  ring->completions_ =
      map(descriptor, params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
  ring->entries_ = map(descriptor, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
  char* submissions = static_cast<char*>(ring->submissions_.address);
  ring->submission_head_ = reinterpret_cast<unsigned*>(submissions + params.sq_off.head);
  ring->submission_tail_ = reinterpret_cast<unsigned*>(submissions + params.sq_off.tail);
  ring->submission_index_ = reinterpret_cast<unsigned*>(submissions + params.sq_off.array);
  ring->submission_mask_ = *reinterpret_cast<unsigned*>(submissions + params.sq_off.ring_mask);
  char* completions = static_cast<char*>(ring->completions_.address);
  ring->completion_head_ = reinterpret_cast<unsigned*>(completions + params.cq_off.head);
  ring->completion_tail_ = reinterpret_cast<unsigned*>(completions + params.cq_off.tail);
  ring->completion_mask_ = *reinterpret_cast<unsigned*>(completions + params.cq_off.ring_mask);
  ring->completed_ = completions + params.cq_off.cqes;
  return ring;
}

void IoRing::push(const Operation& operation) {
  const unsigned tail = *submission_tail_;  // nobody else writes it
  const unsigned slot = tail & submission_mask_;
  io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_.address)[slot];
  memset(&entry, 0, sizeof entry);
  entry.opcode = operation.is_write ? IORING_OP_WRITE : IORING_OP_READ;
  entry.fd = operation.descriptor;
  entry.addr = reinterpret_cast<uint64_t>(operation.address);
  entry.len = operation.bytes;
  entry.off = static_cast<uint64_t>(operation.offset);
  entry.user_data = operation.tag;
  submission_index_[slot] = slot;
  store_release(submission_tail_, tail + 1);
  ++pushed_;
}

void IoRing::submit(unsigned completions) {
  while (true) {
    const unsigned flags = completions > 0 ? IORING_ENTER_GETEVENTS : 0;
    const int64_t taken = syscall(SYS_io_uring_enter, descriptor_, pushed_, completions, flags, nullptr, 0);
    if (taken >= 0) {
      pushed_ -= static_cast<unsigned>(taken);
      if (pushed_ == 0) return;
    } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
      refuse(errno, "io_uring_enter");
    }
  }
}

bool IoRing::pop(uint64_t* tag, int32_t* result) {
  const unsigned head = *completion_head_;  // nobody else writes it
  if (head == load_acquire(completion_tail_)) return false;
  const io_uring_cqe& entry = static_cast<io_uring_cqe*>(completed_)[head & completion_mask_];
  *tag = entry.user_data;
  *result = entry.res;
  store_release(completion_head_, head + 1);
  return true;
}

#else

IoRing::Mapping IoRing::map(int, size_t, int64_t) { refuse(ENOSYS, "no io_uring"); }
std::unique_ptr<IoRing> IoRing::create(unsigned) { refuse(ENOSYS, "fastpar was built without io_uring"); }
void IoRing::push(const Operation&) {}
void IoRing::submit(unsigned) {}
bool IoRing::pop(uint64_t*, int32_t*) { return false; }

#endif

IoRing::~IoRing() {
  for (const Mapping& mapping : {submissions_, completions_, entries_}) {
    if (mapping.address != nullptr) munmap(mapping.address, mapping.bytes);
  }
  if (descriptor_ >= 0) ::close(descriptor_);
}

}  // namespace fastpar
