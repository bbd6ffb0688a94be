// Gradients of attention, padded and packed, with p recomputed from what the forward pass saved. With m and ln(l) of
// each row, p = e^(s - m - ln(l)), and delta = sum(dout out):
//     dv = p^T dout     dp = dout v^T     ds = p (dp - delta)     dq = scale ds k     dk = scale ds^T q
// dq in a pass over keys for each block of queries, which leaves delta too; then dk and dv in a pass over queries for
// each block of keys, with scores transposed, so that p^T and ds^T are left factors as they are: two recomputations
// instead of atomics, and no memory of the size of the scores. Dropout's mask is made again. The gradient of a float
// mask is attention_mask_bwd.cuh's.
//
// FLOPs: 3 products of 2 S_q S_k D a head for dq, 4 for dk and dv. Bytes, 2 an element: q, k, v, out and dout read, dq,
// dk and dv written, (4 S_q + 4 S_k) D 2 a head, the floor; q, k, v and dout once more because there are two passes;
// and 24 S_q for m, ln(l) and delta: 12 in each pass.
//
// As in the forward pass, the block that may reach beyond the sequence comes first.
#pragma once

#include "attention_inputs.cuh"
#include "attention_scores.cuh"
#include "intrinsics.cuh"
#include "products.cuh"
#include "shared_tile.cuh"

namespace bertfast {

struct AttentionBwdTile {
  int warps;  // with 16 rows each: queries for dq, keys for dk and dv
  int step;   // of the others, keys or queries
};

// Four warps: eight would halve the reads of what they share, but leave half of a block idle with sequences of 64. A
// thread's registers hold, for a head dim of 64, 32 sums of dq and 32 numbers each of p and ds, or 64 sums of dk and dv
// and 16 each, beside the random words of dropout; 128 takes twice the sums, so that above 64 the step is half. Shared
// memory holds two tiles of 64 rows and two stages of two tiles of `step`: 48 KiB for dq and 32 for dk and dv with a
// head dim of 64, so that two blocks fit on every multiprocessor, and 64 and 48 with 128.
constexpr AttentionBwdTile attention_bwd_dq_tile(int head_dim) {
  return {4, head_dim <= 64 ? 64 : 32};
}
constexpr AttentionBwdTile attention_bwd_dk_dv_tile(int head_dim) {
  return {4, head_dim > 64 ? 16 : 32};
}

template <class T>
struct AttentionBwd {
  AttentionInputs<T> in;
  HeadsAt<const T> out, dout;
  Global<const float> maxima, logs;
  HeadsAt<T> dquery, dkey, dvalue;
  Global<float> delta;

  __host__ explicit AttentionBwd(const AttentionBwdArgs& a)
      : in(a.inputs),
        out(a.out, a.inputs.head_dim),
        dout(a.dout, a.inputs.head_dim),
        maxima(a.stats),
        logs(maxima + attention_rows(a.inputs)),
        dquery(a.dquery, a.inputs.head_dim),
        dkey(a.dkey, a.inputs.head_dim),
        dvalue(a.dvalue, a.inputs.head_dim),
        delta(a.delta) {}
};

// What p and ds of a query are computed with: p = 2^((s - maximum) to_base_2 - shift).
struct RowStatistics {
  float maximum, shift, delta;

  __device__ __forceinline__ static RowStatistics of(float maximum, float log, float delta) {
    // A row without any key has an infinite one, as its scores are, and inf - inf is NaN.
    return {fabsf(maximum) == kInfinity ? 0 : maximum, log * kLog2E, delta};
  }

  __device__ __forceinline__ float probability(float s, float to_base_2) const {
    return exp2_approximate((s - maximum) * to_base_2 - shift);
  }
};

// The statistics of two stages of kQueries, in shared memory; 0 beyond the sequence, where p is hidden.
template <int kQueries>
class ColumnStatistics {
 public:
  static constexpr int kBytes = shared_bytes<float>(2 * 3 * kQueries);

  __device__ __forceinline__ explicit ColumnStatistics(SharedMemory& shared)
      : values_(shared.take<float>(2 * 3 * kQueries)) {}

  // Begins to copy those of queries from `first` on, which begin at `row` of the saved ones.
  template <class T>
  __device__ __forceinline__ void copy(int stage, const AttentionBwd<T>& args, int64_t row, int first,
                                       int length) const {
    const int query = static_cast<int>(threadIdx.x);
    if (query >= kQueries) return;
    const int64_t i = row + first + query;
    const Shared<float> own = values_ + stage * 3 * kQueries + query;
    copy_async_4(own, args.maxima + i, first + query < length);
    copy_async_4(own + kQueries, args.logs + i, first + query < length);
    copy_async_4(own + 2 * kQueries, Global<const float>(args.delta) + i, first + query < length);
  }

  __device__ __forceinline__ RowStatistics at(int stage, int query) const {
    const Shared<float> own = values_ + stage * 3 * kQueries + query;
    return RowStatistics::of(own[0], own[kQueries], delta(stage, query));
  }
  __device__ __forceinline__ float delta(int stage, int query) const {
    return values_[(stage * 3 + 2) * kQueries + query];
  }

 private:
  Shared<float> values_;
};

// kTransposed: for dk and dv.
template <class T, int kHeadDim, bool kTransposed>
struct BackwardTiles {
  static constexpr AttentionBwdTile kTile =
      kTransposed ? attention_bwd_dk_dv_tile(kHeadDim) : attention_bwd_dq_tile(kHeadDim);
  static constexpr int kThreads = kTile.warps * kWarpSize, kRows = kTile.warps * 16;
  static constexpr int kStep = kTile.step, kN = kStep / 8;
  using Own = SharedTile<T, kRows, kHeadDim>;
  using Other = SharedTile<T, 2 * kStep, kHeadDim>;  // two stages
  using Staged = StagedMask<kTransposed, kN>;
  static_assert(kTransposed || kRows / 2 <= kStep, "out lies in the second stages until delta is known");
  static constexpr int kSharedBytes =
      2 * Own::kBytes + 2 * Other::kBytes + KeptPlace::kBytes + (kTransposed ? ColumnStatistics<kStep>::kBytes : 0);
  static constexpr int kStagedBytes = Staged::bytes(kTile.warps);  // more, with a mask by pair
  static_assert(kSharedBytes + kStagedBytes <= kMostShared, "some devices have no more for a block");
};

template <class T, int kHeadDim, bool kDropout, class Tiles = BackwardTiles<T, kHeadDim, false>>
__global__ void __launch_bounds__(Tiles::kThreads, 1) attention_bwd_kernel_dq(const AttentionBwd<T> args) {
  constexpr int kN = Tiles::kN, kKeys = Tiles::kStep, kThreads = Tiles::kThreads, kRows = Tiles::kRows;
  const AttentionInputs<T>& in = args.in;
  const Place place = place_of_block<false>(in, kRows);
  if (place.block < 0) return;
  SharedMemory shared;
  const typename Tiles::Own queries(shared), douts(shared);
  const typename Tiles::Other keys(shared), values(shared);
  const KeptPlace kept(shared, place);
  const typename Tiles::Staged staged(shared, in.mask, Tiles::kTile.warps);
  const GlobalRows<T> of_k = rows_of(in.key, place, place.begin_k, place.length_k, in.head_dim);
  const GlobalRows<T> of_v = rows_of(in.value, place, place.begin_k, place.length_k, in.head_dim);
  const GlobalRows<T> of_out = rows_of(args.out, place, place.begin_q, place.length_q, in.head_dim);
  const int first_query = place.block * kRows, own_row = uniform(warp()) * 16;
  const int rows = place.length_q - first_query - own_row;  // that this warp has, or fewer than 1
  const int last = last_key_block(place, in.is_causal, first_query + kRows, kKeys);

  const auto copy = [&](int first, int stage) {
    keys.template copy<kThreads, kKeys>(stage * kKeys, of_k, first);
    values.template copy<kThreads, kKeys>(stage * kKeys, of_v, first);
    copy_async_commit();
  };
  queries.template copy<kThreads, kRows>(0, rows_of(in.query, place, place.begin_q, place.length_q, in.head_dim),
                                         first_query);
  douts.template copy<kThreads, kRows>(0, rows_of(args.dout, place, place.begin_q, place.length_q, in.head_dim),
                                       first_query);
  // Only delta needs out: it takes the place of the second stages, one half each.
  keys.template copy<kThreads, kRows / 2>(kKeys, of_out, first_query);
  values.template copy<kThreads, kRows / 2>(kKeys, of_out, first_query + kRows / 2);
  copy(last, 0);
  copy_async_wait<0>();
  sync_threads();

  RowStatistics statistics[2];
  {
    float delta[2] = {};
#pragma unroll
    for (int k = 0; k < kHeadDim; k += 16) {
      uint32_t of_dout[4], of_out[4];
      douts.load_left(of_dout, own_row, k);
      if (own_row < kRows / 2) {
        keys.load_left(of_out, kKeys + own_row, k);
      } else {
        values.load_left(of_out, kKeys + own_row - kRows / 2, k);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) delta[i % 2] += dot_pair<T>(of_dout[i], of_out[i]);
    }
    const int64_t stats_at = stats_row(in, place) + first_query + own_row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane() / 4;
      delta[half] = row_sum(delta[half]);
      statistics[half] = {};
      if (row >= rows) continue;
      statistics[half] = RowStatistics::of(args.maxima[stats_at + row], args.logs[stats_at + row], delta[half]);
      if (lane() % 4 == 0) args.delta[stats_at + row] = delta[half];
    }
  }
  sync_threads();
  if (last > 0) copy(0, 1);

  const auto key = in.dropout.key();
  float dq[1][kHeadDim / 8][4] = {};
  const auto step = [&](auto is_first, int first, int stage) {
    if (rows <= 0) return;
    const KeyMask<kN> key_mask(in.mask, place, first);
    float p[1][kN][4], ds[1][kN][4];
    multiply_transposed<T, kHeadDim>(p, left_of(queries, own_row), keys, stage * kKeys);
    const Scores<false, 1, kN> scores{p, place, in.mask, first_query + own_row, first};
    if (in.mask.is_by_pair()) scores.scale_and_mask(staged, in.scale, -kInfinity);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for_each_of_row(p[0], half, [&](float& s) { s = statistics[half].probability(s, in.to_base_2()); });
    }
    scores.template hide<is_first.value>(in.is_causal, 0);
    key_mask.hide(p, 0);
    multiply_transposed<T, kHeadDim>(ds, left_of(douts, own_row), values, stage * kKeys);
    if constexpr (kDropout) drop_gradients(ds, in, key, place, first_query + own_row, first);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[0][n][i] = p[0][n][i] * (ds[0][n][i] - statistics[i / 2].delta);
    }
    multiply_add<T>(dq, ds, keys, stage * kKeys);
  };
  walk_blocks<kKeys>(0, last, copy, step);
  const Place own = kept.place();
  store_products(dq[0], {in.scale, in.scale}, queries, own_row,
                 args.dquery.at(own.batch, own.head, own.begin_q + first_query + own_row), args.dquery.stride_row,
                 args.dquery.is_vector, rows, in.head_dim);
}

template <class T, int kHeadDim, bool kDropout, class Tiles = BackwardTiles<T, kHeadDim, true>>
__global__ void __launch_bounds__(Tiles::kThreads, 1) attention_bwd_kernel_dk_dv(const AttentionBwd<T> args) {
  constexpr int kN = Tiles::kN, kQueries = Tiles::kStep, kThreads = Tiles::kThreads, kRows = Tiles::kRows;
  static_assert(kQueries <= kThreads, "a thread has one query's statistics");
  const AttentionInputs<T>& in = args.in;
  const Place place = place_of_block<true>(in, kRows);
  if (place.block < 0) return;
  SharedMemory shared;
  const typename Tiles::Own keys(shared), values(shared);
  const typename Tiles::Other queries(shared), douts(shared);
  const KeptPlace kept(shared, place);
  const ColumnStatistics<kQueries> statistics(shared);
  const typename Tiles::Staged staged(shared, in.mask, Tiles::kTile.warps);
  const int first_key = place.block * kRows, own_row = uniform(warp()) * 16;
  const int rows = place.length_k - first_key - own_row;  // that this warp has, or fewer than 1
  const int last = max(place.length_q - 1, 0) / kQueries * kQueries;
  const int begin = in.is_causal ? max(first_key - place.causal_offset, 0) / kQueries * kQueries : 0;

  const auto copy = [&](int first, int stage) {
    // Found again in every step, because their addresses would not fit in registers beside the sums.
    const Place own = kept.place();
    const auto rows_of_q = [&](const HeadsAt<const T>& heads) {
      return rows_of(heads, own, own.begin_q, place.length_q, in.head_dim);
    };
    queries.template copy<kThreads, kQueries>(stage * kQueries, rows_of_q(in.query), first);
    douts.template copy<kThreads, kQueries>(stage * kQueries, rows_of_q(args.dout), first);
    statistics.copy(stage, args, stats_row(in, own), first, place.length_q);
    copy_async_commit();
  };
  keys.template copy<kThreads, kRows>(0, rows_of(in.key, place, place.begin_k, place.length_k, in.head_dim), first_key);
  values.template copy<kThreads, kRows>(0, rows_of(in.value, place, place.begin_k, place.length_k, in.head_dim),
                                        first_key);
  sync_threads();  // of the place that is kept
  copy(last, 0);
  copy_async_wait<0>();
  sync_threads();
  if (begin < last) copy(begin, 1);

  const auto key = in.dropout.key();
  float dk[1][kHeadDim / 8][4] = {}, dv[1][kHeadDim / 8][4] = {};
  const auto step = [&](auto is_first, int first, int stage) {
    if (rows <= 0) return;
    float p[1][kN][4], ds[1][kN][4];
    multiply_transposed<T, kHeadDim>(p, left_of(keys, own_row), queries, stage * kQueries);
    const Scores<true, 1, kN> scores{p, place, in.mask, first, first_key + own_row};
    if (in.mask.is_by_pair()) scores.scale_and_mask(staged, in.scale, -kInfinity);
    for_each_column(p[0], [&](int column, float& s0, float& s1) {
      const RowStatistics of = statistics.at(stage, column);
      s0 = of.probability(s0, in.to_base_2());
      s1 = of.probability(s1, in.to_base_2());
    });
    scores.template hide<is_first.value>(in.is_causal, 0);
    multiply_transposed<T, kHeadDim>(ds, left_of(values, own_row), douts, stage * kQueries);
    if constexpr (kDropout) {
      for_each_kept<true, 1, kN>(in, key, place, first, first_key + own_row, [&](int m, int n, int i, bool is_kept) {
        const float delta = statistics.delta(stage, n * 8 + lane() % 4 * 2 + i % 2);
        ds[m][n][i] = p[m][n][i] * ((is_kept ? ds[m][n][i] * in.dropout.scale : 0) - delta);
        p[m][n][i] = is_kept ? p[m][n][i] * in.dropout.scale : 0;
      });
    } else {
      for_each(ds[0], [&](float& dp, int, int column) { dp -= statistics.delta(stage, column); });
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ds[0][n][i] *= p[0][n][i];
      }
    }
    multiply_add<T>(dv, p, douts, stage * kQueries);
    multiply_add<T>(dk, ds, queries, stage * kQueries);
  };
  walk_blocks<kQueries>(begin, last, copy, step);

  const Place own = kept.place();
  if (in.mask.kind == MaskKind::kBoolByKey) {
    // What a masked key got, infinite or not, stayed in its own row.
    const Global<const uint8_t> data = in.mask.template at<uint8_t>(own);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane() / 4;
      if (row >= rows || data[(first_key + own_row + row) * in.mask.stride_key] != 0) continue;
      for_each_of_row(dk[0], half, [](float& sum) { sum = 0; });
      for_each_of_row(dv[0], half, [](float& sum) { sum = 0; });
    }
  }
  const int64_t begin_k = own.begin_k + first_key + own_row;
  store_products(dk[0], {in.scale, in.scale}, keys, own_row, args.dkey.at(own.batch, own.head, begin_k),
                 args.dkey.stride_row, args.dkey.is_vector, rows, in.head_dim);
  store_products(dv[0], {1, 1}, values, own_row, args.dvalue.at(own.batch, own.head, begin_k), args.dvalue.stride_row,
                 args.dvalue.is_vector, rows, in.head_dim);
}

template <class Tiles, class T>
void launch_attention_bwd_part(const char* name, void (*kernel)(AttentionBwd<T>), const AttentionBwd<T>& args,
                               const AttentionArgs& a, int length, cudaStream_t stream) {
  launch(name, kernel, attention_blocks(a, length, Tiles::kRows), 1, Tiles::kThreads,
         Tiles::kSharedBytes + (args.in.mask.is_by_pair() ? Tiles::kStagedBytes : 0), stream, args);
}

template <class T>
void launch_attention_bwd_of(const AttentionBwdArgs& a, cudaStream_t stream) {
  const AttentionBwd<T> args(a);
  with_attention_form(args.in, [&](auto head_dim, auto has_dropout) {
    constexpr int kHeadDim = head_dim.value;
    if (a.dquery.array.data != nullptr) {
      launch_attention_bwd_part<BackwardTiles<T, kHeadDim, false>>(
          "attention_bwd_dq", attention_bwd_kernel_dq<T, kHeadDim, has_dropout.value>, args, a.inputs,
          a.inputs.length_q, stream);
    }
    if (a.dkey.array.data != nullptr) {
      launch_attention_bwd_part<BackwardTiles<T, kHeadDim, true>>(
          "attention_bwd_dk_dv", attention_bwd_kernel_dk_dv<T, kHeadDim, has_dropout.value>, args, a.inputs,
          a.inputs.length_k, stream);
    }
  });
}

}  // namespace bertfast
