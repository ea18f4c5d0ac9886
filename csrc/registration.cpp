// Every op schema of fastpar, one line each, and the ops that describe the library itself.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/large_buffer.h"

STABLE_TORCH_LIBRARY(fastpar, m) {
  // the library itself
  m.def("build_info() -> str");
  m.def("cpu_capability() -> str");
  m.def("set_cpu_capability(str name) -> ()");
  m.def("large_buffer_stats() -> int[]");
  m.def("large_buffer_release() -> ()");
  m.def("large_buffer_empty(SymInt[] size, ScalarType dtype) -> Tensor");
  // cross_entropy
  m.def(
      "vocab_parallel_cross_entropy_stats(Tensor logits, Tensor target, Tensor? weight, SymInt vocab_start, SymInt vocab_total, int ignore_index, bool smoothing, float softcap, float logit_scale, int call=0) -> Tensor");
  m.def(
      "vocab_parallel_cross_entropy_stats_exp_(Tensor(a!) logits, Tensor target, Tensor? weight, SymInt vocab_start, SymInt vocab_total, int ignore_index, bool smoothing, float softcap, float logit_scale, int call=0) -> Tensor");
  m.def(
      "vocab_parallel_cross_entropy_merge(Tensor gathered, Tensor target, Tensor? weight, Tensor? weight_sum, SymInt vocab_total, int ignore_index, float label_smoothing, float z_loss) -> (Tensor, Tensor)");
  m.def(
      "vocab_parallel_cross_entropy_backward(Tensor logits, Tensor lse, Tensor target, Tensor? weight, Tensor? weight_sum, Tensor grad_loss, Tensor? grad_lse, SymInt vocab_start, SymInt vocab_total, int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale) -> Tensor");
  m.def(
      "vocab_parallel_cross_entropy_backward_(Tensor(a!) logits, Tensor lse, Tensor target, Tensor? weight, Tensor? weight_sum, Tensor grad_loss, Tensor? grad_lse, SymInt vocab_start, SymInt vocab_total, int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale) -> ()");
  m.def(
      "cross_entropy_forward(Tensor logits, Tensor target, Tensor? weight, Tensor? weight_sum, Tensor? denominator, int reduction, int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale) -> (Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_backward(Tensor logits, Tensor lse, Tensor target, Tensor? weight, Tensor? weight_sum, Tensor grad_out, Tensor divisor, SymInt vocab_start, SymInt vocab_total, int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale) -> Tensor");
  m.def(
      "cross_entropy_forward_backward(Tensor logits, Tensor target, Tensor? weight, Tensor? weight_sum, Tensor grad_loss, int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale) -> (Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_forward_backward_(Tensor(a!) logits, Tensor target, Tensor? weight, Tensor? weight_sum, Tensor grad_loss, int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale) -> (Tensor, Tensor)");
  m.def(
      "cross_entropy_reduced_forward_backward(Tensor logits, Tensor target, Tensor? weight, Tensor? weight_sum, Tensor? denominator, int reduction, int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale) -> (Tensor, Tensor, Tensor, Tensor)");
  // rms_norm
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset) -> (Tensor, Tensor)");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset) -> (Tensor, Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, bool needs_grad_x, bool needs_grad_weight) -> (Tensor, Tensor)");
  // the same of rows that are split over ranks: what a rank can do before its collective, and after it
  m.def("rms_norm_squares(Tensor x, Tensor? residual) -> (Tensor, Tensor)");
  m.def("rms_norm_scale(Tensor x, Tensor rstd, Tensor? weight, float weight_offset) -> Tensor");
  m.def(
      "rms_norm_products(Tensor grad_out, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, bool needs_grad_weight) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_grad_x(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor rstd, Tensor factor, Tensor? weight, float weight_offset) -> Tensor");
  // rotary_embedding: tables [..., S, R / 2] for x [..., S, heads, D], or with heads_first for [..., heads, S, D]
  m.def(
      "rotary_embedding(Tensor x, Tensor cos, Tensor sin, bool heads_first, bool interleaved, bool inverse) -> Tensor");
  m.def(
      "rotary_embedding_(Tensor(a!) x, Tensor cos, Tensor sin, bool heads_first, bool interleaved, bool inverse) -> ()");
  // swiglu
  m.def("swiglu(Tensor gate, Tensor? up) -> Tensor");
  m.def("swiglu_backward(Tensor grad_out, Tensor gate, Tensor? up) -> (Tensor, Tensor)");
  m.def("swiglu_weighted(Tensor gate_up, Tensor? weights, Tensor(a!) out) -> ()");
  m.def(
      "swiglu_weighted_backward(Tensor grad_out, Tensor gate_up, Tensor? weights, Tensor(a!) out, Tensor(b!) grad_gate_up, Tensor(c!)? dots) -> ()");
  // vocab_softmax: softmax, log-softmax, log-probabilities and entropy
  m.def(
      "vocab_softmax_stats(Tensor logits, Tensor? ids, SymInt vocab_start, SymInt vocab_total, int ignore_index, bool entropy, float softcap, float logit_scale, int call=0) -> Tensor");
  m.def("vocab_softmax_merge(Tensor gathered, Tensor? ids, int ignore_index) -> (Tensor, Tensor, Tensor)");
  m.def(
      "vocab_softmax_normalize(Tensor logits, Tensor lse, bool log, bool widen, float softcap, float logit_scale) -> Tensor");
  m.def(
      "vocab_softmax_dot(Tensor logits, Tensor lse, Tensor grad_out, bool log, float softcap, float logit_scale) -> Tensor");
  m.def(
      "vocab_softmax_backward(Tensor logits, Tensor lse, Tensor grad_out, Tensor? dot, bool log, float softcap, float logit_scale) -> Tensor");
  m.def(
      "vocab_log_prob_backward(Tensor logits, Tensor lse, Tensor? ids, Tensor? grad_log_prob, Tensor? entropy, Tensor? grad_entropy, SymInt vocab_start, int ignore_index, float softcap, float logit_scale) -> Tensor");
  // vocab_filter: top-k, sampling filters, sampling
  m.def("vocab_topk(Tensor logits, SymInt k, SymInt vocab_start) -> (Tensor, Tensor, Tensor)");
  m.def("vocab_filter_histogram(Tensor logits, Tensor maximum, Tensor prefix, int digit, int mass_bits) -> Tensor");
  m.def("vocab_filter_apply(Tensor logits, Tensor cut, Tensor ties, float filter_value) -> Tensor");
  m.def(
      "vocab_gumbel_argmax(Tensor logits, int seed, SymInt vocab_start, SymInt first_row, float temperature) -> (Tensor, Tensor)");
  // embedding
  m.def("vocab_embedding(Tensor ids, Tensor weight, SymInt vocab_start) -> Tensor");
  m.def(
      "vocab_embedding_backward(Tensor ids, Tensor grad_out, SymInt num_rows, SymInt vocab_start, int padding_idx) -> Tensor");
  // moe: rows of tokens on their way to experts and back; tables lie one below the other
  m.def("moe_sort_pairs(Tensor indices, SymInt num_experts) -> (Tensor, Tensor)");
  m.def("moe_pair_slots(Tensor order, Tensor counts, Tensor first, SymInt num_pairs) -> Tensor");
  m.def(
      "moe_row_sources(Tensor[] orders, Tensor[] weights, Tensor runs, SymInt top_k, SymInt num_rows) -> (Tensor, Tensor)");
  m.def("moe_tokens_by_rank(Tensor indices, SymInt size, SymInt per_rank) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("moe_gather_rows(Tensor[] tables, Tensor index, Tensor? scale, Tensor(a!) out) -> ()");
  m.def("moe_sum_rows(Tensor[] tables, Tensor index, Tensor? weights, Tensor? add, Tensor(a!) out) -> ()");
  m.def("moe_dot_rows(Tensor rows, Tensor[] tables, Tensor index) -> Tensor");
  // symmetric memory: collectives of a group's kernels; group = [first_rank, region_bytes, mailbox_bytes, timeout_ns]
  m.def(
      "symmetric_all_reduce(Tensor x, Tensor(a!) out, Tensor buffers, Tensor signals, Tensor(b!) states, Tensor(c!) report, int[] group, int multicast, int algorithm, bool average) -> ()");
  m.def(
      "symmetric_reduce_scatter(Tensor x, Tensor(a!) out, Tensor buffers, Tensor signals, Tensor(b!) states, Tensor(c!) report, int[] group, SymInt[] counts, bool average) -> ()");
  m.def(
      "symmetric_all_gather(Tensor x, Tensor(a!) out, Tensor buffers, Tensor signals, Tensor(b!) states, Tensor(c!) report, int[] group, SymInt[] counts) -> ()");
  m.def(
      "symmetric_all_reduce_rms_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor(a!) out, Tensor(b!) sum, Tensor(c!) rstd, Tensor buffers, Tensor signals, Tensor(d!) states, Tensor(e!) report, int[] group, SymInt hidden, float eps, float weight_offset) -> ()");
  // quantize: gradients as blocks of 8-bit codes; seed < 0: rounded to nearest
  m.def("quantize_blocks(Tensor x, Tensor(a!)? residual, SymInt[] sizes, int block, int format, int seed) -> Tensor");
  m.def("sum_quantized(Tensor message, SymInt count, SymInt parts, int block, int format, bool average) -> Tensor");
  m.def("dequantize_parts(Tensor message, SymInt[] sizes, int block, int format) -> Tensor");
  m.def("dequantize_into(Tensor message, Tensor(a!)[] outs, int block, int format) -> ()");
  // one scale a part, given (0: what the part needs); block 0 in dequantize_into
  m.def("quantize_scaled(Tensor x, Tensor scales, SymInt[] sizes, int format) -> (Tensor, Tensor, Tensor)");
  // codes and scales of blocks along the last dim
  m.def("quantize_rows(Tensor x, int block, int format, int seed) -> (Tensor, Tensor)");
  m.def("dequantize_rows(Tensor codes, Tensor scales, int block, int format, ScalarType dtype) -> Tensor");
  // square_sum: the exact sum of squares as an integer, and its root
  m.def("exact_square_sum(Tensor[] tensors) -> Tensor");
  m.def("square_sum_norm(Tensor sums, ScalarType dtype) -> Tensor");
  // optimizer: grad_factor and found_inf are float32 scalars; outputs[k] belongs to params[output_of[k]];
  // rounding = [seed, key and first index of every tensor in turn], or empty
  m.def(
      "adamw_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] exp_avg_scales, Tensor(e!)[] exp_avg_sq_scales, Tensor(f!)[] outputs, Tensor(g!)[] remainders, Tensor? grad_factor, Tensor? found_inf, Tensor? step_tensor, int[] output_of, int[] rounding, float factor, int step, float lr, float beta1, float beta2, float eps, float weight_decay) -> ()");
  m.def(
      "sgd_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] momentum_scales, Tensor(d!)[] outputs, Tensor(e!)[] remainders, Tensor? grad_factor, Tensor? found_inf, int[] output_of, int[] rounding, float factor, float lr, float momentum, float dampening, float weight_decay, bool nesterov, bool first) -> ()");
  m.def(
      "lion_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_scales, Tensor(d!)[] outputs, Tensor(e!)[] remainders, Tensor? grad_factor, Tensor? found_inf, int[] output_of, int[] rounding, float factor, float lr, float beta1, float beta2, float weight_decay) -> ()");
  // attention over a table of band tiles; softcap 0: none; out_dtype: q's, or float32 (float64 for float64)
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor tiles, Tensor? tile_offsets, float scale, float softcap, float dropout_p, int dropout_seed, SymInt first_batch, SymInt first_head, Tensor? q_positions, Tensor? k_positions, ScalarType out_dtype) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, Tensor tiles, Tensor? tile_offsets, float scale, float softcap, float dropout_p, int dropout_seed, SymInt first_batch, SymInt first_head, Tensor? q_positions, Tensor? k_positions) -> (Tensor, Tensor, Tensor)");
  // dropout
  m.def("sharded_dropout(Tensor x, float p, int seed, SymInt[] offset, SymInt[] global_shape) -> Tensor");
}

namespace fastpar {
namespace {

// The file that this code was loaded from.
std::string library_path() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&library_path), &info) == 0 || info.dli_fname == nullptr) return "unknown";
  return info.dli_fname;
}

// One `key=value` per line; fastpar/_ext.py makes a dict of it.
std::string build_info() {
  return concatenate("library=", library_path(), "\n", "compiler=", __VERSION__,
                     "\ntorch_target=", FASTPAR_STRINGIZE(TORCH_TARGET_VERSION),
                     "\ncpu_capabilities=", cpu_capabilities(), "\ncuda_archs=", FASTPAR_CUDA_ARCHS);
}

std::vector<int64_t> stats_of_large_buffers() {
  const LargeBufferStats stats = large_buffer_stats();
  return {stats.in_use_bytes, stats.cached_bytes, stats.reused, stats.mapped};
}

// For scratch memory that Python code asks for; the sizes come as int64_t from a SymInt[].
torch::stable::Tensor empty_large_buffer(std::vector<int64_t> sizes, torch::headeronly::ScalarType dtype) {
  return empty_cpu(sizes, dtype);
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&fastpar::build_info));
  m.impl("cpu_capability", TORCH_BOX(&fastpar::cpu_capability_name));
  m.impl("set_cpu_capability", TORCH_BOX(&fastpar::set_cpu_capability));
  m.impl("large_buffer_stats", TORCH_BOX(&fastpar::stats_of_large_buffers));
  m.impl("large_buffer_release", TORCH_BOX(&fastpar::large_buffer_release));
  m.impl("large_buffer_empty", TORCH_BOX(&fastpar::empty_large_buffer));
}
