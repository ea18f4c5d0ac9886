// Transfers of a file under ThreadSanitizer: several threads write and read tensors of their own.
//
//   files [rounds] [seed]          0: all well; ThreadSanitizer prints what is not, and makes the exit status 66
//
// csrc/runtime is compiled as it is. Every thread has a few tensors in the file. It writes one, with bytes that say
// whose they are and how old, and orders a read, or another write, after that without waiting; and looks at every byte
// that it reads. Each backend has its turn: a line for it, or the reason why the system refuses it.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/async_file.h"

namespace fastpar {
namespace {

constexpr int64_t kBlock = 2 * kFileAlignment, kRoom = 8 * kBlock;
constexpr int kThreads = 3, kTensors = 4, kBuffers = 3;
constexpr double kSeconds = 20;

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::_Exit(1);  // not exit: several threads may fail, and others still use what it would destroy
}

void wait(AsyncFile& file, uint64_t ticket) {
  FileFailure failure;
  if (!file.wait(ticket, kSeconds, &failure)) fail("a transfer has not ended");
  if (failure.code != kFileOk) fail("a transfer failed with code " + std::to_string(failure.code));
}

int64_t blocks(int64_t bytes) { return (bytes + kBlock - 1) / kBlock; }

char byte(uint64_t age, int64_t i) { return static_cast<char>(age * 31 + static_cast<uint64_t>(i)); }

class User {
 public:
  User(AsyncFile& file, int thread, unsigned seed)
      : file_(file), thread_(thread), random_(seed + static_cast<unsigned>(thread)) {
    for (auto& buffer : written_) buffer.resize(kRoom);
    read_.resize(kRoom);
    checksums_.resize(kRoom / kBlock);
  }

  // Writes a tensor once or several times, each ordered after the one before, and reads it after the last.
  void round() {
    const int tensor = static_cast<int>(random_() % kTensors);
    const int64_t bytes = static_cast<int64_t>(random_() % (kRoom + 1));
    const int64_t offset = (thread_ * kTensors + tensor) * kRoom;
    const int writes = 1 + static_cast<int>(random_() % kBuffers);
    std::vector<uint64_t> tickets;
    uint64_t after = 0;
    for (int i = 0; i < writes; ++i) {
      std::vector<char>& buffer = written_[i];
      ++age_;
      for (int64_t at = 0; at < bytes; ++at) buffer[at] = byte(age_, at);
      after = file_.submit({true, offset, buffer.data(), bytes, checksums_.data(), blocks(bytes), after});
      tickets.push_back(after);
    }
    tickets.push_back(file_.submit({false, offset, read_.data(), bytes, checksums_.data(), blocks(bytes), after}));
    if (random_() % 2 == 0) std::swap(tickets.front(), tickets.back());  // waits need no order
    for (const uint64_t ticket : tickets) wait(file_, ticket);
    for (int64_t at = 0; at < bytes; ++at) {
      if (read_[at] != byte(age_, at)) fail("byte " + std::to_string(at) + " is not the one that was written last");
    }
  }

 private:
  AsyncFile& file_;
  const int64_t thread_;
  std::mt19937 random_;
  uint64_t age_ = 0;
  std::vector<char> written_[kBuffers], read_;
  std::vector<uint32_t> checksums_;
};

void run(bool ring, int rounds, unsigned seed) {
  const char* name = ring ? "io_uring" : "threads";
  const int descriptor = open("/tmp", O_TMPFILE | O_RDWR, 0600);
  if (descriptor < 0 || ftruncate(descriptor, kThreads * kTensors * kRoom) != 0) fail("no file");
  try {
    AsyncFile file({descriptor, false, ring, 4, kBlock});
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        User user(file, thread, seed);
        for (int round = 0; round < rounds; ++round) user.round();
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::printf("%s: %d rounds\n", name, rounds);
  } catch (const std::system_error& error) {
    std::printf("%s: refused, %s\n", name, error.what());
  }
  close(descriptor);
}

}  // namespace
}  // namespace fastpar

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  for (const bool ring : {false, true}) fastpar::run(ring, rounds, seed);
  return 0;
}
