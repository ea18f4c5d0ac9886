// Rows gathered, summed and multiplied: the CPU kernels, written once over Vec and compiled per instruction set.
//
//   copy    out[i] = table[index[i]]                                    bytes, of any dtype
//   gather  out[i] = scale[i] * table[index[i]]                         one product, then rounded to out's dtype
//   sum     out[i] = add[i] + sum over k of weights[i, k] * table[index[i, k]]
//   dot     out[i] = <rows[i], table[index[i]]>
//
// All are bound by memory. Rows lie anywhere, so while one is read, the next one is prefetched: the processor's own
// prefetcher starts anew with every row.
//
// Measured on Zen 4, one thread, GB/s read and written, rows of 2 to 28 KiB of which 34 MB are moved (memcpy of as
// much: 28 to 36), without prefetching / into the first-level cache / into the second: copy 22-33 / 9-24 / 25-33; copy
// past the caches 37-57 / 37-57 / 47-57; sum past the caches 18-34 / 22-35 / 26-38. Others were running, so these are
// the best of 27 calls in turns.
//
// Note: one result. Sums are the same bits on every instruction set: each element's sum starts at `add` or 0 and takes
// k in order, and each product is rounded before it is added (not fused, since the portable version has no FMA). A dot
// product is 64 sums, of the elements i with i % 64 = 0, 1, ..., whose halves are added until one is left.
//
// Worked example: table [[1, 2], [3, 4]], index [[1, 0], [0, -1]], weights [[0.5, 2], [1, 7]]: sum [[3.5, 6], [1, 2]].
#pragma once

#include "common/dtypes.h"
#include "common/vec_loop.h"
#include "moe/moe_rows.h"

namespace fastpar {
namespace {

constexpr int64_t kCacheLine = 64;

// Into the second-level cache: the first has no room for the next rows beside these.
inline void prefetch_row(const void* p) { __builtin_prefetch(p, 0, 2); }

class RowFinder {
 public:
  explicit RowFinder(const RowTables& tables) : tables_(tables), rows_(tables.begins[tables.count]) {
    while (2 * step_ < tables.count) step_ *= 2;
  }

  // Null for a negative number, and for one beyond the tables.
  const char* operator()(int64_t row) {
    if (row < 0 || row >= rows_) {
      all_within_ = all_within_ && row < 0;
      return nullptr;
    }
    // The last table that begins at or before the row, so none without rows. In steps of 2^n without a branch: rows of
    // neighbours in an index are of any table, and a wrong guess costs more than all steps.
    int at = 0;
    for (int step = step_; step > 0; step /= 2) {
      const int next = at + step < tables_.count ? at + step : tables_.count;
      at = tables_.begins[next] <= row ? next : at;
    }
    return tables_.data[at] + (row - tables_.begins[at]) * tables_.strides[at];
  }

  bool all_within() const { return all_within_; }

 private:
  const RowTables& tables_;
  const int64_t rows_;
  int step_ = 1;
  bool all_within_ = true;
};

// ---- copy ---------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

struct Bytes {
  static constexpr int64_t kWidth = 64;
  __m512i v;

  static Bytes load(const char* p) { return {_mm512_loadu_si512(p)}; }
  void store(char* p) const { _mm512_storeu_si512(p, v); }
  void stream(char* p) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v); }
};

#elif defined(__AVX2__)

struct Bytes {
  static constexpr int64_t kWidth = 32;
  __m256i v;

  static Bytes load(const char* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  void store(char* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  void stream(char* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }
};

#else

struct Bytes {
  static constexpr int64_t kWidth = 16;
  char v[kWidth];

  static Bytes load(const char* p) {
    Bytes out;
    memcpy(out.v, p, kWidth);
    return out;
  }
  void store(char* p) const { memcpy(p, v, kWidth); }
  void stream(char* p) const { store(p); }
};

#endif

// bytes >= Bytes::kWidth. The first and the last register may overlap their neighbours, which hold the same bytes.
template <bool kStream>
void copy_row(char* to, const char* from, const char* next, int64_t bytes) {
  constexpr int64_t W = Bytes::kWidth, kBlock = 4 * W;
  int64_t i = 0;
  if (kStream) {
    Bytes::load(from).store(to);
    i = (W - static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % W)) % W;
  }
  for (; i + kBlock <= bytes; i += kBlock) {
    for (int64_t line = 0; line < kBlock; line += kCacheLine) prefetch_row(next + i + line);
    Bytes block[4];
    for (int u = 0; u < 4; ++u) block[u] = Bytes::load(from + i + u * W);
    for (int u = 0; u < 4; ++u) kStream ? block[u].stream(to + i + u * W) : block[u].store(to + i + u * W);
  }
  for (; i + W <= bytes; i += W) kStream ? Bytes::load(from + i).stream(to + i) : Bytes::load(from + i).store(to + i);
  if (i < bytes) Bytes::load(from + bytes - W).store(to + bytes - W);
}

// Rows of one number each: lookups.
template <typename Word>
bool copy_words(const CopyRows& a, int64_t begin, int64_t end) {
  RowFinder find(a.tables);
  for (int64_t i = begin; i < end; ++i) {
    const char* from = find(a.index[i]);
    Word word = 0;
    if (from != nullptr) memcpy(&word, from, sizeof word);
    memcpy(a.out + i * a.out_stride, &word, sizeof word);
  }
  return find.all_within();
}

template <bool kStream>
bool copy_wide_rows(const CopyRows& a, int64_t begin, int64_t end) {
  RowFinder find(a.tables);
  const char* next = find(a.index[begin]);
  for (int64_t i = begin; i < end; ++i) {
    const char* from = next;
    next = i + 1 < end ? find(a.index[i + 1]) : nullptr;
    char* to = a.out + i * a.out_stride;
    if (from == nullptr) {
      memset(to, 0, static_cast<size_t>(a.row_bytes));
    } else {
      copy_row<kStream>(to, from, next == nullptr ? from : next, a.row_bytes);
    }
  }
  if (kStream) fence_streamed_stores();
  return find.all_within();
}

bool copy_narrow_rows(const CopyRows& a, int64_t begin, int64_t end) {
  RowFinder find(a.tables);
  for (int64_t i = begin; i < end; ++i) {
    const char* from = find(a.index[i]);
    char* to = a.out + i * a.out_stride;
    if (from == nullptr) {
      memset(to, 0, static_cast<size_t>(a.row_bytes));
    } else {
      memcpy(to, from, static_cast<size_t>(a.row_bytes));
    }
  }
  return find.all_within();
}

bool copy_rows(const CopyRows& a, int64_t begin, int64_t end) {
  switch (a.row_bytes) {
    case 2:
      return copy_words<uint16_t>(a, begin, end);
    case 4:
      return copy_words<uint32_t>(a, begin, end);
    case 8:
      return copy_words<uint64_t>(a, begin, end);
    default:
      break;
  }
  if (a.row_bytes < Bytes::kWidth) return copy_narrow_rows(a, begin, end);
  return a.stream ? copy_wide_rows<true>(a, begin, end) : copy_wide_rows<false>(a, begin, end);
}

// ---- gather -------------------------------------------------------------------------------------------------------

template <typename T, typename O, bool kStream>
bool gather_rows_as(const GatherRows& a, int64_t begin, int64_t end) {
  RowFinder find(a.tables);
  const float* scale = static_cast<const float*>(a.scale);
  const char* next = find(a.index[begin]);
  for (int64_t i = begin; i < end; ++i) {
    const T* from = reinterpret_cast<const T*>(next);
    next = i + 1 < end ? find(a.index[i + 1]) : nullptr;
    O* to = reinterpret_cast<O*>(a.out + i * a.out_stride);
    if (from == nullptr) {
      memset(static_cast<void*>(to), 0, sizeof(O) * static_cast<size_t>(a.width));
      continue;
    }
    const T* ahead = next == nullptr ? from : reinterpret_cast<const T*>(next);
    const Vec factor = Vec::set(scale == nullptr ? 1.0f : scale[i]);
    const auto body = [&](int64_t c, auto access, int) __attribute__((always_inline)) {
      prefetch_row(ahead + c);
      access.store(access.load(from + c) * factor, to + c);
    };
    if (kStream) {
      for_each_streamed_vec(elements_to_alignment(to), a.width, body);
    } else {
      for_each_vec(a.width, body);
    }
  }
  if (kStream) fence_streamed_stores();
  return find.all_within();
}

template <typename T, typename O>
bool gather_rows(const GatherRows& a, int64_t begin, int64_t end) {
  return a.stream ? gather_rows_as<T, O, true>(a, begin, end) : gather_rows_as<T, O, false>(a, begin, end);
}

// ---- sum ----------------------------------------------------------------------------------------------------------

// The choices of row i that have a row, in their order.
template <typename Weight>
int list_choices(const SumRows& a, int64_t i, RowFinder& find, Choice* list) {
  const Weight* weights = static_cast<const Weight*>(a.weights);
  int count = 0;
  for (int64_t k = i * a.choices; k < (i + 1) * a.choices; ++k) {
    const char* row = find(a.index[k]);
    if (row == nullptr) continue;
    list[count].row = row;
    list[count++].weight = weights == nullptr ? 1.0 : static_cast<double>(weights[k]);
  }
  return count;
}

template <typename Access>
Vec load_addend(const SumRows& a, int64_t i, int64_t c, const Access& access) {
  const char* row = a.add + i * a.add_stride;
  switch (a.add_type) {
    case 0:
      return access.load(reinterpret_cast<const float*>(row) + c);
    case 1:
      return access.load(reinterpret_cast<const bfloat16*>(row) + c);
    default:
      return access.load(reinterpret_cast<const float16*>(row) + c);
  }
}

// kVecs registers of columns from c on.
template <typename T, typename O, int kVecs, typename Access>
void sum_columns(const SumRows& a, int64_t i, int64_t c, const Choice* list, int count, const Access& access) {
  constexpr int W = Vec::kWidth;
  Vec total[kVecs];
  for (int u = 0; u < kVecs; ++u) total[u] = a.add == nullptr ? Vec::set(0.0f) : load_addend(a, i, c + u * W, access);
  for (int k = 0; k < count; ++k) {
    const T* row = reinterpret_cast<const T*>(list[k].row) + c;
    const Vec weight = Vec::set(static_cast<float>(list[k].weight));
    for (int u = 0; u < kVecs; ++u) total[u] = total[u] + (access.load(row + u * W) * weight).rounded();
  }
  O* out = reinterpret_cast<O*>(a.out + i * a.out_stride) + c;
  for (int u = 0; u < kVecs; ++u) access.store(total[u], out + u * W);
}

template <typename T, typename O, bool kStream>
void sum_row(const SumRows& a, int64_t i, const Choice* list, int count, const Choice* next, int next_count) {
  constexpr int W = Vec::kWidth, kVecs = 4, kBlock = kVecs * W;
  const WholeVec<kStream> whole;
  int64_t c = 0;
  for (; c + kBlock <= a.width; c += kBlock) {
    for (int k = 0; k < next_count; ++k) {
      const char* ahead = next[k].row + c * static_cast<int64_t>(sizeof(T));
      for (int64_t line = 0; line < kBlock * static_cast<int64_t>(sizeof(T)); line += kCacheLine)
        prefetch_row(ahead + line);
    }
    sum_columns<T, O, kVecs>(a, i, c, list, count, whole);
  }
  for (; c + W <= a.width; c += W) sum_columns<T, O, 1>(a, i, c, list, count, whole);
  if (c < a.width) sum_columns<T, O, 1>(a, i, c, list, count, PartVec{static_cast<int>(a.width - c)});
}

template <typename T, typename O>
bool sum_rows(const SumRows& a, int64_t begin, int64_t end, Choice* scratch) {
  RowFinder find(a.tables);
  Choice *list = scratch, *next = scratch + a.choices;
  int next_count = list_choices<float>(a, begin, find, next);
  bool streamed = false;
  for (int64_t i = begin; i < end; ++i) {
    Choice* const swapped = list;
    list = next;
    next = swapped;
    const int count = next_count;
    next_count = i + 1 < end ? list_choices<float>(a, i + 1, find, next) : 0;
    if (a.stream && elements_to_alignment(reinterpret_cast<const O*>(a.out + i * a.out_stride)) == 0) {
      sum_row<T, O, true>(a, i, list, count, next, next_count);
      streamed = true;
    } else {
      sum_row<T, O, false>(a, i, list, count, next, next_count);
    }
  }
  if (streamed) fence_streamed_stores();
  return find.all_within();
}

// ---- dot ----------------------------------------------------------------------------------------------------------

constexpr int kDotSums = 64;

template <typename A, typename B>
void add_products(const A* a, const B* b, Vec* sums) {
  constexpr int W = Vec::kWidth;
  for (int u = 0; u < kDotSums / W; ++u) sums[u] = sums[u] + (Vec::load(a + u * W) * Vec::load(b + u * W)).rounded();
}

template <typename A, typename B>
float dot(const A* a, const B* b, int64_t width, const B* next) {
  constexpr int W = Vec::kWidth;
  Vec sums[kDotSums / W];
  for (int u = 0; u < kDotSums / W; ++u) sums[u] = Vec::set(0.0f);
  int64_t c = 0;
  for (; c + kDotSums <= width; c += kDotSums) {
    for (int line = 0; line < kDotSums; line += kCacheLine / static_cast<int>(sizeof(B))) prefetch_row(next + c + line);
    add_products(a + c, b + c, sums);
  }
  if (c < width) {
    A rest_a[kDotSums] = {};
    B rest_b[kDotSums] = {};
    memcpy(rest_a, a + c, sizeof(A) * static_cast<size_t>(width - c));
    memcpy(rest_b, b + c, sizeof(B) * static_cast<size_t>(width - c));
    add_products(rest_a, rest_b, sums);
  }
  float lanes[kDotSums];
  for (int u = 0; u < kDotSums / W; ++u) sums[u].store(lanes + u * W);
  for (int half = kDotSums / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

template <typename A, typename B>
bool dot_rows(const DotRows& a, int64_t begin, int64_t end) {
  RowFinder find(a.tables);
  float* out = static_cast<float*>(a.out);
  const char* next = find(a.index[begin]);
  for (int64_t i = begin; i < end; ++i) {
    const B* other = reinterpret_cast<const B*>(next);
    next = i + 1 < end ? find(a.index[i + 1]) : nullptr;
    const A* row = reinterpret_cast<const A*>(a.rows + i * a.stride);
    const B* ahead = next == nullptr ? other : reinterpret_cast<const B*>(next);
    out[i] = other == nullptr ? 0.0f : dot(row, other, a.width, ahead);
  }
  return find.all_within();
}

}  // namespace
}  // namespace fastpar

// The table of an instruction set, with its kernels of float64 or nullptr.
#define FASTPAR_MOE_ROWS_PAIRS(kernel, wide)                                                     \
  {                                                                                              \
      {kernel<float, float>, kernel<float, bfloat16>, kernel<float, float16>, nullptr},          \
      {kernel<bfloat16, float>, kernel<bfloat16, bfloat16>, kernel<bfloat16, float16>, nullptr}, \
      {kernel<float16, float>, kernel<float16, bfloat16>, kernel<float16, float16>, nullptr},    \
      {nullptr, nullptr, nullptr, wide},                                                         \
  }
#define FASTPAR_MOE_ROWS_KERNELS(wide_gather, wide_sum, wide_dot)                                           \
  {copy_rows, FASTPAR_MOE_ROWS_PAIRS(gather_rows, wide_gather), FASTPAR_MOE_ROWS_PAIRS(sum_rows, wide_sum), \
   FASTPAR_MOE_ROWS_PAIRS(dot_rows, wide_dot)}
