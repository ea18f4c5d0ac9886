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
// What is shown to the other ranks is written past the caches from here on; see the note in the header.
constexpr int64_t kShowBytes = 8 << 10;
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
constexpr const char* kReductionNames[] = {"sum", "avg", "max", "min", "float32 sum", "float32 avg"};
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
  const size_t op = static_cast<size_t>(header.op), reduction = static_cast<size_t>(header.reduction);
  if (op >= sizeof kOpNames / sizeof *kOpNames || reduction >= sizeof kReductionNames / sizeof *kReductionNames) {
    return "something that is no collective: the memory of that rank was written to";
  }
  std::string text = kOpNames[op];
  if (header.op == CommOp::kBarrier) return text;
  if (is_reduction(header.op)) text += concatenate(" (", kReductionNames[reduction], ")");
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

// How a collective proceeds: in steps, each of which shows something to the other ranks (`fill`), publishes it and
// waits for theirs, and takes what it wants from what they show (`take`). Between the two halves of a step the rank may
// do something else.
enum class Plan {
  kBarrier,
  kAtOnce,         // all_reduce: everybody reduces everything
  kChunks,         // all_reduce, reduce: step s copies chunk s, reduces the own part of chunk s - 1, and collects it
  kInRegion,       // all_reduce, reduce_scatter, all_gather: read where it lies; a second step ends the reading
  kReduceScatter,  // the rest: a chunk of every part a step
  kAllGather,
  kAllToAll,
  kBroadcast,
};

}  // namespace

class Collective {
 public:
  Collective(World& world, uint64_t sequence, const Call& call)
      : world_(world), call_(call), kernels_(reduce_kernels()), rank_(world.rank()), size_(world.size()) {
    header_ = {sequence, call.op, call.dtype, call.reduction, 0, call.root, call.count, 0, 0, 0};
    if (call.op == CommOp::kReduceScatter || call.op == CommOp::kAllGather) header_.sizes = hash_of(call.sizes, size_);
    if (call.op == CommOp::kAllToAll) header_.count = 0;
    const bool is_wide = call.reduction == Reduction::kWideSum || call.reduction == Reduction::kWideAvg;
    output_bytes_ = is_wide ? static_cast<int64_t>(sizeof(float)) : call.element_bytes;
    streams_ = call.input != call.output && call.count * call.element_bytes >= kStreamBytes;
    lay_out();
  }

  const CallHeader& header() const { return header_; }

  void start() {
    offer_region();
    choose(header_.region != 0);
    fill(0);
    world_.header(rank_, world_.next_phase()) = header_;
    publish();
  }

  void finish() {
    wait();
    check_headers();
    int64_t step = 0;
    if (anybody_offered_a_region() && !all_in_one_region()) {
      // Some have shown data in this step and others where theirs lies; now all show data.
      choose(false);
      step = -1;
    } else {
      take(0);
    }
    while (++step < num_steps_) {
      fill(step);
      publish();
      wait();
      take(step);
    }
  }

 private:
  // ---- phases

  void publish() {
    phase_ = world_.next_phase();
    world_.publish();
  }

  void wait() { world_.wait_all(call_.timeout_seconds); }

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
    for (int rank = 0; rank < size_; ++rank)
      text += concatenate("; rank ", world_.name(rank), ": ", describe(header_of(rank)));
    throw CommFailure(CommStatus::kMismatch, text);
  }

  // ---- regions

  // Says in the header where the data lies, if that is in a region and of use.
  void offer_region() {
    const bool in_place = call_.op == CommOp::kAllReduce && call_.input == call_.output;
    if (!(in_place && bytes(call_.count) >= kRegionBytes) && call_.op != CommOp::kReduceScatter &&
        call_.op != CommOp::kAllGather) {
      return;
    }
    const int64_t elements = call_.op == CommOp::kAllGather ? call_.sizes[rank_] : call_.count;
    region_ = world_.find_region(call_.input, bytes(elements));
    if (region_ == nullptr) return;
    header_.region = region_->id;
    header_.offset = static_cast<uint64_t>(static_cast<const char*>(call_.input) - region_->addresses[rank_]);
  }

  bool anybody_offered_a_region() const {
    for (int rank = 0; rank < size_; ++rank) {
      if (header_of(rank).region != 0) return true;
    }
    return false;
  }

  bool all_in_one_region() const {
    for (int rank = 0; rank < size_; ++rank) {
      if (header_of(rank).region == 0 || header_of(rank).region != header_of(0).region) return false;
    }
    for (int rank = 0; rank < size_; ++rank) {
      const int64_t elements = call_.op == CommOp::kAllGather ? call_.sizes[rank] : call_.count;
      const uint64_t offset = header_of(rank).offset, wanted = static_cast<uint64_t>(bytes(elements));
      if (offset > region_->bytes || wanted > region_->bytes - offset) {
        throw CommFailure(CommStatus::kError,
                          concatenate("rank ", world_.name(rank), " says that its data lies outside ",
                                      "of the region: the memory of that rank was written to"));
      }
    }
    return true;
  }

  // Where rank's data is in this process; only where all are in one region.
  char* in_region(int rank) const { return region_->addresses[rank] + header_of(rank).offset; }

  // ---- memory

  // Null for an empty tensor, whatever the element.
  const char* input(int64_t element) const {
    return call_.input == nullptr ? nullptr : static_cast<const char*>(call_.input) + bytes(element);
  }
  char* output(int64_t element) const {
    return call_.output == nullptr ? nullptr : static_cast<char*>(call_.output) + element * output_bytes_;
  }
  int64_t bytes(int64_t elements) const { return elements * call_.element_bytes; }

  void copy(char* to, const char* from, int64_t elements) const {
    if (to != from && elements > 0) memcpy(to, from, static_cast<size_t>(bytes(elements)));
  }
  // Into this rank's buffers, for the others to read.
  void show(char* to, const char* from, int64_t elements) const {
    if (elements <= 0) return;
    if (bytes(elements) >= kShowBytes) {
      kernels_.copy_past_caches(to, from, bytes(elements));
    } else {
      copy(to, from, elements);
    }
  }
  void copy_to_output(char* to, const char* from, int64_t elements) const {
    if (streams_ && elements > 0) {
      kernels_.copy_past_caches(to, from, bytes(elements));
    } else {
      copy(to, from, elements);
    }
  }

  void reduce(const void* const* sources, void* const* targets, int num_targets, int64_t count,
              void* shown = nullptr) const {
    if (count <= 0) return;
    const int type = type_index();
    const bool average = call_.reduction == Reduction::kAvg || call_.reduction == Reduction::kWideAvg;
    const ReduceArguments arguments{sources, size_, targets, num_targets, count, average, shown};
    switch (call_.reduction) {
      case Reduction::kSum:
      case Reduction::kAvg:
        return kernels_.sum[type](arguments);
      case Reduction::kMax:
        return kernels_.max[type](arguments);
      case Reduction::kMin:
        return kernels_.min[type](arguments);
      case Reduction::kWideSum:
      case Reduction::kWideAvg:
        return kernels_.wide_sum[type](arguments);
    }
  }

  int type_index() const {
    for (const TypeOfDtype& entry : kTypes) {
      if (entry.dtype == call_.dtype) return static_cast<int>(entry.type);
    }
    return 0;  // can_reduce was asked first
  }

  // ---- the plan

  // Where the parts of the ranks begin.
  void lay_out() {
    if (call_.sizes == nullptr) return;
    for (int64_t rank = 0, in = 0, out = 0; rank < size_; ++rank) {
      starts_[rank] = in;
      in += call_.sizes[rank];
      largest_ = std::max(largest_, call_.sizes[rank]);
      if (call_.output_sizes == nullptr) continue;
      output_starts_[rank] = out;
      out += call_.output_sizes[rank];
    }
  }

  // The same on every rank, but for whether it begins with regions.
  void choose(bool with_regions) {
    const int64_t slot = world_.slot_bytes() / call_.element_bytes, part = std::max<int64_t>(1, slot / size_);
    const auto in_chunks = [this](Plan plan, int64_t total, int64_t chunk) {
      plan_ = plan;
      chunk_ = chunk;
      num_steps_ = std::max<int64_t>(1, (total + chunk - 1) / chunk);
    };
    if (with_regions) {
      plan_ = Plan::kInRegion;
      num_steps_ = 2;
      return;
    }
    switch (call_.op) {
      case CommOp::kAllReduce:
        if (bytes(call_.count) <= std::min(tuning().one_shot_bytes, world_.slot_bytes())) {
          return in_chunks(Plan::kAtOnce, 1, 1);
        }
        [[fallthrough]];
      case CommOp::kReduce: {
        const int64_t chunk = std::min(tuning().chunk_bytes, world_.slot_bytes()) / kLine * kLine / call_.element_bytes;
        in_chunks(Plan::kChunks, call_.count, std::max<int64_t>(1, chunk));
        ++num_steps_;
        return;
      }
      case CommOp::kReduceScatter:
        return in_chunks(Plan::kReduceScatter, largest_, part);
      case CommOp::kAllGather:
        return in_chunks(Plan::kAllGather, largest_, slot);
      case CommOp::kAllToAll:  // how many steps is known when all have shown their sizes
        return in_chunks(Plan::kAllToAll, 1, part);
      case CommOp::kBroadcast:
        return in_chunks(Plan::kBroadcast, call_.count, slot);
      case CommOp::kBarrier:
        return in_chunks(Plan::kBarrier, 1, 1);
    }
  }

  void fill(int64_t step) {
    const uint64_t next = world_.next_phase();
    char* const slot = world_.exchange(rank_, next);
    const int64_t done = step * chunk_;
    switch (plan_) {
      case Plan::kBarrier:
      case Plan::kInRegion:
        return;
      case Plan::kAtOnce:
        return show(slot, input(0), call_.count);
      case Plan::kChunks:
        if (step + 1 < num_steps_) copy_for_owners(slot, done);
        if (step > 0) reduce_own_part(done - chunk_, next);
        return;
      case Plan::kAllToAll:
        if (step == 0) {
          int64_t* table = world_.size_table(rank_, next);
          std::copy(call_.sizes, call_.sizes + size_, table);
          std::copy(call_.output_sizes, call_.output_sizes + size_, table + size_);
        }
        [[fallthrough]];
      case Plan::kReduceScatter:
        for (int i = 1; i < size_; ++i) {
          const int to = (rank_ + i) % size_;
          show(slot + bytes(to * chunk_), input(starts_[to] + done), std::min(chunk_, call_.sizes[to] - done));
        }
        return;
      case Plan::kAllGather:
        return show(slot, input(done), std::min(chunk_, call_.sizes[rank_] - done));
      case Plan::kBroadcast:
        if (rank_ == call_.root) show(slot, input(done), std::min(chunk_, call_.count - done));
        return;
    }
  }

  void take(int64_t step) {
    const int64_t done = step * chunk_;
    switch (plan_) {
      case Plan::kBarrier:
        return;
      case Plan::kInRegion:
        if (step == 0) take_from_region();
        return;
      case Plan::kAtOnce:
        return reduce_exchanged(0, call_.output, 0, call_.count);
      case Plan::kChunks:
        if (step > 0 && (call_.op == CommOp::kAllReduce || rank_ == call_.root)) collect(done - chunk_);
        return;
      case Plan::kReduceScatter:
        return reduce_exchanged(rank_ * chunk_, output(done), starts_[rank_] + done,
                                std::min(chunk_, call_.sizes[rank_] - done));
      case Plan::kAllGather:
        for (int i = 0; i < size_; ++i) {
          const int from = (rank_ + i) % size_;
          const char* source = from == rank_ ? input(done) : world_.exchange(from, phase_);
          copy_to_output(output(starts_[from] + done), source, std::min(chunk_, call_.sizes[from] - done));
        }
        return;
      case Plan::kAllToAll:
        if (step == 0) {
          num_steps_ = (check_size_tables() + chunk_ - 1) / chunk_;
          copy_to_output(output(output_starts_[rank_]), input(starts_[rank_]), call_.sizes[rank_]);
        }
        for (int i = 1; i < size_; ++i) {
          const int from = (rank_ + i) % size_;
          copy_to_output(output(output_starts_[from] + done), world_.exchange(from, phase_) + bytes(rank_ * chunk_),
                         std::min(chunk_, call_.output_sizes[from] - done));
        }
        return;
      case Plan::kBroadcast:
        return copy_to_output(output(done), rank_ == call_.root ? input(done) : world_.exchange(call_.root, phase_),
                              std::min(chunk_, call_.count - done));
    }
  }

  // Reduces what all show from element `offset` of their buffers on; the own part is input(own).
  void reduce_exchanged(int64_t offset, void* target, int64_t own, int64_t count) const {
    const void* sources[kMaxReduceSources];
    for (int rank = 0; rank < size_; ++rank) sources[rank] = world_.exchange(rank, phase_) + bytes(offset);
    sources[rank_] = input(own);
    reduce(sources, &target, 1, count);
  }

  void take_from_region() {
    void* buffers[kMaxReduceSources];
    if (call_.op == CommOp::kAllReduce) {
      const Part part = part_of(call_.count, rank_, size_, call_.element_bytes);
      for (int rank = 0; rank < size_; ++rank) buffers[rank] = in_region(rank) + bytes(part.begin);
      return reduce(buffers, buffers, size_, part.count());
    }
    if (call_.op == CommOp::kReduceScatter) {
      for (int rank = 0; rank < size_; ++rank) buffers[rank] = in_region(rank) + bytes(starts_[rank_]);
      void* target = call_.output;
      return reduce(buffers, &target, 1, call_.sizes[rank_]);
    }
    for (int i = 0; i < size_; ++i) {
      const int rank = (rank_ + i) % size_;
      copy_to_output(output(starts_[rank]), in_region(rank), call_.sizes[rank]);
    }
  }

  // ---- chunks of all_reduce and reduce, of which every rank owns a part

  int64_t chunk_count(int64_t begin) const { return std::min(chunk_, call_.count - begin); }
  Part part_of_chunk(int64_t begin, int rank) const {
    return part_of(chunk_count(begin), rank, size_, call_.element_bytes);
  }

  void copy_for_owners(char* slot, int64_t begin) const {
    const Part own = part_of_chunk(begin, rank_);
    show(slot, input(begin), own.begin);
    show(slot + bytes(own.end), input(begin + own.end), chunk_count(begin) - own.end);
  }

  // The chunk was shown in the phase before `next`.
  void reduce_own_part(int64_t begin, uint64_t next) const {
    const Part own = part_of_chunk(begin, rank_);
    const void* sources[kMaxReduceSources];
    for (int rank = 0; rank < size_; ++rank) sources[rank] = world_.exchange(rank, next - 1) + bytes(own.begin);
    sources[rank_] = input(begin + own.begin);
    const bool is_rooted = call_.op == CommOp::kReduce, is_root = rank_ == call_.root;
    void* target = is_rooted && !is_root ? nullptr : output(begin + own.begin);
    reduce(sources, &target, target == nullptr ? 0 : 1, own.count(),
           is_rooted && is_root ? nullptr : world_.result(rank_, next));
  }

  void collect(int64_t begin) const {
    for (int i = 1; i < size_; ++i) {
      const int owner = (rank_ + i) % size_;
      const Part part = part_of_chunk(begin, owner);
      copy_to_output(output(begin + part.begin), world_.result(owner, phase_), part.count());
    }
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
        text += concatenate("; rank ", world_.name(rank), " sends");
        for (int to = 0; to < size_; ++to) text += concatenate(" ", table[to]);
        text += " and expects";
        for (int from = 0; from < size_; ++from) text += concatenate(" ", table[size_ + from]);
      }
      throw CommFailure(CommStatus::kMismatch, text);
    }
    return largest;
  }

  World& world_;
  const Call& call_;
  const ReduceKernels& kernels_;
  const int rank_, size_;
  CallHeader header_{};
  std::shared_ptr<const World::Region> region_;
  bool streams_;
  int64_t output_bytes_;                                                  // of an element
  int64_t starts_[kMaxReduceSources], output_starts_[kMaxReduceSources];  // elements; of input and output, by rank
  int64_t largest_ = 0;
  Plan plan_ = Plan::kBarrier;
  int64_t chunk_ = 1, num_steps_ = 1;
  uint64_t phase_ = 0;  // published last
};

bool can_reduce(uint8_t dtype) {
  return std::any_of(std::begin(kTypes), std::end(kTypes),
                     [dtype](const TypeOfDtype& entry) { return entry.dtype == dtype; });
}

Tuning& tuning() {
  static Tuning values;
  return values;
}

namespace {

std::vector<int64_t> copy_of(const int64_t* sizes, int count) {
  return sizes == nullptr ? std::vector<int64_t>() : std::vector<int64_t>(sizes, sizes + count);
}

std::string describe_collective(const void* what) {
  const CallHeader& header = static_cast<const Collective*>(what)->header();
  return concatenate(describe(header), ", call #", header.sequence);
}

}  // namespace

StartedCall::StartedCall(World& world, uint64_t sequence, const Call& call)
    : world_(world),
      call_(call),
      sizes_(copy_of(call.sizes, world.size())),
      output_sizes_(copy_of(call.output_sizes, world.size())) {
  world.check_usable();
  if (call.sizes != nullptr) call_.sizes = sizes_.data();
  if (call.output_sizes != nullptr) call_.output_sizes = output_sizes_.data();
  collective_ = std::make_unique<Collective>(world, sequence, call_);
  collective_->start();
}

StartedCall::~StartedCall() = default;

void StartedCall::finish() {
  world_.set_activity(describe_collective, collective_.get());
  collective_->finish();
}

void run_collective(World& world, uint64_t sequence, const Call& call) {
  world.check_usable();
  Collective collective(world, sequence, call);
  world.set_activity(describe_collective, &collective);
  collective.start();
  collective.finish();
}

}  // namespace fastpar
