// The ops attention_{fwd,bwd} and attention_mask_bwd on the CPU.
#include "attention.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "attention_inputs.h"
#include "dropout.h"

namespace bertfast {
namespace {

AttentionMask mask_of(const std::optional<Tensor>& mask, const Sizes4& scores) {
  if (!mask) return {};
  check_mask(*mask, scores);
  const Sizes4 strides = mask_strides(*mask);
  return {static_cast<const char*>(mask->const_data_ptr()),
          mask->scalar_type(),
          strides[0],
          strides[1],
          strides[2],
          strides[3]};
}

std::vector<Sequence> sequences_of(const Tensor& query, const Tensor& key) {
  return std::vector<Sequence>(query.size(0), Sequence{0, 0, query.size(2), key.size(2)});
}

std::tuple<Tensor, Tensor> attention_fwd(Tensor query, Tensor key, Tensor value, std::optional<Tensor> attn_mask,
                                         std::optional<Tensor> seed, double dropout_p, bool is_causal, double scale) {
  check_heads(query, key, value, 4);
  const auto dropout = dropout_of(seed, dropout_p, kStreamAttention);
  const Tensor out = empty_by_position(query);
  const Tensor stats = new_empty(query, {2, query.size(0), query.size(1), query.size(2)}, ScalarType::Float);
  if (out.numel() == 0) return {out, stats};
  query = unit_rows(query);
  key = unit_rows(key);
  value = unit_rows(value);
  AttentionArgs args = arguments_of(query, key, value, dropout, is_causal, scale);
  args.mask = mask_of(attn_mask, score_sizes(query, key));
  run_attention_fwd(args, sequences_of(query, key), out, stats);
  return {out, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_bwd(Tensor dout, Tensor query, Tensor key, Tensor value,
                                                         std::optional<Tensor> attn_mask, std::optional<Tensor> seed,
                                                         Tensor out, Tensor stats, double dropout_p, bool is_causal,
                                                         double scale) {
  check_heads(query, key, value, 4);
  check_saved(dout, out, stats, query);
  const auto dropout = dropout_of(seed, dropout_p, kStreamAttention);
  const Tensor dquery = empty_by_position(query);
  Tensor dkey = empty_by_position(key);
  Tensor dvalue = empty_by_position(value);
  Tensor delta = new_empty(query, {query.size(0), query.size(1), query.size(2)}, ScalarType::Float);
  if (dquery.numel() == 0) return {dquery, torch::stable::zero_(dkey), torch::stable::zero_(dvalue), delta};
  dout = unit_rows(dout);
  query = unit_rows(query);
  key = unit_rows(key);
  value = unit_rows(value);
  out = unit_rows(out);
  stats = as_contiguous(stats);
  AttentionArgs args = arguments_of(query, key, value, dropout, is_causal, scale);
  args.mask = mask_of(attn_mask, score_sizes(query, key));
  AttentionBwd backward = backward_of(args, out, dout, stats, dquery, dkey, dvalue);
  backward.delta = delta.mutable_data_ptr<float>();
  run_attention_bwd(backward, sequences_of(query, key), false, query.size(2));
  return {dquery, dkey, dvalue, delta};
}

Tensor attention_mask_bwd(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor attn_mask,
                          std::optional<Tensor> seed, Tensor stats, Tensor delta, double dropout_p, bool is_causal,
                          double scale) {
  check_heads(query, key, value, 4);
  check_float("attn_mask", attn_mask);
  check_saved(dout, dout, stats, query);
  check_statistics("delta", delta, score_rows(query));
  const auto dropout = dropout_of(seed, dropout_p, kStreamAttention);
  Tensor dmask = new_empty(attn_mask, sizes_of(attn_mask), attn_mask.scalar_type());
  const auto own = mask_sizes(attn_mask);
  // Softmax does not change when all scores of a query do.
  const bool is_shared = own[3] < key.size(2);
  if (is_shared || dmask.numel() == 0 || query.numel() == 0 || key.numel() == 0) return torch::stable::zero_(dmask);
  dout = unit_rows(dout);
  query = unit_rows(query);
  key = unit_rows(key);
  value = unit_rows(value);
  stats = as_contiguous(stats);
  delta = as_contiguous(delta);
  AttentionArgs in = arguments_of(query, key, value, dropout, is_causal, scale);
  in.mask = mask_of(attn_mask, score_sizes(query, key));
  const float* maxima = stats.const_data_ptr<float>();
  const AttentionMaskBwd args{in,
                              heads_of(dout),
                              maxima,
                              maxima + stats.numel() / 2,
                              delta.const_data_ptr<float>(),
                              static_cast<char*>(dmask.mutable_data_ptr()),
                              query.size(0),
                              query.size(2),
                              key.size(2),
                              own[0],
                              own[1],
                              own[2]};
  std::vector<AttentionMaskUnit> units;
  for (int64_t b = 0; b < own[0]; ++b) {
    for (int64_t head = 0; head < own[1]; ++head) {
      for (int64_t first = 0; first < own[2]; first += kUnitQueries) {
        units.push_back({b, head, first, std::min(kUnitQueries, own[2] - first)});
      }
    }
  }
  const int64_t work = 4 * query.numel() * key.size(2);
  run_units(BERTFAST_BEST_KERNEL(attention_mask_bwd, in.dtype), args, units, work,
            mask_bwd_workspace(in.head_dim, args.keys, std::min(kUnitQueries, own[2])));
  return dmask;
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, CPU, m) {
  m.impl("attention_fwd_cpu", TORCH_BOX(&bertfast::attention_fwd));
  m.impl("attention_bwd_cpu", TORCH_BOX(&bertfast::attention_bwd));
  m.impl("attention_mask_bwd_cpu", TORCH_BOX(&bertfast::attention_mask_bwd));
}
