// The gradient of attention's float mask: ds (attention_bwd.cuh), added up over what the mask is broadcast to.
//
// A block takes a tile of the mask, walks over the batch entries, heads, and blocks of queries that share it, and
// computes their ds anew: no atomics, and no memory beyond the mask's own. There is one stage, so that products wait
// for every copy: a mask that learns is rare. What all keys share has the gradient 0, which needs no kernel: softmax
// does not change when all scores of a query do.
//
// FLOPs: 2 products of 2 S_q S_k D a head. Bytes: of every head q and dout once for each block of keys, k and v once
// for each block of queries, and its mask; the mask's gradient written.
#pragma once

#include "attention_bwd.cuh"

namespace bertfast {

template <class T>
struct AttentionMaskBwd {
  AttentionInputs<T> in;
  HeadsAt<const T> dout;
  Global<const float> maxima, logs, delta;
  Global<void> dmask;
  int mask_batch, mask_heads;
  bool sum_queries;  // whether the mask's one row stands for all
  int blocks_q, blocks_k;

  __host__ AttentionMaskBwd(const AttentionMaskBwdArgs& a, int queries, int keys)
      : in(a.inputs),
        dout(a.dout, a.inputs.head_dim),
        maxima(a.stats),
        logs(maxima + attention_rows(a.inputs)),
        delta(a.delta),
        dmask(a.dmask.data),
        mask_batch(a.mask_batch),
        mask_heads(a.mask_heads),
        sum_queries(a.mask_queries < a.inputs.length_q),
        blocks_q(divide_up(a.inputs.length_q, queries)),
        blocks_k(divide_up(a.inputs.length_k, keys)) {}
};

template <class T, int kHeadDim>
struct MaskTiles {
  static constexpr AttentionBwdTile kTile = attention_bwd_dq_tile(kHeadDim);
  static constexpr int kThreads = kTile.warps * kWarpSize, kQueries = kTile.warps * 16;
  static constexpr int kKeys = kTile.step, kN = kKeys / 8;
  using Queries = SharedTile<T, kQueries, kHeadDim>;
  using Keys = SharedTile<T, kKeys, kHeadDim>;
  using Staged = StagedMask<false, kN>;
  static constexpr int kSharedBytes =
      2 * Queries::kBytes + 2 * Keys::kBytes + shared_bytes<float>(kTile.warps * kKeys) + Staged::bytes(kTile.warps);
  static_assert(kSharedBytes <= kMostShared, "some devices have no more for a block");
};

template <class T, int kHeadDim, bool kDropout, class Tiles = MaskTiles<T, kHeadDim>>
__global__ void __launch_bounds__(Tiles::kThreads, 1) attention_mask_bwd_kernel(const AttentionMaskBwd<T> args) {
  constexpr int kN = Tiles::kN, kKeys = Tiles::kKeys, kQueries = Tiles::kQueries, kThreads = Tiles::kThreads;
  const AttentionInputs<T>& in = args.in;
  const int own_q = args.sum_queries ? 1 : args.blocks_q, steps_q = args.sum_queries ? args.blocks_q : 1;
  const int i_k = static_cast<int>(blockIdx.x) % args.blocks_k;
  const int i_q = static_cast<int>(blockIdx.x) / args.blocks_k % own_q;
  const int i_mask = static_cast<int>(blockIdx.x) / args.blocks_k / own_q;
  const int first_key = i_k * kKeys;
  const int sum_batch = in.batch / args.mask_batch, sum_heads = in.heads / args.mask_heads;
  SharedMemory shared;
  const typename Tiles::Queries queries(shared), douts(shared);
  const typename Tiles::Keys keys(shared), values(shared);
  const Shared<float> of_warps = shared.take<float>(Tiles::kTile.warps * kKeys);
  const typename Tiles::Staged staged(shared, in.mask, Tiles::kTile.warps);
  const int own_row = uniform(warp()) * 16;
  const auto key = in.dropout.key();
  float sums[1][kN][4] = {};

  const int64_t steps = static_cast<int64_t>(sum_batch) * sum_heads * steps_q;
  for (int64_t i = 0; i < steps; ++i) {
    const int first_query = (i_q + static_cast<int>(i % steps_q)) * kQueries;
    const int entry = static_cast<int>(i / steps_q);
    const int head = i_mask % args.mask_heads + entry % sum_heads, batch = i_mask / args.mask_heads + entry / sum_heads;
    const Place place{batch, head, 0, 0, 0, in.length_q, in.length_k, 0};
    const auto copy = [&](const auto& tile, auto count, const HeadsAt<const T>& heads, int length, int first) {
      tile.template copy<kThreads, count.value>(0, rows_of(heads, place, 0, length, in.head_dim), first);
    };
    // All have read what is overwritten.
    sync_threads();
    copy(queries, std::integral_constant<int, kQueries>(), in.query, in.length_q, first_query);
    copy(douts, std::integral_constant<int, kQueries>(), args.dout, in.length_q, first_query);
    copy(keys, std::integral_constant<int, kKeys>(), in.key, in.length_k, first_key);
    copy(values, std::integral_constant<int, kKeys>(), in.value, in.length_k, first_key);
    copy_async_commit();
    RowStatistics statistics[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + own_row + half * 8 + lane() / 4;
      const int64_t at = stats_row(in, place) + query;
      statistics[half] = {};
      if (query < in.length_q) {
        statistics[half] = RowStatistics::of(args.maxima[at], args.logs[at], args.delta[at]);
      }
    }
    copy_async_wait<0>();
    sync_threads();
    float p[1][kN][4], ds[1][kN][4];
    multiply_transposed<T, kHeadDim>(p, left_of(queries, own_row), keys, 0);
    const Scores<false, 1, kN> scores{p, place, in.mask, first_query + own_row, first_key};
    scores.scale_and_mask(staged, in.scale, -kInfinity);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for_each_of_row(p[0], half, [&](float& s) { s = statistics[half].probability(s, in.to_base_2()); });
    }
    scores.template hide<false>(in.is_causal, 0);
    multiply_transposed<T, kHeadDim>(ds, left_of(douts, own_row), values, 0);
    if constexpr (kDropout) drop_gradients(ds, in, key, place, first_query + own_row, first_key);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[0][n][k] += p[0][n][k] * (ds[0][n][k] - statistics[k / 2].delta);
    }
  }

  with_type(in.mask.dtype, [&](auto type) {
    using M = decltype(type);
    const Global<M> dmask = reinterpret<M>(args.dmask);
    const int rows = args.sum_queries ? 1 : in.length_q;
    const auto store = [&](int row, int column, float value) {
      if (row < rows && column < in.length_k) {
        dmask[(static_cast<int64_t>(i_mask) * rows + row) * in.length_k + column] = pack<M>({value, 0}).values[0];
      }
    };
    const int first_query = i_q * kQueries + own_row;
    if (args.sum_queries) {
      for_each_column(sums[0], [&](int column, float& upper, float& lower) {
        float sum = upper + lower;
#pragma unroll
        for (int mask = 4; mask < kWarpSize; mask *= 2) sum += shuffle_xor(sum, mask);
        if (lane() < 4) of_warps[warp() * kKeys + column] = sum;
      });
      sync_threads();
      if (warp() != 0) return;
      for (int column = lane(); column < kKeys; column += kWarpSize) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < Tiles::kTile.warps; ++w) sum += of_warps[w * kKeys + column];
        store(0, first_key + column, sum);
      }
    } else {
      for_each(sums[0], [&](float& sum, int row, int column) { store(first_query + row, first_key + column, sum); });
    }
  });
}

template <class T>
void launch_attention_mask_bwd_of(const AttentionMaskBwdArgs& a, cudaStream_t stream) {
  with_attention_form(AttentionInputs<T>(a.inputs), [&](auto head_dim, auto has_dropout) {
    using Tiles = MaskTiles<T, head_dim.value>;
    const AttentionMaskBwd<T> args(a, Tiles::kQueries, Tiles::kKeys);
    const int64_t blocks =
        static_cast<int64_t>(args.sum_queries ? 1 : args.blocks_q) * args.blocks_k * a.mask_batch * a.mask_heads;
    launch("attention_mask_bwd", attention_mask_bwd_kernel<T, head_dim.value, has_dropout.value>, blocks, 1,
           Tiles::kThreads, Tiles::kSharedBytes, stream, args);
  });
}

}  // namespace bertfast
