#include <array>
#include <cstdlib>
#include <cstring>

#include "winnow/core/error.h"
#include "winnow/cpu/kernels.h"

// WINNOW_CPU_MODULES(X) names the modules of this build, best first: X(x86_64_v4) X(x86_64_v3) ...
#define WINNOW_DECLARE(name) extern "C" const winnow::CpuKernels* winnow_cpu_kernels_##name();
WINNOW_CPU_MODULES(WINNOW_DECLARE)
#undef WINNOW_DECLARE

namespace winnow {
namespace {

// These check what the modules use of the x86-64 levels of the psABI.
[[maybe_unused]] bool has_x86_64_v4() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

[[maybe_unused]] bool has_x86_64_v3() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

[[maybe_unused]] bool has_baseline() { return true; }

#define WINNOW_COUNT(name) +1
constexpr std::size_t kModules = 0 WINNOW_CPU_MODULES(WINNOW_COUNT);
#undef WINNOW_COUNT

const CpuKernels& select() {
  const char* forced = std::getenv("WINNOW_CPU_ISA");
  const bool any = forced == nullptr || *forced == '\0';
  std::string known;
  for (const CpuModule& module : cpu_modules()) {
    if (module.runs_here && (any || std::strcmp(forced, module.kernels->name) == 0)) {
      return *module.kernels;
    }
    known += std::string(known.empty() ? "" : ", ") + module.kernels->name +
             (module.runs_here ? "" : " (not on this processor)");
  }
  if (any) {
    throw Error(ErrorCode::unsupported, "cpu_kernels",
                "no module of this build runs on this processor: " + known);
  }
  throw Error(ErrorCode::unsupported, "cpu_kernels", "WINNOW_CPU_ISA", "one of " + known, forced);
}

}  // namespace

std::span<const CpuModule> cpu_modules() {
#define WINNOW_ENTRY(name) CpuModule{winnow_cpu_kernels_##name(), has_##name()},
  static const std::array<CpuModule, kModules> modules = {WINNOW_CPU_MODULES(WINNOW_ENTRY)};
#undef WINNOW_ENTRY
  return modules;
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = select();
  return chosen;
}

}  // namespace winnow
