// dropout(act(x weight^T + bias)) on tensor cores, for one weight, or for up to three of one shape, as those of query,
// key and value, whose outputs lie side by side. Half precision, sums in fp32.
//
// FLOPs: 2 M N K for x (M, K) and N columns of all weights. Bytes, 2 an element: (M K + N K + M N) 2, and M N 2 more
// where the activation's input is kept for a backward pass: the floor. Where K is split, 8 bytes an output for each
// split through memory, and a second kernel (bias_activation's) that adds them up, always in the same order.
//
// A block has a tile of outputs, and walks over K with the next two stages of x and weight on their way. Tiles go down
// kGroup rows before they go one column on: those in flight then share rows of x and of weight, which come from L2. A
// tile of 128 x 128 asks L2 for 1 byte per 64 FLOPs, and shared memory, for the fragments of a warp's 64 x 64, for 1
// per 32. At the 2,048 FLOPs a clock of a multiprocessor of 8.0 that is 32 bytes written and 64 read, of 128.
//
// Read from machine code for 8.0 (tests/compiled/nvcc-13.0.csv): a warp's step of 64 x 64 outputs and 32 of K is 64
// HMMA, 16 LDSM, 8 LDGSTS and 131 instructions in all, 49 % of them products, in 512 clocks of products; in smaller
// tiles 30 % and 28 %. Those are bound by shared memory there, 144 and 192 bytes a clock: they are for few rows.
//
// The sums leave through shared memory in fp32, so that a thread has 8 neighbouring columns: for stores of 16 bytes,
// for one counter of random bits each four, and for code that has 8 activations instead of 128. With two blocks on a
// multiprocessor, one's activations (some 20 instructions an output for erf, a fifth of the products' time at K = 768
// on 8.0) run beside the other's products.
//
// What stays with torch: the GEMMs of a backward pass, behind bias_activation's kernel, and those whose outputs a
// LayerNorm reads, the second of a feed-forward and attention's projection. To add the residual here would save no
// byte: the GEMM writes M N and the LayerNorm reads 2 M N and writes M N; with the residual the GEMM reads M N more,
// and the LayerNorm M N less. What would move from a kernel bound by memory into one bound by products is 1.5 us of the
// 88 of a layer (4,096 tokens of BERT-base, 4.3 TB/s), twice, and the sum would be rounded to half precision before the
// statistics.
//
// mma.sync is the old way to the tensor cores of 9.0 and 10.0, with about 5 of 8 of wgmma's FLOPs on 9.0 (Luo et al.,
// "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024): for long inputs there, Triton's kernel and
// torch's GEMM are the better choices.
#pragma once

#include <cstdint>

#include "bias_activation.cuh"
#include "gemm.h"
#include "intrinsics.cuh"
#include "packed.cuh"
#include "products.cuh"
#include "shared_tile.cuh"

namespace bertfast {

struct GemmTile {
  int rows, columns;     // of outputs
  int depth;             // of K, a step
  int warps_m, warps_n;  // that share rows, and columns
  int stages;
  int blocks;  // meant to fit on a multiprocessor: 65,536 registers, 100 KiB of shared memory less 1 for each
};

// A warp's tile of 64 x 64 has 128 sums a thread, of 255 registers, and reads 8 fragments of 16 x 16 for 32 products.
// Of 64 x 32 it would be 6 for 16, and shared memory the limit: 96 bytes read a clock, and 32 written. A stage of 32 of
// K and 128 x 128 is 16 KiB: two are under way while one is multiplied, a thousand clocks with two blocks on 8.0. The
// smallest tiles have a quarter of the products a step, and take twice the K.
constexpr GemmTile gemm_tile(GemmShape shape) {
  switch (shape) {
    case GemmShape::k128x128:
      return {128, 128, 32, 2, 2, 3, 2};
    case GemmShape::k128x64:
      return {128, 64, 32, 2, 2, 3, 2};
    case GemmShape::k64x64:
      return {64, 64, 64, 2, 2, 3, 2};
  }
  return {};
}

template <class T>
struct Gemm {
  Global<const T> x, weights[kMostWeights], biases[kMostWeights];
  int64_t rows, stride_x, strides_weight[kMostWeights];
  int count, width, width_in;
  int split_length;
  Epilogue<T> epilogue;
  Global<float> partial;

  __host__ explicit Gemm(const GemmArgs& a)
      : x(static_cast<const T*>(a.x.data)),
        rows(a.rows),
        stride_x(a.stride_x),
        count(a.count),
        width(a.width),
        width_in(a.width_in),
        split_length(a.plan.split_length),
        epilogue(a.out, a.pre, a.dropout, a.formula, a.width),
        partial(a.partial) {
    for (int i = 0; i < count; ++i) {
      weights[i] = static_cast<const T*>(a.weights[i].data);
      biases[i] = static_cast<const T*>(a.biases[i].data);
      strides_weight[i] = a.strides_weight[i];
    }
  }
};

// Numbers of a tile of products on their way from the places that mma.sync gives them to whole rows. Words of 4 lie at
// their number xor twice that of the row, so that neighbouring rows have the same columns in different banks, and
// within each second eight of them xor 1: of the words that begin packets, those of eight neighbours are then in
// different banks.
template <int kRows, int kColumns>
class SumsTile {
 public:
  static constexpr int kBytes = shared_bytes<float>(kRows * kColumns);
  static_assert(kColumns % 32 == 0, "rows begin at the same bank, and xor with up to 7 stays within them");

  __device__ __forceinline__ explicit SumsTile(SharedMemory& shared) : data_(shared.take<float>(kRows * kColumns)) {}

  // The word that begins with `column`, a multiple of 4.
  __device__ __forceinline__ Shared<float> word(int row, int column) const {
    const unsigned i = static_cast<unsigned>(column) / 4;
    return data_ + row * kColumns + static_cast<int>(i ^ static_cast<unsigned>(row) % 4 * 2 ^ i / 8 % 2) * 4;
  }

  // The tile from a row on, a multiple of 4.
  __device__ __forceinline__ SumsTile from(int row) const { return SumsTile(data_ + row * kColumns); }

 private:
  __device__ __forceinline__ explicit SumsTile(const Shared<float>& data) : data_(data) {}

  Shared<float> data_;
};

// Rows that a block reads step by step along K, from the same rows of memory into stages of a tile. Their addresses
// stay in registers, which SharedTile::copy, beside attention's sums, spares: it makes them anew, 40 instructions more
// a step.
template <class T, class Tile, int kRows, int kThreads>
class Panel {
 public:
  // Rows beyond the last, whose products nobody stores, are the last once more.
  __device__ __forceinline__ Panel(SharedMemory& shared, Global<const T> data, int64_t stride, int rows)
      : tile_(shared) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) own_[i] = data + min(own_row() + i * kBetween, rows - 1) * stride + own_column();
  }

  __device__ __forceinline__ Tile stage(int i) const { return tile_.from(i * kRows); }

  // Begins to copy the columns from `k` on, zeros from `end` on, to a stage.
  __device__ __forceinline__ void copy(int k, int end, int i) const {
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      copy_async_16(stage(i).packet(own_row() + c * kBetween, own_column()), own_[c] + k, k + own_column() < end);
    }
  }

 private:
  static constexpr int kBetween = kThreads / Tile::kPackets, kCopies = kRows / kBetween;
  static_assert(kThreads % Tile::kPackets == 0 && kRows % kBetween == 0, "all threads have as many packets");

  __device__ __forceinline__ static int own_row() { return static_cast<int>(threadIdx.x) / Tile::kPackets; }
  __device__ __forceinline__ static int own_column() { return static_cast<int>(threadIdx.x) % Tile::kPackets * 8; }

  Tile tile_;
  Global<const T> own_[kCopies];
};

template <class T, GemmShape kShape>
struct GemmTiles {
  static constexpr GemmTile kTile = gemm_tile(kShape);
  static constexpr int kRows = kTile.rows, kColumns = kTile.columns, kDepth = kTile.depth, kStages = kTile.stages;
  static constexpr int kThreads = kTile.warps_m * kTile.warps_n * kWarpSize;
  static constexpr int kM = kRows / kTile.warps_m / 16, kN = kColumns / kTile.warps_n / 8;
  using LeftTile = SharedTile<T, kStages * kRows, kDepth>;
  using RightTile = SharedTile<T, kStages * kColumns, kDepth>;
  using Left = Panel<T, LeftTile, kRows, kThreads>;
  using Right = Panel<T, RightTile, kColumns, kThreads>;
  static constexpr int kSharedBytes = LeftTile::kBytes + RightTile::kBytes;
  // Sums leave in as many passes as their room in the stages' place takes.
  static constexpr int kPasses = kRows * kColumns * 4 > kSharedBytes ? 2 : 1;
  static constexpr int kPassRows = kM * 16 / kPasses;  // of a warp
  using Sums = SumsTile<kRows / kPasses, kColumns>;
  static_assert(Sums::kBytes <= kSharedBytes && kM % kPasses == 0, "a pass takes a part of each warp's rows");
  static_assert(kTile.blocks * (kSharedBytes + 1024) <= 100 * 1024, "all that 8.6, 8.9 and 12.0 have");
  static_assert(kThreads % (kColumns / 8) == 0, "a thread has the same columns of all rows");
};

// A block's tile.
struct TilePlace {
  int64_t row;  // the first
  int rows;
  int weight, column, columns;  // of that weight
};

// Found anew behind the products, beside whose sums it would not fit in registers.
template <class Tiles, class T>
__device__ __forceinline__ TilePlace tile_of_block(const Gemm<T>& args) {
  constexpr int kGroup = 8;
  const int tiles_m = static_cast<int>((args.rows - 1) / Tiles::kRows) + 1;
  const int of_weight = (args.width - 1) / Tiles::kColumns + 1, tiles_n = args.count * of_weight;
  const int tile = opaque(static_cast<int>(blockIdx.x)), in_group = tile % (kGroup * tiles_n);
  const int first = tile / (kGroup * tiles_n) * kGroup, group = min(tiles_m - first, kGroup);
  const int i_n = in_group / group;
  const int64_t row = static_cast<int64_t>(first + in_group % group) * Tiles::kRows;
  const int column = i_n % of_weight * Tiles::kColumns;
  return {row, static_cast<int>(min(args.rows - row, static_cast<int64_t>(Tiles::kRows))), i_n / of_weight, column,
          min(args.width - column, Tiles::kColumns)};
}

// x weight^T over K from `begin` to `end`: `begin` a multiple of a step, and so is `end` unless it is K.
template <class Tiles, class T, int kM, int kN>
__device__ __forceinline__ void accumulate(float (&sums)[kM][kN][4], const Gemm<T>& args, int begin, int end) {
  const TilePlace place = tile_of_block<Tiles>(args);
  constexpr int kStages = Tiles::kStages, kDepth = Tiles::kDepth;
  const int64_t stride_weight = args.strides_weight[place.weight];
  SharedMemory shared;
  const typename Tiles::Left x(shared, args.x + place.row * args.stride_x, args.stride_x, place.rows);
  const typename Tiles::Right weight(shared, args.weights[place.weight] + place.column * stride_weight, stride_weight,
                                     place.columns);
  // Also from `end` on: to copy zeros that nobody reads costs less than to ask in every step.
  const auto copy = [&](int k, int stage) {
    x.copy(k, end, stage);
    weight.copy(k, end, stage);
    copy_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy(begin + stage * kDepth, stage);
  const int own_row = warp() / Tiles::kTile.warps_n * kM * 16, own_column = warp() % Tiles::kTile.warps_n * kN * 8;
  int stage = 0;
#pragma unroll 1
  for (int k = begin; k < end; k += kDepth) {
    copy_async_wait<kStages - 2>();
    // Copies of all threads to this stage have landed, and none still reads the one before.
    sync_threads();
    copy(k + (kStages - 1) * kDepth, stage == 0 ? kStages - 1 : stage - 1);
    multiply_add_transposed<T, kDepth>(sums, left_of<kM>(x.stage(stage), own_row), weight.stage(stage), own_column);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  copy_async_wait<0>();
}

// body(row, column, values) for each 8 neighbouring columns of the tile, which each thread has the same of. All threads
// of the block must call.
template <class Tiles, int kM, int kN, class Body>
__device__ __forceinline__ void for_each_packet(const float (&sums)[kM][kN][4], int rows, const Body& body) {
  constexpr int kPassRows = Tiles::kPassRows, kPackets = Tiles::kColumns / 8;
  SharedMemory shared;
  const typename Tiles::Sums staged(shared);
  // As if it were not known yet: what the products made of it would else wait in registers.
  const int thread = opaque(static_cast<int>(threadIdx.x)), own_warp = thread / kWarpSize;
  const int own_row = own_warp / Tiles::kTile.warps_n * kPassRows + thread / 4 % 8;
  const int own_column = own_warp % Tiles::kTile.warps_n * kN * 8 + thread / 2 % 2 * 4;
  const int column = thread % kPackets * 8;
#pragma unroll 1
  for (int pass = 0; pass < Tiles::kPasses; ++pass) {
    // Nobody reads any more what lies there.
    sync_threads();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if (m * 16 / kPassRows != pass) continue;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Shared<float> word = staged.from(m * 16 % kPassRows + half * 8).word(own_row, own_column + n * 8);
          reinterpret<float2>(word)[thread % 2] = float2{sums[m][n][2 * half], sums[m][n][2 * half + 1]};
        }
      }
    }
    sync_threads();
#pragma unroll 1
    for (int i = thread / kPackets; i < Tiles::kRows / Tiles::kPasses; i += Tiles::kThreads / kPackets) {
      const int row = i / kPassRows * (kM * 16) + pass * kPassRows + i % kPassRows;
      if (row >= rows) continue;
      float values[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 word = *reinterpret<const float4>(staged.word(i, column + half * 4));
        values[half * 4] = word.x;
        values[half * 4 + 1] = word.y;
        values[half * 4 + 2] = word.z;
        values[half * 4 + 3] = word.w;
      }
      body(row, column, values);
    }
  }
}

// Of a thread's 8 columns, those that there are.
__device__ __forceinline__ int columns_from(const TilePlace& place, int column) {
  return max(min(place.columns - column, 8), 0);
}

// Bias of a thread's columns, 0 without.
template <class Tiles, class T>
__device__ __forceinline__ void load_bias(float (&values)[8], const Gemm<T>& args, const TilePlace& place) {
  const int column = static_cast<int>(threadIdx.x) % (Tiles::kColumns / 8) * 8, count = columns_from(place, column);
  const Global<const T> bias = args.biases[place.weight];
#pragma unroll
  for (int k = 0; k < 8; ++k) values[k] = bias != nullptr && k < count ? to_float(bias[place.column + column + k]) : 0;
}

template <class T, GemmShape kShape, class Tiles = GemmTiles<T, kShape>>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kTile.blocks) gemm_kernel(const Gemm<T> args) {
  float sums[Tiles::kM][Tiles::kN][4] = {}, bias[8];
  accumulate<Tiles>(sums, args, 0, args.width_in);
  const TilePlace place = tile_of_block<Tiles>(args);
  load_bias<Tiles>(bias, args, place);
  const auto key = args.epilogue.dropout.key();
  const int64_t width = static_cast<int64_t>(args.count) * args.width;
  const int first = place.weight * args.width + place.column;
  for_each_packet<Tiles>(sums, place.rows, [&](int row, int column, float (&values)[8]) {
#pragma unroll
    for (int k = 0; k < 8; ++k) values[k] += bias[k];
    args.epilogue.store(key, place.row + row, first + column, (place.row + row) * width + first + column,
                        columns_from(place, column), args.epilogue.is_vector, values);
  });
}

// A split of K.
template <class T, GemmShape kShape, class Tiles = GemmTiles<T, kShape>>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kTile.blocks) gemm_kernel_split(const Gemm<T> args) {
  const int split = static_cast<int>(blockIdx.y), begin = split * args.split_length;
  float sums[Tiles::kM][Tiles::kN][4] = {}, bias[8] = {};
  accumulate<Tiles>(sums, args, begin, min(begin + args.split_length, args.width_in));
  const TilePlace place = tile_of_block<Tiles>(args);
  if (split == 0) load_bias<Tiles>(bias, args, place);
  const int64_t width = static_cast<int64_t>(args.count) * args.width;
  const int first = place.weight * args.width + place.column;
  for_each_packet<Tiles>(sums, place.rows, [&](int row, int column, float (&values)[8]) {
#pragma unroll
    for (int k = 0; k < 8; ++k) values[k] += bias[k];
    const Global<float> target = args.partial + ((split * args.rows + place.row + row) * width + first + column);
    if (args.epilogue.is_vector) {
      store_packet<true>(target, columns_from(place, column), values);
    } else {
      store_packet<false>(target, columns_from(place, column), values);
    }
  });
}

template <class T, GemmShape kShape>
void launch_gemm_tile(void (*kernel)(Gemm<T>), const GemmArgs& a, cudaStream_t stream) {
  using Tiles = GemmTiles<T, kShape>;
  launch("gemm", kernel, tiles_of(a.rows, Tiles::kRows) * a.count * tiles_of(a.width, Tiles::kColumns), a.plan.splits,
         Tiles::kThreads, Tiles::kSharedBytes, stream, Gemm<T>(a));
}

template <class T>
void launch_gemm_of(const GemmArgs& a, cudaStream_t stream) {
  if (a.plan.splits > 1) return launch_gemm_tile<T, kSplitShape>(gemm_kernel_split<T, kSplitShape>, a, stream);
  switch (a.plan.shape) {
    case GemmShape::k128x128:
      return launch_gemm_tile<T, GemmShape::k128x128>(gemm_kernel<T, GemmShape::k128x128>, a, stream);
    case GemmShape::k128x64:
      return launch_gemm_tile<T, GemmShape::k128x64>(gemm_kernel<T, GemmShape::k128x64>, a, stream);
    case GemmShape::k64x64:
      return launch_gemm_tile<T, GemmShape::k64x64>(gemm_kernel<T, GemmShape::k64x64>, a, stream);
  }
}

}  // namespace bertfast
