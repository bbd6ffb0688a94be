// Backward of attention, of one (sequence, head), by blocks of kQueryRows queries and kKeys keys:
//     p       = exp(scale (scores - max)) / sum, made again            pd = dropout(p)
//     dvalue += pd^T dout                 delta = sum(dout out) of a row
//     ds      = scale (pd (dout value^T) - p delta)
//     dquery += ds key                    dkey += ds^T query
// FLOPs: 10 D per query and key. Products are of BERTFAST_OPERANDS, pd and ds among them. Gradients of keys and values
// are summed up in fp32 in one place, block by block.
#pragma once

#include "attention_gradients.h"

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

// sums[i] = sum(a[i] b[i]), term by term as a tile adds up products: where a query sees one key, dout value^T and delta
// are the same number, and its gradient is 0.
BERTFAST_INLINE void row_products(const Word* a, const Word* b, int64_t width, int64_t head_dim, float* sums) {
  constexpr int kAtOnce = 8;  // the latency of a multiply-add, two of which begin in a clock
  static_assert(kQueryRows % kAtOnce == 0);
  for (int64_t first = 0; first < kQueryRows; first += kAtOnce) {
    float sum[kAtOnce] = {};
    for (int64_t k = 0; k < words_of(head_dim); ++k) {
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t at = (first + i) * width + k;
        sum[i] = multiply_add(a[at], b[at], sum[i]);
      }
    }
    for (int i = 0; i < kAtOnce; ++i) sums[first + i] = sum[i];
  }
}

}  // namespace

void attention_bwd(const AttentionBwd& args, const AttentionUnit& unit, float* workspace) {
  const AttentionArgs& in = args.in;
  const int64_t d = in.head_dim, width = padded(d), keys = unit.length_k;
  auto* key_panels = reinterpret_cast<Word*>(workspace);
  Word* value_panels = key_panels + padded(keys) * width;
  Word* rows_read = value_panels + padded(keys) * width;
  Word* key_pairs = rows_read + padded(keys) * width;
  Word* queries = key_pairs + padded(keys) / 2 * width;
  Word* query_pairs = queries + kQueryRows * width;
  Word* dout = query_pairs + kQueryRows / 2 * width;
  Word* dout_pairs = dout + kQueryRows * width;
  Word* score_pairs = dout_pairs + kQueryRows / 2 * width;
  auto* dkey = reinterpret_cast<float*>(score_pairs + kQueryRows / 2 * kKeys);
  float* dvalue = dkey + padded_rows(keys) * width;
  float* dquery = dvalue + padded_rows(keys) * width;
  float* scores = dquery + kQueryRows * width;
  float* dscores = scores + kQueryRows * kKeys;
  float* dropped = dscores + kQueryRows * kKeys;
  auto* words = reinterpret_cast<uint32_t*>(dropped + kQueryRows * kKeys);

  read_rows(in.value, in.dtype, unit, unit.begin_k, keys, padded(keys), d, rows_read);
  to_panels(rows_read, padded(keys), d, value_panels);
  read_rows(in.key, in.dtype, unit, unit.begin_k, keys, padded(keys), d, rows_read);
  to_panels(rows_read, padded(keys), d, key_panels);
  const Word* key_rows = across_rows(rows_read, padded(keys), width, width, key_pairs);
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
    const Word* query_rows = across_rows(queries, kQueryRows, width, width, query_pairs);
    const Word* dout_rows = across_rows(dout, kQueryRows, width, width, dout_pairs);
    std::memset(dquery, 0, kQueryRows * width * sizeof(float));
    const int64_t seen = visible_keys(in, unit, first + rows - 1);
    for (int64_t first_key = 0; first_key < seen; first_key += kKeys) {
      const int64_t count = seen - first_key < kKeys ? seen - first_key : kKeys;
      const int64_t columns = padded(count), key_tiles = padded_rows(count);
      const Saved saved{args.maxima + unit.stats, args.sums + unit.stats, delta};
      // Rows and columns that fill up tiles of the products below add nothing.
      const int64_t filled = columns < key_tiles ? key_tiles : columns;
      float* kept = score_gradients(in, unit, saved, first, rows, first_key, columns, filled, in.scale, queries, dout,
                                    key_panels, value_panels, buffers);
      for (int64_t i = 0; i < kQueryRows; ++i) {
        to_words(kept + i * kKeys, filled);
        to_words(dscores + i * kKeys, filled);
      }
      const auto* pd = reinterpret_cast<const Word*>(kept);
      const auto* ds = reinterpret_cast<const Word*>(dscores);
      product<true>(rows, width, columns, ds, kKeys, 1, key_rows + words_of(first_key) * width, kPanel, width, dquery,
                    width);
      pd = across_rows(pd, kQueryRows, filled, kKeys, score_pairs);
      product<true>(key_tiles, width, kQueryRows, pd, 1, kKeys, dout_rows, kPanel, width, dvalue + first_key * width,
                    width);
      ds = across_rows(ds, kQueryRows, filled, kKeys, score_pairs);
      product<true>(key_tiles, width, kQueryRows, ds, 1, kKeys, query_rows, kPanel, width, dkey + first_key * width,
                    width);
    }
    write_rows(dquery, args.dquery, in.dtype, unit, unit.begin_q + first, rows, d);
  }
  write_rows(dkey, args.dkey, in.dtype, unit, unit.begin_k, keys, d);
  write_rows(dvalue, args.dvalue, in.dtype, unit, unit.begin_k, keys, d);
}

}  // namespace BERTFAST_ISA
}  // namespace bertfast
