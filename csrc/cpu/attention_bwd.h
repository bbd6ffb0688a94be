// Backward of attention, of one (sequence, head), by blocks of kQueryRows queries and kKeys keys:
//     p       = exp(scale (scores - max)) / sum, made again            pd = dropout(p)
//     dvalue += pd^T dout                 delta = sum(dout out) of a row
//     ds      = scale (pd (dout value^T) - p delta)
//     dquery += ds key                    dkey += ds^T query
// FLOPs: 10 D per query and key. Gradients of keys and values are summed up in fp32 in one place, block by block.
#pragma once

#include "attention_gradients.h"

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

// sums[i] = sum(a[i] b[i]), term by term as a tile adds up products: where a query sees one key, dout value^T and delta
// are the same number, and its gradient is 0.
BERTFAST_INLINE void row_products(const float* a, const float* b, int64_t width, int64_t head_dim, float* sums) {
  constexpr int kAtOnce = 8;  // the latency of a multiply-add, two of which begin in a clock
  static_assert(kQueryRows % kAtOnce == 0);
  for (int64_t first = 0; first < kQueryRows; first += kAtOnce) {
    float sum[kAtOnce] = {};
    for (int64_t k = 0; k < head_dim; ++k) {
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t at = (first + i) * width + k;
#if BERTFAST_LANES > 4 || defined(__ARM_FEATURE_FMA)
        sum[i] = __builtin_fmaf(a[at], b[at], sum[i]);  // the compiler does not fuse these by itself
#else
        sum[i] += a[at] * b[at];
#endif
      }
    }
    for (int i = 0; i < kAtOnce; ++i) sums[first + i] = sum[i];
  }
}

}  // namespace

void attention_bwd(const AttentionBwd& args, const AttentionUnit& unit, float* workspace) {
  const AttentionArgs& in = args.in;
  const int64_t d = in.head_dim, width = padded(d), keys = unit.length_k;
  float* key_panels = workspace;
  float* value_panels = key_panels + padded(keys) * width;
  float* key_rows = value_panels + padded(keys) * width;
  float* dkey = key_rows + padded(keys) * width;
  float* dvalue = dkey + padded_rows(keys) * width;
  float* queries = dvalue + padded_rows(keys) * width;
  float* dout = queries + kQueryRows * width;
  float* dquery = dout + kQueryRows * width;
  float* scores = dquery + kQueryRows * width;
  float* dscores = scores + kQueryRows * kKeys;
  float* dropped = dscores + kQueryRows * kKeys;
  auto* words = reinterpret_cast<uint32_t*>(dropped + kQueryRows * kKeys);

  read_rows(in.value, in.dtype, unit, unit.begin_k, keys, padded(keys), d, key_rows);
  to_panels(key_rows, padded(keys), d, value_panels);
  read_rows(in.key, in.dtype, unit, unit.begin_k, keys, padded(keys), d, key_rows);
  to_panels(key_rows, padded(keys), d, key_panels);
  std::memset(dkey, 0, 2 * padded_rows(keys) * width * sizeof(float));
  const ScoreBuffers buffers{scores, dscores, dropped, words};
  for (int64_t first = 0; first < unit.length_q; first += kQueryRows) {
    const int64_t rows = unit.length_q - first < kQueryRows ? unit.length_q - first : kQueryRows;
    float delta[kQueryRows];
    read_rows(args.out, in.dtype, unit, unit.begin_q + first, rows, kQueryRows, d, queries);
    read_rows(args.dout, in.dtype, unit, unit.begin_q + first, rows, kQueryRows, d, dout);
    row_products(dout, queries, width, d, delta);
    for (int64_t i = 0; args.delta && i < rows; ++i) args.delta[unit.stats + first + i] = delta[i];
    read_rows(in.query, in.dtype, unit, unit.begin_q + first, rows, kQueryRows, d, queries);
    std::memset(dquery, 0, kQueryRows * width * sizeof(float));
    const int64_t seen = visible_keys(in, unit, first + rows - 1);
    for (int64_t first_key = 0; first_key < seen; first_key += kKeys) {
      const int64_t count = seen - first_key < kKeys ? seen - first_key : kKeys;
      const int64_t columns = padded(count), key_tiles = padded_rows(count);
      const Saved saved{args.maxima + unit.stats, args.sums + unit.stats, delta};
      // Rows and columns that fill up tiles of the products below add nothing.
      const int64_t filled = columns < key_tiles ? key_tiles : columns;
      const float* kept = score_gradients(in, unit, saved, first, rows, first_key, columns, filled, in.scale, queries,
                                          dout, key_panels, value_panels, buffers);
      product<true>(key_tiles, width, kQueryRows, kept, 1, kKeys, dout, kPanel, width, dvalue + first_key * width,
                    width);
      product<true>(key_tiles, width, kQueryRows, dscores, 1, kKeys, queries, kPanel, width, dkey + first_key * width,
                    width);
      product<true>(rows, width, columns, dscores, kKeys, 1, key_rows + first_key * width, kPanel, width, dquery,
                    width);
    }
    write_rows(dquery, args.dquery, in.dtype, unit, unit.begin_q + first, rows, d);
  }
  write_rows(dkey, args.dkey, in.dtype, unit, unit.begin_k, keys, d);
  write_rows(dvalue, args.dvalue, in.dtype, unit, unit.begin_k, keys, d);
}

}  // namespace BERTFAST_ISA
}  // namespace bertfast
