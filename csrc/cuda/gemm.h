// The launchers of gemm_fp16.cu and gemm_bf16.cu, and how a product is shared out among blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "arrays.h"
#include "bias_activation.h"

namespace bertfast {

constexpr int kMostWeights = 3;

// Tiles of outputs that a block can have, rows x columns.
enum class GemmShape : int32_t { k128x128, k128x64, k64x64 };

// The one that sums a split of K.
constexpr GemmShape kSplitShape = GemmShape::k64x64;

struct GemmPlan {
  GemmShape shape;
  int splits;        // of K, each summed by blocks of its own
  int split_length;  // of each but the last, which is shorter or as long
};

// x weight^T + bias for up to three weights of one shape, their outputs side by side.
struct GemmArgs {
  ConstArray x;                      // (rows, width_in), unit stride in the last dimension
  ConstArray weights[kMostWeights];  // (width, width_in), the same
  ConstArray biases[kMostWeights];   // (width,) contiguous, or null
  int64_t rows, stride_x, strides_weight[kMostWeights];
  int count, width, width_in;  // `count` weights
  GemmPlan plan;
  // Where K is not split: dropout(act(...)), and its input where it is not null, (rows, count * width) contiguous.
  Array out, pre;
  DropoutArgs dropout;
  Formula formula;
  // Where it is: (splits, rows, count * width), which add up to the sums with bias.
  float* partial;
};

constexpr int64_t tiles_of(int64_t length, int tile) {
  return (length + tile - 1) / tile;
}

// The largest tile of which there is one for each multiprocessor: larger ones read less, and a multiprocessor without
// a tile computes nothing. 64 rows take the smallest, and 64 columns no tile of 128.
//
// Where even the smallest leave half of the multiprocessors idle, K is split, as Triton's kernels split it
// (`kernels.tiles.gemm_splits`): 256 or more for each split but the last, which fill the pipeline once, and at
// most 8, because each costs 8 bytes an output through memory. Whole steps, so that the last may be shorter.
inline GemmPlan gemm_plan(int64_t rows, int width, int count, int width_in, int multiprocessors) {
  const auto fills = [&](int tile_rows, int tile_columns) {
    return tiles_of(rows, tile_rows) * count * tiles_of(width, tile_columns) >= multiprocessors;
  };
  if (rows > 64 && width > 64 && fills(128, 128)) return {GemmShape::k128x128, 1, width_in};
  if (rows > 64 && fills(128, 64)) return {GemmShape::k128x64, 1, width_in};
  constexpr int kStep = 64, kShortest = 256, kMostSplits = 8;
  const int64_t tiles = tiles_of(rows, 64) * count * tiles_of(width, 64);
  const int wanted = static_cast<int>(std::min<int64_t>({multiprocessors / tiles, width_in / kShortest, kMostSplits}));
  if (wanted < 2) return {GemmShape::k64x64, 1, width_in};
  const int length = static_cast<int>(tiles_of(tiles_of(width_in, kStep), wanted)) * kStep;
  return {kSplitShape, static_cast<int>(tiles_of(width_in, length)), length};
}

// Kernels of one element type are compiled in a unit of their own, side by side with the others.
void launch_gemm_fp16(const GemmArgs& args, cudaStream_t stream);
void launch_gemm_bf16(const GemmArgs& args, cudaStream_t stream);
inline void launch_gemm(const GemmArgs& args, cudaStream_t stream) {
  args.x.dtype == Dtype::kHalf ? launch_gemm_fp16(args, stream) : launch_gemm_bf16(args, stream);
}

}  // namespace bertfast
