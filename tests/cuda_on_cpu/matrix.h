// Tensor cores' operations, on fragments as the PTX ISA lays them out.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "pointers.h"
#include "warp.h"

namespace bertfast {
namespace emulator {

void load_matrices(uint32_t (&fragment)[4], uintptr_t row, bool transposed, Location location);
void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_half, Location location);

}  // namespace emulator

template <class T>
void load_matrix_x4(uint32_t (&fragment)[4], const Shared<T>& row, BERTFAST_HERE) {
  static_assert(sizeof(T) == 2, "ldmatrix moves 16-bit elements");
  emulator::load_matrices(fragment, row.checked_quietly(16, 16), false, {file, line});
}
template <class T>
void load_matrix_x4_transposed(uint32_t (&fragment)[4], const Shared<T>& row, BERTFAST_HERE) {
  static_assert(sizeof(T) == 2, "ldmatrix moves 16-bit elements");
  emulator::load_matrices(fragment, row.checked_quietly(16, 16), true, {file, line});
}

template <class T>
void multiply_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], BERTFAST_HERE) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, "half precision");
  emulator::multiply(c, a, b, std::is_same_v<T, __half>, {file, line});
}

}  // namespace bertfast
