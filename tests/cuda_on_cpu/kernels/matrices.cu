// Fragments, and a product that uses all of cp.async, ldmatrix and mma.
#include "cases.h"

namespace bertfast {
namespace {

// Four 8 x 8 matrices, one behind the other, and what each lane's registers get of them.
template <bool kTransposed>
__global__ void fragments_of(Global<const __half> in, Global<uint32_t> out) {
  SharedMemory shared;
  Shared<__half> matrices = shared.take<__half>(4 * 64);
  for (int i = 0; i < 8; ++i) matrices[lane() * 8 + i] = in[lane() * 8 + i];
  sync_warp();
  uint32_t fragment[4];
  if constexpr (kTransposed) {
    load_matrix_x4_transposed(fragment, matrices + lane() * 8);
  } else {
    load_matrix_x4(fragment, matrices + lane() * 8);
  }
  for (int i = 0; i < 4; ++i) out[lane() * 4 + i] = fragment[i];
}

// Of each lane the registers of a, b and c, 4 + 2 + 4; c becomes the product.
template <class T>
__global__ void product_of(Global<const uint32_t> a, Global<const uint32_t> b, Global<float> c) {
  uint32_t own_a[4], own_b[2];
  float own_c[4];
  for (int i = 0; i < 4; ++i) own_a[i] = a[lane() * 4 + i];
  for (int i = 0; i < 2; ++i) own_b[i] = b[lane() * 2 + i];
  for (int i = 0; i < 4; ++i) own_c[i] = c[lane() * 4 + i];
  multiply_16x8x16<T>(own_c, own_a, own_b);
  for (int i = 0; i < 4; ++i) c[lane() * 4 + i] = own_c[i];
}

enum class Mistake { kNone, kNoWait, kWaitsForTooFew, kNoBarrierBehindWait, kNoBarrierBeforeRefill, kLastNotAwaited };

// out (M, N) = a (M, K) b (K, N), a block of four warps for 64 x 64 of it; K is a multiple of 32, n in all.
template <class T, Mistake kMistake>
__global__ void multiply_matrices(Global<const T> a, Global<const T> b, Global<float> out, int k_size) {
  constexpr int kRows = 64, kColumns = 64, kDepth = 32;
  // Rows of a matrix are an odd number of 16 bytes apart, so that eight of them are in different banks.
  constexpr int kStrideA = kDepth + 8, kStrideB = kColumns + 8;
  SharedMemory shared;
  Shared<T> tiles_a = shared.take<T>(2 * kRows * kStrideA);
  Shared<T> tiles_b = shared.take<T>(2 * kDepth * kStrideB);
  const int n_size = static_cast<int>(gridDim.x) * kColumns;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kRows;
  const int column = static_cast<int>(blockIdx.x) * kColumns;
  const int steps = k_size / kDepth;

  const auto load = [&](int step) {
    Shared<T> tile_a = tiles_a + step % 2 * kRows * kStrideA;
    Shared<T> tile_b = tiles_b + step % 2 * kDepth * kStrideB;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kDepth / 8; i += static_cast<int>(blockDim.x)) {
      const int y = i / (kDepth / 8), x = i % (kDepth / 8) * 8;
      copy_async_16(tile_a + y * kStrideA + x, a + (row + y) * k_size + step * kDepth + x);
    }
    for (int i = static_cast<int>(threadIdx.x); i < kDepth * kColumns / 8; i += static_cast<int>(blockDim.x)) {
      const int y = i / (kColumns / 8), x = i % (kColumns / 8) * 8;
      copy_async_16(tile_b + y * kStrideB + x, b + static_cast<int64_t>(step * kDepth + y) * n_size + column + x);
    }
  };

  const int warp_row = warp() / 2 * 32, warp_column = warp() % 2 * 32;
  float sums[2][4][4] = {};
  load(0);
  copy_async_commit();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load(step + 1);
    copy_async_commit();
    if constexpr (kMistake == Mistake::kWaitsForTooFew) {
      copy_async_wait<2>();
    } else if constexpr (kMistake != Mistake::kNoWait) {
      copy_async_wait<1>();
    }
    if constexpr (kMistake != Mistake::kNoBarrierBehindWait) sync_threads();
    Shared<T> tile_a = tiles_a + step % 2 * kRows * kStrideA;
    Shared<T> tile_b = tiles_b + step % 2 * kDepth * kStrideB;
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t of_a[2][4], of_b[2][4];
      for (int i = 0; i < 2; ++i) {
        load_matrix_x4(of_a[i], tile_a + (warp_row + i * 16 + lane() % 16) * kStrideA + k + lane() / 16 * 8);
        load_matrix_x4_transposed(of_b[i],
                                  tile_b + (k + lane() % 16) * kStrideB + warp_column + i * 16 + lane() / 16 * 8);
      }
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 4; ++j) {
          const uint32_t (&pair)[4] = of_b[j / 2];
          const uint32_t own_b[2] = {pair[j % 2 * 2], pair[j % 2 * 2 + 1]};
          multiply_16x8x16<T>(sums[i][j], of_a[i], own_b);
        }
      }
    }
    if constexpr (kMistake != Mistake::kNoBarrierBeforeRefill) sync_threads();
  }
  if constexpr (kMistake == Mistake::kNoWait || kMistake == Mistake::kWaitsForTooFew) copy_async_wait<0>();
  if constexpr (kMistake == Mistake::kLastNotAwaited) {
    load(0);
    copy_async_commit();
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 4; ++j) {
      for (int k = 0; k < 4; ++k) {
        const int64_t y = row + warp_row + i * 16 + lane() / 4 + k / 2 * 8;
        out[y * n_size + column + warp_column + j * 8 + lane() % 4 * 2 + k % 2] = sums[i][j][k];
      }
    }
  }
}

// A copy, 16 or 4 bytes at a time, of zeros where the source ends.
template <bool kWide>
__global__ void copy_valid(Global<const float> in, Global<float> out, int64_t n) {
  SharedMemory shared;
  Shared<float> values = shared.take<float>(4 * static_cast<int>(blockDim.x));
  const int own = 4 * static_cast<int>(threadIdx.x);
  if constexpr (kWide) {
    copy_async_16(values + own, in + own, own < n);
  } else {
    for (int i = own; i < own + 4; ++i) copy_async_4(values + i, in + i, i < n);
  }
  copy_async_commit();
  copy_async_wait<0>();
  for (int i = 0; i < 4; ++i) out[own + i] = values[own + i];
}

}  // namespace
}  // namespace bertfast

using namespace bertfast;

BERTFAST_CASE(fragments_plain, fragments_of<false>, c.array<__half>(0), c.array<uint32_t>(1))
BERTFAST_CASE(fragments_transposed, fragments_of<true>, c.array<__half>(0), c.array<uint32_t>(1))
BERTFAST_CASE(product_half, product_of<__half>, c.array<uint32_t>(0), c.array<uint32_t>(1), c.array<float>(2))
BERTFAST_CASE(product_bfloat16, product_of<__nv_bfloat16>, c.array<uint32_t>(0), c.array<uint32_t>(1),
              c.array<float>(2))
BERTFAST_CASE(copy_valid, copy_valid<true>, c.array<float>(0), c.array<float>(1), c.n)
BERTFAST_CASE(copy_valid_4, copy_valid<false>, c.array<float>(0), c.array<float>(1), c.n)

#define MULTIPLY(name, type, mistake)                                                                  \
  BERTFAST_CASE(name, (multiply_matrices<type, Mistake::mistake>), c.array<type>(0), c.array<type>(1), \
                c.array<float>(2), static_cast<int>(c.n))
MULTIPLY(multiply_half, __half, kNone)
MULTIPLY(multiply_bfloat16, __nv_bfloat16, kNone)
MULTIPLY(multiply_without_wait, __half, kNoWait)
MULTIPLY(multiply_waiting_for_too_few, __half, kWaitsForTooFew)
MULTIPLY(multiply_without_barrier_behind_wait, __half, kNoBarrierBehindWait)
MULTIPLY(multiply_without_barrier_before_refill, __half, kNoBarrierBeforeRefill)
MULTIPLY(multiply_with_last_not_awaited, __half, kLastNotAwaited)
