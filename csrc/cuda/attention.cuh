// softmax(scale q k^T + mask) v, padded and packed, without the scores in memory: forward. In one pass over the keys
// (online softmax, Milakov and Gimelshein 2018), in base 2 with log2(e) folded into the scale:
//     s = q k^T     m = max(s)     p = 2^(log2(e) scale (s - m))     l = sum(p)     out = p v / l
// m is subtracted before the scale is multiplied, an instruction for each score: of large scores, or of a float mask's
// largest finite numbers, which are arithmetic and no masking, the two products would be rounded apart, or overflow. A
// float mask is added to scale s, and the scale left out of p. A row without any key has m = -inf; 0 is subtracted
// instead, so that p = 0 and out = 0. Saved are m, in units of s, and ln(l), not their sum: where m is as large as such
// a mask, ln(l) would drown.
//
// The last block of keys comes first: it alone meets the end of the sequence, and rescales nothing. A sequence of at
// most one block is done with it, in one pass.
//
// FLOPs: 4 S_q S_k D a head. Bytes, 2 an element: (2 S_q + 2 S_k) D 2 a head, the floor, and 8 S_q for m and ln(l).
//
// What a warp of 16 rows does with a block of 64 keys and a head dim of 64, in clocks of a multiprocessor of 8.0: 64
// products of 16 x 8 x 16, 128 clocks at 1,024 FMA a clock; 16 KiB of keys and values read as fragments, 128 at 128
// bytes a clock; 1,024 exponentials, 64 at 16. So for long sequences a warp has two rows of products, where registers
// suffice, which share the fragments read: 64 clocks a row. Queries and p stay in registers, p as the left factor of
// the second product.
//
// Read from machine code for 8.0, with a head dim of 64, no mask and no dropout (tests/compiled/nvcc-13.0.csv): a
// warp's step of 32 keys and 32 queries is 64 HMMA, 16 LDSM, 36 MUFU and 453 instructions in all, in 512 clocks of
// products; one of 64 keys and 16 queries 64 HMMA, 32 LDSM, 34 MUFU and 492.
//
// On 9.0 and 10.0 mma.sync is the old way to the tensor cores: of the 2,048 FMA a clock that wgmma reaches on 9.0, it
// has about 5 of 8 (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024), and fragments
// take their way through registers, so that more than half of the peak is not to be expected of this kernel; Triton's
// use wgmma and tcgen05.
#pragma once

#include "attention_inputs.cuh"
#include "attention_scores.cuh"
#include "intrinsics.cuh"
#include "products.cuh"
#include "shared_tile.cuh"

namespace bertfast {

struct AttentionTile {
  int warps;
  int rows;  // of 16 x 8 products, of each warp
  int keys;  // of each step
};

// A thread's registers hold, for each row of products, head_dim / 2 sums, keys / 2 scores and head_dim / 4 packed
// queries: 128 of 255 with two rows, 32 keys and a head dim of 64, or with one row, 64 keys and 128; 64 keys for two
// rows spilled. Two rows leave no room for what dropout and masks by pair need beside that, and above a head dim of 64
// neither do 64 keys for dropout. Shared memory holds queries and two stages of keys and values, 2 bytes a number: 96
// KiB of 99 for 128 queries and a head dim of 128; 32 for blocks of four warps and a head dim of 64, or 40 for short
// sequences, so that two fit on a multiprocessor. Short tiles have 64 queries a block, so that all warps of short
// sequences have some, and room for masks by pair, whose time goes into the S_q S_k numbers of the mask.
constexpr AttentionTile attention_fwd_tile(int head_dim, bool is_long, bool has_dropout) {
  const int keys = head_dim > 64 && has_dropout ? 32 : 64;
  if (!is_long) return {4, 1, keys};
  return head_dim <= 64 && !has_dropout ? AttentionTile{4, 2, 32} : AttentionTile{8, 1, keys};
}

template <class T>
struct AttentionFwd {
  AttentionInputs<T> in;
  HeadsAt<T> out;
  Global<float> maxima, logs;

  __host__ explicit AttentionFwd(const AttentionFwdArgs& a)
      : in(a.inputs), out(a.out, a.inputs.head_dim), maxima(a.stats), logs(maxima + attention_rows(a.inputs)) {}
};

template <class T, int kHeadDim, bool kIsLong, bool kDropout>
struct ForwardTiles {
  static constexpr AttentionTile kTile = attention_fwd_tile(kHeadDim, kIsLong, kDropout);
  static constexpr bool kTakesPairs = !kIsLong;
  static constexpr int kM = kTile.rows, kN = kTile.keys / 8, kKeys = kTile.keys;
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kQueries = kTile.warps * kM * 16;
  using Queries = SharedTile<T, kQueries, kHeadDim>;
  using Keys = SharedTile<T, 2 * kKeys, kHeadDim>;  // two stages
  using Staged = StagedMask<false, kN>;
  static constexpr int kSharedBytes = Queries::kBytes + 2 * Keys::kBytes + KeptPlace::kBytes;
  static constexpr int kStagedBytes = kTakesPairs ? Staged::bytes(kTile.warps) : 0;  // more, with a mask by pair
  static_assert(kSharedBytes + kStagedBytes <= kMostShared, "some devices have no more for a block");
  static_assert(kM * (kHeadDim / 2 + kKeys / 2 + kHeadDim / 4) <= 128, "of 255 registers a thread, half for the rest");
};

// 1 block at least: without the number ptxas would rather spill a few registers than have too many for a third block.
template <class T, int kHeadDim, bool kIsLong, bool kDropout,
          class Tiles = ForwardTiles<T, kHeadDim, kIsLong, kDropout>>
__global__ void __launch_bounds__(Tiles::kThreads, 1) attention_fwd_kernel(const AttentionFwd<T> args) {
  constexpr int kM = Tiles::kM, kN = Tiles::kN, kKeys = Tiles::kKeys, kThreads = Tiles::kThreads;
  const AttentionInputs<T>& in = args.in;
  const Place place = place_of_block<false>(in, Tiles::kQueries);
  if (place.block < 0) return;
  SharedMemory shared;
  const typename Tiles::Queries queries(shared);
  const typename Tiles::Keys keys(shared), values(shared);
  const KeptPlace kept(shared, place);
  const typename Tiles::Staged staged(shared, in.mask, Tiles::kTile.warps);
  const GlobalRows<T> of_q = rows_of(in.query, place, place.begin_q, place.length_q, in.head_dim);
  const GlobalRows<T> of_k = rows_of(in.key, place, place.begin_k, place.length_k, in.head_dim);
  const GlobalRows<T> of_v = rows_of(in.value, place, place.begin_k, place.length_k, in.head_dim);
  const int first_query = place.block * Tiles::kQueries, own_row = uniform(warp()) * kM * 16;
  const int last = last_key_block(place, in.is_causal, first_query + Tiles::kQueries, kKeys);

  const auto copy = [&](int first, int stage) {
    keys.template copy<kThreads, kKeys>(stage * kKeys, of_k, first);
    values.template copy<kThreads, kKeys>(stage * kKeys, of_v, first);
    copy_async_commit();
  };
  queries.template copy<kThreads, Tiles::kQueries>(0, of_q, first_query);
  copy(last, 0);
  copy_async_wait<0>();
  sync_threads();
  if (last > 0) copy(0, 1);

  // The scale's sign goes into the queries, because the maximum is taken before scores are scaled; of a scale that may
  // be 0 in fp32, and 0 x -inf is NaN, queries become 0.
  uint32_t q[kM][kHeadDim / 16][4];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      queries.load_left(q[m][k], own_row + m * 16, k * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q[m][k][i] = in.scale == 0 ? 0 : in.scale < 0 ? q[m][k][i] ^ 0x80008000u : q[m][k][i];
      }
    }
  }
  const bool is_by_pair = Tiles::kTakesPairs && in.mask.is_by_pair();
  const float scale = in.scale == 0 ? 1 : fabsf(in.scale);
  const float to_base_2 = is_by_pair ? kLog2E : scale * kLog2E;
  const auto key = in.dropout.key();
  float out[kM][kHeadDim / 8][4] = {}, maximum[kM][2], sum[kM][2];

  const int rows = place.length_q - first_query - own_row;  // that this warp has, or fewer than 1
  const auto step = [&](auto is_first, int first, int stage) {
    if (rows <= 0) return;
    const KeyMask<kN> key_mask(in.mask, place, first);
    float p[kM][kN][4];
    multiply_transposed<T, kHeadDim>(
        p,
        [&](uint32_t (&left)[kM][4], int k) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) left[m][i] = q[m][k / 16][i];
          }
        },
        keys, stage * kKeys);
    const Scores<false, kM, kN> scores{p, place, in.mask, first_query + own_row, first};
    if (is_by_pair) scores.scale_and_mask(staged, scale, -kInfinity);
    scores.template hide<is_first.value>(in.is_causal, -kInfinity);
    key_mask.hide(p, -kInfinity);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = is_first.value ? -kInfinity : maximum[m][half];
#pragma unroll
        for (int n = 0; n < kN; ++n) most = fmaxf(most, fmaxf(p[m][n][2 * half], p[m][n][2 * half + 1]));
        most = row_max(most);
        // Rows without a key so far: -inf - -inf is NaN.
        const float pivot = most == -kInfinity ? 0 : most;
        if constexpr (!is_first.value) {
          const float shrunk = exp2_approximate((maximum[m][half] - pivot) * to_base_2);
          sum[m][half] *= shrunk;
#pragma unroll
          for (int n = 0; n < kHeadDim / 8; ++n) {
            out[m][n][2 * half] *= shrunk;
            out[m][n][2 * half + 1] *= shrunk;
          }
        } else {
          sum[m][half] = 0;
        }
        maximum[m][half] = most;
        for_each_of_row(p[m], half, [&](float& s) {
          s = exp2_approximate((s - pivot) * to_base_2);
          sum[m][half] += s;
        });
      }
    }
    if constexpr (kDropout) {
      for_each_kept<false, kM, kN>(in, key, place, first_query + own_row, first,
                                   [&](int m, int n, int i, bool is_kept) {
                                     if (!is_kept) p[m][n][i] = 0;
                                   });
    }
    multiply_add<T>(out, p, values, stage * kKeys);
  };
  walk_blocks<kKeys>(0, last, copy, step);

  const Place own = kept.place();
  const int64_t stats_at = stats_row(in, own) + first_query + own_row;
  const Global<T> target = args.out.at(own.batch, own.head, own.begin_q + first_query + own_row);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + lane() / 4;
      const float whole = row_sum(sum[m][half]), positive = whole == 0 ? 1 : whole;
      factors[half] = in.dropout.scale * reciprocal(positive);
      if (row < rows && lane() % 4 == 0) {
        args.maxima[stats_at + row] = in.scale < 0 && !is_by_pair ? -maximum[m][half] : maximum[m][half];
        args.logs[stats_at + row] = logf(positive);
      }
    }
    store_products(out[m], factors, queries, own_row + m * 16, target + m * 16 * args.out.stride_row,
                   args.out.stride_row, args.out.is_vector, rows - m * 16, in.head_dim);
  }
}

template <class T, int kHeadDim, bool kIsLong, bool kDropout>
void launch_attention_fwd_tile(const AttentionFwd<T>& args, const AttentionArgs& a, cudaStream_t stream) {
  using Tiles = ForwardTiles<T, kHeadDim, kIsLong, kDropout>;
  launch("attention_fwd", attention_fwd_kernel<T, kHeadDim, kIsLong, kDropout>,
         attention_blocks(a, a.length_q, Tiles::kQueries), 1, Tiles::kThreads,
         Tiles::kSharedBytes + (args.in.mask.is_by_pair() ? Tiles::kStagedBytes : 0), stream, args);
}

template <class T>
void launch_attention_fwd_of(const AttentionFwdArgs& a, cudaStream_t stream) {
  const AttentionFwd<T> args(a);
  const bool is_long = mean_length(a.inputs, a.inputs.length_q) > 64 && !args.in.mask.is_by_pair();
  with_attention_form(args.in, [&](auto head_dim, auto has_dropout) {
    with_constant(is_long, [&](auto is_long) {
      launch_attention_fwd_tile<T, head_dim.value, is_long.value, has_dropout.value>(args, a.inputs, stream);
    });
  });
}

}  // namespace bertfast
