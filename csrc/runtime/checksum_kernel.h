// The checksum of checksum.h, compiled once with the processor's CRC instruction and once with a table.
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/checksum.h"

#if defined(__SSE4_2__)
#include <immintrin.h>
#endif

namespace fastpar {
namespace {

#if defined(__SSE4_2__)

inline uint32_t crc_word(uint32_t crc, uint64_t word) { return static_cast<uint32_t>(_mm_crc32_u64(crc, word)); }
inline uint32_t crc_byte(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }

#else

// entries[k][b]: what byte b, k bytes before the last one of a word, adds to the remainder.
struct CrcTable {
  uint32_t entries[8][256] = {};

  constexpr CrcTable() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc & 1u) != 0 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
      entries[0][byte] = crc;
    }
    for (int k = 1; k < 8; ++k) {
      for (int byte = 0; byte < 256; ++byte) {
        entries[k][byte] = entries[k - 1][byte] >> 8 ^ entries[0][entries[k - 1][byte] & 0xff];
      }
    }
  }
};
constexpr CrcTable kCrcTable;

inline uint32_t crc_byte(uint32_t crc, uint8_t byte) { return crc >> 8 ^ kCrcTable.entries[0][(crc ^ byte) & 0xff]; }

inline uint32_t crc_word(uint32_t crc, uint64_t word) {
  word ^= crc;
  uint32_t next = 0;
  for (int i = 0; i < 8; ++i) next ^= kCrcTable.entries[7 - i][word >> (8 * i) & 0xff];
  return next;
}

#endif

// Words are read in the machine's byte order, which is little-endian wherever torch runs.
template <bool kCopies>
inline uint64_t next_word(char* target, const char* source) {
  uint64_t word;
  memcpy(&word, source, sizeof word);
  if (kCopies) memcpy(target, &word, sizeof word);
  return word;
}

template <bool kCopies>
uint32_t four_streams(char* target, const char* source, size_t bytes) {
  uint32_t crc[4] = {~0u, ~0u, ~0u, ~0u};
  size_t at = 0;
  {
    uint32_t c0 = ~0u, c1 = ~0u, c2 = ~0u, c3 = ~0u;
    for (; at + 32 <= bytes; at += 32) {
      c0 = crc_word(c0, next_word<kCopies>(target + at, source + at));
      c1 = crc_word(c1, next_word<kCopies>(target + at + 8, source + at + 8));
      c2 = crc_word(c2, next_word<kCopies>(target + at + 16, source + at + 16));
      c3 = crc_word(c3, next_word<kCopies>(target + at + 24, source + at + 24));
    }
    crc[0] = c0, crc[1] = c1, crc[2] = c2, crc[3] = c3;
  }
  int stream = 0;
  for (; at + 8 <= bytes; at += 8, ++stream) {
    crc[stream] = crc_word(crc[stream], next_word<kCopies>(target + at, source + at));
  }
  for (; at < bytes; ++at) {
    if (kCopies) target[at] = source[at];
    crc[stream] = crc_byte(crc[stream], static_cast<uint8_t>(source[at]));
  }
  uint32_t combined = ~0u;
  for (int pair = 0; pair < 2; ++pair) {
    combined =
        crc_word(combined, static_cast<uint64_t>(~crc[2 * pair]) | static_cast<uint64_t>(~crc[2 * pair + 1]) << 32);
  }
  return ~combined;
}

uint32_t checksum_of(const void* data, size_t bytes) {
  return four_streams<false>(nullptr, static_cast<const char*>(data), bytes);
}

uint32_t copy_and_checksum(void* target, const void* source, size_t bytes) {
  return four_streams<true>(static_cast<char*>(target), static_cast<const char*>(source), bytes);
}

}  // namespace
}  // namespace fastpar
