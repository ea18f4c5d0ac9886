// Asynchronous files as C functions, for fastpar/storage/_library.py. Not ops: see comm/c_api.h.
#pragma once

#include <cstdint>

#define FASTPAR_EXPORT __attribute__((visibility("default")))

extern "C" {

// Null with an errno in `error` where io_uring is asked for and refused, or where there are no threads or no memory.
FASTPAR_EXPORT void* fastpar_file_create(int descriptor, int direct, int ring, int depth, int64_t block_bytes,
                                         int64_t* error);
// Waits for every transfer.
FASTPAR_EXPORT void fastpar_file_destroy(void* file);

// The ticket, see AsyncFile::submit; 0: out of memory.
FASTPAR_EXPORT uint64_t fastpar_file_submit(void* file, int is_write, int64_t offset, void* address, int64_t bytes,
                                            uint32_t* checksums, int64_t num_checksums, uint64_t after);
// 0: done; -1: not within `seconds`; 1: failed, and `failure` has code (FileCode or errno), offset, bytes, is_write.
FASTPAR_EXPORT int fastpar_file_wait(void* file, uint64_t ticket, double seconds, int64_t* failure);

// Room on the disk for a range of the file; 0, or an errno. Where a file system cannot promise room, the file only
// grows.
FASTPAR_EXPORT int fastpar_file_reserve(int descriptor, int64_t offset, int64_t bytes);

FASTPAR_EXPORT uint32_t fastpar_checksum(const void* data, int64_t bytes);
}
