// What the op layer (moe_rows.cpp) and the instruction-set versions (moe_rows_<isa>.cpp) agree on.
#pragma once

#include <cstdint>

namespace fastpar {

// Tables whose rows count as those of one, lying one below the other.
struct RowTables {
  int count;
  const char* const* data;
  const int64_t* strides;  // between rows, in bytes
  const int64_t* begins;   // [count + 1]: the number of each table's first row, and of rows in all
};

struct CopyRows {
  RowTables tables;
  const int64_t* index;
  int64_t row_bytes;
  char* out;
  int64_t out_stride;  // in bytes
  bool stream;
};

struct GatherRows {
  RowTables tables;
  const int64_t* index;
  const void* scale;  // of each row: float, or double for float64; null: 1
  int64_t width;
  char* out;
  int64_t out_stride;  // in bytes
  bool stream;
};

struct SumRows {
  RowTables tables;
  const int64_t* index;  // [rows, choices]
  int64_t choices;
  const void* weights;  // [rows, choices], float, or double for float64; null: 1
  const char* add;      // null: 0
  int64_t add_stride;   // in bytes
  int add_type;         // FloatType; that of the tables for float64
  int64_t width;
  char* out;
  int64_t out_stride;  // in bytes
  bool stream;
};

// A row that is summed.
struct Choice {
  const char* row;
  double weight;
};

struct DotRows {
  const char* rows;
  int64_t stride;  // in bytes
  RowTables tables;
  const int64_t* index;
  int64_t width;
  void* out;  // float, or double for float64
};

// Kernels take rows [begin, end), and say whether every index was within the tables; such a row counts as one of zeros.
using CopyRowsKernel = bool (*)(const CopyRows&, int64_t begin, int64_t end);
using GatherRowsKernel = bool (*)(const GatherRows&, int64_t begin, int64_t end);
using SumRowsKernel = bool (*)(const SumRows&, int64_t begin, int64_t end, Choice* scratch);  // of 2 * choices
using DotRowsKernel = bool (*)(const DotRows&, int64_t begin, int64_t end);

// By FloatType: of the tables and of `out`, or of the rows. Null where there is none: float64 goes with itself only, in
// the portable version.
struct MoeRowsKernels {
  CopyRowsKernel copy;
  GatherRowsKernel gather[4][4];
  SumRowsKernel sum[4][4];
  DotRowsKernel dot[4][4];
};

extern const MoeRowsKernels kMoeRowsPortable;
#if FASTPAR_X86
extern const MoeRowsKernels kMoeRowsAvx2;
extern const MoeRowsKernels kMoeRowsAvx512;
#endif

}  // namespace fastpar
