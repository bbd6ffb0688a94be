// The ops attention_{fwd,bwd} and attention_mask_bwd on the CPU.
#include "attention.h"

#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "attention_inputs.h"

namespace bertfast {
namespace {

// (B, H, S, D), (B, S, H, D) in memory: heads next to each other, as the projections around attention have them.
Tensor empty_by_position(const Tensor& heads) {
  const Tensor rows =
      new_empty(heads, {heads.size(0), heads.size(2), heads.size(1), heads.size(3)}, heads.scalar_type());
  return torch::stable::transpose(rows, 1, 2);
}

std::array<int64_t, 4> score_sizes(const Tensor& query, const Tensor& key) {
  return {query.size(0), query.size(1), query.size(2), key.size(2)};
}

// Of a mask's own dimensions, the last of four.
std::array<int64_t, 4> mask_sizes(const Tensor& mask) {
  std::array<int64_t, 4> sizes{1, 1, 1, 1};
  for (int64_t i = 1; i <= mask.dim(); ++i) sizes[4 - i] = mask.size(mask.dim() - i);
  return sizes;
}

// Broadcast by strides of 0.
AttentionMask mask_of(const std::optional<Tensor>& mask, const std::array<int64_t, 4>& scores) {
  AttentionMask found;
  if (!mask) return found;
  found.dtype = mask->scalar_type();
  if (found.dtype != ScalarType::Bool) check_float("attn_mask", *mask);
  bool fits = mask->dim() <= 4;
  for (int i = 0; fits && i < 4; ++i) {
    const int64_t size = mask_sizes(*mask)[i];
    fits = size == 1 || size == scores[i];
  }
  STD_TORCH_CHECK(fits, "attn_mask: expected a shape that broadcasts to (", scores[0], ", ", scores[1], ", ", scores[2],
                  ", ", scores[3], "), got ", shape_of(*mask));
  int64_t* strides[] = {&found.batch, &found.head, &found.row, &found.key};
  for (int64_t i = 1; i <= mask->dim(); ++i) {
    const int64_t dim = mask->dim() - i;
    *strides[4 - i] = mask->size(dim) == 1 ? 0 : mask->stride(dim);
  }
  found.data = static_cast<const char*>(mask->const_data_ptr());
  return found;
}

std::vector<Sequence> sequences_of(const Tensor& query, const Tensor& key) {
  return std::vector<Sequence>(query.size(0), Sequence{0, 0, query.size(2), key.size(2)});
}

std::tuple<Tensor, Tensor> attention_fwd(Tensor query, Tensor key, Tensor value, std::optional<Tensor> attn_mask,
                                         std::optional<Tensor> seed, double dropout_p, bool is_causal, double scale) {
  check_heads(query, key, value, 4);
  const auto dropout = attention_dropout(seed, dropout_p);
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
  const auto dropout = attention_dropout(seed, dropout_p);
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
  check_statistics("delta", delta, rows_of(sizes_of(query)));
  const auto dropout = attention_dropout(seed, dropout_p);
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
  run_units(BERTFAST_BEST_KERNEL(attention_mask_bwd), args, units, work,
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
