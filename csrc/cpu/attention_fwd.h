// Forward of attention, per block of kQueryRows queries, in fp32 but for what is multiplied (BERTFAST_OPERANDS):
//     scores = query key^T            p = exp(scale (scores - max)), by blocks of kKeys keys
//     out    = sum(dropout(p) value) / sum(p)
// FLOPs: 4 D per query and key, in register tiles. Where p is rounded to bf16 for its product, sum(p) is of what was
// not, as on GPUs. Bytes: keys and values are read and converted once per unit and lie in cache while its queries pass
// over them.
#pragma once

#include "attention_rows.h"

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

// The state of a row between blocks of keys.
struct Softmax {
  float maximum = -kInfinity, sum = 0;
};

// Scores become probabilities. Returns the factor of what was summed up under the maximum until now.
BERTFAST_INLINE float softmax_row(float* scores, int64_t width, float log2_scale, Softmax& row) {
  Floats largest = all(row.maximum);
  for (int64_t j = 0; j < width; j += kLanes) {
    const Floats s = load(scores + j);
    largest = s > largest ? s : largest;
  }
  const float maximum = max_of(largest);
  Floats sums{};
  for (int64_t j = 0; j < width; j += kLanes) {
    const Floats p = probabilities(load(scores + j), maximum, log2_scale);
    sums += p;
    store(scores + j, p);
  }
  const float factor = probabilities(all(row.maximum), maximum, log2_scale)[0];
  row.sum = row.sum * factor + sum_of(sums);
  row.maximum = maximum;
  return factor;
}

}  // namespace

void attention_fwd(const AttentionFwd& args, const AttentionUnit& unit, float* workspace) {
  const AttentionArgs& in = args.in;
  const int64_t d = in.head_dim, width = padded(d);
  const int64_t keys = visible_keys(in, unit, unit.first + unit.count - 1);
  auto* key_panels = reinterpret_cast<Word*>(workspace);
  Word* rows_read = key_panels + padded(unit.length_k) * width;
  Word* pairs = rows_read + padded(unit.length_k) * width;
  Word* queries = pairs + padded(unit.length_k) / 2 * width;
  auto* out = reinterpret_cast<float*>(queries + kQueryRows * width);
  float* scores = out + kQueryRows * width;
  auto* words = reinterpret_cast<uint32_t*>(scores + kQueryRows * kKeys);

  read_rows(in.key, in.dtype, unit, unit.begin_k, keys, padded(keys), d, rows_read);
  to_panels(rows_read, padded(keys), d, key_panels);
  read_rows(in.value, in.dtype, unit, unit.begin_k, keys, padded(keys), d, rows_read);
  const Word* values = across_rows(rows_read, padded(keys), width, width, pairs);
  const float log2_scale = log2_scale_of(in);
  for (int64_t done = 0; done < unit.count; done += kQueryRows) {
    const int64_t first = unit.first + done;
    const int64_t rows = unit.count - done < kQueryRows ? unit.count - done : kQueryRows;
    read_rows(in.query, in.dtype, unit, unit.begin_q + first, rows, kQueryRows, d, queries);
    Softmax softmax[kQueryRows];
    for (int64_t first_key = 0; first_key < keys; first_key += kKeys) {
      const int64_t columns = padded(keys - first_key < kKeys ? keys - first_key : kKeys);
      product<false>(rows, columns, d, queries, width, 1, key_panels + first_key * words_of(d), kPanel * words_of(d),
                     kPanel, scores, kKeys);
      for (int64_t i = 0; i < rows; ++i) {
        float* row = scores + i * kKeys;
        mask_row(in, unit, first + i, first_key, columns, row);
        const float factor = softmax_row(row, columns, log2_scale, softmax[i]);
        if (in.dropout) {
          dropout_row(*in.dropout, dropout_row_of(in, unit, first + i), columns, row, words, first_key);
        }
        to_words(row, columns);
        if (first_key) {
          for (int64_t j = 0; j < width; ++j) out[i * width + j] *= factor;
        }
      }
      const auto* p = reinterpret_cast<const Word*>(scores);
      const Word* block = values + words_of(first_key) * width;
      if (first_key) {
        product<true>(rows, width, columns, p, kKeys, 1, block, kPanel, width, out, width);
      } else {
        product<false>(rows, width, columns, p, kKeys, 1, block, kPanel, width, out, width);
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      const Softmax& row = softmax[i];
      // A row without keys is 0 even where a value is not finite.
      for (int64_t j = 0; j < width; ++j) out[i * width + j] = row.sum == 0 ? 0.0f : out[i * width + j] / row.sum;
      args.maxima[unit.stats + first + i] = row.maximum;
      args.sums[unit.stats + first + i] = row.sum;
    }
    write_rows(out, args.out, in.dtype, unit, unit.begin_q + first, rows, d);
  }
}

}  // namespace BERTFAST_ISA
}  // namespace bertfast
