// Forward of attention, per block of kQueryRows queries, in fp32 whatever the storage:
//     scores = query key^T            p = exp(scale (scores - max)), by blocks of kKeys keys
//     out    = sum(dropout(p) value) / sum(p)
// FLOPs: 4 D per query and key, in register tiles; p takes about as long as 14 of them, 5 % at D = 64. Bytes: keys and
// values are read and converted once per unit and lie in cache while its queries pass over them.
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
  float* key_panels = workspace;
  float* values = key_panels + padded(unit.length_k) * width;
  float* queries = values + padded(unit.length_k) * width;
  float* out = queries + kQueryRows * width;
  float* scores = out + kQueryRows * width;
  auto* words = reinterpret_cast<uint32_t*>(scores + kQueryRows * kKeys);

  // Through the memory of the values, which are read after them.
  read_rows(in.key, in.dtype, unit, unit.begin_k, keys, padded(keys), d, values);
  to_panels(values, padded(keys), d, key_panels);
  read_rows(in.value, in.dtype, unit, unit.begin_k, keys, padded(keys), d, values);
  const float log2_scale = log2_scale_of(in);
  for (int64_t done = 0; done < unit.count; done += kQueryRows) {
    const int64_t first = unit.first + done;
    const int64_t rows = unit.count - done < kQueryRows ? unit.count - done : kQueryRows;
    read_rows(in.query, in.dtype, unit, unit.begin_q + first, rows, kQueryRows, d, queries);
    if (is_negated(in)) {
      for (int64_t i = 0; i < rows * width; ++i) queries[i] = -queries[i];
    }
    Softmax softmax[kQueryRows];
    for (int64_t first_key = 0; first_key < keys; first_key += kKeys) {
      const int64_t columns = padded(keys - first_key < kKeys ? keys - first_key : kKeys);
      product<false>(rows, columns, d, queries, width, 1, key_panels + first_key * d, kPanel * d, kPanel, scores,
                     kKeys);
      for (int64_t i = 0; i < rows; ++i) {
        float* row = scores + i * kKeys;
        mask_row(in, unit, first + i, first_key, columns, row);
        const float factor = softmax_row(row, columns, log2_scale, softmax[i]);
        if (in.dropout) {
          dropout_row(*in.dropout, dropout_row_of(in, unit, first + i), columns, row, words, first_key);
        }
        if (first_key) {
          for (int64_t j = 0; j < width; ++j) out[i * width + j] *= factor;
        }
      }
      if (first_key) {
        product<true>(rows, width, columns, scores, kKeys, 1, values + first_key * width, kPanel, width, out, width);
      } else {
        product<false>(rows, width, columns, scores, kKeys, 1, values, kPanel, width, out, width);
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
