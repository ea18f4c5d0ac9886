#include "common/cpu_capability.h"

#include <atomic>

#include "common/checks.h"

#if FASTPAR_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastpar {
namespace {

constexpr const char* kNames[kNumCpuCapabilities] = {"portable", "avx2", "avx512", "avx512bf16", "amx"};

#if FASTPAR_X86
// Tiles of bfloat16, and the kernel's leave to use them: their registers are 8 KiB that a process has to ask for.
bool has_amx() {
  constexpr unsigned kTile = 1u << 24, kBFloat16 = 1u << 22;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (~edx & (kTile | kBFloat16)) != 0) return false;
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

CpuCapability detect() {
#if FASTPAR_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (bf16 && has_amx()) return CpuCapability::kAmx;
  if (bf16) return CpuCapability::kAvx512Bf16;
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
