// Gradients of the scores of a block of queries, which backward and the mask's gradient have in common.
#pragma once

#include "attention_rows.h"

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

// kQueryRows rows of kKeys.
struct ScoreBuffers {
  float *scores, *dscores, *dropped;
  uint32_t* words;
};

struct Saved {
  const float *maxima, *sums;  // from the sequence's first row on
  const float* delta;          // from the block's first row on
};

// From queries and dout, (kQueryRows, padded(D)), and columns [first_key, first_key + columns) of the panels:
//     p = exp(score - max) / sum        pd = dropout(p)        dscores = factor (pd (dout value^T) - p delta)
// Returns pd. Of rows beyond `rows` and of columns from there to `filled`, pd and dscores are 0.
inline float* score_gradients(const AttentionArgs& in, const AttentionUnit& unit, const Saved& saved, int64_t first,
                              int64_t rows, int64_t first_key, int64_t columns, int64_t filled, float factor,
                              const Word* queries, const Word* dout, const Word* key_panels, const Word* value_panels,
                              const ScoreBuffers& buffers) {
  const int64_t d = in.head_dim, width = padded(d), words = words_of(d);
  product<false>(rows, columns, d, queries, width, 1, key_panels + first_key * words, kPanel * words, kPanel,
                 buffers.scores, kKeys);
  product<false>(rows, columns, d, dout, width, 1, value_panels + first_key * words, kPanel * words, kPanel,
                 buffers.dscores, kKeys);
  float* kept = in.dropout ? buffers.dropped : buffers.scores;
  const float log2_scale = log2_scale_of(in);
  for (int64_t i = 0; i < kQueryRows; ++i) {
    float *p = buffers.scores + i * kKeys, *ds = buffers.dscores + i * kKeys, *pd = kept + i * kKeys;
    // A row without keys passes 0 gradients even where a value is not finite.
    const float sum = i < rows ? saved.sums[first + i] : 0.0f;
    if (sum != 0) {
      const float maximum = saved.maxima[first + i], inverse = 1.0f / sum;
      mask_row(in, unit, first + i, first_key, columns, p);
      for (int64_t j = 0; j < columns; j += kLanes) {
        store(p + j, probabilities(load(p + j), maximum, log2_scale) * inverse);
      }
      if (in.dropout) {
        std::memcpy(pd, p, columns * sizeof(float));
        dropout_row(*in.dropout, dropout_row_of(in, unit, first + i), columns, pd, buffers.words, first_key);
      }
      for (int64_t j = 0; j < columns; j += kLanes) {
        store(ds + j, (load(pd + j) * load(ds + j) - load(p + j) * saved.delta[i]) * factor);
      }
    }
    for (int64_t j = sum != 0 ? columns : 0; j < filled; ++j) pd[j] = ds[j] = 0;
  }
  return kept;
}

}  // namespace
}  // namespace BERTFAST_ISA
}  // namespace bertfast
