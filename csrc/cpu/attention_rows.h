// Rows of heads, and rows of scores; behind tile.h, for one instruction set.
#pragma once

#include "attention.h"
#include "tile.h"

namespace bertfast {
namespace BERTFAST_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

BERTFAST_INLINE int64_t bytes_of(ScalarType dtype) {
  return dtype == ScalarType::Float ? 4 : 2;
}

// Rows of one head, from `first` on, as a left matrix (rows, padded(D)), with zeros behind the head dim and in rows up
// to `filled`.
void read_rows(const HeadsArray& array, ScalarType dtype, const AttentionUnit& unit, int64_t first, int64_t rows,
               int64_t filled, int64_t head_dim, Word* target) {
  const int64_t width = padded(head_dim), bytes = bytes_of(dtype);
  const char* source = array.data + bytes * (unit.sequence * array.batch + first * array.row + unit.head * array.head);
  for (int64_t i = 0; i < rows; ++i) {
    read_row(source + bytes * i * array.row, dtype, head_dim, width, target + i * width);
  }
  std::memset(target + rows * width, 0, (filled - rows) * width * sizeof(Word));
}

void write_rows(const float* source, const HeadsArray& array, ScalarType dtype, const AttentionUnit& unit,
                int64_t first, int64_t rows, int64_t head_dim) {
  const int64_t width = padded(head_dim), bytes = bytes_of(dtype);
  char* target = array.data + bytes * (unit.sequence * array.batch + first * array.row + unit.head * array.head);
  for (int64_t i = 0; i < rows; ++i) {
    from_row(source + i * width, dtype, head_dim, target + bytes * i * array.row);
  }
}

// Rows (filled, padded(D)) as the columns of a right matrix of depth D: panels of kPanel columns, (words of D, kPanel)
// each.
void to_panels(const Word* rows, int64_t filled, int64_t head_dim, Word* panels) {
  const int64_t width = padded(head_dim), words = words_of(head_dim);
  for (int64_t first = 0; first < filled; first += kPanel) {
    for (int64_t j = 0; j < kPanel; ++j) {
      const Word* row = rows + (first + j) * width;
      Word* panel = panels + first * words + j;
      for (int64_t k = 0; k < words; ++k) panel[k * kPanel] = row[k];
    }
  }
}

// How many of the keys [0, length_k) some query of the unit sees; causal queries see a beginning of them.
BERTFAST_INLINE int64_t visible_keys(const AttentionArgs& in, const AttentionUnit& unit, int64_t query) {
  if (!in.is_causal) return unit.length_k;
  const int64_t end = query + unit.causal_offset + 1;
  return end < 0 ? 0 : end < unit.length_k ? end : unit.length_k;
}

// Of the mask's row of a query, keys [first, first + count).
BERTFAST_INLINE void read_mask(const AttentionMask& mask, const char* source, int64_t count, float* target) {
  if (mask.key == 1) {
    to_row(source, mask.dtype, count, target);
  } else {
    for (int64_t j = 0; j < count; ++j) to_row(source + bytes_of(mask.dtype) * j * mask.key, mask.dtype, 1, target + j);
  }
}

// The largest score must be that of the largest probability: where the scale is negative, scores are negated.
BERTFAST_INLINE bool is_negated(const AttentionArgs& in) {
  return in.scale < 0 && !in.mask.is_added();
}

// What a score is multiplied by in the exponent of 2.
BERTFAST_INLINE float log2_scale_of(const AttentionArgs& in) {
  return in.mask.is_added() ? kLog2e : (in.scale < 0 ? -in.scale : in.scale) * kLog2e;
}

// Products of one query and the keys [first, first + width) become scores: with the mask, and -inf where the query does
// not see the key.
BERTFAST_INLINE void mask_row(const AttentionArgs& in, const AttentionUnit& unit, int64_t query, int64_t first,
                              int64_t width, float* scores) {
  const AttentionMask& mask = in.mask;
  for (int64_t j = 0; is_negated(in) && j < width; ++j) scores[j] = -scores[j];
  int64_t visible = visible_keys(in, unit, query) - first;
  visible = visible < 0 ? 0 : visible < width ? visible : width;
  if (mask.data) {
    const int64_t place = unit.sequence * mask.batch + unit.head * mask.head + query * mask.row + first * mask.key;
    if (mask.is_added()) {
      float biases[kKeys];
      read_mask(mask, mask.data + bytes_of(mask.dtype) * place, visible, biases);
      for (int64_t j = 0; j < visible; ++j) scores[j] = scores[j] * in.scale + biases[j];
    } else {
      const auto* is_seen = reinterpret_cast<const bool*>(mask.data) + place;
      for (int64_t j = 0; j < visible; ++j) {
        if (!is_seen[j * mask.key]) scores[j] = -kInfinity;
      }
    }
  }
  for (int64_t j = visible; j < width; ++j) scores[j] = -kInfinity;
}

// 2^(log2_scale (score - maximum)), and 0 where the score is -inf, also where that is the maximum or the scale is 0.
BERTFAST_INLINE Floats probabilities(Floats scores, float maximum, float log2_scale) {
  const Floats p = exp2_of_nonpositive((scores - maximum) * log2_scale);
  return scores == -kInfinity ? Floats{} : p;
}

BERTFAST_INLINE int64_t dropout_row_of(const AttentionArgs& in, const AttentionUnit& unit, int64_t query) {
  return (unit.sequence * in.heads + unit.head) << 32 | query;
}

}  // namespace
}  // namespace BERTFAST_ISA
}  // namespace bertfast
