// Vectors of fp32, and rows in and out of them, for one instruction set. The file that includes this has chosen it (a
// pragma), its name (BERTFAST_ISA) and lanes of a vector (BERTFAST_LANES).
//
// Vectors are GCC's, not loops for the compiler to vectorise: it does not keep an array of sums in registers. They are
// lowered where a function is defined, before it is inlined, so with_best_isa() of simd.h cannot compile this.
#pragma once

#include <cstdint>

#include "exp2.h"
#include "simd.h"

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

constexpr int kLanes = BERTFAST_LANES;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef float AnyFloats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

BERTFAST_INLINE Floats load(const float* source) {
  return *reinterpret_cast<const AnyFloats*>(source);
}

BERTFAST_INLINE void store(float* target, Floats values) {
  *reinterpret_cast<AnyFloats*>(target) = values;
}

BERTFAST_INLINE Floats all(float value) {
  return value - Floats{};
}

// 2^z for z <= 0, down to 2^-126. NaN stays NaN.
BERTFAST_INLINE Floats exp2_of_nonpositive(Floats z) {
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits
  z = z < -126.0f ? all(-126.0f) : z;
  const Floats shifted = z + kToInteger;
  const Floats f = z - (shifted - kToInteger);
  Floats p = all(kExp2Terms[5]);
  p = p * f + kExp2Terms[4];
  p = p * f + kExp2Terms[3];
  p = p * f + kExp2Terms[2];
  p = p * f + kExp2Terms[1];
  p = p * f + kExp2Terms[0];
  p = p * f + 1.0f;
  const Floats power = (Floats)((Ints)p + ((Ints)shifted << 23));
  // The bits of a NaN would be taken for an exponent.
  return z == z ? power : z;
}

// Lane i becomes lane i XOR `distance`.
template <int distance>
BERTFAST_INLINE Floats swap_lanes(Floats values) {
  Ints from{};
  for (int lane = 0; lane < kLanes; ++lane) from[lane] = lane ^ distance;
  return __builtin_shuffle(values, from);
}

// In as many steps as the logarithm of the lanes: one after the other they take as long as softmax of a short row.
template <int distance = kLanes / 2>
BERTFAST_INLINE float sum_of(Floats values) {
  const Floats sums = values + swap_lanes<distance>(values);
  if constexpr (distance > 1) return sum_of<distance / 2>(sums);
  return sums[0];
}

template <int distance = kLanes / 2>
BERTFAST_INLINE float max_of(Floats values) {
  const Floats other = swap_lanes<distance>(values), largest = other > values ? other : values;
  if constexpr (distance > 1) return max_of<distance / 2>(largest);
  return largest[0];
}

BERTFAST_INLINE void to_row(const char* source, ScalarType dtype, int64_t size, float* target) {
  const auto* bits = reinterpret_cast<const uint16_t*>(source);
  if (dtype == ScalarType::Float) {
    std::memcpy(target, source, size * sizeof(float));
  } else if (dtype == ScalarType::BFloat16) {
    to_floats(bits, size, target, bfloat16_value);
  } else {
    to_floats(bits, size, target, half_value);
  }
}

BERTFAST_INLINE void from_row(const float* source, ScalarType dtype, int64_t size, char* target) {
  auto* bits = reinterpret_cast<uint16_t*>(target);
  if (dtype == ScalarType::Float) {
    std::memcpy(target, source, size * sizeof(float));
  } else if (dtype == ScalarType::BFloat16) {
    from_floats(source, size, bits, bfloat16_bits);
  } else {
    from_floats(source, size, bits, half_bits);
  }
}

}  // namespace
}  // namespace BERTFAST_ISA
}  // namespace bertfast
