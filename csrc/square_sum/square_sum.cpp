// CPU op layer of the exact sum of squares: check, cut the tensors into blocks, launch, carry; and the root of a sum.
// What the numbers mean is in fastpar/ops/square_sum.py, how they are summed in square_sum_kernel.h.
#include "square_sum/square_sum.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#if FASTPAR_X86
#include <immintrin.h>
#endif

#include "common/checks.h"
#include "common/cpu_capability.h"
#include "common/tensor_rows.h"

namespace fastpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGrainBlocks = 8;

const SquareSumKernels& kernels(FloatType type) {
#if FASTPAR_X86
  if (type != FloatType::kFloat64) {
    if (cpu_capability() >= CpuCapability::kAvx512) return kSquareSumAvx512;
    if (cpu_capability() == CpuCapability::kAvx2) return kSquareSumAvx2;
  }
#endif
  return kSquareSumPortable;
}

// While it lives, the thread computes with subnormal numbers, and rounds to nearest, whatever torch.set_flush_denormal
// has set for it: that is a property of a thread, and the sum must not depend on which thread an element falls to.
class DefaultFloatingPoint {
 public:
#if FASTPAR_X86
  DefaultFloatingPoint() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatingPoint() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  DefaultFloatingPoint() {}
#endif
};

// Whether the elements are all of the memory between the first and the last, in any order.
bool fills_its_memory(const Tensor& x) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1) dims.emplace_back(x.stride(d), x.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

void carry(SquareSum* sum) {
  for (int i = 0; i + 1 < SquareSum::kDigits; ++i) {
    sum->digits[i + 1] += sum->digits[i] >> 32;  // rounds down, so that negative digits borrow
    sum->digits[i] &= 0xffffffff;
  }
}

// Elements as the kernels take them.
struct Span {
  const char* data;
  int64_t count;
  int64_t element_size;
  SquareSumKernel kernel;
  int64_t first_block;
};

void add_blocks(const std::vector<Span>& spans, int64_t begin, int64_t end, SquareSum* sum) {
  const auto after = [](int64_t block, const Span& span) { return block < span.first_block; };
  auto span = std::upper_bound(spans.begin(), spans.end(), begin, after) - 1;
  for (int64_t block = begin; block < end; ++span) {
    const int64_t start = (block - span->first_block) * kSquareSumBlock;
    const int64_t count = std::min((end - block) * kSquareSumBlock, span->count - start);
    span->kernel(span->data + start * span->element_size, count, sum);
    block += (count + kSquareSumBlock - 1) / kSquareSumBlock;
  }
}

Tensor exact_square_sum_cpu(std::vector<Tensor> tensors) {
  FASTPAR_CHECK(!tensors.empty(), "tensors must not be empty");
  std::vector<Tensor> kept;  // copies of what does not fill its memory
  std::vector<Span> spans;
  int64_t blocks = 0;
  for (const Tensor& x : tensors) {
    const FloatType type = float_type(x, "tensors");
    if (x.numel() == 0) continue;
    kept.push_back(fills_its_memory(x) ? x : torch::stable::contiguous(x));
    spans.push_back({static_cast<const char*>(kept.back().const_data_ptr()), x.numel(),
                     static_cast<int64_t>(x.element_size()), kernels(type).of[static_cast<int>(type)], blocks});
    blocks += (x.numel() + kSquareSumBlock - 1) / kSquareSumBlock;
  }
  SquareSum total;
  std::mutex mutex;
  torch::stable::parallel_for(0, blocks, kGrainBlocks, [&](int64_t begin, int64_t end) {
    const DefaultFloatingPoint environment;
    SquareSum sum;  // a digit has room for 2^31 additions; a block makes fewer than 2^7, so for 2^36 elements
    add_blocks(spans, begin, end, &sum);
    carry(&sum);
    const std::lock_guard<std::mutex> lock(mutex);
    total.nans += sum.nans;
    total.infinities += sum.infinities;
    for (int i = 0; i < SquareSum::kDigits; ++i) total.digits[i] += sum.digits[i];
  });
  carry(&total);
  Tensor out = torch::stable::new_empty(tensors[0], {kSquareSumLength}, ScalarType::Long);
  memcpy(out.mutable_data_ptr(), &total, sizeof total);
  return out;
}

// floor(sqrt(value)) of value < 2^120
uint64_t integer_root(unsigned __int128 value) {
  if (value == 0) return 0;
  uint64_t root = static_cast<uint64_t>(std::sqrt(static_cast<double>(value)));  // good to 2^-52 of itself
  root = static_cast<uint64_t>((root + value / root) / 2);                       // to 1
  while (static_cast<unsigned __int128>(root) * root > value) --root;
  while (static_cast<unsigned __int128>(root + 1) * (root + 1) <= value) ++root;
  return root;
}

// root * 2^exponent rounded to nearest even, to `digits` binary digits and no finer than 2^lowest. The last bit of root
// may be one that only says that there is more.
double rounded(uint64_t root, int exponent, int digits, int lowest) {
  const int length = root == 0 ? 0 : 64 - __builtin_clzll(root);
  const int drop = std::max({length - digits, lowest - exponent, 0});
  if (drop > 63) return 0.0;
  const uint64_t rest = root & ((uint64_t{1} << drop) - 1), half = (uint64_t{1} << drop) >> 1;
  uint64_t kept = root >> drop;
  if (drop > 0 && (rest > half || (rest == half && (kept & 1) != 0))) ++kept;
  return std::ldexp(static_cast<double>(kept), drop + exponent);
}

double root_of(SquareSum sum, bool is_float) {
  if (sum.nans != 0) return std::numeric_limits<double>::quiet_NaN();
  if (sum.infinities != 0) return std::numeric_limits<double>::infinity();
  carry(&sum);
  // The top 118 bits or so, which give a root of more bits than a double has. An even number of bits is left away.
  int place = SquareSum::kDigits - 1;
  while (place > 0 && sum.digits[place] == 0) --place;
  unsigned __int128 value = static_cast<uint64_t>(sum.digits[place]);  // the last digit may have 63 bits
  while (place > 0 && value < (static_cast<unsigned __int128>(1) << 86)) {
    value = value << 32 | static_cast<uint64_t>(sum.digits[--place]);
  }
  int shift = 0;
  if (place > 0) {
    const auto next = static_cast<uint64_t>(sum.digits[place - 1]);
    for (; value < (static_cast<unsigned __int128>(1) << 116) && shift < 32; shift += 2) {
      value = value << 2 | (next >> (30 - shift) & 3);
    }
  }
  bool has_more = place > 0 && (static_cast<uint64_t>(sum.digits[place - 1]) << shift & 0xffffffff) != 0;
  for (int i = 0; i + 1 < place; ++i) has_more = has_more || sum.digits[i] != 0;
  // A sum of few bits is followed by zeros: its root may have more than float64 has.
  for (; value != 0 && value < (static_cast<unsigned __int128>(1) << 116); shift += 2) value <<= 2;
  const uint64_t root = integer_root(value);
  has_more = has_more || static_cast<unsigned __int128>(root) * root != value;
  const int exponent = (SquareSum::kLowest + 32 * place - shift) / 2;
  const uint64_t marked = root | static_cast<uint64_t>(has_more);
  return is_float ? rounded(marked, exponent, 24, -149) : rounded(marked, exponent, 53, -1074);
}

Tensor square_sum_norm_cpu(const Tensor& sums, ScalarType dtype) {
  FASTPAR_CHECK(sums.scalar_type() == ScalarType::Long && sums.dim() == 1 && sums.size(0) == kSquareSumLength &&
                    sums.is_contiguous(),
                "sums must be int64 of shape [", kSquareSumLength, "] and contiguous");
  FASTPAR_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "dtype must be float32 or float64");
  const DefaultFloatingPoint environment;
  SquareSum sum;
  memcpy(&sum, sums.const_data_ptr(), sizeof sum);
  Tensor out = torch::stable::new_empty(sums, {}, dtype);
  const double root = root_of(sum, dtype == ScalarType::Float);
  if (dtype == ScalarType::Float) {
    *out.mutable_data_ptr<float>() = static_cast<float>(root);
  } else {
    *out.mutable_data_ptr<double>() = root;
  }
  return out;
}

}  // namespace
}  // namespace fastpar

STABLE_TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("exact_square_sum", TORCH_BOX(&fastpar::exact_square_sum_cpu));
  m.impl("square_sum_norm", TORCH_BOX(&fastpar::square_sum_norm_cpu));
}
