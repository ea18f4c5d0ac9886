#include "comm/collectives.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "common/checks.h"
#include "common/cpu_capability.h"

namespace fastpar {
namespace {

constexpr int64_t kLine = 64;
// Outputs of at least this size are written past the caches, where they are not the input.
constexpr int64_t kStreamBytes = 4 << 20;
// Inputs smaller than this are copied even where they lie in a region: that takes one phase instead of two.
constexpr int64_t kRegionBytes = 8 << 10;

const ReduceKernels& reduce_kernels() {
#if FASTPAR_X86
  if (cpu_capability() >= CpuCapability::kAvx512) return kReduceAvx512;
  if (cpu_capability() == CpuCapability::kAvx2) return kReduceAvx2;
#endif
  return kReducePortable;
}

// ---- words ----------------------------------------------------------------------------------------------------------

constexpr const char* kOpNames[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                                    "broadcast",  "reduce",         "barrier"};
constexpr const char* kReductionNames[] = {"sum", "avg", "max", "min"};
constexpr const char* kDtypeNames[] = {"uint8",   "int8",    "int16",     "int32",     "int64",      "float16",
                                       "float32", "float64", "complex32", "complex64", "complex128", "bool",
                                       "qint8",   "quint8",  "qint32",    "bfloat16"};

struct TypeOfDtype {
  uint8_t dtype;
  CommType type;
};
constexpr TypeOfDtype kTypes[] = {{6, CommType::kFloat32}, {15, CommType::kBFloat16}, {5, CommType::kFloat16},
                                  {7, CommType::kFloat64}, {4, CommType::kInt64},     {3, CommType::kInt32},
                                  {2, CommType::kInt16},   {1, CommType::kInt8},      {0, CommType::kUInt8},
                                  {11, CommType::kUInt8}};

bool is_reduction(CommOp op) {
  return op == CommOp::kAllReduce || op == CommOp::kReduceScatter || op == CommOp::kReduce;
}

std::string describe(const CallHeader& header) {
  std::string text = kOpNames[static_cast<int>(header.op)];
  if (header.op == CommOp::kBarrier) return text;
  if (is_reduction(header.op)) text += concatenate(" (", kReductionNames[static_cast<int>(header.reduction)], ")");
  const bool known = header.dtype < sizeof kDtypeNames / sizeof *kDtypeNames;
  if (header.op != CommOp::kAllToAll) text += concatenate(" of ", header.count, " elements,");
  text += concatenate(" ", known ? kDtypeNames[header.dtype] : concatenate("dtype ", int{header.dtype}));
  if (header.op == CommOp::kBroadcast || header.op == CommOp::kReduce) text += concatenate(", root ", header.root);
  if (header.sizes != 0) text += concatenate(", sizes #", header.sizes % 10000);
  return text;
}

uint64_t hash_of(const int64_t* sizes, int count) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over whole numbers
  for (int i = 0; i < count; ++i) hash = (hash ^ static_cast<uint64_t>(sizes[i])) * 0x100000001b3;
  return hash == 0 ? 1 : hash;
}

// ---- one call -------------------------------------------------------------------------------------------------------

struct Part {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// Where the rank's elements of [0, count) begin and end, cut at cache lines.
Part part_of(int64_t count, int rank, int size, int64_t element_bytes) {
  const int64_t unit = std::max<int64_t>(1, kLine / element_bytes);
  const int64_t units = (count + unit - 1) / unit;
  return {std::min(count, units * rank / size * unit), std::min(count, units * (rank + 1) / size * unit)};
}

class Collective {
 public:
  Collective(World& world, uint64_t sequence, const Call& call)
      : world_(world), call_(call), kernels_(reduce_kernels()), rank_(world.rank()), size_(world.size()) {
    header_ = {sequence, call.op, call.dtype, call.reduction, 0, call.root, call.count, 0, 0, 0};
    if (call.op == CommOp::kReduceScatter || call.op == CommOp::kAllGather) header_.sizes = hash_of(call.sizes, size_);
    if (call.op == CommOp::kAllToAll) header_.count = 0;
    streams_ = call.input != call.output && call.count * call.element_bytes >= kStreamBytes;
  }

  const CallHeader& header() const { return header_; }

  void run() {
    switch (call_.op) {
      case CommOp::kAllReduce:
        return all_reduce();
      case CommOp::kReduceScatter:
        return reduce_scatter();
      case CommOp::kAllGather:
        return all_gather();
      case CommOp::kAllToAll:
        return all_to_all();
      case CommOp::kBroadcast:
        return broadcast();
      case CommOp::kReduce:
        return reduce_chunks(call_.root);
      case CommOp::kBarrier:
        begin();
        return check_headers();
    }
  }

 private:
  // ---- phases

  // Publishes the header with the first phase of the collective.
  void begin() {
    world_.header(rank_, world_.next_phase()) = header_;
    phase();
  }

  void phase() {
    phase_ = world_.next_phase();
    world_.publish();
    world_.wait_all(call_.timeout_seconds);
  }

  // For loops over chunks. False: in this first phase other ranks have only said that their data lies in a region;
  // since not all do, the chunk has to be exchanged with them in the next phase.
  bool exchange_chunk() {
    if (phase_ != 0) {
      phase();
      return true;
    }
    begin();
    check_headers();
    for (int rank = 0; rank < size_; ++rank) {
      if (header_of(rank).region != 0) return false;
    }
    return true;
  }

  const CallHeader& header_of(int rank) const { return world_.header(rank, phase_); }

  void check_headers() const {
    bool equal = true;
    for (int rank = 0; rank < size_; ++rank) {
      const CallHeader& other = header_of(rank);
      equal = equal && other.sequence == header_.sequence && other.op == header_.op && other.dtype == header_.dtype &&
              other.reduction == header_.reduction && other.root == header_.root && other.count == header_.count &&
              other.sizes == header_.sizes;
    }
    if (!equal) mismatch("the ranks of the group called different collectives");
  }

  [[noreturn]] void mismatch(const char* what) const {
    std::string text = concatenate("call #", header_.sequence, ": ", what);
    for (int rank = 0; rank < size_; ++rank) text += concatenate("; rank ", rank, ": ", describe(header_of(rank)));
    throw CommFailure(CommStatus::kMismatch, text);
  }

  // Notes where `data` lies if it is in a region, and whether it is worth telling.
  void offer_region(const void* data, int64_t elements) {
    std::shared_ptr<const World::Region> region = world_.find_region(data, elements * call_.element_bytes);
    if (region == nullptr) return;
    header_.region = region->id;
    header_.offset = static_cast<uint64_t>(static_cast<const char*>(data) - region->addresses[rank_]);
    region_ = std::move(region);
  }

  bool all_in_one_region() const {
    for (int rank = 0; rank < size_; ++rank) {
      if (header_of(rank).region == 0 || header_of(rank).region != header_of(0).region) return false;
    }
    return true;
  }

  // Where rank's data is in this process; only where all are in one region.
  char* in_region(int rank) const { return region_->addresses[rank] + header_of(rank).offset; }

  // ---- memory

  const char* input(int64_t element) const {
    return static_cast<const char*>(call_.input) + element * call_.element_bytes;
  }
  char* output(int64_t element) const { return static_cast<char*>(call_.output) + element * call_.element_bytes; }
  int64_t bytes(int64_t elements) const { return elements * call_.element_bytes; }
  int64_t slot_elements() const { return world_.slot_bytes() / call_.element_bytes; }

  void copy(char* to, const char* from, int64_t elements) const {
    if (to != from && elements > 0) memcpy(to, from, static_cast<size_t>(bytes(elements)));
  }
  void copy_to_output(char* to, const char* from, int64_t elements) const {
    if (streams_ && elements > 0) {
      kernels_.copy_past_caches(to, from, bytes(elements));
    } else {
      copy(to, from, elements);
    }
  }

  void reduce(const void* const* sources, void* const* targets, int num_targets, int64_t count) const {
    if (count <= 0) return;
    const int type = type_index();
    const ReduceArguments arguments{sources, size_, targets, num_targets, count, call_.reduction == Reduction::kAvg};
    switch (call_.reduction) {
      case Reduction::kSum:
      case Reduction::kAvg:
        return kernels_.sum[type](arguments);
      case Reduction::kMax:
        return kernels_.max[type](arguments);
      case Reduction::kMin:
        return kernels_.min[type](arguments);
    }
  }

  int type_index() const {
    for (const TypeOfDtype& entry : kTypes) {
      if (entry.dtype == call_.dtype) return static_cast<int>(entry.type);
    }
    return 0;  // can_reduce was asked first
  }

  // ---- all_reduce and reduce

  void all_reduce() {
    if (call_.input == call_.output && bytes(call_.count) >= kRegionBytes) offer_region(call_.input, call_.count);
    if (header_.region != 0) {
      begin();
      check_headers();
      if (all_in_one_region()) return all_reduce_in_region();
    }
    if (bytes(call_.count) <= std::min(tuning().one_shot_bytes, world_.slot_bytes())) return all_reduce_at_once();
    reduce_chunks(kEveryRank);
  }

  void all_reduce_in_region() {
    const Part part = part_of(call_.count, rank_, size_, call_.element_bytes);
    void* buffers[kMaxReduceSources];
    for (int rank = 0; rank < size_; ++rank) buffers[rank] = in_region(rank) + bytes(part.begin);
    reduce(buffers, buffers, size_, part.count());
    phase();
  }

  void all_reduce_at_once() {
    do {
      copy(world_.exchange(rank_, world_.next_phase()), input(0), call_.count);
    } while (!exchange_chunk());
    const void* sources[kMaxReduceSources];
    for (int rank = 0; rank < size_; ++rank) sources[rank] = world_.exchange(rank, phase_);
    sources[rank_] = call_.input;
    void* target = call_.output;
    reduce(sources, &target, 1, call_.count);
  }

  static constexpr int kEveryRank = -1;

  // Step s copies chunk s to where its owners find it, while the parts of chunk s - 1 are reduced; after the phase
  // those who want the result collect it. May follow a first phase in which headers were exchanged already.
  void reduce_chunks(int root) {
    const bool collects = root == kEveryRank || root == rank_;
    const int64_t chunk =
        std::max<int64_t>(1, std::min(tuning().chunk_bytes, world_.slot_bytes()) / kLine * kLine / call_.element_bytes);
    const int64_t num_chunks = (call_.count + chunk - 1) / chunk;
    for (int64_t step = 0; step <= num_chunks;) {
      const uint64_t next = world_.next_phase();
      if (step < num_chunks) copy_in(step * chunk, std::min(chunk, call_.count - step * chunk), next);
      const int64_t begun = (step - 1) * chunk, count = std::min(chunk, call_.count - begun);
      if (step > 0) reduce_own_part(begun, count, next, root);
      if (!exchange_chunk()) continue;
      if (step > 0 && collects) collect(begun, count);
      ++step;
    }
  }

  void copy_in(int64_t begin, int64_t count, uint64_t next) const {
    const Part own = part_of(count, rank_, size_, call_.element_bytes);
    char* slot = world_.exchange(rank_, next);
    copy(slot, input(begin), own.begin);
    copy(slot + bytes(own.end), input(begin + own.end), count - own.end);
  }

  void reduce_own_part(int64_t begin, int64_t count, uint64_t next, int root) const {
    const Part own = part_of(count, rank_, size_, call_.element_bytes);
    const void* sources[kMaxReduceSources];
    for (int rank = 0; rank < size_; ++rank) sources[rank] = world_.exchange(rank, next - 1) + bytes(own.begin);
    sources[rank_] = input(begin + own.begin);
    char* const result = world_.result(rank_, next);
    if (root == rank_) {
      void* const target = output(begin + own.begin);
      return reduce(sources, &target, 1, own.count());
    }
    void* const targets[] = {result, root == kEveryRank ? output(begin + own.begin) : nullptr};
    reduce(sources, targets, root == kEveryRank ? 2 : 1, own.count());
  }

  void collect(int64_t begin, int64_t count) const {
    for (int step = 1; step < size_; ++step) {
      const int owner = (rank_ + step) % size_;
      const Part part = part_of(count, owner, size_, call_.element_bytes);
      copy_to_output(output(begin + part.begin), world_.result(owner, phase_), part.count());
    }
  }

  // ---- the others

  void reduce_scatter() {
    int64_t offsets[kMaxReduceSources], largest = 0, total = 0;
    for (int rank = 0; rank < size_; ++rank) {
      offsets[rank] = total;
      total += call_.sizes[rank];
      largest = std::max(largest, call_.sizes[rank]);
    }
    const int64_t mine = call_.sizes[rank_];
    const void* sources[kMaxReduceSources];
    void* target = call_.output;
    offer_region(call_.input, call_.count);
    if (header_.region != 0) {
      begin();
      check_headers();
      if (all_in_one_region()) {
        for (int rank = 0; rank < size_; ++rank) sources[rank] = in_region(rank) + bytes(offsets[rank_]);
        reduce(sources, &target, 1, mine);
        return phase();
      }
    }
    const int64_t chunk = std::max<int64_t>(1, slot_elements() / size_);
    for (int64_t done = 0; done == 0 || done < largest;) {
      char* slot = world_.exchange(rank_, world_.next_phase());
      for (int step = 1; step < size_; ++step) {
        const int owner = (rank_ + step) % size_;
        copy(slot + bytes(owner * chunk), input(offsets[owner] + done), std::min(chunk, call_.sizes[owner] - done));
      }
      if (!exchange_chunk()) continue;
      for (int rank = 0; rank < size_; ++rank) sources[rank] = world_.exchange(rank, phase_) + bytes(rank_ * chunk);
      sources[rank_] = input(offsets[rank_] + done);
      target = output(done);
      reduce(sources, &target, 1, std::min(chunk, mine - done));
      done += chunk;
    }
  }

  void all_gather() {
    int64_t offsets[kMaxReduceSources], largest = 0, total = 0;
    for (int rank = 0; rank < size_; ++rank) {
      offsets[rank] = total;
      total += call_.sizes[rank];
      largest = std::max(largest, call_.sizes[rank]);
    }
    const int64_t mine = call_.sizes[rank_];
    offer_region(call_.input, mine);
    if (header_.region != 0) {
      begin();
      check_headers();
      if (all_in_one_region()) {
        for (int step = 0; step < size_; ++step) {
          const int rank = (rank_ + step) % size_;
          copy_to_output(output(offsets[rank]), in_region(rank), call_.sizes[rank]);
        }
        return phase();
      }
    }
    const int64_t chunk = slot_elements();
    for (int64_t done = 0; done == 0 || done < largest;) {
      copy(world_.exchange(rank_, world_.next_phase()), input(done), std::min(chunk, mine - done));
      if (!exchange_chunk()) continue;
      for (int step = 1; step < size_; ++step) {
        const int rank = (rank_ + step) % size_;
        copy_to_output(output(offsets[rank] + done), world_.exchange(rank, phase_),
                       std::min(chunk, call_.sizes[rank] - done));
      }
      copy_to_output(output(offsets[rank_] + done), input(done), std::min(chunk, mine - done));
      done += chunk;
    }
  }

  void all_to_all() {
    const int64_t chunk = std::max<int64_t>(1, slot_elements() / size_);
    int64_t inputs[kMaxReduceSources], outputs[kMaxReduceSources];
    for (int64_t rank = 0, in = 0, out = 0; rank < size_; ++rank) {
      inputs[rank] = in;
      outputs[rank] = out;
      in += call_.sizes[rank];
      out += call_.output_sizes[rank];
    }
    int64_t* table = world_.size_table(rank_, world_.next_phase());
    std::copy(call_.sizes, call_.sizes + size_, table);
    std::copy(call_.output_sizes, call_.output_sizes + size_, table + size_);
    int64_t largest = 0;
    for (int64_t done = 0; done == 0 || done < largest; done += chunk) {
      char* slot = world_.exchange(rank_, world_.next_phase());
      for (int step = 1; step < size_; ++step) {
        const int to = (rank_ + step) % size_;
        copy(slot + bytes(to * chunk), input(inputs[to] + done), std::min(chunk, call_.sizes[to] - done));
      }
      exchange_chunk();
      if (done == 0) largest = check_size_tables();
      for (int step = 1; step < size_; ++step) {
        const int from = (rank_ + step) % size_;
        copy_to_output(output(outputs[from] + done), world_.exchange(from, phase_) + bytes(rank_ * chunk),
                       std::min(chunk, call_.output_sizes[from] - done));
      }
    }
    copy_to_output(output(outputs[rank_]), input(inputs[rank_]), call_.sizes[rank_]);
  }

  // Every rank reads the tables of all, so that all come to the same verdict. Gives the largest part of all.
  int64_t check_size_tables() const {
    int64_t largest = 0;
    bool equal = true;
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        const int64_t sent = world_.size_table(from, phase_)[to];
        equal = equal && sent == world_.size_table(to, phase_)[size_ + from];
        if (from != to) largest = std::max(largest, sent);
      }
    }
    if (!equal) {
      std::string text =
          concatenate("call #", header_.sequence, ": what ranks send is not what ranks expect in all_to_all");
      for (int rank = 0; rank < size_; ++rank) {
        const int64_t* table = world_.size_table(rank, phase_);
        text += concatenate("; rank ", rank, " sends");
        for (int to = 0; to < size_; ++to) text += concatenate(" ", table[to]);
        text += " and expects";
        for (int from = 0; from < size_; ++from) text += concatenate(" ", table[size_ + from]);
      }
      throw CommFailure(CommStatus::kMismatch, text);
    }
    return largest;
  }

  void broadcast() {
    const int64_t chunk = slot_elements();
    for (int64_t done = 0; done == 0 || done < call_.count; done += chunk) {
      const int64_t count = std::min(chunk, call_.count - done);
      if (rank_ == call_.root) copy(world_.exchange(rank_, world_.next_phase()), input(done), count);
      exchange_chunk();
      const char* from = rank_ == call_.root ? input(done) : world_.exchange(call_.root, phase_);
      copy_to_output(output(done), from, count);
    }
  }

  World& world_;
  const Call& call_;
  const ReduceKernels& kernels_;
  const int rank_, size_;
  CallHeader header_{};
  std::shared_ptr<const World::Region> region_;
  uint64_t phase_ = 0;  // of this collective, the last one; 0: none yet
  bool streams_;
};

}  // namespace

bool can_reduce(uint8_t dtype) {
  return std::any_of(std::begin(kTypes), std::end(kTypes),
                     [dtype](const TypeOfDtype& entry) { return entry.dtype == dtype; });
}

Tuning& tuning() {
  static Tuning values;
  return values;
}

void run_collective(World& world, uint64_t sequence, const Call& call) {
  world.check_usable();
  Collective collective(world, sequence, call);
  world.set_activity(
      [](const void* what) {
        const CallHeader& header = static_cast<const Collective*>(what)->header();
        return concatenate(describe(header), ", call #", header.sequence);
      },
      &collective);
  collective.run();
}

}  // namespace fastpar
