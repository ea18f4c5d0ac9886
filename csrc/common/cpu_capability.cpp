#include "common/cpu_capability.h"

#include <atomic>

#include "common/checks.h"

namespace fastpar {
namespace {

constexpr const char* kNames[kNumCpuCapabilities] = {"portable", "avx2", "avx512", "avx512bf16"};

CpuCapability detect() {
#if FASTPAR_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return CpuCapability::kAvx512Bf16;
  // F16C is not asked for: every processor with AVX2 has it.
  if (avx512) return CpuCapability::kAvx512;
  if (avx2) return CpuCapability::kAvx2;
#endif
  return CpuCapability::kPortable;
}

std::atomic<CpuCapability>& current() {
  static std::atomic<CpuCapability> value{detect()};
  return value;
}

}  // namespace

CpuCapability cpu_capability() { return current().load(std::memory_order_relaxed); }

std::string cpu_capability_name() { return kNames[static_cast<int>(cpu_capability())]; }

std::string cpu_capabilities() {
  std::string names;
  for (int i = static_cast<int>(detect()); i >= 0; --i) names += (names.empty() ? "" : " ") + std::string(kNames[i]);
  return names;
}

void set_cpu_capability(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(detect()); ++i) {
    if (name == kNames[i]) {
      current().store(static_cast<CpuCapability>(i), std::memory_order_relaxed);
      return;
    }
  }
  FASTPAR_CHECK(false, "set_cpu_capability: '", name,
                "' is not available here; this machine can run: ", cpu_capabilities());
}

}  // namespace fastpar
