// The shared-memory transport under ThreadSanitizer: the ranks are threads of one process.
//
//   transport [rounds] [seed]        0: all well; ThreadSanitizer prints what is not, and makes the exit status 66
//
// csrc/comm is compiled as it is, but for what ranks.h replaces.
//
// Every round all ranks call a few random collectives, blocking, in halves or not, with random delays, and look at
// every element of the results, which are whole numbers. What the rounds are is drawn from one seed, what a rank makes
// of them (delays, which way to call, data in a region or not) from one of its own.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "comm/progress.h"
#include "common/checks.h"
#include "ranks.h"

namespace fastpar {
namespace {

constexpr uint8_t kFloat = 6, kInt64 = 4;  // torch's numbers
constexpr size_t kSlotBytes = 4096;        // small: most calls take several chunks
constexpr int64_t kMaxCount = 5000;

// What the threads share to find each other, as processes do through a store.
struct Meeting {
  explicit Meeting(int size) : barrier(size), descriptors(size), nonces(size), regions(size) {}
  Barrier barrier;
  std::vector<int64_t> descriptors;
  std::vector<uint64_t> nonces;
  std::vector<float*> regions;
};

float value(int rank, int64_t i, int round) { return static_cast<float>((i * (rank + 2) + round) % 17); }

class RankThread {
 public:
  RankThread(Meeting& meeting, int rank, int size, unsigned seed)
      : meeting_(meeting),
        rank_(rank),
        size_(size),
        common_(seed),
        own_(seed * 1000 + static_cast<unsigned>(rank)),
        progress_(WorldOptions{rank, size, size + 1, kSlotBytes}),
        region_(SharedSegment::create(kMaxCount * sizeof(float))) {
    join();
  }

  void run(int rounds) {
    for (round_ = 0; round_ < rounds; ++round_) {
      switch (pick(common_, 7)) {
        case 0:
          all_reduce();
          break;
        case 1:
          reduce_scatter();
          break;
        case 2:
          all_gather();
          break;
        case 3:
          all_to_all();
          break;
        case 4:
          broadcast();
          break;
        case 5:
          two_at_once();
          break;
        case 6:
          mismatch();
          break;
      }
    }
    failure();
    meeting_.barrier.wait();  // nobody unmaps what others still look at
  }

 private:
  int64_t any_count() { return 1 + pick(common_, pick(common_, 2) == 0 ? 40 : kMaxCount); }

  void join() {
    World& world = progress_.world();
    meeting_.descriptors[rank_] = world.descriptor();
    meeting_.nonces[rank_] = world.nonce();
    meeting_.regions[rank_] = reinterpret_cast<float*>(region_.address());
    meeting_.barrier.wait();
    const std::vector<int64_t> pids(size_, getpid());
    world.connect(pids.data(), meeting_.descriptors.data(), meeting_.nonces.data());
    std::vector<char*> addresses;
    for (float* address : meeting_.regions) addresses.push_back(reinterpret_cast<char*>(address));
    world.add_region(addresses, kMaxCount * sizeof(float));
    meeting_.barrier.wait();
    world.seal();
  }

  void dawdle() {
    if (pick(own_, 4) == 0) usleep(static_cast<useconds_t>(pick(own_, 300)));
  }

  Call call(CommOp op, const void* input, void* output, int64_t count) {
    return {op, kFloat, Reduction::kSum, 0, 4, input, output, count, nullptr, nullptr, 20.0};
  }

  void finish(const Call& call) {
    dawdle();
    const int way = static_cast<int>(pick(own_, 3));
    if (way == 0) return progress_.run(call, nullptr);
    if (way == 1) {
      const uint64_t begun = progress_.begin(call);
      dawdle();
      return progress_.finish(begun, nullptr);
    }
    const uint64_t ticket = progress_.submit(call);
    dawdle();
    while (!progress_.wait(ticket, 0.05)) {
    }
  }

  // Memory for this rank's input: ordinary, or its part of the region.
  float* input(std::vector<float>& memory, int64_t count) {
    memory.resize(count);
    float* const x = pick(own_, 2) == 0 ? memory.data() : reinterpret_cast<float*>(region_.address());
    for (int64_t i = 0; i < count; ++i) x[i] = value(rank_, i, round_);
    return x;
  }

  float sum(int64_t i) const {
    float total = 0;
    for (int rank = 0; rank < size_; ++rank) total += value(rank, i, round_);
    return total;
  }

  std::vector<int64_t> uneven(int64_t total) const {
    std::vector<int64_t> sizes(size_, total / size_ / 2);
    sizes[round_ % size_] += total - total / size_ / 2 * size_;
    return sizes;
  }

  void all_reduce() {
    const int64_t count = any_count();
    std::vector<float> memory, other(count);
    float* const x = input(memory, count);
    float* const out = pick(common_, 2) == 0 ? x : other.data();
    finish(call(CommOp::kAllReduce, x, out, count));
    for (int64_t i = 0; i < count; ++i) EXPECT(out[i] == sum(i), "all_reduce[", i, "] of ", count, ": ", out[i]);
  }

  void reduce_scatter() {
    const int64_t count = any_count();
    const std::vector<int64_t> sizes = uneven(count);
    int64_t begin = 0;
    for (int rank = 0; rank < rank_; ++rank) begin += sizes[rank];
    std::vector<float> memory, out(sizes[rank_] + 1);
    Call made = call(CommOp::kReduceScatter, input(memory, count), out.data(), count);
    made.sizes = sizes.data();
    finish(made);
    for (int64_t i = 0; i < sizes[rank_]; ++i) EXPECT(out[i] == sum(begin + i), "reduce_scatter[", i, "]: ", out[i]);
  }

  void all_gather() {
    const int64_t count = any_count();
    const std::vector<int64_t> sizes = uneven(count);
    std::vector<float> memory, out(count);
    Call made = call(CommOp::kAllGather, input(memory, sizes[rank_]), out.data(), count);
    made.sizes = sizes.data();
    finish(made);
    for (int64_t rank = 0, at = 0; rank < size_; ++rank) {
      for (int64_t i = 0; i < sizes[rank]; ++i, ++at) {
        EXPECT(out[at] == value(static_cast<int>(rank), i, round_), "all_gather[", at, "]: ", out[at]);
      }
    }
  }

  void all_to_all() {
    const int64_t unit = 1 + any_count() / (2 * size_);  // rank r sends (r + to) % 3 units to rank `to`
    std::vector<int64_t> sent(size_), received(size_);
    int64_t total = 0, result = 0;
    for (int rank = 0; rank < size_; ++rank) {
      total += sent[rank] = (rank_ + rank) % 3 * unit;
      result += received[rank] = (rank_ + rank) % 3 * unit;
    }
    std::vector<float> x(total + 1), out(result + 1);
    for (int64_t to = 0, at = 0; to < size_; ++to) {
      for (int64_t i = 0; i < sent[to]; ++i, ++at) x[at] = value(rank_, i + to, round_);
    }
    Call made = call(CommOp::kAllToAll, x.data(), out.data(), total);
    made.sizes = sent.data();
    made.output_sizes = received.data();
    finish(made);
    for (int64_t from = 0, at = 0; from < size_; ++from) {
      for (int64_t i = 0; i < received[from]; ++i, ++at) {
        EXPECT(out[at] == value(static_cast<int>(from), i + rank_, round_), "all_to_all[", at, "]: ", out[at]);
      }
    }
  }

  void broadcast() {
    const int64_t count = any_count();
    const int root = pick(common_, size_);
    std::vector<float> memory, out(count);
    Call made = call(CommOp::kBroadcast, input(memory, count), out.data(), count);
    made.root = root;
    finish(made);
    for (int64_t i = 0; i < count; ++i) EXPECT(out[i] == value(root, i, round_), "broadcast[", i, "]: ", out[i]);
  }

  // Two calls in the background and one that blocks, all under way together.
  void two_at_once() {
    const int64_t count = any_count();
    std::vector<float> x(count), first(count), second(count * size_), third(count);
    for (int64_t i = 0; i < count; ++i) x[i] = value(rank_, i, round_);
    const std::vector<int64_t> sizes(size_, count);
    Call gather = call(CommOp::kAllGather, x.data(), second.data(), count * size_);
    gather.sizes = sizes.data();
    const uint64_t one = progress_.submit(call(CommOp::kAllReduce, x.data(), first.data(), count));
    const uint64_t two = progress_.submit(gather);
    dawdle();
    progress_.run(call(CommOp::kAllReduce, x.data(), third.data(), count), nullptr);
    EXPECT(progress_.done(one) && progress_.done(two), "calls end in order");
    EXPECT(progress_.wait(two, 0) && progress_.wait(one, 0), "in any order of waits");
    for (int64_t i = 0; i < count; ++i) EXPECT(first[i] == sum(i) && third[i] == sum(i), "all_reduce[", i, "]");
    EXPECT(second.back() == value(size_ - 1, count - 1, round_), "all_gather: ", second.back());
  }

  // One rank calls something else: an error on every rank, and the next round goes on.
  void mismatch() {
    const int64_t count = any_count();
    const bool odd = pick(common_, size_) == rank_;
    const int what = pick(common_, 3);
    std::vector<float> memory, out(count + 1);
    Call made = call(CommOp::kAllReduce, input(memory, count + 1), out.data(), count + (odd && what == 0));
    if (odd && what == 1) made.op = CommOp::kBroadcast;
    if (odd && what == 2) made.dtype = 7;
    try {
      finish(made);
      EXPECT(false, "a mismatch went unnoticed");
    } catch (const CommFailure& failure) {
      EXPECT(failure.status() == CommStatus::kMismatch, failure.what());
    }
  }

  // The last rank is late, and rank 0 gives up. Who has all that this call needs finishes it, and fails in the next.
  void failure() {
    float x = 1, out = 0;
    Call made = call(CommOp::kAllReduce, &x, &out, 1);
    made.timeout_seconds = rank_ == 0 ? 0.05 : 20.0;
    if (rank_ == size_ - 1) usleep(200'000);
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        finish(made);
        EXPECT(rank_ != 0 && attempt == 0, "a rank that gave up went unnoticed");
      } catch (const CommFailure& failure) {
        EXPECT(failure.status() == CommStatus::kTimeout, failure.what());
        break;
      }
    }
    try {
      finish(made);
      EXPECT(false, "a broken world was used");
    } catch (const CommFailure& failure) {
      EXPECT(failure.status() == CommStatus::kTimeout, failure.what());
    }
  }

  Meeting& meeting_;
  const int rank_, size_;
  std::minstd_rand common_, own_;
  Progress progress_;
  SharedSegment region_;
  int round_ = 0;
};

}  // namespace
}  // namespace fastpar

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 60;
  const unsigned seed = count > 2 ? static_cast<unsigned>(std::atoi(arguments[2])) : 1;
  fastpar::tuning() = {512, 2048};
  for (int size = 2; size <= 4; ++size) {
    fastpar::Meeting meeting(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] { fastpar::RankThread(meeting, rank, size, seed).run(rounds); });
    }
    for (std::thread& thread : threads) thread.join();
    std::printf("%d ranks: %d rounds\n", size, rounds);
  }
}
