// Tiles of 16-bit elements in shared memory, from which tensor cores' operands are read 16 x 16 at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "intrinsics.cuh"

namespace bertfast {

// Rows in global memory, their elements 1 apart.
template <class T>
struct GlobalRows {
  Global<const T> data;
  int64_t stride;
  int rows, columns;
  bool is_vector;  // whether 16-byte accesses fit, and columns are a multiple of 8
};

// kRows rows of kColumns elements. Packets of 16 bytes lie at their column's number xor one of the row: eight
// neighbouring rows then have the packets of one column in different banks, and ldmatrix, which reads those, meets no
// conflict.
template <class T, int kRows, int kColumns>
class SharedTile {
 public:
  static constexpr int kPackets = kColumns / 8;  // in a row
  static constexpr int kBytes = shared_bytes<T>(kRows * kColumns);
  static_assert(sizeof(T) == 2, "ldmatrix moves 16-bit elements");
  static_assert(kPackets % 4 == 0, "xor with up to 3 must stay within a row");
  static_assert(kRows % 8 == 0, "a part of the tile, from a multiple of 8 rows on, is swizzled as a tile");

  __device__ __forceinline__ explicit SharedTile(SharedMemory& shared) : data_(shared.take<T>(kRows * kColumns)) {}

  // The packet that begins with `column`, a multiple of 8.
  __device__ __forceinline__ Shared<T> packet(int row, int column) const {
    return data_ + row * kColumns + (column / 8 ^ swizzle(row)) * 8;
  }

  // The tile from a row on, a multiple of 8: addresses of the same rows of several such are one, and numbers known to
  // the compiler.
  __device__ __forceinline__ SharedTile from(int row) const { return SharedTile(data_ + row * kColumns); }

  // Begins to copy kCount rows of `source`, from `first` on, to rows `row` on; 0 beyond its rows and columns. All
  // kThreads threads of the block must call.
  template <int kThreads, int kCount>
  __device__ __forceinline__ void copy(int row, const GlobalRows<T>& source, int first) const {
    constexpr int kAll = kCount * kPackets;
    if (source.is_vector) {
      const int from = opaque(first);
#pragma unroll
      for (int i = 0; i < kAll; i += kThreads) {
        const int own = i + static_cast<int>(threadIdx.x), y = own / kPackets, column = own % kPackets * 8;
        if constexpr (kAll % kThreads != 0) {
          if (own >= kAll) break;
        }
        const bool valid = from + y < source.rows && column < source.columns;
        copy_async_16(packet(row + y, column), source.data + (from + y) * source.stride + column, valid);
      }
    } else {
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < kAll; i += kThreads) {
        const int y = i / kPackets, column = i % kPackets * 8;
        T values[8] = {};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          if (first + y >= source.rows || column + k >= source.columns) continue;
          values[k] = source.data[(first + y) * source.stride + column + k];
        }
        uint4 words;
        memcpy(&words, values, 16);
        store_16(reinterpret<uint4>(packet(row + y, column)), words);
      }
    }
  }

  // The left factor of a product: 16 rows from `row` on by 16 columns from `column` on.
  __device__ __forceinline__ void load_left(uint32_t (&fragment)[4], int row, int column) const {
    load_matrix_x4(fragment, packet(row + lane() % 16, column + lane() / 16 * 8));
  }

  // The right factor of a product, 16 x 16 as two of 8 columns each. ldmatrix transposes, because right factors are
  // held by columns.
  __device__ __forceinline__ void load_right(uint32_t (&fragments)[2][2], int row, int column) const {
    uint32_t loaded[4];
    load_matrix_x4_transposed(loaded, packet(row + lane() % 16, column + lane() / 16 * 8));
    split(loaded, fragments);
  }

  // The same of the transposed tile: the factor's columns are 16 rows from `row` on.
  __device__ __forceinline__ void load_right_of_transposed(uint32_t (&fragments)[2][2], int row, int column) const {
    uint32_t loaded[4];
    load_matrix_x4(loaded, packet(row + lane() / 16 * 8 + lane() % 8, column + lane() / 8 % 2 * 8));
    split(loaded, fragments);
  }

 private:
  __device__ __forceinline__ explicit SharedTile(const Shared<T>& data) : data_(data) {}

  // Rows of 64 or 192 bytes begin at one of two banks in turn, so that pairs of them have to differ; others at the
  // same.
  __device__ __forceinline__ static int swizzle(int row) { return kPackets % 8 == 0 ? row % 8 : row / 2 % 4; }

  __device__ __forceinline__ static void split(const uint32_t (&loaded)[4], uint32_t (&fragments)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) fragments[i / 2][i % 2] = loaded[i];
  }

  Shared<T> data_;
};

// Steps through the block at `last`, then those from `begin` up to it, kStep apart. Their tiles have two stages:
// step(is_first, first, stage) reads one while copy(first, stage) fills the other. `last` has landed in stage 0, and
// the copy of `begin` to stage 1 has begun, if there is one. All threads of the block must call.
template <int kStep, class Copy, class Step>
__device__ __forceinline__ void walk_blocks(int begin, int last, const Copy& copy, const Step& step) {
  step(std::true_type(), last, 0);
  int stage = 1;
  for (int first = begin; first < last; first += kStep) {
    copy_async_wait<0>();
    // Copies of all threads have landed, and none still reads the other stage.
    sync_threads();
    if (first + kStep < last) copy(first + kStep, 1 - stage);
    step(std::false_type(), first, stage);
    stage = 1 - stage;
  }
}

}  // namespace bertfast
