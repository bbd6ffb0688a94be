// The gradient of attention's float mask: that of the scores (attention_gradients.h), added up over what the mask is
// broadcast to, in fp32 and in one order. FLOPs: 4 D per query and key of every head.
#pragma once

#include "attention_gradients.h"

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

// The mask's place along a dimension stands for one entry, or for all.
struct Span {
  int64_t begin, end;
};

BERTFAST_INLINE Span span_of(int64_t place, int64_t own, int64_t all) {
  return own == 1 ? Span{0, all} : Span{place, place + 1};
}

}  // namespace

void attention_mask_bwd(const AttentionMaskBwd& args, const AttentionMaskUnit& part, float* workspace) {
  const AttentionArgs& in = args.in;
  const int64_t d = in.head_dim, width = padded(d), keys = args.keys;
  auto* key_panels = reinterpret_cast<Word*>(workspace);
  Word* value_panels = key_panels + padded(keys) * width;
  Word* rows_read = value_panels + padded(keys) * width;
  Word* queries = rows_read + padded(keys) * width;
  Word* dout = queries + kQueryRows * width;
  auto* scores = reinterpret_cast<float*>(dout + kQueryRows * width);
  float* dscores = scores + kQueryRows * kKeys;
  float* dropped = dscores + kQueryRows * kKeys;
  auto* words = reinterpret_cast<uint32_t*>(dropped + kQueryRows * kKeys);
  float* sums = dropped + kQueryRows * kKeys + kKeys;
  const ScoreBuffers buffers{scores, dscores, dropped, words};

  const int64_t row = padded(keys);
  std::memset(sums, 0, part.count * row * sizeof(float));
  const bool sums_queries = args.mask_queries < args.queries;
  const Span batch = span_of(part.batch, args.mask_batch, args.batch);
  const Span heads = span_of(part.head, args.mask_heads, in.heads);
  const int64_t begin = sums_queries ? 0 : part.first, end = sums_queries ? args.queries : part.first + part.count;
  for (int64_t b = batch.begin; b < batch.end; ++b) {
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      const int64_t stats = (b * in.heads + head) * args.queries;
      const AttentionUnit unit{b, head, 0, 0, args.queries, keys, begin, end - begin, stats, 0};
      read_rows(in.key, in.dtype, unit, 0, keys, padded(keys), d, rows_read);
      to_panels(rows_read, padded(keys), d, key_panels);
      read_rows(in.value, in.dtype, unit, 0, keys, padded(keys), d, rows_read);
      to_panels(rows_read, padded(keys), d, value_panels);
      for (int64_t first = begin; first < end; first += kQueryRows) {
        const int64_t rows = end - first < kQueryRows ? end - first : kQueryRows;
        read_rows(in.query, in.dtype, unit, first, rows, kQueryRows, d, queries);
        read_rows(args.dout, in.dtype, unit, first, rows, kQueryRows, d, dout);
        const Saved saved{args.maxima + stats, args.sums + stats, args.delta + stats + first};
        for (int64_t first_key = 0; first_key < keys; first_key += kKeys) {
          const int64_t columns = padded(keys - first_key < kKeys ? keys - first_key : kKeys);
          score_gradients(in, unit, saved, first, rows, first_key, columns, columns, 1.0f, queries, dout, key_panels,
                          value_panels, buffers);
          // A block's rows first: the shorter the sums, the less is rounded off.
          for (int64_t i = 1; sums_queries && i < rows; ++i) {
            for (int64_t j = 0; j < columns; ++j) dscores[j] += dscores[i * kKeys + j];
          }
          for (int64_t i = 0; i < (sums_queries ? 1 : rows); ++i) {
            float* sum = sums + (sums_queries ? 0 : first + i - begin) * row + first_key;
            for (int64_t j = 0; j < columns; ++j) sum[j] += dscores[i * kKeys + j];
          }
        }
      }
    }
  }
  const int64_t place = ((part.batch * args.mask_heads + part.head) * args.mask_queries + part.first) * keys;
  const int64_t bytes = bytes_of(in.mask.dtype);
  for (int64_t i = 0; i < part.count; ++i) {
    from_row(sums + i * row, in.mask.dtype, keys, args.dmask + bytes * (place + i * keys));
  }
}

}  // namespace BERTFAST_ISA
}  // namespace bertfast
