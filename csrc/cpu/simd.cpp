// The choice of instruction set.
#include "simd.h"

#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <string>

namespace bertfast {
namespace {

Isa machine_isa() {
#if defined(__x86_64__)
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("avx512bf16") ? Isa::avx512bf16 : Isa::avx512;
  }
  if (has_avx2) return Isa::avx2;
#endif
  return Isa::baseline;
}

Isa allowed_isa() {
  const char* named = std::getenv("BERTFAST_CPU_ISA");
  const std::string name = named ? named : "avx512bf16";
  if (name == "baseline") return Isa::baseline;
  if (name == "avx2") return Isa::avx2;
  if (name == "avx512") return Isa::avx512;
  STD_TORCH_CHECK(name == "avx512bf16", "BERTFAST_CPU_ISA: expected baseline, avx2, avx512 or avx512bf16, got ", name);
  return Isa::avx512bf16;
}

}  // namespace

Isa best_isa() {
  static const Isa best = std::min(machine_isa(), allowed_isa());
  return best;
}

}  // namespace bertfast
