// The ops varlen_attention_{fwd,bwd} on CUDA: attention's kernels on packed sequences.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "arguments.h"
#include "attention.h"
#include "attention_arguments.h"

namespace bertfast {
namespace {

void check_ends(const char* name, const Tensor& ends) {
  STD_TORCH_CHECK(ends.scalar_type() == ScalarType::Int || ends.scalar_type() == ScalarType::Long, name,
                  ": expected int32 or int64, got ", torch::headeronly::toString(ends.scalar_type()));
  STD_TORCH_CHECK(ends.dim() == 1, name, ": expected shape (sequences + 1), got ", shape_of(ends));
}

void check_packed(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                  const Tensor& cu_seqlens_k) {
  check_heads(query, key, value, 3);
  check_ends("cu_seqlens_q", cu_seqlens_q);
  check_ends("cu_seqlens_k", cu_seqlens_k);
  check_same_shape("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q", cu_seqlens_q);
  check_count("cu_seqlens_q", "ends", cu_seqlens_q.numel());
  STD_TORCH_CHECK(cu_seqlens_q.numel() > 1 || query.size(0) + key.size(0) == 0,
                  "cu_seqlens_q must hold the ends of a sequence or more, got ", cu_seqlens_q.numel(), " values");
}

EndsArray ends_of(const Tensor& ends) {
  return {data(ends), ends.scalar_type() == ScalarType::Long};
}

AttentionArgs packed_arguments_of(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                  const std::optional<Tensor>& seed, double dropout_p, bool is_causal, double scale) {
  AttentionArgs args = arguments_of(query, key, value, seed, dropout_p, is_causal, scale);
  args.ends_q = ends_of(cu_seqlens_q);
  args.ends_k = ends_of(cu_seqlens_k);
  args.sequences = static_cast<int>(cu_seqlens_q.numel() - 1);
  return args;
}

std::tuple<Tensor, Tensor> varlen_attention_fwd(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,
                                                Tensor cu_seqlens_k, std::optional<Tensor> seed, double dropout_p,
                                                bool is_causal, double scale) {
  check_packed(query, key, value, cu_seqlens_q, cu_seqlens_k);
  const OnDevice on(query);
  const Tensor out = new_empty(query, sizes_of(query), query.scalar_type());
  const Tensor stats = new_empty(query, {2, query.size(1), query.size(0)}, ScalarType::Float);
  if (out.numel() == 0) return {out, stats};

  query = unit_rows(query);
  key = unit_rows(key);
  value = unit_rows(value);
  cu_seqlens_q = as_contiguous(cu_seqlens_q);
  cu_seqlens_k = as_contiguous(cu_seqlens_k);
  const AttentionArgs inputs =
      packed_arguments_of(query, key, value, cu_seqlens_q, cu_seqlens_k, seed, dropout_p, is_causal, scale);
  launch_attention_fwd(forward_of(inputs, out, stats), on.stream());
  return {out, stats};
}

std::tuple<Tensor, Tensor, Tensor> varlen_attention_bwd(Tensor dout, Tensor query, Tensor key, Tensor value,
                                                        Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                                        std::optional<Tensor> seed, Tensor out, Tensor stats,
                                                        double dropout_p, bool is_causal, double scale) {
  check_packed(query, key, value, cu_seqlens_q, cu_seqlens_k);
  check_saved(dout, out, stats, query);
  const OnDevice on(query);
  const Tensor dquery = new_empty(query, sizes_of(query), query.scalar_type());
  Tensor dkey = new_empty(key, sizes_of(key), key.scalar_type());
  Tensor dvalue = new_empty(value, sizes_of(value), value.scalar_type());
  if (dquery.numel() == 0) return {dquery, torch::stable::zero_(dkey), torch::stable::zero_(dvalue)};

  dout = unit_rows(dout);
  query = unit_rows(query);
  key = unit_rows(key);
  value = unit_rows(value);
  out = unit_rows(out);
  stats = as_contiguous(stats);
  cu_seqlens_q = as_contiguous(cu_seqlens_q);
  cu_seqlens_k = as_contiguous(cu_seqlens_k);
  const Tensor delta = new_empty(query, {query.size(1), query.size(0)}, ScalarType::Float);
  const AttentionArgs inputs =
      packed_arguments_of(query, key, value, cu_seqlens_q, cu_seqlens_k, seed, dropout_p, is_causal, scale);
  launch_attention_bwd(backward_of(inputs, dout, out, stats, dquery, dkey, dvalue, delta), on.stream());
  return {dquery, dkey, dvalue};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, BERTFAST_CUDA_KEY, m) {
  m.impl("varlen_attention_fwd_cuda", TORCH_BOX(&bertfast::varlen_attention_fwd));
  m.impl("varlen_attention_bwd_cuda", TORCH_BOX(&bertfast::varlen_attention_bwd));
}
