#include "emulation/late_stores.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "emulation/machine.h"

namespace fastpar {
namespace emulation {
namespace {

struct LateStore {
  unsigned char* address;
  size_t bytes;
  unsigned char value[16];
  Writer writer;

  void land() const { std::memcpy(address, value, bytes); }
  bool overlaps(const LateStore& other) const {
    return address < other.address + other.bytes && other.address < address + bytes;
  }
};

// In the order of the program.
std::vector<LateStore>& pending() {
  static std::vector<LateStore> stores;
  return stores;
}

// Lands those that `is_due`, and keeps the others.
template <typename F>
void land_if(const F& is_due) {
  auto& stores = pending();
  size_t kept = 0;
  for (const LateStore& store : stores) {
    if (is_due(store)) {
      store.land();
    } else {
      stores[kept++] = store;
    }
  }
  stores.resize(kept);
}

struct Range {
  size_t bytes;
  std::vector<unsigned char*> ranks;
};

std::map<unsigned char*, Range>& multicasts() {
  static std::map<unsigned char*, Range> ranges;
  return ranges;
}

}  // namespace

void store_late(void* address, const void* value, size_t bytes) {
  LateStore store{static_cast<unsigned char*>(address), bytes, {}, writer()};
  if (bytes > sizeof store.value) throw Error("a store has at most 16 bytes");
  std::memcpy(store.value, value, bytes);
  if (schedule() == Schedule::kAscending) {
    store.land();
  } else {
    pending().push_back(store);
  }
}

void land_released() {
  const Writer now = writer();
  land_if([&](const LateStore& store) {
    const Writer& by = store.writer;
    return by.block == now.block && (by.thread == now.thread || by.barriers < now.barriers);
  });
}

void land_some(std::mt19937_64& random) {
  auto& stores = pending();
  constexpr size_t kMost = 64;
  for (size_t draws = random() % (1 + std::min(stores.size(), kMost)); draws > 0; --draws) {
    size_t chosen = random() % stores.size();
    for (size_t i = 0; i < chosen; ++i) {
      if (stores[i].overlaps(stores[chosen])) chosen = i;
    }
    stores[chosen].land();
    stores.erase(stores.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
}

void land_grid(int64_t grid) {
  land_if([&](const LateStore& store) { return store.writer.grid == grid; });
}

void land_all() {
  land_if([](const LateStore&) { return true; });
}

Multicast::Multicast(size_t bytes, std::vector<unsigned char*> ranks) : bytes_(bytes) {
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (range == MAP_FAILED) throw Error("no address range for a multicast object");
  data_ = static_cast<unsigned char*>(range);
  multicasts()[data_] = {bytes, std::move(ranks)};
}

Multicast::~Multicast() {
  multicasts().erase(data_);
  munmap(data_, bytes_);
}

std::vector<unsigned char*> multicast_addresses(const void* address) {
  auto* byte = static_cast<unsigned char*>(const_cast<void*>(address));
  auto after = multicasts().upper_bound(byte);
  if (after == multicasts().begin()) throw Error("not a multicast address");
  const auto& [base, range] = *std::prev(after);
  if (byte >= base + range.bytes) throw Error("not a multicast address");
  std::vector<unsigned char*> addresses;
  for (unsigned char* rank : range.ranks) addresses.push_back(rank + (byte - base));
  return addresses;
}

}  // namespace emulation
}  // namespace fastpar
