// CPU op layer of attention: check, plan blocks, choose the kernels, launch in chunks.
// The algebra is in attention_forward.h and attention_backward.h.
#include "attention/attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <tuple>
#include <vector>

#include "attention/block_plan.h"
#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/large_buffer.h"
#include "common/tensor_rows.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const AttentionKernels& kernels_for(FloatType type) {
  const int index = static_cast<int>(type);
#if FASTPAR_X86
  if (type != FloatType::kFloat64) {
    const CpuCapability capability = cpu_capability();
    if (capability >= CpuCapability::kAmx) return kAttentionAmx[index];
    if (type == FloatType::kBFloat16 && capability >= CpuCapability::kAvx512Bf16) return kAttentionAvx512Bf16;
    if (capability >= CpuCapability::kAvx512) return kAttentionAvx512[index];
    if (capability >= CpuCapability::kAvx2) return kAttentionAvx2[index];
  }
#endif
  return kAttentionPortable[index];
}

ScalarType sum_dtype(FloatType type) { return type == FloatType::kFloat64 ? ScalarType::Double : ScalarType::Float; }

// ---- inputs -------------------------------------------------------------------------------------------------------

Tensor with_dense_columns(const Tensor& x) {
  return x.size(3) <= 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

AttentionMatrix matrix_of(const Tensor& x, bool is_wide) {
  return {x.const_data_ptr(), is_wide, x.stride(0), x.stride(1), x.stride(2)};
}

// The options that forward and backward share, as the ops have them.
struct Options {
  double scale, softcap, dropout_p;
  int64_t dropout_seed, first_batch, first_head;
  const std::optional<Tensor>&query_positions, &key_positions;
};

const int64_t* positions_of(const std::optional<Tensor>& positions, int64_t count, const char* name) {
  if (!positions.has_value()) return nullptr;
  FASTPAR_CHECK(positions->scalar_type() == ScalarType::Long && positions->dim() == 1 && positions->size(0) == count &&
                    positions->is_contiguous(),
                name, " must be ", count, " contiguous int64");
  return positions->const_data_ptr<int64_t>();
}

AttentionProblem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  FASTPAR_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must be [batch, heads, tokens, dim]");
  FASTPAR_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                "k and v must have the dtype of q");
  FASTPAR_CHECK(k.size(0) == q.size(0) && v.size(0) == q.size(0), "q, k and v must have the same batch, got ",
                q.size(0), ", ", k.size(0), " and ", v.size(0));
  FASTPAR_CHECK(v.size(1) == k.size(1) && v.size(2) == k.size(2), "v must have the heads and tokens of k");
  FASTPAR_CHECK(k.size(3) == q.size(3), "k must have q's head dim ", q.size(3), ", got ", k.size(3));
  FASTPAR_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "query heads (", q.size(1),
                ") must be a multiple of key heads (", k.size(1), ")");
  FASTPAR_CHECK(q.size(3) > 0 && v.size(3) > 0, "head dims must be positive");
  FASTPAR_CHECK(q.size(2) < (int64_t{1} << 31) - kBlock && k.size(2) < (int64_t{1} << 31) - kBlock,
                "at most 2^31 - 65 tokens");
  FASTPAR_CHECK(std::isfinite(options.scale), "scale must be finite, got ", options.scale);
  FASTPAR_CHECK(std::isfinite(options.softcap) && options.softcap >= 0.0, "softcap must be 0 (none) or positive, got ",
                options.softcap);
  FASTPAR_CHECK(options.dropout_p >= 0.0 && options.dropout_p <= 1.0, "dropout_p must be between 0 and 1, got ",
                options.dropout_p);
  AttentionProblem p{};
  p.batch = q.size(0);
  p.query_heads = q.size(1);
  p.key_heads = k.size(1);
  p.num_queries = q.size(2);
  p.num_keys = k.size(2);
  p.dim = q.size(3);
  p.value_dim = v.size(3);
  p.scale = options.scale;
  p.softcap = options.softcap;
  p.dropout_p = options.dropout_p;
  p.dropout_seed = static_cast<uint64_t>(options.dropout_seed);
  p.first_batch = options.first_batch;
  p.first_head = options.first_head;
  p.query_positions = positions_of(options.query_positions, p.num_queries, "q_positions");
  p.key_positions = positions_of(options.key_positions, p.num_keys, "k_positions");
  return p;
}

void round_up(AttentionProblem* p, const AttentionKernels& kernels) {
  const int64_t multiple = kernels.multiple;
  p->padded_dim = (p->dim + multiple - 1) / multiple * multiple;
  p->padded_value_dim = (p->value_dim + multiple - 1) / multiple * multiple;
  p->query_blocks = (p->num_queries + kBlock - 1) / kBlock;
  p->key_blocks = (p->num_keys + kBlock - 1) / kBlock;
}

// ---- plans --------------------------------------------------------------------------------------------------------

// The plans of a table of tiles, one for all batch rows or one for each.
class Plans {
 public:
  Plans(const Tensor& tiles, const std::optional<Tensor>& offsets, const AttentionProblem& p, int group) {
    FASTPAR_CHECK(
        tiles.scalar_type() == ScalarType::Int && tiles.dim() == 2 && tiles.size(1) == 6 && tiles.is_contiguous(),
        "tiles must be a contiguous int32 [T, 6]");
    const int64_t num_tiles = tiles.size(0);
    const AttentionTile* rows = reinterpret_cast<const AttentionTile*>(tiles.const_data_ptr<int32_t>());
    for (int64_t i = 0; i < num_tiles; ++i) check_tile(rows[i], i, p);
    if (!offsets.has_value()) {
      plans_.emplace_back(rows, num_tiles, p.num_queries, p.num_keys, group);
    } else {
      FASTPAR_CHECK(offsets->scalar_type() == ScalarType::Long && offsets->dim() == 1 &&
                        offsets->size(0) == p.batch + 1 && offsets->is_contiguous(),
                    "tile_offsets must be ", p.batch + 1, " contiguous int64, one more than the batch");
      const int64_t* at = offsets->const_data_ptr<int64_t>();
      FASTPAR_CHECK(at[0] == 0 && at[p.batch] == num_tiles && std::is_sorted(at, at + p.batch + 1),
                    "tile_offsets must ascend from 0 to the number of tiles, ", num_tiles);
      for (int64_t b = 0; b < p.batch; ++b) {
        plans_.emplace_back(rows + at[b], at[b + 1] - at[b], p.num_queries, p.num_keys, group);
      }
    }
    for (const BlockPlan& plan : plans_) runs_.push_back(plan.runs());
  }

  const BlockRuns* runs() const { return runs_.data(); }

 private:
  static void check_tile(const AttentionTile& t, int64_t i, const AttentionProblem& p) {
    FASTPAR_CHECK(t.q0 >= 0 && t.q0 <= t.q1 && t.q1 <= p.num_queries && t.k0 >= 0 && t.k0 <= t.k1 && t.k1 <= p.num_keys,
                  "tile ", i, " (", t.q0, ", ", t.q1, ", ", t.k0, ", ", t.k1, ") does not lie inside ", p.num_queries,
                  " queries and ", p.num_keys, " keys");
  }

  std::vector<BlockPlan> plans_;
  std::vector<BlockRuns> runs_;
};

// ---- launching ----------------------------------------------------------------------------------------------------

// Buffers of a chunk and the scratch memory of its tasks, one behind the other in one buffer of the pool: fresh pages
// would cost as much as the work of a short sequence.
class Arena {
 public:
  // Places are given out twice: first to count, then for good.
  void* take(int64_t bytes) {
    void* place = base_ != nullptr ? base_ + used_ : nullptr;
    used_ += (bytes + 63) / 64 * 64;
    return place;
  }
  void take_scratch(int64_t bytes) {
    scratch_bytes_ = (bytes + 4095) / 4096 * 4096;
    num_scratch_ = static_cast<int64_t>(torch::stable::get_num_threads());
    scratch_ = static_cast<char*>(take(scratch_bytes_ * num_scratch_));
  }
  void allocate() {
    const int64_t bytes = std::max(used_ + 64, static_cast<int64_t>(kLargeBufferBytes));
    buffer_ = empty_cpu({(bytes + 3) / 4}, ScalarType::Float);
    base_ = static_cast<char*>(buffer_->mutable_data_ptr());
    base_ += (64 - reinterpret_cast<uintptr_t>(base_) % 64) % 64;
    used_ = 0;
  }

  // `kernel` over 0 up to `count`; every task has scratch memory of its own.
  template <typename Kernel, typename Arguments>
  void launch(Kernel kernel, const Arguments& arguments, int64_t count, int64_t grain) {
    std::atomic<int64_t> tasks{0};
    torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      const int64_t task = tasks.fetch_add(1, std::memory_order_relaxed);
      if (task < num_scratch_) return kernel(arguments, scratch_ + task * scratch_bytes_, begin, end);
      // More tasks than threads: not seen, and not promised.
      const std::unique_ptr<void, decltype(&std::free)> own(std::aligned_alloc(4096, scratch_bytes_), &std::free);
      if (own == nullptr) throw std::bad_alloc();
      kernel(arguments, own.get(), begin, end);
    });
  }

 private:
  std::optional<Tensor> buffer_;
  char *base_ = nullptr, *scratch_ = nullptr;
  int64_t used_ = 0, scratch_bytes_ = 0, num_scratch_ = 0;
};

// Units (a batch row's key head) that are worked on at a time: enough for all threads, and few, because their packed
// operands take memory. Results do not depend on it.
int64_t units_per_chunk(int64_t units, int64_t tasks_per_unit) {
  const int64_t wanted = 2 * static_cast<int64_t>(torch::stable::get_num_threads());
  return std::min(units, std::max<int64_t>(1, (wanted + tasks_per_unit - 1) / tasks_per_unit));
}

// Blocks of queries that read keys together: as many as leave every thread several tasks. Results do not depend on it.
int64_t query_group_of(int64_t blocks) {
  const int64_t wanted = 4 * static_cast<int64_t>(torch::stable::get_num_threads());
  return std::max<int64_t>(1, std::min<int64_t>(kMostQueryBlocks, blocks / wanted));
}

std::tuple<Tensor, Tensor> attention_forward_cpu(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                 const Tensor& tiles, std::optional<Tensor> tile_offsets, double scale,
                                                 double softcap, double dropout_p, int64_t dropout_seed,
                                                 int64_t first_batch, int64_t first_head,
                                                 std::optional<Tensor> q_positions, std::optional<Tensor> k_positions,
                                                 ScalarType out_dtype) {
  const FloatType type = float_type(q_in, "q");
  const bool wide = out_dtype != q_in.scalar_type();
  FASTPAR_CHECK(!wide || out_dtype == sum_dtype(type), "out_dtype must be q's dtype, or that of sums");
  AttentionProblem p = problem_of(
      q_in, k_in, v_in, {scale, softcap, dropout_p, dropout_seed, first_batch, first_head, q_positions, k_positions});
  const Tensor q = with_dense_columns(q_in), k = with_dense_columns(k_in), v = with_dense_columns(v_in);
  const AttentionKernels& kernels = kernels_for(type);
  round_up(&p, kernels);
  const Plans plans(tiles, tile_offsets, p, 0);
  p.runs = plans.runs();
  p.runs_by_batch = tile_offsets.has_value();

  Tensor out = empty_cpu({p.batch, p.query_heads, p.num_queries, p.value_dim}, out_dtype);
  Tensor lse = empty_cpu({p.batch, p.query_heads, p.num_queries}, sum_dtype(type));
  const int64_t units = p.batch * p.key_heads, heads = p.query_heads / p.key_heads;
  if (units == 0 || p.query_blocks == 0) return {out, lse};
  p.query_group = query_group_of(units * heads * p.query_blocks);
  const int64_t groups = (p.query_blocks + p.query_group - 1) / p.query_group;
  const int64_t chunk = units_per_chunk(units, heads * groups);
  AttentionForwardArguments a{};
  a.q = matrix_of(q, false);
  a.k = matrix_of(k, false);
  a.v = matrix_of(v, false);
  a.out = out.mutable_data_ptr();
  a.out_is_wide = wide;
  a.lse = lse.mutable_data_ptr();
  Arena arena;
  for (int pass = 0; pass < 2; ++pass) {
    const int64_t keys = chunk * p.key_blocks * kBlock * kernels.element_bytes;
    a.packed_keys = arena.take(keys * p.padded_dim);
    a.packed_values = arena.take(keys * p.padded_value_dim);
    a.key_flags = static_cast<uint8_t*>(arena.take(chunk * p.key_blocks));
    a.value_flags = static_cast<uint8_t*>(arena.take(chunk * p.key_blocks));
    arena.take_scratch(kernels.forward_scratch(p));
    if (pass == 0) arena.allocate();
  }
  for (p.first_unit = 0; p.first_unit < units; p.first_unit += chunk) {
    a.problem = p;
    const int64_t count = std::min(chunk, units - p.first_unit);
    arena.launch(kernels.pack_forward, a, count * p.key_blocks, 8);
    arena.launch(kernels.forward, a, count * heads * groups, 1);
  }
  return {out, lse};
}

// Parts of the keys whose dq is summed apart, for work to be found for 16 threads where there are few heads. By shapes
// alone: bits do not depend on the number of threads.
int64_t splits_of(const AttentionProblem& p, int64_t key_groups) {
  constexpr int64_t kTasks = 16, kMost = 8;
  const int64_t units = p.batch * p.key_heads;
  return std::max<int64_t>(1, std::min({(kTasks + units - 1) / units, kMost, key_groups / 4}));
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_cpu(
    const Tensor& grad_out_in, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& lse_in,
    const Tensor& delta_in, const Tensor& tiles, std::optional<Tensor> tile_offsets, double scale, double softcap,
    double dropout_p, int64_t dropout_seed, int64_t first_batch, int64_t first_head, std::optional<Tensor> q_positions,
    std::optional<Tensor> k_positions) {
  const FloatType type = float_type(q_in, "q");
  AttentionProblem p = problem_of(
      q_in, k_in, v_in, {scale, softcap, dropout_p, dropout_seed, first_batch, first_head, q_positions, k_positions});
  const ScalarType sums = sum_dtype(type);
  FASTPAR_CHECK(grad_out_in.scalar_type() == q_in.scalar_type() || grad_out_in.scalar_type() == sums,
                "grad_out must have the dtype of q, or that of sums");
  FASTPAR_CHECK(shape_of(grad_out_in) == (std::vector<int64_t>{p.batch, p.query_heads, p.num_queries, p.value_dim}),
                "grad_out must have the shape of the output");
  const std::vector<int64_t> rows{p.batch, p.query_heads, p.num_queries};
  FASTPAR_CHECK(shape_of(lse_in) == rows && shape_of(delta_in) == rows, "lse and delta must be [batch, heads, tokens]");
  FASTPAR_CHECK(lse_in.scalar_type() == sums && delta_in.scalar_type() == sums,
                "lse and delta must be float32 (float64 for float64)");
  const Tensor q = with_dense_columns(q_in), k = with_dense_columns(k_in), v = with_dense_columns(v_in);
  const Tensor grad_out = with_dense_columns(grad_out_in);
  const Tensor lse = torch::stable::contiguous(lse_in), delta = torch::stable::contiguous(delta_in);
  const AttentionKernels& kernels = kernels_for(type);
  round_up(&p, kernels);
  const Plans plans(tiles, tile_offsets, p, kernels.key_group);
  p.runs = plans.runs();
  p.runs_by_batch = tile_offsets.has_value();

  Tensor grad_q = empty_cpu(shape_of(q), sums), grad_k = empty_cpu(shape_of(k), sums);
  Tensor grad_v = empty_cpu(shape_of(v), sums);
  const int64_t units = p.batch * p.key_heads, heads = p.query_heads / p.key_heads;
  if (units == 0 || p.query_blocks + p.key_blocks == 0) return {grad_q, grad_k, grad_v};
  AttentionBackwardArguments a{};
  a.q = matrix_of(q, false);
  a.k = matrix_of(k, false);
  a.v = matrix_of(v, false);
  a.grad_out = matrix_of(grad_out, grad_out.scalar_type() != q.scalar_type());
  a.lse = lse.const_data_ptr();
  a.delta = delta.const_data_ptr();
  a.grad_q = grad_q.mutable_data_ptr();
  a.grad_k = grad_k.mutable_data_ptr();
  a.grad_v = grad_v.mutable_data_ptr();
  a.splits = splits_of(p, (p.key_blocks + kernels.key_group - 1) / kernels.key_group);
  const int64_t chunk = units_per_chunk(units, a.splits);
  Arena arena;
  for (int pass = 0; pass < 2; ++pass) {
    const int64_t keys = chunk * p.key_blocks, queries = chunk * heads * p.query_blocks;
    const int64_t bytes = kBlock * kernels.element_bytes;
    a.key_rows = arena.take(keys * bytes * p.padded_dim);
    a.key_columns = arena.take(keys * bytes * p.padded_dim);
    a.value_rows = arena.take(keys * bytes * p.padded_value_dim);
    a.query_columns = arena.take(queries * bytes * p.padded_dim);
    a.query_rows = arena.take(queries * bytes * p.padded_dim);
    a.grad_out_columns = arena.take(queries * bytes * p.padded_value_dim);
    a.grad_out_rows = arena.take(queries * bytes * p.padded_value_dim);
    a.partial_grad_q = arena.take(a.splits * queries * kBlock * p.padded_dim * kernels.real_bytes);
    a.key_flags = static_cast<uint8_t*>(arena.take(keys));
    a.value_flags = static_cast<uint8_t*>(arena.take(keys));
    a.query_flags = static_cast<uint8_t*>(arena.take(queries));
    a.grad_out_flags = static_cast<uint8_t*>(arena.take(queries));
    arena.take_scratch(kernels.backward_scratch(p));
    if (pass == 0) arena.allocate();
  }
  for (p.first_unit = 0; p.first_unit < units; p.first_unit += chunk) {
    a.problem = p;
    a.num_units = std::min(chunk, units - p.first_unit);
    arena.launch(kernels.pack_keys, a, a.num_units * p.key_blocks, 8);
    arena.launch(kernels.pack_queries, a, a.num_units * heads * p.query_blocks, 8);
    arena.launch(kernels.backward, a, a.num_units * a.splits, 1);
    arena.launch(kernels.finish, a, a.num_units * heads * p.query_blocks, 8);
  }
  return {grad_q, grad_k, grad_v};
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&fastpar::attention_forward_cpu));
  m.impl("attention_backward", TORCH_BOX(&fastpar::attention_backward_cpu));
}
