// Memory that other ranks look at: stores that are seen late, and multicast addresses.
//
// On a device a store reaches the memory of another rank at some time after it, and two stores in either order, unless
// the protocol says otherwise. So does this: a late store lands
//
//   kAscending    at once
//   kDescending   when it has to
//   kRandom       at some time until then, in any order but that of two stores to one address
//
// It has to when its thread releases (a system-wide release store, or a fence), when another thread of its block does
// so after both have passed a barrier, when the grid ends, and when no thread gets anywhere without it. Stricter than
// the device: a release by one lane does not cover what the others of its warp stored before a __syncwarp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace fastpar {
namespace emulation {

// The thread that runs now.
struct Writer {
  int64_t grid, block;  // counted over all launches
  unsigned thread;      // in its block
  int64_t barriers;     // that its block has passed
};
Writer writer();  // in machine.cpp

void store_late(void* address, const void* value, size_t bytes);
void land_released();  // what a release by the running thread covers
void land_some(std::mt19937_64& random);
void land_grid(int64_t grid);
void land_all();

// An address range that stands for the same range of every rank's memory: what NVLink's switch calls multicast. No
// memory lies behind it: a plain access is a fault.
class Multicast {
 public:
  Multicast(size_t bytes, std::vector<unsigned char*> ranks);
  ~Multicast();
  Multicast(const Multicast&) = delete;
  Multicast& operator=(const Multicast&) = delete;

  unsigned char* data() const { return data_; }

 private:
  unsigned char* data_;
  size_t bytes_;
};

// What a multicast address means, by rank. Throws Error for any other address.
std::vector<unsigned char*> multicast_addresses(const void* address);

}  // namespace emulation
}  // namespace fastpar
