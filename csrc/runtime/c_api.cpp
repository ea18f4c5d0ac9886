#include "runtime/c_api.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "runtime/async_file.h"
#include "runtime/checksum.h"

namespace {

fastpar::AsyncFile& async_file(void* file) { return *static_cast<fastpar::AsyncFile*>(file); }

}  // namespace

void* fastpar_file_create(int descriptor, int direct, int ring, int depth, int64_t block_bytes, int64_t* error) {
  try {
    return new fastpar::AsyncFile({descriptor, direct != 0, ring != 0, depth, block_bytes});
  } catch (const std::system_error& failure) {
    *error = failure.code().value();
  } catch (const std::bad_alloc&) {
    *error = ENOMEM;
  }
  return nullptr;
}

void fastpar_file_destroy(void* file) { delete static_cast<fastpar::AsyncFile*>(file); }

uint64_t fastpar_file_submit(void* file, int is_write, int64_t offset, void* address, int64_t bytes,
                             uint32_t* checksums, int64_t num_checksums, uint64_t after) {
  try {
    return async_file(file).submit(
        {is_write != 0, offset, static_cast<char*>(address), bytes, checksums, num_checksums, after});
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

int fastpar_file_wait(void* file, uint64_t ticket, double seconds, int64_t* out) {
  fastpar::FileFailure failure;
  if (!async_file(file).wait(ticket, seconds, &failure)) return -1;
  if (failure.code == fastpar::kFileOk) return 0;
  out[0] = failure.code;
  out[1] = failure.offset;
  out[2] = failure.bytes;
  out[3] = failure.is_write;
  return 1;
}

int fastpar_file_reserve(int descriptor, int64_t offset, int64_t bytes) {
  int result = 0;
  do {
    result = fallocate(descriptor, 0, offset, bytes);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  struct stat status{};
  if (fstat(descriptor, &status) != 0) return errno;
  return ftruncate(descriptor, std::max<off_t>(status.st_size, offset + bytes)) == 0 ? 0 : errno;
}

uint32_t fastpar_checksum(const void* data, int64_t bytes) {
  return fastpar::checksum(data, static_cast<size_t>(bytes));
}
