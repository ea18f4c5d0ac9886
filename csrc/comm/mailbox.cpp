#include "comm/mailbox.h"

#include <pthread.h>
#include <sched.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "comm/dlpack.h"
#include "common/checks.h"

namespace fastpar {

enum class MailState : uint32_t { kOpen, kClosed, kFailed };

// The messages from the owner of the segment to one receiver.
struct Lane {
  alignas(64) std::atomic<uint64_t> sent;
  uint64_t first_letter;
  alignas(64) std::atomic<uint32_t> sleepers;  // whether the receiver waits for `sent` in a futex: it writes this
};

struct MailControl {
  uint64_t nonce;
  alignas(64) std::atomic<uint64_t> returned;  // blocks that peers have given back: the first one, linked; they write
  alignas(64) std::atomic<MailState> state;
  double failed_at;
  char reason[1024];
};

namespace {

constexpr uint64_t kLine = 64;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2 << 20;

uint64_t rounded_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

constexpr uint64_t kMaxDims = 64;

// Before every block.
struct alignas(kLine) BlockHeader {
  uint64_t next_returned;  // while it is on that list
};

// The beginning of a letter. Behind it: for every tensor `block, dtype | dims << 8, sizes...`, and then the note.
struct LetterHead {
  uint64_t number;  // in its lane, from 1
  int64_t tag;
  int64_t kind;
  uint64_t num_tensors, num_words, note_bytes;
};

struct Letter : LetterHead {
  uint64_t next;  // written when the next one is sent, while this one is read

  int64_t* words() { return reinterpret_cast<int64_t*>(this + 1); }
  char* note() { return reinterpret_cast<char*>(words() + num_words); }
};

template <typename T>
T& at(char* base, uint64_t offset) {
  return *reinterpret_cast<T*>(base + offset);
}

BlockHeader& header_of(char* base, uint64_t block) { return at<BlockHeader>(base, block - sizeof(BlockHeader)); }

// How often this process is a fork of another one.
std::atomic<uint32_t>& forks() {
  static std::atomic<uint32_t> count{0};
  return count;
}

uint32_t fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks(); });
  FASTPAR_CHECK(registered == 0, "cannot watch for forks");
  return forks().load(std::memory_order_relaxed);
}

void give_back(char* base, uint64_t block) {
  std::atomic<uint64_t>& returned = at<MailControl>(base, 0).returned;
  uint64_t first = returned.load(std::memory_order_relaxed);
  do {
    header_of(base, block).next_returned = first;
  } while (!returned.compare_exchange_weak(first, block, std::memory_order_release, std::memory_order_relaxed));
}

int& failed_rank_here() {
  thread_local int rank = -1;
  return rank;
}

}  // namespace

// ---- arena ----------------------------------------------------------------------------------------------------------

uint64_t Arena::allocate(uint64_t bytes, bool may_grow) {
  bytes = rounded_up(sizeof(BlockHeader) + bytes, kLine);
  uint64_t begin = 0;
  const auto same_size = free_blocks_.find(bytes);
  if (same_size != free_blocks_.end() && !same_size->second.empty()) {
    begin = same_size->second.back() - sizeof(BlockHeader);
    same_size->second.pop_back();
  }
  if (begin == 0) begin = take_range(bytes);
  if (begin == 0 && !free_blocks_.empty()) {
    join_free_blocks();
    begin = take_range(bytes);
  }
  if (begin == 0 && may_grow && bytes <= end_ - top_) {
    begin = top_;
    top_ += bytes;
    touched_ = std::max(touched_, top_ - begin_);
  }
  if (begin == 0) return 0;
  used_ += bytes;
  blocks_.emplace(begin + sizeof(BlockHeader), bytes);
  return begin + sizeof(BlockHeader);
}

bool Arena::free(uint64_t block) {
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) return false;
  used_ -= found->second;
  free_blocks_[found->second].push_back(block);
  blocks_.erase(found);
  return true;
}

uint64_t Arena::take_range(uint64_t bytes) {
  const auto found = ranges_by_size_.lower_bound({bytes, 0});
  if (found == ranges_by_size_.end()) return 0;
  const auto [size, begin] = *found;
  ranges_by_size_.erase(found);
  ranges_.erase(begin);
  if (size > bytes) {
    ranges_.emplace(begin + bytes, size - bytes);
    ranges_by_size_.emplace(size - bytes, begin + bytes);
  }
  return begin;
}

void Arena::add_range(uint64_t begin, uint64_t bytes) {
  auto next = ranges_.lower_bound(begin);
  if (next != ranges_.end() && next->first == begin + bytes) {
    bytes += next->second;
    ranges_by_size_.erase({next->second, next->first});
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      ranges_by_size_.erase({previous->second, previous->first});
      begin = previous->first;
      bytes += previous->second;
    }
  }
  ranges_[begin] = bytes;
  ranges_by_size_.emplace(bytes, begin);
}

void Arena::join_free_blocks() {
  for (const auto& [bytes, blocks] : free_blocks_) {
    for (const uint64_t block : blocks) add_range(block - sizeof(BlockHeader), bytes);
  }
  free_blocks_.clear();
  if (ranges_.empty()) return;
  const auto last = std::prev(ranges_.end());
  if (last->first + last->second == top_) {  // so that the next block to grow by begins here
    top_ = last->first;
    ranges_by_size_.erase({last->second, last->first});
    ranges_.erase(last);
  }
}

// ---- tensors of others ----------------------------------------------------------------------------------------------

Loan::Loan(std::shared_ptr<const SharedSegment> segment, uint64_t block, uint8_t dtype, const int64_t* sizes, int dims)
    : segment_(std::move(segment)),
      block_(block),
      generation_(fork_generation()),
      dtype_(dtype),
      sizes_(sizes, sizes + dims) {}

Loan::~Loan() {
  if (block_ != 0 && generation_ == fork_generation()) give_back(segment_->address(), block_);
}

void* Loan::address() const { return block_ == 0 ? nullptr : segment_->address() + block_; }

// ---- mailbox --------------------------------------------------------------------------------------------------------

Mailbox::Mailbox(const MailboxOptions& options)
    : options_(options),
      generation_(fork_generation()),
      patience_(Patience::of(options.ranks_on_host)),
      outboxes_(static_cast<size_t>(options.size)),
      inboxes_(static_cast<size_t>(options.size)) {
  FASTPAR_CHECK(options.size >= 1 && options.rank >= 0 && options.rank < options.size, "rank ", options.rank, " of ",
                options.size);
  lanes_offset_ = rounded_up(sizeof(MailControl), kLine);
  arena_offset_ = rounded_up(lanes_offset_ + static_cast<size_t>(options.size) * sizeof(Lane), kPage);
  const size_t bytes = rounded_up(arena_offset_ + options.arena_bytes, kHugePage);
  own_ = std::make_shared<SharedSegment>(SharedSegment::create(bytes));
  segments_.resize(static_cast<size_t>(options.size));
  segments_[static_cast<size_t>(rank())] = own_;
  new (own_->address()) MailControl();
  for (int peer = 0; peer < size(); ++peer) new (&lane(rank(), peer)) Lane();
  FASTPAR_CHECK(getrandom(&control(rank()).nonce, sizeof(uint64_t), 0) == sizeof(uint64_t), "no random numbers");
  arena_.emplace(own_->address(), arena_offset_, bytes);
}

Mailbox::~Mailbox() { close(); }

void Mailbox::connect(const int64_t* pids, const int64_t* descriptors, const uint64_t* nonces) {
  watches_.resize(segments_.size());
  pids_.assign(pids, pids + size());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const pid_t pid = static_cast<pid_t>(pids[peer]);
    const size_t i = static_cast<size_t>(peer);
    segments_[i] =
        std::make_shared<SharedSegment>(SharedSegment::open(pid, static_cast<int>(descriptors[peer]), own_->bytes()));
    FASTPAR_CHECK(control(peer).nonce == nonces[peer], "process ", pid, " is not rank ", peer,
                  " (another process namespace?)");
    watches_[i] = ProcessWatch(pid);
  }
}

uint64_t Mailbox::nonce() const { return control(rank()).nonce; }
MailControl& Mailbox::control(int rank) const { return at<MailControl>(base(rank), 0); }
Lane& Mailbox::lane(int from, int to) const {
  return at<Lane>(base(from), lanes_offset_ + static_cast<size_t>(to) * sizeof(Lane));
}

// ---- sending

void Mailbox::send(int peer, int64_t tag, int64_t kind, const std::string& note,
                   const std::vector<Enclosure>& tensors) {
  check_usable();
  check_peer(peer);
  uint64_t num_words = 0;
  for (const Enclosure& tensor : tensors) num_words += 2 + static_cast<uint64_t>(tensor.dims);
  std::vector<uint64_t> blocks(tensors.size(), 0);
  uint64_t offset = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    collect_returned();
    try {
      offset = allocate(sizeof(Letter) + num_words * sizeof(int64_t) + note.size(), peer);
      for (size_t i = 0; i < tensors.size(); ++i) {
        if (tensors[i].bytes > 0) blocks[i] = allocate(static_cast<uint64_t>(tensors[i].bytes), peer);
      }
    } catch (...) {
      for (const uint64_t block : blocks) {
        if (block != 0) arena_->free(block);
      }
      if (offset != 0) arena_->free(offset);
      throw;
    }
  }
  Letter& letter = at<Letter>(own_->address(), offset);
  letter = {{0, tag, kind, tensors.size(), num_words, note.size()}, 0};
  int64_t* word = letter.words();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Enclosure& tensor = tensors[i];
    *word++ = static_cast<int64_t>(blocks[i]);
    *word++ = tensor.dtype | tensor.dims << 8;
    word = std::copy(tensor.sizes, tensor.sizes + tensor.dims, word);
    if (tensor.bytes > 0) {
      std::memcpy(own_->address() + blocks[i], tensor.address, static_cast<size_t>(tensor.bytes));
    }
  }
  std::memcpy(letter.note(), note.data(), note.size());
  append(peer, offset);
}

// With mutex_ held.
uint64_t Mailbox::allocate(uint64_t bytes, int peer) {
  uint64_t block = arena_->allocate(bytes, false);
  if (block != 0) return block;
  // More is outstanding than ever before: look whether anybody is there to take it.
  if (watches_[static_cast<size_t>(peer)].has_ended()) fail_lost(peer, "has ended");
  block = arena_->allocate(bytes, true);
  if (block == 0) {
    throw CommFailure(CommStatus::kError,
                      concatenate("no room for a message of ", bytes, " bytes to rank ", peer, ": ",
                                  arena_->used_bytes(), " bytes of messages and received tensors ", "are outstanding"));
  }
  return block;
}

// With mutex_ held.
void Mailbox::collect_returned() {
  std::atomic<uint64_t>& returned = control(rank()).returned;
  if (returned.load(std::memory_order_relaxed) == 0) return;
  uint64_t block = returned.exchange(0, std::memory_order_acquire);
  while (block != 0) {
    // What peers have written: an offset that is not a block's, or that comes again, must lead nowhere.
    if (!arena_->free(block)) {
      throw CommFailure(CommStatus::kError,
                        concatenate("another rank has given back block ", block, " of rank ", rank(),
                                    ", which it does not have: its memory, or this rank's, is damaged"));
    }
    block = header_of(own_->address(), block).next_returned;
  }
}

void Mailbox::append(int peer, uint64_t letter) {
  Lane& out = lane(rank(), peer);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Outbox& outbox = outboxes_[static_cast<size_t>(peer)];
    uint64_t& link = outbox.letter == 0 ? out.first_letter : at<Letter>(own_->address(), outbox.letter).next;
    link = letter;
    outbox.letter = letter;
    at<Letter>(own_->address(), letter).number = outbox.sent + 1;
    // Sequentially consistent, as is the other side: either the sleeper sees the letter or we see the sleeper.
    out.sent.store(++outbox.sent, std::memory_order_seq_cst);
  }
  if (out.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(out.sent);
}

// ---- receiving

Mail Mailbox::receive(int peer, int64_t tag, double timeout_seconds, InterruptCheck check) {
  Inbox& inbox = inboxes_[static_cast<size_t>(peer)];
  double started = 0.0;
  for (;;) {
    check_usable();
    uint64_t seen = 0;
    {
      const std::lock_guard<std::mutex> lock(inbox.mutex);
      if (std::optional<Mail> mail = take(inbox, peer, tag)) return std::move(*mail);
      seen = inbox.taken;
    }
    wait_for_more(peer, tag, seen, started, timeout_seconds, check);
  }
}

std::optional<Mail> Mailbox::receive_now(int peer, int64_t tag) {
  check_usable();
  Inbox& inbox = inboxes_[static_cast<size_t>(peer)];
  const std::lock_guard<std::mutex> lock(inbox.mutex);
  return take(inbox, peer, tag);
}

bool Mailbox::is_ready(int peer, int64_t tag) {
  check_usable();
  Inbox& inbox = inboxes_[static_cast<size_t>(peer)];
  const std::lock_guard<std::mutex> lock(inbox.mutex);
  if (inbox.kept.count(tag) > 0) return true;
  std::optional<Mail> mail = take(inbox, peer, tag);
  const bool is_there = mail.has_value();
  if (is_there) inbox.kept.emplace(tag, std::move(*mail));
  return is_there;
}

// With the inbox's mutex held. Letters with other tags that come before are kept.
std::optional<Mail> Mailbox::take(Inbox& inbox, int peer, int64_t tag) {
  const auto kept = inbox.kept.lower_bound(tag);  // the first of that tag to have come
  if (kept != inbox.kept.end() && kept->first == tag) {
    Mail mail = std::move(kept->second);
    inbox.kept.erase(kept);
    return mail;
  }
  const Lane& in = lane(peer, rank());
  const uint64_t sent = in.sent.load(std::memory_order_acquire);
  while (inbox.taken < sent) {
    const uint64_t next = inbox.letter == 0 ? in.first_letter : at<Letter>(base(peer), inbox.letter).next;
    int64_t its_tag = 0;
    Mail mail = open(peer, next, inbox.taken + 1, its_tag);  // throws, and stays here, where the letter is damaged
    if (inbox.letter != 0) give_back(base(peer), inbox.letter);
    inbox.letter = next;
    ++inbox.taken;
    if (its_tag == tag) return mail;
    inbox.kept.emplace(its_tag, std::move(mail));
  }
  return std::nullopt;
}

// Note: what a peer has written is looked at once, copied, and checked before it is used. A rank that writes where it
// should not, or whose memory somebody else has written to, must not take its readers with it.
Mail Mailbox::open(int peer, uint64_t offset, uint64_t number, int64_t& tag) const {
  const uint64_t end = own_->bytes();  // of every rank's segment
  const auto require = [&](bool is_so, const char* what) {
    if (is_so) return;
    throw CommFailure(CommStatus::kError, concatenate("message ", number, " of rank ", peer, " is damaged (", what,
                                                      "): the memory of that rank was written to"));
  };
  const auto is_block = [&](uint64_t block, uint64_t bytes) {
    return block % kLine == 0 && block >= arena_offset_ + sizeof(BlockHeader) && block <= end && bytes <= end - block;
  };
  require(is_block(offset, sizeof(Letter)), "where it lies");
  const LetterHead letter = at<Letter>(base(peer), offset);
  require(letter.number == number, "its number");
  const uint64_t room = end - offset - sizeof(Letter);
  require(letter.num_words <= room / sizeof(int64_t) && letter.num_tensors <= letter.num_words / 2, "its tensors");
  require(letter.note_bytes <= room - letter.num_words * sizeof(int64_t), "the length of its note");
  const int64_t* first = at<Letter>(base(peer), offset).words();
  const std::vector<int64_t> words(first, first + letter.num_words);
  tag = letter.tag;
  Mail mail{letter.kind, std::string(reinterpret_cast<const char*>(first + letter.num_words), letter.note_bytes), {}};
  mail.tensors.reserve(letter.num_tensors);
  size_t word = 0;
  for (uint64_t i = 0; i < letter.num_tensors; ++i) {
    require(words.size() - word >= 2, "a tensor");
    const uint64_t block = static_cast<uint64_t>(words[word]), spec = static_cast<uint64_t>(words[word + 1]);
    const uint64_t dims = spec >> 8;
    const uint8_t dtype = static_cast<uint8_t>(spec & 0xff);
    word += 2;
    require(dims <= kMaxDims && dims <= words.size() - word, "the dims of a tensor");
    require(is_sendable(dtype), "the dtype of a tensor");
    uint64_t bytes = dl_type(dtype).bits / 8;
    for (uint64_t dim = 0; dim < dims; ++dim) {
      const int64_t size = words[word + dim];
      require(size >= 0, "a size of a tensor");
      if (size == 0) bytes = 0;
      require(bytes == 0 || static_cast<uint64_t>(size) <= end / bytes, "the sizes of a tensor");
      bytes *= static_cast<uint64_t>(size);
    }
    require(bytes == 0 ? block == 0 : is_block(block, bytes), "the block of a tensor");
    mail.tensors.push_back(std::make_unique<Loan>(segments_[static_cast<size_t>(peer)], block, dtype,
                                                  words.data() + word, static_cast<int>(dims)));
    word += dims;
  }
  return mail;
}

// Returns when the peer has sent more than `seen` messages. `started`: when the call first had to wait for long, or 0.
void Mailbox::wait_for_more(int peer, int64_t tag, uint64_t seen, double& started, double timeout_seconds,
                            InterruptCheck check) {
  Lane& in = lane(peer, rank());
  for (int spin = 0; spin < patience_.spins; ++spin) {
    if (in.sent.load(std::memory_order_acquire) > seen) return;
    pause();
  }
  const double yielding = now();
  if (started == 0.0) started = yielding;
  for (int i = 1; i % kYieldsPerLookAtTheClock != 0 || now() - yielding < patience_.yield_seconds; ++i) {
    if (in.sent.load(std::memory_order_acquire) > seen) return;
    sched_yield();
  }
  in.sleepers.fetch_add(1, std::memory_order_seq_cst);
  try {
    while (in.sent.load(std::memory_order_seq_cst) <= seen) {
      look_for_trouble(peer, tag, seen, started, timeout_seconds, check);
      futex_wait(in.sent, seen, kSliceNanoseconds);
    }
  } catch (...) {
    in.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    throw;
  }
  in.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// Throws if there is no point in waiting on. A message that was sent before its sender closed or ended is no trouble.
void Mailbox::look_for_trouble(int peer, int64_t tag, uint64_t seen, double started, double timeout_seconds,
                               InterruptCheck check) const {
  check_usable();
  if (check != nullptr && check()) throw CommFailure(CommStatus::kInterrupted, "interrupted");
  const auto has_come = [&] { return lane(peer, rank()).sent.load(std::memory_order_acquire) > seen; };
  int failed = -1;
  for (int other = 0; other < size(); ++other) {
    if (other == rank() || control(other).state.load(std::memory_order_acquire) != MailState::kFailed) continue;
    if (failed < 0 || control(other).failed_at < control(failed).failed_at) failed = other;
  }
  if (failed >= 0 && !has_come()) {
    failed_rank_here() = failed;
    throw CommFailure(CommStatus::kPeerFailed, reason_of(failed));
  }
  const bool is_closed = control(peer).state.load(std::memory_order_acquire) == MailState::kClosed;
  const double time = now();
  if (is_closed || time - started > kDeathCheckSeconds) {
    // First of all who has ended without a word: a peer that has closed its end may have done so for that reason.
    for (int other = 0; other < size(); ++other) {
      if (has_vanished(other) && !has_come()) fail_lost(other, "has ended");
    }
    if (is_closed && !has_come()) fail_lost(peer, "has closed its end");
  }
  late_reporter().report_if_due(time - started, [&] {
    return concatenate("rank ", rank(), " has waited ", static_cast<int64_t>(time - started),
                       " s for a message with tag ", tag, " of rank ", peer);
  });
  if (time - started > timeout_seconds && !has_come()) {
    throw CommFailure(CommStatus::kTimeout,
                      concatenate("rank ", rank(), " waited ", timeout_seconds, " s for a message with tag ", tag,
                                  " of rank ", peer, other_tags(peer)));
  }
}

std::string Mailbox::other_tags(int peer) const {
  constexpr size_t kMost = 8;
  Inbox& inbox = inboxes_[static_cast<size_t>(peer)];
  const std::lock_guard<std::mutex> lock(inbox.mutex);
  if (inbox.kept.empty()) return "; it has sent no other";
  std::string text;
  size_t count = 0;
  for (auto it = inbox.kept.begin(); it != inbox.kept.end(); it = inbox.kept.upper_bound(it->first)) {
    if (++count > kMost) return concatenate("; it has sent others, with tags ", text, ", ...");
    text += concatenate(text.empty() ? "" : ", ", it->first);
  }
  return concatenate("; it has sent others, with tag(s) ", text);
}

// ---- ends

void Mailbox::check_usable() const {
  if (generation_ != fork_generation()) {
    throw CommFailure(CommStatus::kError, "this process was forked from a rank: it has no part in its messages");
  }
  if (closed_.load(std::memory_order_relaxed)) throw CommFailure(CommStatus::kClosed, "this end was closed");
  if (control(rank()).state.load(std::memory_order_relaxed) == MailState::kFailed) {
    throw CommFailure(CommStatus::kClosed, concatenate("this rank has given up: ", control(rank()).reason));
  }
}

// Before sending: what is known without a system call.
void Mailbox::check_peer(int peer) const {
  const MailState state = control(peer).state.load(std::memory_order_acquire);
  if (state == MailState::kClosed) {
    for (int other = 0; other < size(); ++other) {
      if (has_vanished(other)) fail_lost(other, "has ended");
    }
    fail_lost(peer, "has closed its end");
  }
  if (state == MailState::kFailed) {
    failed_rank_here() = peer;
    throw CommFailure(CommStatus::kPeerFailed, reason_of(peer));
  }
}

// Whether its process has ended and its end was not closed before.
bool Mailbox::has_vanished(int other) const {
  return other != rank() && watches_[static_cast<size_t>(other)].has_ended() &&
         control(other).state.load(std::memory_order_acquire) != MailState::kClosed;
}

std::string Mailbox::reason_of(int other) const {
  const MailControl& theirs = control(other);
  return std::string(theirs.reason, strnlen(theirs.reason, sizeof theirs.reason));
}

void Mailbox::fail_lost(int peer, const char* how) const {
  throw CommFailure(CommStatus::kPeerLost,
                    concatenate("the process of rank ", peer, " (pid ", pids_[static_cast<size_t>(peer)], ") ", how));
}

void Mailbox::abort(const std::string& reason) {
  if (generation_ != fork_generation() || closed_.load(std::memory_order_relaxed)) check_usable();
  MailControl& own = control(rank());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (own.state.load(std::memory_order_relaxed) != MailState::kOpen) return;
    strncpy(own.reason, reason.c_str(), sizeof own.reason - 1);
    own.failed_at = now();
    own.state.store(MailState::kFailed, std::memory_order_release);
  }
  for (int peer = 0; peer < size(); ++peer) futex_wake_all(lane(rank(), peer).sent);
}

void Mailbox::close() {
  if (closed_.exchange(true) || generation_ != fork_generation()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::atomic<MailState>& state = control(rank()).state;
    if (state.load(std::memory_order_relaxed) == MailState::kOpen) {
      state.store(MailState::kClosed, std::memory_order_release);
    }
  }
  for (int peer = 0; peer < size(); ++peer) futex_wake_all(lane(rank(), peer).sent);
}

int Mailbox::failed_rank() { return failed_rank_here(); }

MailboxStats Mailbox::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  collect_returned();
  return {arena_->used_bytes(), arena_->touched_bytes()};
}

}  // namespace fastpar
