// What the op layer (attention.cpp), the plan of blocks (block_plan.h) and the instruction-set versions
// (attention_<isa>.cpp) agree on.
#pragma once

#include <cstdint>

namespace fastpar {

constexpr int kBlock = 64;           // queries, and keys, of a block: one 64-bit word says which queries see a key
constexpr int kMostQueryBlocks = 4;  // of a group

// A row of the table of tiles: rows q0 <= q < q1 and keys k0 <= k < k1, visible iff lo <= (k - k0) - (q - q0) <= hi.
struct AttentionTile {
  int32_t q0, q1, k0, k1, lo, hi;
};

// A block of queries by one of keys that has visible pairs.
struct BlockPair {
  int32_t queries, keys;            // which blocks
  int32_t first_piece, num_pieces;  // the tiles with pairs in it; no pieces: all 64 x 64 pairs are visible
};

// Pairs in runs: by block of queries for forward (run r: queries == r, keys ascending), by group of key blocks for
// backward (run r: keys / group == r, sorted by queries, then keys).
struct BlockRuns {
  const int64_t* offsets;  // run r is pairs[offsets[r]] up to pairs[offsets[r + 1]]
  const BlockPair* pairs;
  const int32_t* pieces;  // indices into tiles
  const AttentionTile* tiles;
};

// [batch, heads, rows, columns], columns dense; strides in elements. q's dtype, or where it is wide that of sums.
struct AttentionMatrix {
  const void* data;
  bool is_wide;
  int64_t batch_stride, head_stride, row_stride;
};

struct AttentionProblem {
  int64_t batch, query_heads, key_heads, num_queries, num_keys, dim, value_dim;
  double scale, softcap;  // softcap 0: none
  double dropout_p;
  uint64_t dropout_seed;
  int64_t first_batch, first_head;                 // global numbers of the first, for dropout's hash
  const int64_t *query_positions, *key_positions;  // null: the numbers of the rows
  const BlockRuns* runs;                           // by batch row, or one for all
  bool runs_by_batch;

  // Filled in by the op layer from the kernel's multiples: dims padded with zeros, and numbers of blocks.
  int64_t padded_dim, padded_value_dim, query_blocks, key_blocks;
  int64_t query_group;  // blocks of queries of a task in forward
  int64_t first_unit;  // units, pairs of batch row and key head, are worked on in chunks; packed operands are a chunk's
};

// Packed operands of a chunk; [unit][block][..] for keys and values, [unit][head of the group][block][..] for queries.
// See attention_pack.h for the layouts. Flags: a block holds an infinity or NaN.
struct AttentionForwardArguments {
  AttentionProblem problem;
  AttentionMatrix q, k, v;
  void *packed_keys, *packed_values;
  uint8_t *key_flags, *value_flags;
  void* out;  // [batch, query_heads, num_queries, value_dim], contiguous
  bool out_is_wide;
  void* lse;  // float64 for float64, else float32
};

struct AttentionBackwardArguments {
  AttentionProblem problem;
  AttentionMatrix q, k, v, grad_out;
  const void *lse, *delta;  // [batch, query_heads, num_queries], contiguous; types as lse in forward
  void *key_rows, *key_columns, *value_rows;
  void *query_columns, *query_rows, *grad_out_columns, *grad_out_rows;
  uint8_t *key_flags, *value_flags, *query_flags, *grad_out_flags;
  int64_t num_units;               // of the chunk
  int64_t splits;                  // of the key groups; each sums its own part of dq
  void* partial_grad_q;            // [splits][unit][head of the group][query block][padded_dim][kBlock]
  void *grad_q, *grad_k, *grad_v;  // contiguous, accumulated precision
};

using AttentionForwardKernel = void (*)(const AttentionForwardArguments&, void* scratch, int64_t begin, int64_t end);
using AttentionBackwardKernel = void (*)(const AttentionBackwardArguments&, void* scratch, int64_t begin, int64_t end);

// One input dtype's kernels. Ranges are of: (unit, key block) to pack keys; (unit, head, query block) to pack queries
// and to finish dq; (unit, head, group of query blocks) for forward; (unit, split) for backward.
struct AttentionKernels {
  int element_bytes;                                    // of packed operands
  int real_bytes;                                       // of accumulators
  int multiple;                                         // dims are padded to it
  int key_group;                                        // key blocks that backward works on at a time
  int64_t (*forward_scratch)(const AttentionProblem&);  // bytes per task, aligned to 64
  int64_t (*backward_scratch)(const AttentionProblem&);
  AttentionForwardKernel pack_forward, forward;
  AttentionBackwardKernel pack_keys, pack_queries, backward, finish;
};

// By FloatType of q; float64 is the portable table's alone, and bfloat16 has two more.
extern const AttentionKernels kAttentionPortable[4];
#if FASTPAR_X86
extern const AttentionKernels kAttentionAvx2[3];
extern const AttentionKernels kAttentionAvx512[3];
extern const AttentionKernels kAttentionAvx512Bf16;
extern const AttentionKernels kAttentionAmx[3];
#endif

}  // namespace fastpar
