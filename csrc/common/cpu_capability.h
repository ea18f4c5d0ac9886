// Which of the compiled instruction-set versions of a CPU kernel runs.
#pragma once

#include <string>

namespace fastpar {

// Each has what those before it have.
enum class CpuCapability { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };
constexpr int kNumCpuCapabilities = 5;

// The best one this machine has, or the one chosen with set_cpu_capability.
CpuCapability cpu_capability();

// "amx", "avx512bf16", "avx512", "avx2" or "portable"; an error names what is possible here. For tests and benches: it
// is not synchronised with kernels that are already running.
void set_cpu_capability(const std::string& name);

std::string cpu_capability_name();

// Space-separated names of what this machine can run, best first.
std::string cpu_capabilities();

}  // namespace fastpar
