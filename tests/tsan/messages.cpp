// Messages through shared memory under ThreadSanitizer: the ranks are threads of one process.
//
//   messages [rounds] [seed]       0: all well; ThreadSanitizer prints what is not, and makes the exit status 66
//
// csrc/comm is compiled as it is, but for what ranks.h replaces.
//
// Every round every rank sends a few messages to every other one, with random tags and sizes, and receives in a random
// order what was sent to it. It looks at every byte, writes some of them, and hands most of the tensors to a thread
// that looks at them again, some time later, and lets go of them. What the rounds are is drawn from one seed, the order
// of receiving and all delays from one of each rank's own.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/mailbox.h"
#include "common/checks.h"
#include "ranks.h"

namespace fastpar {
namespace {

constexpr uint8_t kUInt8 = 0;  // torch's number
constexpr int kTags = 3, kMaxMessages = 3, kMaxTensors = 2, kMaxBytes = 600;
constexpr size_t kArenaBytes = 8 << 20;
constexpr uint64_t kMaxLetterBytes = 512;

// What the threads share to find each other, as processes do through a store.
struct Meeting {
  explicit Meeting(int size) : barrier(size), descriptors(size), nonces(size) {}
  Barrier barrier;
  std::vector<int64_t> descriptors;
  std::vector<uint64_t> nonces;
};

struct Message {
  int64_t tag, number;
  std::vector<int64_t> sizes;  // of its tensors
  char byte(int64_t i) const { return static_cast<char>(number * 31 + i); }
};

// Tensors that live on for a while, on a thread of their own.
class Holder {
 public:
  explicit Holder(unsigned seed) : random_(seed), thread_([this] { work(); }) {}
  ~Holder() {
    hold(nullptr, {});
    thread_.join();
  }
  void hold(std::unique_ptr<Loan> loan, const Message& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_.emplace_back(std::move(loan), message);
    changed_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !held_.empty(); });
      auto [loan, message] = std::move(held_.front());
      held_.pop_front();
      lock.unlock();
      if (loan == nullptr) return;
      if (pick(random_, 8) == 0) usleep(static_cast<useconds_t>(pick(random_, 200)));
      const char* const data = static_cast<char*>(loan->address());
      for (int64_t i = 1; i < loan->sizes()[0]; ++i) EXPECT(data[i] == message.byte(i), "held byte ", i, " changed");
    }
  }

  std::minstd_rand random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<std::unique_ptr<Loan>, Message>> held_;
  std::thread thread_;
};

class RankThread {
 public:
  RankThread(Meeting& meeting, int rank, int size, unsigned seed)
      : meeting_(meeting),
        rank_(rank),
        size_(size),
        common_(seed),
        own_(seed * 1000 + static_cast<unsigned>(rank)),
        mailbox_({rank, size, size + 1, kArenaBytes}) {
    meeting_.descriptors[rank_] = mailbox_.descriptor();
    meeting_.nonces[rank_] = mailbox_.nonce();
    meeting_.barrier.wait();
    const std::vector<int64_t> pids(size_, getpid());
    mailbox_.connect(pids.data(), meeting_.descriptors.data(), meeting_.nonces.data());
    meeting_.barrier.wait();
    mailbox_.seal();
  }

  void run(int rounds) {
    {
      Holder holder(seed_of_holder());
      holder_ = &holder;
      for (int round = 0; round < rounds; ++round) exchange();
    }
    meeting_.barrier.wait();
    // All tensors are back, and all letters but the last of each lane.
    const uint64_t used = mailbox_.stats().used_bytes;
    EXPECT(used <= (size_ - 1) * kMaxLetterBytes, used, " bytes are still in use");
    meeting_.barrier.wait();
    failure();
    meeting_.barrier.wait();  // nobody unmaps what others still look at
  }

 private:
  unsigned seed_of_holder() { return static_cast<unsigned>(own_()); }

  void dawdle() {
    if (pick(own_, 6) == 0) usleep(static_cast<useconds_t>(pick(own_, 200)));
  }

  void exchange() {
    std::vector<std::vector<Message>> expected(size_);
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        const int count = from == to ? 0 : pick(common_, kMaxMessages + 1);
        for (int i = 0; i < count; ++i) {
          Message message{pick(common_, kTags), number_++, {}};
          message.sizes.resize(pick(common_, kMaxTensors + 1));
          for (int64_t& bytes : message.sizes) bytes = pick(common_, kMaxBytes);
          if (from == rank_) send(to, message);
          if (to == rank_) expected[from].push_back(message);
        }
      }
    }
    std::vector<int> order;  // of senders, each as often as it has sent
    for (int from = 0; from < size_; ++from) order.insert(order.end(), expected[from].size(), from);
    std::shuffle(order.begin(), order.end(), own_);
    for (const int from : order) {
      std::vector<Message>& left = expected[from];
      const int64_t tag = left[pick(own_, static_cast<int>(left.size()))].tag;
      const auto first = std::find_if(left.begin(), left.end(), [&](const Message& m) { return m.tag == tag; });
      receive(from, *first);
      left.erase(first);
    }
  }

  void send(int to, const Message& message) {
    dawdle();
    std::vector<std::vector<char>> data;
    std::vector<Enclosure> tensors;
    for (const int64_t& bytes : message.sizes) {
      data.emplace_back(bytes + 1);
      for (int64_t i = 0; i < bytes; ++i) data.back()[i] = message.byte(i);
      tensors.push_back({data.back().data(), bytes, kUInt8, 1, &bytes});
    }
    mailbox_.send(to, message.tag, message.number, std::to_string(message.number), tensors);
  }

  void receive(int from, const Message& message) {
    dawdle();
    if (pick(own_, 3) == 0) mailbox_.is_ready(from, message.tag);
    std::optional<Mail> mail;
    if (pick(own_, 2) == 0) mail = mailbox_.receive_now(from, message.tag);
    if (!mail) mail = mailbox_.receive(from, message.tag, 20.0, nullptr);
    EXPECT(mail->kind == message.number, "message ", mail->kind, " instead of ", message.number, " from ", from);
    EXPECT(mail->note == std::to_string(message.number), "note ", mail->note);
    EXPECT(mail->tensors.size() == message.sizes.size(), mail->tensors.size(), " tensors");
    for (size_t t = 0; t < message.sizes.size(); ++t) {
      std::unique_ptr<Loan>& loan = mail->tensors[t];
      EXPECT(loan->dtype() == kUInt8 && loan->sizes() == std::vector<int64_t>{message.sizes[t]}, "another tensor");
      char* const data = static_cast<char*>(loan->address());
      for (int64_t i = 0; i < message.sizes[t]; ++i) EXPECT(data[i] == message.byte(i), "byte ", i, " is ", data[i]);
      if (message.sizes[t] > 0) data[0] = 0;
      if (pick(own_, 4) != 0) holder_->hold(std::move(loan), message);
    }
  }

  // Rank 0 gives up while all others wait for it.
  void failure() {
    if (rank_ == 0) {
      usleep(20'000);
      mailbox_.send(1, 1, 0, "", {});
      mailbox_.abort("for a reason");
      return;
    }
    if (rank_ == 1) EXPECT(mailbox_.receive(0, 1, 20.0, nullptr).note.empty(), "sent before");
    try {
      mailbox_.receive(rank_ == 1 ? 0 : 1, 0, 20.0, nullptr);
      EXPECT(false, "a rank that gave up went unnoticed");
    } catch (const CommFailure& failure) {
      EXPECT(failure.status() == CommStatus::kPeerFailed && failure.what() == std::string("for a reason"),
             failure.what());
      EXPECT(Mailbox::failed_rank() == 0, "rank ", Mailbox::failed_rank());
    }
  }

  Meeting& meeting_;
  const int rank_, size_;
  std::minstd_rand common_, own_;
  Mailbox mailbox_;
  Holder* holder_ = nullptr;
  int64_t number_ = 0;
};

}  // namespace
}  // namespace fastpar

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 60;
  const unsigned seed = count > 2 ? static_cast<unsigned>(std::atoi(arguments[2])) : 1;
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
