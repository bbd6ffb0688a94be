// Products of tiles in shared memory by tensor cores.
//
// A warp's products are float [kM][kN][4]: rows of kN products of 16 x 8, of which each thread has 4 numbers, in the
// places that mma.sync gives it.
#pragma once

#include <cstdint>
#include <cstring>

#include "intrinsics.cuh"
#include "packed.cuh"
#include "shared_tile.cuh"

namespace bertfast {

// body(number, row, column) for all numbers of a row of products.
template <int kN, class Body>
__device__ __forceinline__ void for_each(float (&products)[kN][4], const Body& body) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      body(products[n][i], i / 2 * 8 + lane() / 4, n * 8 + lane() % 4 * 2 + i % 2);
    }
  }
}

// body(number) for those of one of the two rows that a thread has of 16.
template <int kN, class Body>
__device__ __forceinline__ void for_each_of_row(float (&products)[kN][4], int half, const Body& body) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) body(products[n][2 * half + i]);
  }
}

// body(column, number, number) for the columns that a thread has of a row of products, in both of its rows.
template <int kN, class Body>
__device__ __forceinline__ void for_each_column(float (&products)[kN][4], const Body& body) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) body(n * 8 + lane() % 4 * 2 + i, products[n][i], products[n][2 + i]);
  }
}

template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const float values[2] = {low, high};
  const Packet<T, 2> packed = pack<T>(values);
  uint32_t word;
  memcpy(&word, packed.values, 4);
  return word;
}

// Numbers of two neighbouring 16 x 8 products as the left factor of another: a thread has the same places in both.
template <class T>
__device__ __forceinline__ void as_left(const float (&first)[4], const float (&second)[4], uint32_t (&fragment)[4]) {
  fragment[0] = pack_pair<T>(first[0], first[1]);
  fragment[1] = pack_pair<T>(first[2], first[3]);
  fragment[2] = pack_pair<T>(second[0], second[1]);
  fragment[3] = pack_pair<T>(second[2], second[3]);
}

// The sum of the products of two pairs.
template <class T>
__device__ __forceinline__ float dot_pair(uint32_t a, uint32_t b) {
  Packet<T, 2> of_a, of_b;
  memcpy(of_a.values, &a, 4);
  memcpy(of_b.values, &b, 4);
  return of_a[0] * of_b[0] + of_a[1] * of_b[1];
}

// sums += left * right, 16 rows by 16 columns.
template <class T>
__device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4], const uint32_t (&left)[4],
                                         const uint32_t (&right)[2][2]) {
  multiply_16x8x16<T>(first, left, right[0]);
  multiply_16x8x16<T>(second, left, right[1]);
}

// Left factors of kM * 16 rows of a tile from `row` on, for multiply_transposed.
template <int kM = 1, class Tile>
__device__ __forceinline__ auto left_of(const Tile& tile, int row) {
  return [tile, row](uint32_t (&fragments)[kM][4], int k) {
#pragma unroll
    for (int m = 0; m < kM; ++m) tile.from(m * 16).load_left(fragments[m], row, k);
  };
}

// sums += left right^T for kM * 16 rows; `load_left(fragments, k)` gives those of columns k to k + 15 of `left`.
// `right` has kN * 8 rows from `row` on.
template <class T, int kDepth, int kM, int kN, class LoadLeft, class Right>
__device__ __forceinline__ void multiply_add_transposed(float (&sums)[kM][kN][4], const LoadLeft& load_left,
                                                        const Right& right, int row) {
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t of_left[kM][4];
    load_left(of_left, k);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t of_right[2][2];
      right.from(n * 8).load_right_of_transposed(of_right, row, k);
#pragma unroll
      for (int m = 0; m < kM; ++m) multiply<T>(sums[m][n], sums[m][n + 1], of_left[m], of_right);
    }
  }
}

// products = left right^T, the same.
template <class T, int kDepth, int kM, int kN, class LoadLeft, class Right>
__device__ __forceinline__ void multiply_transposed(float (&products)[kM][kN][4], const LoadLeft& load_left,
                                                    const Right& right, int row) {
#pragma unroll
  for (int m = 0; m < kM; ++m) for_each(products[m], [](float& product, int, int) { product = 0; });
  multiply_add_transposed<T, kDepth>(products, load_left, right, row);
}

// sums += left right for kM * 16 rows; `left` are products, kK * 8 columns of them, `right` has as many rows from `row`
// on.
template <class T, int kM, int kN, int kK, class Right>
__device__ __forceinline__ void multiply_add(float (&sums)[kM][kN][4], const float (&left)[kM][kK][4],
                                             const Right& right, int row) {
#pragma unroll
  for (int k = 0; k < kK; k += 2) {
    uint32_t of_left[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) as_left<T>(left[m][k], left[m][k + 1], of_left[m]);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t of_right[2][2];
      right.load_right(of_right, row + k * 8, n * 8);
#pragma unroll
      for (int m = 0; m < kM; ++m) multiply<T>(sums[m][n], sums[m][n + 1], of_left[m], of_right);
    }
  }
}

// The sum, or the maximum, over the four lanes that hold a row.
__device__ __forceinline__ float row_sum(float value) {
  value += shuffle_xor(value, 1);
  return value + shuffle_xor(value, 2);
}
__device__ __forceinline__ float row_max(float value) {
  value = fmaxf(value, shuffle_xor(value, 1));
  return fmaxf(value, shuffle_xor(value, 2));
}

// Writes 16 rows of products times `factors` of the two rows of a thread, through rows `row` on of a tile, which only
// this warp may use: whole packets go out, where pairs of numbers would be written otherwise.
template <int kN, class Tile, class T>
__device__ __forceinline__ void store_products(const float (&products)[kN][4], const float (&factors)[2],
                                               const Tile& tile, int row, Global<T> out, int64_t stride, bool is_vector,
                                               int rows, int columns) {
  static_assert(16 * kN % kWarpSize == 0, "lanes have equal shares");
  sync_warp();
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair =
          pack_pair<T>(products[n][2 * half] * factors[half], products[n][2 * half + 1] * factors[half]);
      reinterpret<uint32_t>(tile.packet(row + half * 8 + lane() / 4, n * 8))[lane() % 4] = pair;
    }
  }
  sync_warp();
#pragma unroll
  for (int i = 0; i < 16 * kN; i += kWarpSize) {
    const int y = (i + lane()) / kN, column = (i + lane()) % kN * 8;
    if (y >= rows || column >= columns) continue;
    const Shared<T> packet = tile.packet(row + y, column);
    if (is_vector) {
      store_16(reinterpret<uint4>(out + (y * stride + column)), *reinterpret<const uint4>(packet));
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (column + k < columns) out[y * stride + column + k] = packet[k];
      }
    }
  }
}

}  // namespace bertfast
