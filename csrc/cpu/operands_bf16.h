// What tile.h multiplies: pairs of bf16, which lie next to each other along the depth of a product. vdpbf16ps
// multiplies two pairs and adds both products to an fp32 sum. It takes and gives 0 for denormals. operands_fp32.h has
// the same names for fp32.
#pragma once

#include <immintrin.h>

#include "floats.h"

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

typedef uint32_t Word __attribute__((may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint32_t AnyWords __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint16_t Bfloat16 __attribute__((may_alias));
constexpr int64_t kWordSize = 2;

BERTFAST_INLINE Words load(const Word* source) {
  return *reinterpret_cast<const AnyWords*>(source);
}

BERTFAST_INLINE Words all(Word value) {
  return value - Words{};
}

BERTFAST_INLINE Floats multiply_add(Words left, Words right, Floats sum) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}

BERTFAST_INLINE float multiply_add(Word left, Word right, float sum) {
  const auto pair = [](Word word) { return (__m128bh)_mm_cvtsi32_si128(static_cast<int>(word)); };
  return _mm_cvtss_f32(_mm_dpbf16_ps(_mm_set_ss(sum), pair(left), pair(right)));
}

// Half of the row's words hold it.
BERTFAST_INLINE void read_row(const char* source, ScalarType, int64_t size, int64_t width, Word* target) {
  auto* row = reinterpret_cast<Bfloat16*>(target);
  std::memcpy(row, source, size * sizeof(Bfloat16));
  for (int64_t j = size; j < width; ++j) row[j] = 0;
}

// `size` is rounded up to two vectors.
BERTFAST_INLINE void to_words(float* values, int64_t size) {
  auto* words = reinterpret_cast<Word*>(values);
  for (int64_t j = 0; j < size; j += 2 * kLanes) {
    const auto first = (__m512)load(values + j), second = (__m512)load(values + j + kLanes);
    *reinterpret_cast<AnyWords*>(words + j / 2) = (Words)_mm512_cvtne2ps_pbh(second, first);
  }
}

// Rows 2i and 2i + 1 become one, of pairs.
BERTFAST_INLINE const Word* across_rows(const Word* rows, int64_t count, int64_t width, int64_t stride, Word* buffer) {
  for (int64_t i = 0; i < count; i += 2) {
    const auto* even = reinterpret_cast<const Bfloat16*>(rows + i * stride);
    const auto* odd = reinterpret_cast<const Bfloat16*>(rows + (i + 1) * stride);
    Word* pairs = buffer + i / 2 * stride;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) pairs[j] = even[j] | uint32_t{odd[j]} << 16;
  }
  return buffer;
}

}  // namespace
}  // namespace BERTFAST_ISA
}  // namespace bertfast
