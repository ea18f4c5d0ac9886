#include "runtime/async_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>

#include "runtime/checksum.h"
#include "runtime/io_ring.h"

namespace fastpar {
namespace {

constexpr int kRingLanes = 4;  // two were slower than threads where other programs had the processors, four are not

int64_t round_up(int64_t bytes) { return (bytes + kFileAlignment - 1) / kFileAlignment * kFileAlignment; }

}  // namespace

struct AsyncFile::Request {
  Transfer transfer;
  uint64_t ticket;
  int64_t blocks = 0;  // in all
  int64_t taken = 0, moved = 0;
  bool is_done = false;
  FileFailure failure;
  std::vector<std::shared_ptr<Request>> followers;
};

struct AsyncFile::Block {
  std::shared_ptr<Request> request;
  int64_t index = 0;
  int64_t offset = 0;  // in the file
  int64_t bytes = 0;
  char* address = nullptr;
  bool is_dropped = false;  // its transfer has failed already

  bool is_write() const { return request->transfer.is_write; }
  uint32_t* checksum() const {
    return request->transfer.checksums == nullptr ? nullptr : request->transfer.checksums + index;
  }
};

// Aligned memory of one block, allocated when it is first needed.
struct AsyncFile::Buffer {
  char* address = nullptr;

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(address); }

  char* get(int64_t bytes) {
    if (address == nullptr) {
      address = static_cast<char*>(std::aligned_alloc(kFileAlignment, static_cast<size_t>(bytes)));
      if (address == nullptr) throw std::bad_alloc();
    }
    return address;
  }
};

AsyncFile::AsyncFile(const FileOptions& options) : options_(options) {
  if (options_.block_bytes <= 0 || options_.block_bytes > kMaxBlockBytes ||
      options_.block_bytes % kFileAlignment != 0 || options_.depth < 1 || options_.depth > kMaxDepth) {
    throw std::system_error(EINVAL, std::generic_category(), "block_bytes or depth");
  }
  try {
    start();
  } catch (...) {  // a thread that is neither joined nor detached ends the process
    stop();
    throw;
  }
}

void AsyncFile::start() {
  if (options_.ring) {
    std::vector<int> depths;
    for (int left = options_.depth, lane = std::min(kRingLanes, options_.depth); lane > 0; --lane) {
      const int depth = left / lane;
      left -= depth;
      depths.push_back(depth);
      rings_.push_back(IoRing::create(static_cast<unsigned>(depth)));
    }
    for (size_t lane = 0; lane < rings_.size(); ++lane) {
      lanes_.emplace_back([this, lane, depth = depths[lane]] { run_ring_lane(*rings_[lane], depth); });
    }
    return;
  }
  for (int lane = 0; lane < options_.depth; ++lane) lanes_.emplace_back([this] { run_thread_lane(); });
}

AsyncFile::~AsyncFile() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] {
      return std::all_of(requests_.begin(), requests_.end(), [](const auto& entry) { return entry.second->is_done; });
    });
  }
  stop();
}

void AsyncFile::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  work_.notify_all();
  for (std::thread& lane : lanes_) lane.join();
}

bool AsyncFile::is_sound(const Transfer& transfer) const {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max() - kMaxBlockBytes;  // so that no sum here overflows
  if (transfer.bytes < 0 || transfer.offset < 0 || transfer.offset % kFileAlignment != 0) return false;
  if (transfer.bytes > kMax - transfer.offset) return false;
  if (transfer.address == nullptr && transfer.bytes > 0) return false;
  return transfer.checksums == nullptr || transfer.num_checksums == num_blocks(transfer.bytes);
}

int64_t AsyncFile::num_blocks(int64_t bytes) const { return (bytes + options_.block_bytes - 1) / options_.block_bytes; }

uint64_t AsyncFile::submit(const Transfer& transfer) {
  auto request = std::make_shared<Request>();
  request->transfer = transfer;
  if (is_sound(transfer)) {
    request->blocks = num_blocks(transfer.bytes);
  } else {
    request->failure = {EINVAL, transfer.offset, transfer.bytes, transfer.is_write};
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  request->ticket = ++last_ticket_;
  requests_[request->ticket] = request;
  const auto predecessor = requests_.find(transfer.after);
  if (predecessor != requests_.end() && !predecessor->second->is_done) {
    predecessor->second->followers.push_back(request);
  } else {
    if (predecessor != requests_.end() && !transfer.is_write && predecessor->second->failure.is_write) {
      request->failure = predecessor->second->failure;
    }
    release(request);
  }
  return request->ticket;
}

bool AsyncFile::wait(uint64_t ticket, double seconds, FileFailure* failure) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = requests_.find(ticket);
  if (found == requests_.end()) {
    *failure = {EINVAL, 0, 0, false};
    return true;
  }
  const std::shared_ptr<Request> request = found->second;
  if (!done_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return request->is_done; })) return false;
  *failure = request->failure;
  requests_.erase(ticket);
  return true;
}

void AsyncFile::release(const std::shared_ptr<Request>& request) {
  if (request->blocks == 0 || request->failure.code != kFileOk) {
    complete(request);
    return;
  }
  ready_[request->transfer.is_write].push_back(request);
  if (request->blocks == 1) {
    work_.notify_one();
  } else {
    work_.notify_all();
  }
}

void AsyncFile::complete(const std::shared_ptr<Request>& request) {
  request->is_done = true;
  for (const std::shared_ptr<Request>& follower : std::exchange(request->followers, {})) {
    if (request->failure.is_write && !follower->transfer.is_write) follower->failure = request->failure;
    release(follower);
  }
  done_.notify_all();
}

bool AsyncFile::take(bool waits, Block* block) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (waits) work_.wait(lock, [this] { return closing_ || !ready_[0].empty() || !ready_[1].empty(); });
  if (ready_[0].empty() && ready_[1].empty()) return false;
  auto& queue = ready_[write_next_].empty() ? ready_[!write_next_] : ready_[write_next_];
  write_next_ = !write_next_;
  const std::shared_ptr<Request> request = queue.front();
  const Transfer& transfer = request->transfer;
  block->request = request;
  block->index = request->taken++;
  const int64_t start = block->index * options_.block_bytes;
  block->offset = transfer.offset + start;
  block->bytes = std::min(options_.block_bytes, transfer.bytes - start);
  block->address = transfer.address + start;
  block->is_dropped = request->failure.code != kFileOk;
  if (request->taken == request->blocks) queue.pop_front();
  return true;
}

void AsyncFile::finish(const Block& block, int64_t code) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = *block.request;
  if (code != kFileOk && request.failure.code == kFileOk) {
    request.failure = {code, block.offset, block.bytes, request.transfer.is_write};
  }
  if (++request.moved == request.blocks) complete(block.request);
}

AsyncFile::Move AsyncFile::begin(const Block& block, Buffer& buffer) const {
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(block.address) % kFileAlignment == 0 && block.bytes % kFileAlignment == 0;
  const bool is_copied = options_.direct && !is_aligned;
  const Move move =
      is_copied ? Move{buffer.get(options_.block_bytes), round_up(block.bytes)} : Move{block.address, block.bytes};
  if (!block.is_write()) return move;
  const size_t bytes = static_cast<size_t>(block.bytes);
  if (is_copied) {
    if (block.checksum() != nullptr) {
      *block.checksum() = copy_with_checksum(move.address, block.address, bytes);
    } else {
      memcpy(move.address, block.address, bytes);
    }
    memset(move.address + block.bytes, 0, static_cast<size_t>(move.bytes - block.bytes));
  } else if (block.checksum() != nullptr) {
    *block.checksum() = checksum(block.address, bytes);
  }
  return move;
}

int64_t AsyncFile::end(const Block& block, const Move& move) const {
  if (block.is_write()) {
    // Errors of a full page cache would come late otherwise, and all at once.
    if (!options_.direct) sync_file_range(options_.descriptor, block.offset, block.bytes, SYNC_FILE_RANGE_WRITE);
    return kFileOk;
  }
  // The page cache is not to hold a second copy of what has been read; pages that are not written yet stay.
  if (!options_.direct) posix_fadvise(options_.descriptor, block.offset, block.bytes, POSIX_FADV_DONTNEED);
  const size_t bytes = static_cast<size_t>(block.bytes);
  const bool is_copied = move.address != block.address;
  if (block.checksum() == nullptr) {
    if (is_copied) memcpy(block.address, move.address, bytes);
    return kFileOk;
  }
  const uint32_t found =
      is_copied ? copy_with_checksum(block.address, move.address, bytes) : checksum(block.address, bytes);
  return found == *block.checksum() ? kFileOk : kFileCorrupt;
}

namespace {

// How far a block has come. A call may move less than it was asked to, or be interrupted.
struct Progress {
  int64_t wanted;  // bytes that have to be moved; what is asked for may be more, up to the alignment
  int64_t moved = 0;
  int64_t code = kFileOk;

  // Takes the result of a call (bytes or a negative errno); true: there is nothing more to do.
  bool advance(int64_t result, bool direct) {
    if (result == -EINTR || result == -EAGAIN) return false;
    if (result < 0) {
      code = -result;
      return true;
    }
    if (moved + result >= wanted) return true;
    const int64_t step = direct ? result / kFileAlignment * kFileAlignment : result;
    if (step == 0) {
      code = kFileEnded;
      return true;
    }
    moved += step;
    return false;
  }
};

}  // namespace

void AsyncFile::run_thread_lane() {
  Buffer buffer;
  Block block;
  while (take(true, &block)) {
    if (block.is_dropped) {
      finish(block, kFileOk);
      continue;
    }
    int64_t code = ENOMEM;
    try {
      const Move move = begin(block, buffer);
      Progress progress{block.is_write() ? move.bytes : block.bytes};
      int64_t result = 0;
      do {
        char* address = move.address + progress.moved;
        const size_t bytes = static_cast<size_t>(move.bytes - progress.moved);
        const off_t offset = block.offset + progress.moved;
        result = block.is_write() ? pwrite(options_.descriptor, address, bytes, offset)
                                  : pread(options_.descriptor, address, bytes, offset);
        if (result < 0) result = -errno;
      } while (!progress.advance(result, options_.direct));
      code = progress.code == kFileOk ? end(block, move) : progress.code;
    } catch (const std::bad_alloc&) {
    }
    finish(block, code);
  }
}

// Keeps up to `depth` blocks in flight; its thread sleeps in the kernel until one of them has ended, and looks for new
// ones then.
class AsyncFile::RingLane {
 public:
  RingLane(AsyncFile& file, IoRing& ring, int depth) : file_(file), ring_(ring), slots_(static_cast<size_t>(depth)) {
    for (size_t index = 0; index < slots_.size(); ++index) idle_.push_back(index);
  }

  void run() {
    while (fill()) {
      if (is_idle()) continue;  // what was taken has failed
      try {
        ring_.submit(1);
      } catch (const std::system_error& error) {
        fail_everything(error.code().value());
        continue;
      }
      reap();
    }
  }

 private:
  struct Slot {
    Buffer buffer;
    Block block;
    Move move{};
    Progress progress{};
    bool is_busy = false;
  };

  bool is_idle() const { return idle_.size() == slots_.size(); }

  // Begins blocks while there are some and room for them. False: there will never be one again.
  bool fill() {
    bool waits = is_idle();
    while (!idle_.empty()) {
      Block block;
      if (!file_.take(waits, &block)) return !waits;
      waits = false;
      if (block.is_dropped || broken_ != kFileOk) {
        file_.finish(block, broken_);
      } else {
        begin(block);
      }
    }
    return true;
  }

  void begin(const Block& block) {
    const size_t index = idle_.back();
    Slot& slot = slots_[index];
    try {
      slot.move = file_.begin(block, slot.buffer);
    } catch (const std::bad_alloc&) {
      file_.finish(block, ENOMEM);
      return;
    }
    slot.progress = {block.is_write() ? slot.move.bytes : block.bytes};
    slot.block = block;
    slot.is_busy = true;
    idle_.pop_back();
    push(index);
  }

  void push(size_t index) {
    const Slot& slot = slots_[index];
    const int64_t moved = slot.progress.moved;
    ring_.push({slot.block.is_write(), file_.options_.descriptor, slot.move.address + moved,
                static_cast<uint32_t>(slot.move.bytes - moved), slot.block.offset + moved, index});
  }

  void reap() {
    uint64_t index = 0;
    int32_t result = 0;
    while (ring_.pop(&index, &result)) {
      Slot& slot = slots_[index];
      if (!slot.progress.advance(result, file_.options_.direct)) {
        push(index);
      } else {
        end(index, slot.progress.code == kFileOk ? file_.end(slot.block, slot.move) : slot.progress.code);
      }
    }
  }

  void end(size_t index, int64_t code) {
    Slot& slot = slots_[index];
    slot.is_busy = false;
    idle_.push_back(index);
    file_.finish(std::exchange(slot.block, {}), code);
  }

  // The ring itself does not work any more: the failure of all that is in it, and of all that comes later.
  void fail_everything(int64_t code) {
    broken_ = code;
    for (size_t index = 0; index < slots_.size(); ++index) {
      if (slots_[index].is_busy) end(index, code);
    }
  }

  AsyncFile& file_;
  IoRing& ring_;
  std::vector<Slot> slots_;
  std::vector<size_t> idle_;
  int64_t broken_ = kFileOk;
};

void AsyncFile::run_ring_lane(IoRing& ring, int depth) { RingLane(*this, ring, depth).run(); }

}  // namespace fastpar
