#include "emulation/late_stores.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
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
};

// In the order of the program. Those that have landed stay, without bytes, until there are many of them.
struct Pending {
  std::vector<LateStore> stores;
  size_t landed = 0;
  std::unordered_map<const void*, int> at_address;  // how many have not landed

  void add(const LateStore& store) {
    stores.push_back(store);
    ++at_address[store.address];
  }
  void land(LateStore* store) {
    store->land();
    if (--at_address[store->address] == 0) at_address.erase(store->address);
    store->bytes = 0;
    ++landed;
  }
  void forget_landed() {
    if (2 * landed < stores.size()) return;
    stores.erase(std::remove_if(stores.begin(), stores.end(), [](const LateStore& s) { return s.bytes == 0; }),
                 stores.end());
    landed = 0;
  }
};

Pending& pending() {
  static Pending instance;
  return instance;
}

template <typename F>
void land_if(const F& is_due) {
  for (LateStore& store : pending().stores) {
    if (store.bytes > 0 && is_due(store)) pending().land(&store);
  }
  pending().forget_landed();
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

// Two stores to one place have one address: nothing here writes the same bytes as parts of different packets.
void store_late(void* address, const void* value, size_t bytes) {
  LateStore store{static_cast<unsigned char*>(address), bytes, {}, writer()};
  if (bytes > sizeof store.value) throw Error("a store has at most 16 bytes");
  std::memcpy(store.value, value, bytes);
  if (schedule() == Schedule::kAscending) {
    store.land();
  } else {
    pending().add(store);
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
  constexpr size_t kMost = 64;
  auto& stores = pending().stores;
  for (size_t draws = random() % (1 + std::min(stores.size(), kMost)); draws > 0; --draws) {
    LateStore* chosen = &stores[random() % stores.size()];
    if (chosen->bytes == 0) continue;
    if (pending().at_address[chosen->address] > 1) {  // the oldest first
      chosen = &*std::find_if(stores.begin(), stores.end(), [&](const LateStore& store) {
        return store.bytes > 0 && store.address == chosen->address;
      });
    }
    pending().land(chosen);
  }
  pending().forget_landed();
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
