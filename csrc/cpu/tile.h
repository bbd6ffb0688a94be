// Matrix products of fp32 out of tiles that stay in registers, for one instruction set. The file that includes this has
// chosen it (a pragma), its name (BERTFAST_ISA), lanes of a vector (BERTFAST_LANES) and rows of a tile (BERTFAST_ROWS):
// rows times two vectors of sums, two vectors of the right matrix and a broadcast fill its registers, 32 of AVX-512 and
// 16 of AVX2.
//
// Vectors are GCC's, not loops for the compiler to vectorise: it does not keep an array of sums in registers. They are
// lowered where a function is defined, before it is inlined, so with_best_isa() of simd.h cannot compile this.
#pragma once

#include <cstdint>

#include "simd.h"

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

constexpr int kLanes = BERTFAST_LANES;
constexpr int kTileRows = BERTFAST_ROWS;
constexpr int kTileVectors = 2;
constexpr int kPanel = kTileVectors * kLanes;

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

// One tile of c (+)= a b. Element (row, k) of a is a[row * a_row + k * a_k].
template <bool kAdd>
BERTFAST_INLINE void tile(int64_t depth, const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t b_k,
                          float* c, int64_t c_row) {
  Floats sums[kTileRows][kTileVectors];
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) sums[row][v] = kAdd ? load(c + row * c_row + v * kLanes) : Floats{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats right[kTileVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) right[v] = load(b + k * b_k + v * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      const Floats left = all(a[row * a_row + k * a_k]);
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) sums[row][v] += left * right[v];
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) store(c + row * c_row + v * kLanes, sums[row][v]);
  }
}

// c (+)= a b in whole tiles: rows are rounded up to those of a tile, and columns are a multiple of kPanel. Column panel
// p of b begins at b + p * b_panel, and its row k at k * b_k from there.
template <bool kAdd>
void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row, int64_t a_k, const float* b,
             int64_t b_panel, int64_t b_k, float* c, int64_t c_row) {
  for (int64_t column = 0; column < columns; column += kPanel, b += b_panel) {
    for (int64_t row = 0; row < rows; row += kTileRows) {
      tile<kAdd>(depth, a + row * a_row, a_row, a_k, b, b_k, c + row * c_row + column, c_row);
    }
  }
}

// 2^z for z <= 0, down to 2^-126; relative error 2e-9 before rounding. NaN stays NaN.
BERTFAST_INLINE Floats exp2_negative(Floats z) {
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits
  z = z < -126.0f ? all(-126.0f) : z;
  const Floats shifted = z + kToInteger;
  const Floats f = z - (shifted - kToInteger);
  Floats p = all(0.00015345795f);
  p = p * f + 0.0013399932f;
  p = p * f + 0.009618489f;
  p = p * f + 0.055503286f;
  p = p * f + 0.24022646f;
  p = p * f + 0.6931472f;
  p = p * f + 1.0f;
  const Floats power = (Floats)((Ints)p + ((Ints)shifted << 23));
  // The bits of a NaN would be taken for an exponent.
  return z == z ? power : z;
}

BERTFAST_INLINE float sum_of(Floats values) {
  float total = values[0];
  for (int lane = 1; lane < kLanes; ++lane) total += values[lane];
  return total;
}

BERTFAST_INLINE float max_of(Floats values) {
  float largest = values[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = values[lane] > largest ? values[lane] : largest;
  return largest;
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
