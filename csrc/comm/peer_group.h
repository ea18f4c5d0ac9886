// What the host tells the kernels about a group of ranks with symmetric memory, and what they tell it.
//
// Every rank has a buffer and a signal pad that all others can write. For a group of W ranks they hold
//
//   buffer   inbox     [2 parities][2 phases][W sources][region_bytes]
//            mailbox   [3 turns][W sources][mailbox_bytes]          of the collectives without flags; poison at first
//   signals  flags     [2 phases][kMaxBlocks blocks][W sources]     uint64, 0 at first
//
// Note: the protocol. A collective has a number, its epoch: 1, 2, 3, ... over the life of the group, kept on the
// device, so that a captured graph can be launched again. Block b of rank r works on the same elements as block b of
// every other rank. It pushes what they need into its own region of their inboxes (source r, parity of the epoch),
// raises its flag to the epoch with each of them, and waits until the flags that they raise here are at the epoch or
// beyond. Flags only grow. So
//
//   * a rank that has finished epoch e knows that all others have begun it, hence have finished epoch e - 1;
//   * in epoch e + 1 it may write what its peers read in epoch e - 1, the same parity, and nothing else;
//   * two blocks of one rank never wait for each other, and need not run at the same time.
//
// This needs the launches of a group in one order, on one stream or streams that wait for each other, the same on all
// ranks. Phase 1 is the second exchange of an epoch (two-shot, multimem).
//
// Note: without flags. A word of a mailbox that holds poison has not been written yet; data that looks like poison is
// sent as another NaN. In turn t, counted apart from epochs, ranks exchange in mailbox t mod 3 and fill their own of
// turn t - 1 with poison: all others have sent what it held (they were polled), and none writes to it before turn
// t + 2, when it has this rank's data of turn t + 1, sent after that fill.
#pragma once

#include <cstdint>

namespace fastpar {

constexpr int kMaxRanks = 64;
constexpr int kMaxBlocks = 32;  // of one rank in one launch
constexpr int kNumPhases = 2;
constexpr int kNumTurns = 3;

// In memory of the device, one for each rank that it holds; 0 at first.
struct RankState {
  unsigned long long epoch;                       // of the last collective that has ended here
  unsigned long long turn;                        // the same for the collectives without flags
  unsigned long long ticket;                      // blocks of the running one that have ended
  unsigned long long mailbox_packets[kNumTurns];  // that the turn used
  unsigned long long failed;
  unsigned long long unused;
};

// Who waited for whom in vain: the first time that happens. In host memory that the device can write; 0 at first.
struct TimeoutReport {
  uint64_t collective;  // 1 + Collective; written last
  uint64_t rank, peer, block, phase;
  uint64_t epoch;  // waited for
  uint64_t seen;   // in the flag; of a collective without flags, the packet that had not come
  uint64_t waited_nanoseconds;
};

enum class Collective {
  kAllReduceOneShot,
  kAllReduceTwoShot,
  kReduceScatter,
  kAllGather,
  kAllReduceMailbox,
  kAllReduceMultimem,
  kAllReduceRmsNorm
};

struct PeerGroup {
  const uint64_t* buffers;  // [size] addresses
  const uint64_t* signals;  // [size] addresses
  RankState* states;        // [local_ranks]
  TimeoutReport* report;
  int size;
  int first_rank, local_ranks;  // the ranks that this launch works for: several only where they share a device
  int64_t region_bytes, mailbox_bytes;
  uint64_t timeout_nanoseconds;
};

constexpr int64_t inbox_bytes(int64_t size, int64_t region_bytes) { return 2 * kNumPhases * size * region_bytes; }
constexpr int64_t mailboxes_bytes(int64_t size, int64_t mailbox_bytes) { return kNumTurns * size * mailbox_bytes; }
constexpr int64_t flag_words(int64_t size) { return 2 * kNumPhases * kMaxBlocks * size; }  // of 32 bits

// A part of a tensor for each rank, in elements.
struct Parts {
  int64_t begin[kMaxRanks];
  int64_t count[kMaxRanks];
};

}  // namespace fastpar
