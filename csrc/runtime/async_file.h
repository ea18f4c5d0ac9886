// Reads and writes of a file that run while the caller computes.
//
// A transfer (one tensor, say) is cut into blocks. Lanes, which are threads, take blocks and move them: four lanes with
// an io_uring each, which keep `depth` blocks in flight together, or `depth` lanes that call pread and pwrite. With
// O_DIRECT the disk reads and writes the caller's memory itself where that is aligned, and a block is copied through a
// buffer of the lane where it is not. Checksums of blocks are taken and verified on the way, in the pass that copies
// where there is one; so that this takes place while the disk works there is more than one lane with a ring.
//
// Transfers are served first come, first served, reads and writes in turns, so that neither waits behind all of the
// other. A transfer may be ordered after another one (`after`).
//
// Nothing is lost: every error becomes the failure of its transfer, the first by time. Blocks of a failed transfer that
// have not begun are dropped.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace fastpar {

class IoRing;

constexpr int64_t kFileAlignment = 4096;              // of addresses, offsets and sizes under O_DIRECT
constexpr int64_t kMaxBlockBytes = int64_t{1} << 30;  // an io_uring takes 32 bits of them, a lane's buffer has one
constexpr int kMaxDepth = 4096;

struct FileOptions {
  int descriptor;  // stays the caller's
  bool direct;     // whether it was opened with O_DIRECT
  bool ring;
  int depth;            // blocks in flight, 1 to kMaxDepth
  int64_t block_bytes;  // a multiple of kFileAlignment, at most kMaxBlockBytes
};

// Codes besides errno's.
enum FileCode : int64_t { kFileOk = 0, kFileEnded = -1, kFileCorrupt = -2 };

struct FileFailure {
  int64_t code = kFileOk;
  int64_t offset = 0;  // in the file, where the block begins
  int64_t bytes = 0;
  bool is_write = false;
};

struct Transfer {
  bool is_write;
  int64_t offset;  // a multiple of kFileAlignment; up to the next multiple after its end the file is the transfer's
  char* address;
  int64_t bytes;
  uint32_t* checksums;  // one per block, written by writes and verified by reads; null: none
  int64_t num_checksums;
  uint64_t after;  // ticket of the transfer to start after, or 0. Where that is a write that fails, a read fails too.
};

class AsyncFile {
 public:
  // Throws std::system_error where io_uring is asked for and refused, where the system has no more threads, and
  // (EINVAL) where the options are none.
  explicit AsyncFile(const FileOptions& options);
  // Waits for every transfer.
  ~AsyncFile();
  AsyncFile(const AsyncFile&) = delete;
  AsyncFile& operator=(const AsyncFile&) = delete;

  // The ticket. The memory must stay until the transfer is done. A transfer whose numbers do not fit together (offset,
  // bytes, or the number of its checksums) fails with EINVAL, and nothing of it is touched.
  uint64_t submit(const Transfer& transfer);

  // Whether it is done, after at most `seconds`. Then `failure` is set, and the ticket must not be used again but as
  // an `after`; it is unknown then, which is EINVAL.
  bool wait(uint64_t ticket, double seconds, FileFailure* failure);

 private:
  struct Request;
  struct Block;
  struct Buffer;
  class RingLane;

  // The next block to move. False: there is none, or (`waits`) there will never be one.
  bool take(bool waits, Block* block);
  void finish(const Block& block, int64_t code);

  bool is_sound(const Transfer& transfer) const;
  int64_t num_blocks(int64_t bytes) const;
  void start();
  void stop();

  // With the mutex held.
  void release(const std::shared_ptr<Request>& request);
  void complete(const std::shared_ptr<Request>& request);

  // What the system is asked to move for a block: its memory, or a buffer where O_DIRECT cannot take that.
  struct Move {
    char* address;
    int64_t bytes;
  };
  Move begin(const Block& block, Buffer& buffer) const;
  int64_t end(const Block& block, const Move& move) const;

  void run_thread_lane();
  void run_ring_lane(IoRing& ring, int depth);

  const FileOptions options_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<std::shared_ptr<Request>> ready_[2];  // reads, writes
  bool write_next_ = false;
  bool closing_ = false;
  uint64_t last_ticket_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Request>> requests_;
  std::vector<std::unique_ptr<IoRing>> rings_;
  std::vector<std::thread> lanes_;
};

}  // namespace fastpar
