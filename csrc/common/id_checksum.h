// A checksum of ids (targets) and of the other arguments of a call, which ranks that must agree compare.
#pragma once

#include <cstdint>

namespace fastpar {
namespace {

// `call` is what the caller knows of its other arguments; 0: there is nobody to compare with, and no checksum. The bits
// never are those of a NaN: they travel as a float.
inline uint32_t id_checksum(const int64_t* ids, int64_t count, int64_t call) {
  if (call == 0) return 0;
  uint64_t sum = static_cast<uint64_t>(call) * 0x9e3779b97f4a7c15u;
  for (int64_t i = 0; i < count; ++i) {
    // Sums of products: ids that changed places, or that were replaced by others of the same sum, are seen.
    sum += (static_cast<uint64_t>(ids[i]) + 0xd1b54a32d192ed03u) * (2 * static_cast<uint64_t>(i) + 1) *
           0xbf58476d1ce4e5b9u;
  }
  sum ^= sum >> 32;
  return static_cast<uint32_t>(sum * 0x94d049bb133111ebu >> 32) & ~(uint32_t{1} << 23);
}

}  // namespace
}  // namespace fastpar
