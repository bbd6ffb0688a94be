// The second stage of sums over rows: (K, P, N) partial sums to K vectors (N,), in one order whatever runs beside it.
//
// Bytes: 4 K P N read, 4 K N written, and 4 K P N written by the first stage. P is up to three blocks a multiprocessor:
// with K = 2 and 132 of these both stages move 6 per cent of what a pass over 16,384 rows of half precision does, and
// as much as one over 1,024. A warp reads 32 neighbouring columns of a row, the block's 8 warps every eighth row.
#include <algorithm>

#include "column_sum.h"
#include "intrinsics.cuh"
#include "rows.cuh"

namespace bertfast {
namespace {

constexpr int kWarps = 8;

__global__ void __launch_bounds__(kWarps* kWarpSize)
    column_sum_kernel(Global<const float> partial, Global<float> first, Global<float> second, Global<float> third,
                      int64_t programs, int width) {
  SharedMemory shared;
  Shared<float> parts = shared.take<float>(kWarps * kWarpSize);
  const int k = static_cast<int>(blockIdx.y);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarpSize + lane();
  float sum = 0;
  if (column < width) {
    for (int64_t i = warp(); i < programs; i += kWarps) sum += partial[(k * programs + i) * width + column];
  }
  parts[threadIdx.x] = sum;
  sync_threads();
  if (warp() != 0 || column >= width) return;
  sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += parts[i * kWarpSize + lane()];
  (k == 0 ? first : k == 1 ? second : third)[column] = sum;
}

}  // namespace

int64_t row_programs(int64_t rows, int width, int multiprocessors) {
  using Narrow = BackwardRow<__half, true, true>;
  using Wide = BackwardRow<__half, false, true>;
  const bool narrow = width <= kNarrow;
  const int64_t most = (narrow ? Narrow::kMinBlocks : Wide::kMinBlocks) * multiprocessors;
  return std::min(most, (rows - 1) / (narrow ? Narrow::kTeams : Wide::kTeams) + 1);
}

void launch_column_sum(const float* partial, int count, int64_t programs, int width, float* const (&sums)[3],
                       cudaStream_t stream) {
  launch("column_sum", column_sum_kernel, (width - 1) / kWarpSize + 1, count, kWarps * kWarpSize,
         shared_bytes<float>(kWarps * kWarpSize), stream, partial, sums[0], sums[1], sums[2], programs, width);
}

}  // namespace bertfast
