// CUDA op layer of the collectives over symmetric memory: check, return early on empty, launch.
// Which kernel and how many blocks is decided in symmetric_launch.cuh. Tensors of the ranks of one launch, of which
// there are several only where they share a device, are the rows of x and out.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "comm/symmetric_launch.cuh"
#include "common/cuda_stream.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using OptionalTensor = std::optional<Tensor>;

device::ReduceType reduce_type(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return device::ReduceType::kFloat32;
    case ScalarType::BFloat16:
      return device::ReduceType::kBFloat16;
    case ScalarType::Half:
      return device::ReduceType::kFloat16;
    default:
      FASTPAR_CHECK(false, "x must be float32, bfloat16 or float16");
  }
  return device::ReduceType::kFloat32;
}

// One contiguous row for each of `ranks`.
device::RankPointer rows_of(const Tensor& x, int64_t ranks, const char* name) {
  FASTPAR_CHECK(x.dim() == 2 && x.size(0) == ranks && (x.size(1) <= 1 || x.stride(1) == 1), name, " must be [", ranks,
                ", elements] with contiguous rows");
  return {const_cast<void*>(x.const_data_ptr()), x.stride(0)};
}

void check_words(const Tensor& x, int64_t words, const char* name) {
  FASTPAR_CHECK(x.scalar_type() == ScalarType::Long && x.is_contiguous() && x.numel() == words, name, " must be ",
                words, " contiguous int64");
}

// sizes: first rank, bytes of a region, bytes of a mailbox, nanoseconds until a wait times out
PeerGroup peer_group(const Tensor& x, const Tensor& buffers, const Tensor& signals, const Tensor& states,
                     const Tensor& report, const std::vector<int64_t>& sizes) {
  FASTPAR_CHECK(sizes.size() == 4, "group must be [first_rank, region_bytes, mailbox_bytes, timeout_nanoseconds]");
  constexpr int64_t kStateWords = sizeof(RankState) / sizeof(int64_t);
  const int64_t ranks = buffers.numel(), local_ranks = states.numel() / kStateWords;
  FASTPAR_CHECK(ranks >= 1 && ranks <= kMaxRanks, "a group has 1 to ", kMaxRanks, " ranks, not ", ranks);
  FASTPAR_CHECK(sizes[0] >= 0 && local_ranks >= 1 && sizes[0] + local_ranks <= ranks, "no ranks ", sizes[0], " to ",
                sizes[0] + local_ranks - 1, " in a group of ", ranks);
  FASTPAR_CHECK(sizes[1] > 0 && sizes[1] % 16 == 0 && sizes[2] > 0 && sizes[2] % 16 == 0,
                "regions and mailboxes hold whole packets of 16 bytes, not ", sizes[1], " and ", sizes[2], " bytes");
  check_words(buffers, ranks, "buffers");
  check_words(signals, ranks, "signals");
  check_words(states, local_ranks * kStateWords, "states");
  check_words(report, sizeof(TimeoutReport) / sizeof(int64_t), "report");
  FASTPAR_CHECK(buffers.get_device_index() == x.get_device_index() &&
                    signals.get_device_index() == x.get_device_index() &&
                    states.get_device_index() == x.get_device_index() && report.is_cpu(),
                "buffers, signals and states must be on the device of x, and report in pinned host memory");
  return {reinterpret_cast<const uint64_t*>(buffers.const_data_ptr()),
          reinterpret_cast<const uint64_t*>(signals.const_data_ptr()),
          static_cast<RankState*>(states.mutable_data_ptr()),
          static_cast<TimeoutReport*>(report.mutable_data_ptr()),
          static_cast<int>(ranks),
          static_cast<int>(sizes[0]),
          static_cast<int>(local_ranks),
          sizes[1],
          sizes[2],
          static_cast<uint64_t>(sizes[3])};
}

Parts parts_of(const std::vector<int64_t>& counts, const PeerGroup& group) {
  FASTPAR_CHECK(static_cast<int>(counts.size()) == group.size, "counts must have an entry for each of the ", group.size,
                " ranks, not ", counts.size());
  Parts parts{};
  int64_t begin = 0;
  for (int rank = 0; rank < group.size; ++rank) {
    FASTPAR_CHECK(counts[rank] >= 0, "counts must not be negative");
    parts.begin[rank] = begin;
    parts.count[rank] = counts[rank];
    begin += counts[rank];
  }
  return parts;
}

int64_t total(const Parts& parts, int size) { return parts.begin[size - 1] + parts.count[size - 1]; }

// Of the ranks that this launch works for.
int64_t longest_here(const Parts& parts, const PeerGroup& group) {
  return *std::max_element(parts.count + group.first_rank, parts.count + group.first_rank + group.local_ranks);
}

void all_reduce_cuda(const Tensor& x, Tensor out, const Tensor& buffers, const Tensor& signals, Tensor states,
                     Tensor report, std::vector<int64_t> group_sizes, int64_t multicast, int64_t algorithm,
                     bool average) {
  using device::AllReduceAlgorithm;
  const PeerGroup group = peer_group(x, buffers, signals, states, report, group_sizes);
  FASTPAR_CHECK(algorithm >= 0 && algorithm <= static_cast<int64_t>(AllReduceAlgorithm::kMultimem),
                "no all-reduce number ", algorithm);
  FASTPAR_CHECK(out.scalar_type() == x.scalar_type() && out.size(1) == x.size(1), "out must be as x");
  const DeviceGuard guard(x.get_device_index());
  const auto kind = static_cast<AllReduceAlgorithm>(algorithm);
  const bool is_small = kind == AllReduceAlgorithm::kOneShot || kind == AllReduceAlgorithm::kMailbox;
  device::launch_all_reduce(reduce_type(x), kind, group, static_cast<uint64_t>(multicast),
                            rows_of(x, group.local_ranks, "x"), rows_of(out, group.local_ranks, "out"), x.size(1),
                            average, is_small ? device::kLatencyLimits : device::kBandwidthLimits,
                            current_cuda_stream(x.get_device_index()));
}

void reduce_scatter_cuda(const Tensor& x, Tensor out, const Tensor& buffers, const Tensor& signals, Tensor states,
                         Tensor report, std::vector<int64_t> group_sizes, std::vector<int64_t> counts, bool average) {
  const PeerGroup group = peer_group(x, buffers, signals, states, report, group_sizes);
  const Parts parts = parts_of(counts, group);
  FASTPAR_CHECK(x.dim() == 2 && x.size(1) == total(parts, group.size), "x must have as many elements as all parts");
  FASTPAR_CHECK(out.scalar_type() == x.scalar_type() && out.size(1) >= longest_here(parts, group),
                "out must hold this rank's part");
  const DeviceGuard guard(x.get_device_index());
  device::launch_reduce_scatter(reduce_type(x), group, rows_of(x, group.local_ranks, "x"),
                                rows_of(out, group.local_ranks, "out"), parts, average, device::kBandwidthLimits,
                                current_cuda_stream(x.get_device_index()));
}

void all_gather_cuda(const Tensor& x, Tensor out, const Tensor& buffers, const Tensor& signals, Tensor states,
                     Tensor report, std::vector<int64_t> group_sizes, std::vector<int64_t> counts) {
  const PeerGroup group = peer_group(x, buffers, signals, states, report, group_sizes);
  const Parts parts = parts_of(counts, group);
  FASTPAR_CHECK(x.dim() == 2 && x.size(1) >= longest_here(parts, group), "x must hold this rank's part");
  FASTPAR_CHECK(out.scalar_type() == x.scalar_type() && out.dim() == 2 && out.size(1) == total(parts, group.size),
                "out must have as many elements as all parts");
  const DeviceGuard guard(x.get_device_index());
  device::launch_all_gather(static_cast<int64_t>(x.element_size()), group, rows_of(x, group.local_ranks, "x"),
                            rows_of(out, group.local_ranks, "out"), parts, device::kBandwidthLimits,
                            current_cuda_stream(x.get_device_index()));
}

void all_reduce_rms_norm_cuda(const Tensor& x, OptionalTensor residual, OptionalTensor weight, Tensor out, Tensor sum,
                              Tensor rstd, const Tensor& buffers, const Tensor& signals, Tensor states, Tensor report,
                              std::vector<int64_t> group_sizes, int64_t hidden, double eps, double weight_offset) {
  const PeerGroup group = peer_group(x, buffers, signals, states, report, group_sizes);
  const auto is_like_x = [&](const Tensor& other) {
    return other.scalar_type() == x.scalar_type() && other.dim() == 2 && other.size(1) == x.size(1);
  };
  FASTPAR_CHECK(x.dim() == 2 && hidden > 0 && x.size(1) % hidden == 0, "x must have rows of ", hidden, " elements");
  FASTPAR_CHECK(is_like_x(out) && is_like_x(sum) && (!residual.has_value() || is_like_x(*residual)),
                "residual, out and sum must be as x");
  FASTPAR_CHECK(!weight.has_value() ||
                    (weight->scalar_type() == x.scalar_type() && weight->is_contiguous() && weight->numel() == hidden),
                "weight must be [", hidden, "], contiguous, and have the dtype of x");
  const int64_t rows = x.size(1) / hidden;
  FASTPAR_CHECK(rstd.scalar_type() == ScalarType::Float && rstd.dim() == 2 && rstd.size(1) == rows,
                "rstd must be float32 and have an element for each row");
  const DeviceGuard guard(x.get_device_index());
  const int64_t ranks = group.local_ranks;
  const device::RankPointer none{nullptr, 0};
  const device::NormPointers norm{
      residual.has_value() ? rows_of(*residual, ranks, "residual") : none,
      weight.has_value() ? device::RankPointer{const_cast<void*>(weight->const_data_ptr()), 0} : none,
      rows_of(out, ranks, "out"),
      rows_of(sum, ranks, "sum"),
      rows_of(rstd, ranks, "rstd"),
      rows,
      hidden,
      static_cast<float>(eps),
      static_cast<float>(weight_offset)};
  device::launch_all_reduce_rms_norm(reduce_type(x), group, rows_of(x, ranks, "x"), norm, device::kBandwidthLimits,
                                     current_cuda_stream(x.get_device_index()));
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CUDA, m) {
  m.impl("symmetric_all_reduce", TORCH_BOX(&fastpar::all_reduce_cuda));
  m.impl("symmetric_reduce_scatter", TORCH_BOX(&fastpar::reduce_scatter_cuda));
  m.impl("symmetric_all_gather", TORCH_BOX(&fastpar::all_gather_cuda));
  m.impl("symmetric_all_reduce_rms_norm", TORCH_BOX(&fastpar::all_reduce_rms_norm_cuda));
}
