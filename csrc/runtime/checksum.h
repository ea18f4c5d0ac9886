// The checksum of a block of a file: CRC-32C over four interleaved streams, at the speed of memory.
//
// A processor's CRC instruction takes 8 bytes, and three cycles until the next one of the same stream may begin. So the
// words of 8 bytes go to four streams in turn (word i to stream i mod 4), and the checksum is the CRC-32C of the four
// streams' CRC-32C values (4 bytes each, little-endian). The last, shorter word goes to the stream whose turn it is.
//
// Example: the 9 bytes "123456789" are the words "12345678" (stream 0) and "9" (stream 1), with CRC-32C 0x6087809a and
// 0x1a2cc12c; streams 2 and 3 are empty and have 0. The checksum is the CRC-32C of 9a 80 87 60 2c c1 2c 1a and 8 zeros:
// 0xbfcd1107.
//
// What is found: as with CRC-32C every change of up to 32 neighbouring bits of a stream, and any other change but one
// in 2^32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastpar {

uint32_t checksum(const void* data, size_t bytes);

// Of `source`, while it is copied to `target`.
uint32_t copy_with_checksum(void* target, const void* source, size_t bytes);

struct ChecksumKernels {
  uint32_t (*read)(const void* data, size_t bytes);
  uint32_t (*copy)(void* target, const void* source, size_t bytes);
};

extern const ChecksumKernels kChecksumPortable;
#if FASTPAR_X86
extern const ChecksumKernels kChecksumAvx2;  // SSE4.2's instruction; every processor with AVX2 has it
#endif

}  // namespace fastpar
