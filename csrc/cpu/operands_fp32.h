// What tile.h multiplies: fp32, whatever tensors are stored in. operands_bf16.h has the same names for pairs of bf16.
#pragma once

#include "floats.h"

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

typedef float Word;
typedef Floats Words;
constexpr int64_t kWordSize = 1;  // numbers of a word: terms of a sum that are added at once

BERTFAST_INLINE Floats multiply_add(Words left, Words right, Floats sum) {
  return sum + left * right;
}

// What multiply_add() does to one lane.
BERTFAST_INLINE float multiply_add(Word left, Word right, float sum) {
#if BERTFAST_LANES > 4 || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(left, right, sum);  // the compiler does not fuse these by itself
#else
  return sum + left * right;
#endif
}

// A row of `size` numbers as a row of a left matrix, with zeros up to `width`.
BERTFAST_INLINE void read_row(const char* source, ScalarType dtype, int64_t size, int64_t width, Word* target) {
  to_row(source, dtype, size, target);
  for (int64_t j = size; j < width; ++j) target[j] = 0;
}

// The same of numbers that a product gave, in place.
BERTFAST_INLINE void to_words(float*, int64_t) {}

// Rows of a left matrix (rows, width) as those of a right one of that depth, or as its own transpose. Rows lie `stride`
// apart. `buffer` is not needed here.
BERTFAST_INLINE const Word* across_rows(const Word* rows, int64_t, int64_t, int64_t, Word*) {
  return rows;
}

}  // namespace
}  // namespace BERTFAST_ISA
}  // namespace bertfast
