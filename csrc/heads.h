// Tensors of attention, padded (B, H, S, D) and packed (T, H, D) alike: what its ops on any device check and allocate.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdint>
#include <optional>

#include "check.h"
#include "tensor.h"

namespace bertfast {

// The dimension of positions: of (B, H, S, D), or of packed (T, H, D).
inline int64_t position_dim(const Tensor& heads) {
  return heads.dim() == 4 ? 2 : 0;
}

// How many rows of scores there are: B H S_q, or packed H T_q.
inline int64_t score_rows(const Tensor& query) {
  return rows_of(sizes_of(query));
}

// Whether `tensor` has the shape of `query` but for its number of positions.
inline bool fits_query(const Tensor& tensor, const Tensor& query) {
  if (tensor.dim() != query.dim()) return false;
  for (int64_t i = 0; i < query.dim(); ++i) {
    if (i != position_dim(query) && tensor.size(i) != query.size(i)) return false;
  }
  return true;
}

// Query, key and value, with 4 dimensions or packed with 3, of one dtype.
inline void check_same_heads(const Tensor& query, const Tensor& key, const Tensor& value, int64_t dim) {
  STD_TORCH_CHECK(query.dim() == dim, "query: expected shape ", dim == 4 ? "(B, H, S, D)" : "(T, H, D)", ", got ",
                  shape_of(query));
  check_same_dtype("key", key, "query", query);
  STD_TORCH_CHECK(fits_query(key, query), "key: expected the shape of query, ", shape_of(query),
                  ", but for the number of keys, got ", shape_of(key));
  check_same_dtype("value", value, "query", query);
  check_same_shape("value", value, "key", key);
}

// Each row's maximum, and what is known of its sum.
inline void check_stats(const Tensor& stats, const Tensor& query) {
  STD_TORCH_CHECK(stats.scalar_type() == ScalarType::Float, "stats: expected float32, got ",
                  torch::headeronly::toString(stats.scalar_type()));
  STD_TORCH_CHECK(stats.numel() == 2 * score_rows(query), "stats: expected two values per row, ", 2 * score_rows(query),
                  ", got shape ", shape_of(stats));
}

// `heads` with unit stride in its last dimension, copied only where it has another.
inline Tensor unit_rows(const Tensor& heads) {
  const int64_t last = heads.dim() - 1;
  return heads.stride(last) == 1 || heads.size(last) <= 1 ? heads : torch::stable::contiguous(heads);
}

// (B, H, S, D), (B, S, H, D) in memory: heads next to each other, as the projections around attention have them.
inline Tensor empty_by_position(const Tensor& heads) {
  const Tensor rows =
      new_empty(heads, {heads.size(0), heads.size(2), heads.size(1), heads.size(3)}, heads.scalar_type());
  return torch::stable::transpose(rows, 1, 2);
}

using Sizes4 = std::array<int64_t, 4>;

// (B, H, S_q, S_k).
inline Sizes4 score_sizes(const Tensor& query, const Tensor& key) {
  return {query.size(0), query.size(1), query.size(2), key.size(2)};
}

// Sizes or strides of a mask's own dimensions, the last of four.
template <class Of>
Sizes4 of_last_dims(const Tensor& mask, int64_t missing, const Of& of) {
  Sizes4 found;
  found.fill(missing);
  for (int64_t i = 1; i <= mask.dim(); ++i) found[4 - i] = of(mask.dim() - i);
  return found;
}
inline Sizes4 mask_sizes(const Tensor& mask) {
  return of_last_dims(mask, 1, [&](int64_t dim) { return mask.size(dim); });
}
// Broadcast by strides of 0.
inline Sizes4 mask_strides(const Tensor& mask) {
  return of_last_dims(mask, 0, [&](int64_t dim) { return mask.size(dim) == 1 ? 0 : mask.stride(dim); });
}

inline void check_mask(const Tensor& mask, const Sizes4& scores) {
  const ScalarType dtype = mask.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Bool || dtype == ScalarType::Float || dtype == ScalarType::BFloat16 ||
                      dtype == ScalarType::Half,
                  "attn_mask: expected bool, float32, bfloat16 or float16, got ", torch::headeronly::toString(dtype));
  bool fits = mask.dim() <= 4;
  if (fits) {
    const Sizes4 sizes = mask_sizes(mask);
    for (int i = 0; i < 4; ++i) fits = fits && (sizes[i] == 1 || sizes[i] == scores[i]);
  }
  STD_TORCH_CHECK(fits, "attn_mask: expected a shape that broadcasts to (", scores[0], ", ", scores[1], ", ", scores[2],
                  ", ", scores[3], "), got ", shape_of(mask));
}

}  // namespace bertfast
