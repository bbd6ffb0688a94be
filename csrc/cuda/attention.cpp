// The ops attention_{fwd,bwd} and attention_mask_bwd on CUDA.
#include "attention.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "arguments.h"
#include "attention_arguments.h"

namespace bertfast {
namespace {

// Broadcast by strides of 0.
MaskArray mask_of(const std::optional<Tensor>& mask) {
  if (!mask) return {};
  MaskArray found;
  found.is_bool = mask->scalar_type() == ScalarType::Bool;
  found.array = found.is_bool ? ConstArray{data(*mask)} : array_of(*mask);
  const Sizes4 strides = mask_strides(*mask);
  found.stride_batch = strides[0];
  found.stride_head = strides[1];
  found.stride_query = strides[2];
  found.stride_key = strides[3];
  return found;
}

std::tuple<Tensor, Tensor> attention_fwd(Tensor query, Tensor key, Tensor value, std::optional<Tensor> attn_mask,
                                         std::optional<Tensor> seed, double dropout_p, bool is_causal, double scale) {
  check_heads(query, key, value, 4);
  if (attn_mask) check_mask(*attn_mask, score_sizes(query, key));
  const OnDevice on(query);
  const Tensor out = empty_by_position(query);
  const Tensor stats = new_empty(query, {2, query.size(0), query.size(1), query.size(2)}, ScalarType::Float);
  if (out.numel() == 0) return {out, stats};

  query = unit_rows(query);
  key = unit_rows(key);
  value = unit_rows(value);
  AttentionArgs inputs = arguments_of(query, key, value, seed, dropout_p, is_causal, scale);
  inputs.mask = mask_of(attn_mask);
  launch_attention_fwd(forward_of(inputs, out, stats), on.stream());
  return {out, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_bwd(Tensor dout, Tensor query, Tensor key, Tensor value,
                                                         std::optional<Tensor> attn_mask, std::optional<Tensor> seed,
                                                         Tensor out, Tensor stats, double dropout_p, bool is_causal,
                                                         double scale) {
  check_heads(query, key, value, 4);
  if (attn_mask) check_mask(*attn_mask, score_sizes(query, key));
  check_saved(dout, out, stats, query);
  const OnDevice on(query);
  const Tensor dquery = empty_by_position(query);
  Tensor dkey = empty_by_position(key);
  Tensor dvalue = empty_by_position(value);
  const Tensor delta = new_empty(query, {query.size(0), query.size(1), query.size(2)}, ScalarType::Float);
  if (dquery.numel() == 0) return {dquery, torch::stable::zero_(dkey), torch::stable::zero_(dvalue), delta};

  dout = unit_rows(dout);
  query = unit_rows(query);
  key = unit_rows(key);
  value = unit_rows(value);
  out = unit_rows(out);
  stats = as_contiguous(stats);
  AttentionArgs inputs = arguments_of(query, key, value, seed, dropout_p, is_causal, scale);
  inputs.mask = mask_of(attn_mask);
  launch_attention_bwd(backward_of(inputs, dout, out, stats, dquery, dkey, dvalue, delta), on.stream());
  return {dquery, dkey, dvalue, delta};
}

Tensor attention_mask_bwd(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor attn_mask,
                          std::optional<Tensor> seed, Tensor stats, Tensor delta, double dropout_p, bool is_causal,
                          double scale) {
  check_heads(query, key, value, 4);
  check_float("attn_mask", attn_mask);
  check_mask(attn_mask, score_sizes(query, key));
  check_like("dout", dout, "query", query);
  check_stats(stats, query);
  check_statistics("delta", delta, score_rows(query));
  const OnDevice on(query);
  Tensor dmask = new_empty(attn_mask, sizes_of(attn_mask), attn_mask.scalar_type());
  const Sizes4 own = mask_sizes(attn_mask);
  // Softmax does not change when all scores of a query do.
  const bool is_shared = own[3] < key.size(2);
  if (is_shared || dmask.numel() == 0 || query.numel() == 0 || key.numel() == 0) return torch::stable::zero_(dmask);

  dout = unit_rows(dout);
  query = unit_rows(query);
  key = unit_rows(key);
  value = unit_rows(value);
  stats = as_contiguous(stats);
  delta = as_contiguous(delta);
  AttentionMaskBwdArgs args{};
  args.inputs = arguments_of(query, key, value, seed, dropout_p, is_causal, scale);
  args.inputs.mask = mask_of(attn_mask);
  args.dout = heads_of(dout);
  args.stats = data<float>(stats);
  args.delta = data<float>(delta);
  args.dmask = mutable_array_of(dmask);
  args.mask_batch = static_cast<int>(own[0]);
  args.mask_heads = static_cast<int>(own[1]);
  args.mask_queries = static_cast<int>(own[2]);
  launch_attention_mask_bwd(args, on.stream());
  return dmask;
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, BERTFAST_CUDA_KEY, m) {
  m.impl("attention_fwd_cuda", TORCH_BOX(&bertfast::attention_fwd));
  m.impl("attention_bwd_cuda", TORCH_BOX(&bertfast::attention_bwd));
  m.impl("attention_mask_bwd_cuda", TORCH_BOX(&bertfast::attention_mask_bwd));
}
