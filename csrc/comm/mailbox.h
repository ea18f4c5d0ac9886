// Messages between two ranks of a host, each with a tag, a note and tensors of any shape, which never wait for the
// receiver; and which are read where the sender has put them.
//
// Note: protocol. Every rank owns one segment, which all others map: a control block with a lane for every receiver,
// and an arena. What a rank writes, and who else touches it:
//
//   letter   a block of the arena that says what a message is: tag, note, and for every tensor its dtype, sizes and
//            block. Letters to one receiver are a linked list. The sender writes letter k (its number in the lane,
//            1, 2, 3, ...) and the link to it, and then stores k in lane.sent: release. The receiver loads lane.sent:
//            acquire; whatever letters up to that number say, their links and the data are there to read. It reads the
//            link to letter k + 1 only where sent > k.
//   block    belongs to the sender until its letter is sent, then to the receiver. The receiver gives it back, from any
//            thread and as often as it likes, by pushing it on the list `returned` of its owner's control block: a
//            compare-and-swap on the head: release. The owner takes that whole list at once, by an exchange with the
//            empty one: acquire; so nothing is popped off a list that others push on, which is what makes such lists
//            hard. What the receiver read or wrote in the block is over before the owner writes it again.
//            A tensor's block goes back when the last view of it dies. A letter goes back when the receiver has gone on
//            to the next one, whose link was in it; by then the sender writes into that one's. So the last letter of a
//            lane always stays, and the sender never writes a letter that the receiver may have given back.
//
// Nobody but the owner allocates, and what it knows of its blocks is its own memory. Counters only grow. Offsets and
// lengths that another rank has written are checked before they are used.
//
// Note: arena. It is as large as the machine's memory: address space, of which the system gives out what is touched. So
// sending waits for nobody, no peer ever has to open more memory (its owner may be gone by then), and what is in use is
// what is outstanding. Freed blocks are used again before new memory is touched: those of the same size first, the last
// freed first; then the smallest free range that is large enough, after all neighbours have been joined. Memory that
// was touched once is kept until the segment goes.
//
// Note: ends. A segment lives as long as somebody maps it, and a tensor over it holds the mapping; so messages and
// tensors outlive their sender. A rank says in its control block that it is closed, or has failed and why; that a
// process has ended without a word its pidfd says. A rank that waits looks at all of that every few milliseconds, and
// takes a message that is there before it believes that none will come. A process forked from a rank has the mappings,
// and must not give back blocks that its parent uses: it is told by a count of forks.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/failure.h"
#include "comm/waiting.h"
#include "runtime/shared_segment.h"

namespace fastpar {

struct MailboxOptions {
  int rank;
  int size;
  int ranks_on_host;   // of the whole job: more than there are processors, and spinning is pointless
  size_t arena_bytes;  // address space, equal on all ranks
};

struct Lane;
struct MailControl;

// The free and used blocks of the own arena. Offsets count from the beginning of the segment. Not thread-safe.
class Arena {
 public:
  Arena(char* base, uint64_t begin, uint64_t end) : base_(base), begin_(begin), top_(begin), end_(end) {}

  // A block of at least that many bytes from its address on; 0: there is no room. `may_grow`: touch new memory.
  uint64_t allocate(uint64_t bytes, bool may_grow);
  // Whether that was a block: if not, nothing is done.
  bool free(uint64_t block);

  uint64_t used_bytes() const { return used_; }
  uint64_t touched_bytes() const { return touched_; }

 private:
  uint64_t take_range(uint64_t bytes);
  void add_range(uint64_t begin, uint64_t bytes);
  void join_free_blocks();

  char* base_;
  uint64_t begin_, top_, end_;
  uint64_t used_ = 0, touched_ = 0;
  std::unordered_map<uint64_t, uint64_t> blocks_;                    // in use: their bytes with the header
  std::unordered_map<uint64_t, std::vector<uint64_t>> free_blocks_;  // by size
  std::map<uint64_t, uint64_t> ranges_;                              // free ranges: begin -> bytes, no two adjacent
  std::set<std::pair<uint64_t, uint64_t>> ranges_by_size_;           // (bytes, begin)
};

// A tensor of a message, in the memory of its sender. Gives the block back when it goes, on any thread.
class Loan {
 public:
  Loan(std::shared_ptr<const SharedSegment> segment, uint64_t block, uint8_t dtype, const int64_t* sizes, int dims);
  ~Loan();
  Loan(const Loan&) = delete;

  void* address() const;
  uint8_t dtype() const { return dtype_; }
  std::vector<int64_t>& sizes() { return sizes_; }

 private:
  const std::shared_ptr<const SharedSegment> segment_;
  const uint64_t block_;  // 0: no elements, no memory
  const uint32_t generation_;
  const uint8_t dtype_;
  std::vector<int64_t> sizes_;
};

// A message that was received.
struct Mail {
  int64_t kind;
  std::string note;
  std::vector<std::unique_ptr<Loan>> tensors;
};

// A tensor to be sent: contiguous.
struct Enclosure {
  const void* address;
  int64_t bytes;
  uint8_t dtype;  // torch's number
  int dims;
  const int64_t* sizes;
};

struct MailboxStats {
  uint64_t used_bytes;     // of messages and tensors that have not been given back
  uint64_t touched_bytes;  // the most there ever was of that, and what lay between
};

// The calls are thread-safe; messages that two threads send at once are in either order.
class Mailbox {
 public:
  explicit Mailbox(const MailboxOptions& options);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }

  // Descriptor of the own segment, and what peers find in it if they have opened the right one.
  int descriptor() const { return own_->descriptor(); }
  uint64_t nonce() const;
  // Maps the segments of the others (arrays by rank). Throws where that is not possible.
  void connect(const int64_t* pids, const int64_t* descriptors, const uint64_t* nonces);
  // All ranks are connected: from here on nobody else can open the segment.
  void seal() { own_->close_descriptor(); }

  // Copies the tensors and returns. Throws CommFailure where the peer is known to be gone.
  void send(int peer, int64_t tag, int64_t kind, const std::string& note, const std::vector<Enclosure>& tensors);
  // The first message of that peer with that tag that was not received yet. Throws CommFailure.
  Mail receive(int peer, int64_t tag, double timeout_seconds, InterruptCheck check);
  // The same without waiting.
  std::optional<Mail> receive_now(int peer, int64_t tag);
  // Whether receive() would return at once.
  bool is_ready(int peer, int64_t tag);

  // Tells every other rank, whose waits fail with it from then on.
  void abort(const std::string& reason);
  // No more messages either way; waits of other threads of this rank end. Messages that were sent can be received.
  void close();
  // Of the last kPeerFailed of this thread.
  static int failed_rank();
  MailboxStats stats();

 private:
  struct Inbox {  // what has come from one peer
    std::mutex mutex;
    uint64_t taken = 0;                 // letters looked at
    uint64_t letter = 0;                // the last of them
    std::multimap<int64_t, Mail> kept;  // by tag, in order: they were not asked for yet
  };
  struct Outbox {  // with mutex_ held
    uint64_t sent = 0;
    uint64_t letter = 0;  // the last one
  };

  MailControl& control(int rank) const;
  Lane& lane(int from, int to) const;
  char* base(int rank) const { return segments_[static_cast<size_t>(rank)]->address(); }
  uint64_t allocate(uint64_t bytes, int peer);
  void collect_returned();
  void append(int peer, uint64_t letter);
  std::optional<Mail> take(Inbox& inbox, int peer, int64_t tag);
  Mail open(int peer, uint64_t letter, uint64_t number, int64_t& tag) const;
  void wait_for_more(int peer, int64_t tag, uint64_t seen, double& started, double timeout_seconds,
                     InterruptCheck check);
  void look_for_trouble(int peer, int64_t tag, uint64_t seen, double started, double timeout_seconds,
                        InterruptCheck check) const;
  void check_usable() const;
  void check_peer(int peer) const;
  bool has_vanished(int other) const;
  std::string reason_of(int other) const;
  [[noreturn]] void fail_lost(int peer, const char* how) const;
  std::string other_tags(int peer) const;

  const MailboxOptions options_;
  const uint32_t generation_;
  const Patience patience_;
  size_t lanes_offset_, arena_offset_;
  std::shared_ptr<SharedSegment> own_;
  std::vector<std::shared_ptr<SharedSegment>> segments_;  // by rank
  std::vector<ProcessWatch> watches_;
  std::vector<int64_t> pids_;
  std::mutex mutex_;  // of the arena and the outboxes
  std::optional<Arena> arena_;
  std::vector<Outbox> outboxes_;
  mutable std::vector<Inbox> inboxes_;
  std::atomic<bool> closed_{false};
};

}  // namespace fastpar
