// Memory that several processes on one host map, and a watch on whether those processes live.
//
// A segment is a memfd: it has no name in any file system, so that nothing can be left behind, whenever its owner dies,
// and the size of /dev/shm (64 MB in a container, by default) does not limit it. Only its owner's user may open it
// (mode 0600). A peer opens it through /proc/<pid>/fd/<fd>, which needs the same process namespace and user; where
// that is not so, open() throws, and the callers fall back to another transport.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace fastpar {

class SharedSegment {
 public:
  SharedSegment() = default;
  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  // New memory, zeroed. Throws std::runtime_error when the system refuses.
  static SharedSegment create(size_t bytes);

  // The segment that process `pid` holds under descriptor `fd`.
  static SharedSegment open(pid_t pid, int fd, size_t bytes);

  // For peers to open; -1 once close_descriptor() has been called, after which nobody can.
  int descriptor() const { return descriptor_; }
  void close_descriptor();

  char* address() const { return static_cast<char*>(address_); }
  size_t bytes() const { return bytes_; }

 private:
  static SharedSegment map(int descriptor, size_t bytes);

  int descriptor_ = -1;
  void* address_ = nullptr;
  size_t bytes_ = 0;
};

// Whether a process still runs. A process that was killed and that nobody has waited for yet (a zombie) does not.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(pid_t pid);
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ~ProcessWatch();

  bool has_ended() const;

 private:
  int descriptor_ = -1;
};

}  // namespace fastpar
