// The device behind csrc/cuda/intrinsics.cuh, for a C++ compiler and the CPU. CUDA's own headers give the types and the
// half-precision arithmetic, which they implement for the host too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <driver_types.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "copy.h"
#include "launch.h"
#include "matrix.h"
#include "pointers.h"
#include "runtime.h"
#include "warp.h"

// Pointers are classes here. And a variable of a block would be one of each thread: kernels take SharedMemory.
#undef __restrict__
#define __restrict__
#undef __shared__
#define __launch_bounds__(...)

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace bertfast {

// Known to nvcc without a header.
using std::max;
using std::min;

inline uint4 load_16(const Global<const uint4>& address) {
  const uintptr_t checked = address.checked(16, 16, emulator::Access::kRead);
  emulator::global_log.note_read_only(address.extent());
  return *reinterpret_cast<const uint4*>(checked);
}
inline void store_16(const Global<uint4>& address, uint4 value) {
  *reinterpret_cast<uint4*>(address.checked(16, 16, emulator::Access::kWrite)) = value;
}
inline void store_16(const Shared<uint4>& address, uint4 value) {
  *reinterpret_cast<uint4*>(address.checked(16, 16, emulator::Access::kWrite)) = value;
}

inline float reciprocal(float x) {
  return 1.0f / x;
}

inline float exp2_approximate(float x) {
  return x < -126.0f ? 0.0f : std::exp2(x);
}

inline int opaque(int value) {
  return value;
}

inline int lowest_bit(uint32_t bits) {
  return __builtin_ctz(bits);
}

inline uint32_t multiply_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((uint64_t{a} * b) >> 32);
}

}  // namespace bertfast
