// Matrix products out of tiles that stay in registers, for one instruction set and one kind of operands
// (BERTFAST_OPERANDS, a header: of fp32 or of pairs of bf16); sums are fp32. A tile of BERTFAST_ROWS rows times two
// vectors of sums, two vectors of the right matrix and a broadcast fill the registers, 32 of AVX-512 and 16 of AVX2.
#pragma once

#include <cstdint>

#include BERTFAST_OPERANDS

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

constexpr int kTileRows = BERTFAST_ROWS;
constexpr int kTileVectors = 2;
constexpr int kPanel = kTileVectors * kLanes;

// Words that hold `depth` numbers.
BERTFAST_INLINE int64_t words_of(int64_t depth) {
  return (depth + kWordSize - 1) / kWordSize;
}

// One tile of c (+)= a b. Word (row, k) of a is a[row * a_row + k * a_k].
template <bool kAdd>
BERTFAST_INLINE void tile(int64_t words, const Word* a, int64_t a_row, int64_t a_k, const Word* b, int64_t b_k,
                          float* c, int64_t c_row) {
  Floats sums[kTileRows][kTileVectors];
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) sums[row][v] = kAdd ? load(c + row * c_row + v * kLanes) : Floats{};
  }
  for (int64_t k = 0; k < words; ++k) {
    Words right[kTileVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) right[v] = load(b + k * b_k + v * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      const Words left = all(a[row * a_row + k * a_k]);
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) sums[row][v] = multiply_add(left, right[v], sums[row][v]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVectors; ++v) store(c + row * c_row + v * kLanes, sums[row][v]);
  }
}

// c (+)= a b in whole tiles: rows are rounded up to those of a tile, and columns are a multiple of kPanel. Column panel
// p of b begins at b + p * b_panel, and its row k of words at k * b_k from there.
template <bool kAdd>
void product(int64_t rows, int64_t columns, int64_t depth, const Word* a, int64_t a_row, int64_t a_k, const Word* b,
             int64_t b_panel, int64_t b_k, float* c, int64_t c_row) {
  for (int64_t column = 0; column < columns; column += kPanel, b += b_panel) {
    for (int64_t row = 0; row < rows; row += kTileRows) {
      tile<kAdd>(words_of(depth), a + row * a_row, a_row, a_k, b, b_k, c + row * c_row + column, c_row);
    }
  }
}

}  // namespace
}  // namespace BERTFAST_ISA
}  // namespace bertfast
