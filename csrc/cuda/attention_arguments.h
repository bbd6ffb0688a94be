// What the ops of attention check and hand to its launchers, padded (B, H, S, D) and packed (T, H, D) alike.
#pragma once

#include <climits>
#include <cstdint>
#include <optional>

#include "arguments.h"
#include "attention.h"
#include "heads.h"

namespace bertfast {

// Kernels count by int, and round up to whole blocks of 128 at most.
constexpr int kMaxCount = INT_MAX - 127;

inline void check_count(const char* name, const char* what, int64_t count) {
  STD_TORCH_CHECK(count <= kMaxCount, name, ": expected at most ", kMaxCount, " ", what, ", got ", count);
}

// Query, key and value, with 4 dimensions or packed with 3.
inline void check_heads(const Tensor& query, const Tensor& key, const Tensor& value, int64_t dim) {
  const ScalarType dtype = query.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "query: expected bfloat16 or float16, got ", torch::headeronly::toString(dtype));
  check_same_heads(query, key, value, dim);
  const int64_t head_dim = query.size(dim - 1);
  STD_TORCH_CHECK(head_dim <= kMaxHeadDim, "head dim: expected at most ", kMaxHeadDim, ", got ", head_dim);
  check_count("query", "heads of all sequences", dim == 4 ? query.size(0) * query.size(1) : query.size(1));
  check_count("query", "positions", query.size(position_dim(query)));
  check_count("key", "positions", key.size(position_dim(key)));
}

// What the forward pass left, and the gradient of its output.
inline void check_saved(const Tensor& dout, const Tensor& out, const Tensor& stats, const Tensor& query) {
  check_like("dout", dout, "query", query);
  check_like("out", out, "query", query);
  check_stats(stats, query);
}

template <class A>
HeadsOf<A> heads_of(A array, const Tensor& heads) {
  const bool packed = heads.dim() == 3;
  return {array, packed ? 0 : heads.stride(0), heads.stride(1), heads.stride(position_dim(heads))};
}
// With unit rows.
inline ConstHeads heads_of(const Tensor& heads) {
  return heads_of(array_of(heads), heads);
}
inline Heads mutable_heads_of(const Tensor& heads) {
  return heads_of(mutable_array_of(heads), heads);
}

// All but the mask, or the sequences' ends, of tensors with unit rows.
inline AttentionArgs arguments_of(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const std::optional<Tensor>& seed, double dropout_p, bool is_causal, double scale) {
  AttentionArgs args{};
  args.query = heads_of(query);
  args.key = heads_of(key);
  args.value = heads_of(value);
  args.batch = query.dim() == 4 ? static_cast<int>(query.size(0)) : 1;
  args.heads = static_cast<int>(query.size(1));
  args.head_dim = static_cast<int>(query.size(query.dim() - 1));
  args.length_q = static_cast<int>(query.size(position_dim(query)));
  args.length_k = static_cast<int>(key.size(position_dim(key)));
  args.is_causal = is_causal;
  args.scale = static_cast<float>(scale);
  args.dropout = dropout_of(seed, dropout_p);
  return args;
}

inline AttentionFwdArgs forward_of(const AttentionArgs& inputs, const Tensor& out, const Tensor& stats) {
  return {inputs, mutable_heads_of(out), mutable_data<float>(stats)};
}

inline AttentionBwdArgs backward_of(const AttentionArgs& inputs, const Tensor& dout, const Tensor& out,
                                    const Tensor& stats, const Tensor& dquery, const Tensor& dkey, const Tensor& dvalue,
                                    const Tensor& delta) {
  AttentionBwdArgs args{};
  args.inputs = inputs;
  args.out = heads_of(out);
  args.dout = heads_of(dout);
  args.stats = data<float>(stats);
  args.dquery = mutable_heads_of(dquery);
  args.dkey = mutable_heads_of(dkey);
  args.dvalue = mutable_heads_of(dvalue);
  args.delta = mutable_data<float>(delta);
  return args;
}

}  // namespace bertfast
