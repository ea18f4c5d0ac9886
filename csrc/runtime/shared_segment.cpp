#include "runtime/shared_segment.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "common/checks.h"

namespace fastpar {

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      address_(std::exchange(other.address_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SharedSegment::~SharedSegment() {
  close_descriptor();
  if (address_ != nullptr) munmap(address_, bytes_);
}

SharedSegment SharedSegment::map(int descriptor, size_t bytes) {
  SharedSegment segment;
  segment.descriptor_ = descriptor;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  FASTPAR_CHECK(address != MAP_FAILED, "cannot map ", bytes, " bytes of shared memory: ", strerror(errno));
  segment.address_ = address;
  segment.bytes_ = bytes;
  madvise(address, bytes, MADV_HUGEPAGE);  // a refusal costs speed only
  return segment;
}

SharedSegment SharedSegment::create(size_t bytes) {
  const int descriptor = static_cast<int>(syscall(SYS_memfd_create, "fastpar", MFD_CLOEXEC));
  FASTPAR_CHECK(descriptor >= 0, "cannot create shared memory: ", strerror(errno));
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0 || fchmod(descriptor, 0600) != 0) {
    const int error = errno;
    ::close(descriptor);
    FASTPAR_CHECK(false, "cannot create ", bytes, " bytes of shared memory: ", strerror(error));
  }
  return map(descriptor, bytes);
}

SharedSegment SharedSegment::open(pid_t pid, int fd, size_t bytes) {
  const std::string path = concatenate("/proc/", pid, "/fd/", fd);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  FASTPAR_CHECK(descriptor >= 0, "cannot open the shared memory ", path, ": ", strerror(errno));
  struct stat status{};
  if (fstat(descriptor, &status) != 0 || static_cast<size_t>(status.st_size) != bytes) {
    ::close(descriptor);
    FASTPAR_CHECK(false, path, " is not the shared memory of ", bytes, " bytes that was announced");
  }
  SharedSegment segment = map(descriptor, bytes);
  segment.close_descriptor();
  return segment;
}

void SharedSegment::close_descriptor() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

ProcessWatch::ProcessWatch(pid_t pid) : descriptor_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
  FASTPAR_CHECK(descriptor_ >= 0, "cannot watch process ", pid, ": ", strerror(errno));
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

ProcessWatch::~ProcessWatch() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool ProcessWatch::has_ended() const {
  if (descriptor_ < 0) return false;
  pollfd query{descriptor_, POLLIN, 0};
  return poll(&query, 1, 0) > 0;
}

}  // namespace fastpar
