#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/symmetric_launch.cuh"
#include "emulation/bindings.h"

namespace fastpar {
namespace emulation {
namespace {

using device::LaunchLimits;
using device::RankPointer;
using device::ReduceType;

ReduceType reduce_type(const std::string& name) {
  if (name == "float32") return ReduceType::kFloat32;
  if (name == "bfloat16") return ReduceType::kBFloat16;
  if (name == "float16") return ReduceType::kFloat16;
  throw py::value_error("no sums of " + name);
}

device::AllReduceAlgorithm all_reduce_algorithm(const std::string& name) {
  if (name == "one_shot") return device::AllReduceAlgorithm::kOneShot;
  if (name == "two_shot") return device::AllReduceAlgorithm::kTwoShot;
  if (name == "mailbox") return device::AllReduceAlgorithm::kMailbox;
  if (name == "multimem") return device::AllReduceAlgorithm::kMultimem;
  throw py::value_error("no all-reduce called " + name);
}

// All ranks of a group. A launch works for one of them, `rank`, or with rank = -1 for all of them at once.
class Group {
 public:
  Group(int size, int64_t region_bytes, int64_t mailbox_bytes, uint64_t timeout_nanoseconds, LaunchLimits limits)
      : limits_(limits),
        states_(static_cast<size_t>(size)),
        reports_(static_cast<size_t>(size)),
        region_bytes_(region_bytes),
        mailbox_bytes_(mailbox_bytes),
        timeout_nanoseconds_(timeout_nanoseconds) {
    const auto bytes = static_cast<size_t>(inbox_bytes(size, region_bytes) + mailboxes_bytes(size, mailbox_bytes));
    std::vector<unsigned char*> memory;
    for (int rank = 0; rank < size; ++rank) {
      buffers_.push_back(std::make_unique<Buffer>(bytes, 0));
      signals_.push_back(std::make_unique<Buffer>(static_cast<size_t>(flag_words(size)) * sizeof(uint32_t), 0));
      std::memset(signals_.back()->data(), 0, signals_.back()->bytes());
      memory.push_back(buffers_.back()->data());
      buffer_addresses_.push_back(reinterpret_cast<uint64_t>(buffers_.back()->data()));
      signal_addresses_.push_back(reinterpret_cast<uint64_t>(signals_.back()->data()));
    }
    multicast_ = std::make_unique<Multicast>(bytes, memory);
  }

  int size() const { return static_cast<int>(states_.size()); }

  PeerGroup of(int rank) {
    const bool is_all = rank < 0;
    return {buffer_addresses_.data(),
            signal_addresses_.data(),
            states_.data() + (is_all ? 0 : rank),
            reports_.data() + (is_all ? 0 : rank),
            size(),
            is_all ? 0 : rank,
            is_all ? size() : 1,
            region_bytes_,
            mailbox_bytes_,
            timeout_nanoseconds_};
  }

  uint64_t multicast() const { return reinterpret_cast<uint64_t>(multicast_->data()); }
  const LaunchLimits& limits() const { return limits_; }
  void set_limits(LaunchLimits limits) { limits_ = limits; }
  void set_epoch(uint64_t epoch) {
    for (RankState& state : states_) state.epoch = state.turn = epoch;
  }
  uint64_t epoch(int rank) const { return states_.at(static_cast<size_t>(rank)).epoch; }

  py::dict report(int rank) const {
    const TimeoutReport& r = reports_.at(static_cast<size_t>(rank));
    py::dict found;
    found["collective"] = r.collective;
    found["rank"] = r.rank;
    found["peer"] = r.peer;
    found["block"] = r.block;
    found["phase"] = r.phase;
    found["epoch"] = r.epoch;
    found["seen"] = r.seen;
    return found;
  }

 private:
  LaunchLimits limits_;
  std::vector<std::unique_ptr<Buffer>> buffers_, signals_;
  std::vector<uint64_t> buffer_addresses_, signal_addresses_;
  std::vector<RankState> states_;
  std::vector<TimeoutReport> reports_;
  std::unique_ptr<Multicast> multicast_;
  int64_t region_bytes_, mailbox_bytes_;
  uint64_t timeout_nanoseconds_;
};

RankPointer pointer(const Buffer* buffer, int64_t stride) { return {FromPython<void*>::get(buffer), stride}; }

Parts parts_of(const std::vector<int64_t>& counts) {
  Parts parts{};
  int64_t begin = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    parts.begin[rank] = begin;
    parts.count[rank] = counts[rank];
    begin += counts[rank];
  }
  return parts;
}

void all_reduce(Group& group, int rank, const std::string& algorithm, const std::string& dtype, const Buffer* x,
                const Buffer* out, int64_t count, bool average, Stream* stream) {
  const auto kind = all_reduce_algorithm(algorithm);
  device::launch_all_reduce(reduce_type(dtype), kind, group.of(rank), group.multicast(), pointer(x, count),
                            pointer(out, count), count, average, group.limits(), stream);
}

void reduce_scatter(Group& group, int rank, const std::string& dtype, const Buffer* x, int64_t x_stride,
                    const Buffer* out, int64_t out_stride, const std::vector<int64_t>& counts, bool average,
                    Stream* stream) {
  device::launch_reduce_scatter(reduce_type(dtype), group.of(rank), pointer(x, x_stride), pointer(out, out_stride),
                                parts_of(counts), average, group.limits(), stream);
}

void all_gather(Group& group, int rank, int64_t unit, const Buffer* x, int64_t x_stride, const Buffer* out,
                int64_t out_stride, const std::vector<int64_t>& counts, Stream* stream) {
  device::launch_all_gather(unit, group.of(rank), pointer(x, x_stride), pointer(out, out_stride), parts_of(counts),
                            group.limits(), stream);
}

void all_reduce_rms_norm(Group& group, int rank, const std::string& dtype, const Buffer* x, const Buffer* residual,
                         const Buffer* weight, const Buffer* out, const Buffer* sum, const Buffer* rstd, int64_t rows,
                         int64_t hidden, float eps, float weight_offset, Stream* stream) {
  const int64_t count = rows * hidden;
  const device::NormPointers norm{pointer(residual, count),
                                  pointer(weight, 0),
                                  pointer(out, count),
                                  pointer(sum, count),
                                  pointer(rstd, rows),
                                  rows,
                                  hidden,
                                  eps,
                                  weight_offset};
  device::launch_all_reduce_rms_norm(reduce_type(dtype), group.of(rank), pointer(x, count), norm, group.limits(),
                                     stream);
}

// (blocks of all local ranks, threads)
py::tuple plan(int size, int local_ranks, int64_t packets, bool is_latency) {
  PeerGroup group{};
  group.size = size;
  group.local_ranks = local_ranks;
  const auto config = device::plan(&device::all_reduce_two_shot<float>, group, packets,
                                   is_latency ? device::kLatencyLimits : device::kBandwidthLimits);
  return py::make_tuple(config.blocks, config.threads);
}

}  // namespace

void bind_symmetric(py::module_& m) {
  py::class_<Group>(m, "Group")
      .def(py::init([](int size, int64_t region_bytes, int64_t mailbox_bytes, uint64_t timeout_nanoseconds, int blocks,
                       int threads) {
             return std::make_unique<Group>(size, region_bytes, mailbox_bytes, timeout_nanoseconds,
                                            LaunchLimits{blocks, threads});
           }),
           py::arg("size"), py::arg("region_bytes") = 4096, py::arg("mailbox_bytes") = 4096,
           py::arg("timeout_nanoseconds") = uint64_t{1} << 40, py::arg("blocks") = 2, py::arg("threads") = 64)
      .def("set_epoch", &Group::set_epoch)
      .def("epoch", &Group::epoch)
      .def("report", &Group::report)
      .def("set_limits",
           [](Group& group, int blocks, int threads) { group.set_limits(LaunchLimits{blocks, threads}); });
  m.def("all_reduce", &all_reduce);
  m.def("reduce_scatter", &reduce_scatter);
  m.def("all_gather", &all_gather);
  m.def("all_reduce_rms_norm", &all_reduce_rms_norm);
  m.def("plan", &plan);
}

}  // namespace emulation
}  // namespace fastpar
