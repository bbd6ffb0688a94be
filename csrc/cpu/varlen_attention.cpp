// The ops varlen_attention_{fwd,bwd} on the CPU: attention's kernels on packed sequences, all in one call.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "attention_inputs.h"
#include "dropout.h"

namespace bertfast {
namespace {

std::vector<int64_t> ends_of(const char* name, const Tensor& cu_seqlens, int64_t total) {
  const ScalarType dtype = cu_seqlens.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, name, ": expected int32 or int64, got ",
                  torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(cu_seqlens.dim() == 1, name, ": expected shape (sequences + 1), got ", shape_of(cu_seqlens));
  const Tensor dense = as_contiguous(cu_seqlens);
  std::vector<int64_t> ends(dense.numel());
  for (size_t i = 0; i < ends.size(); ++i) {
    ends[i] = dtype == ScalarType::Int ? dense.const_data_ptr<int32_t>()[i] : dense.const_data_ptr<int64_t>()[i];
  }
  bool rises = !ends.empty() && ends.front() == 0 && ends.back() == total;
  for (size_t i = 1; rises && i < ends.size(); ++i) rises = ends[i] >= ends[i - 1];
  STD_TORCH_CHECK(rises, name, ": expected to rise from 0 to the number of tokens, ", total);
  return ends;
}

std::vector<Sequence> sequences_of(const Tensor& query, const Tensor& key, const Tensor& cu_seqlens_q,
                                   const Tensor& cu_seqlens_k) {
  check_same_shape("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q", cu_seqlens_q);
  const std::vector<int64_t> ends_q = ends_of("cu_seqlens_q", cu_seqlens_q, query.size(0));
  const std::vector<int64_t> ends_k = ends_of("cu_seqlens_k", cu_seqlens_k, key.size(0));
  std::vector<Sequence> sequences;
  for (size_t i = 0; i + 1 < ends_q.size(); ++i) {
    sequences.push_back({ends_q[i], ends_k[i], ends_q[i + 1] - ends_q[i], ends_k[i + 1] - ends_k[i]});
  }
  return sequences;
}

std::tuple<Tensor, Tensor> varlen_attention_fwd(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,
                                                Tensor cu_seqlens_k, std::optional<Tensor> seed, double dropout_p,
                                                bool is_causal, double scale) {
  check_heads(query, key, value, 3);
  const auto dropout = dropout_of(seed, dropout_p, kStreamAttention);
  const Tensor out = new_empty(query, sizes_of(query), query.scalar_type());
  const Tensor stats = new_empty(query, {2, query.size(1), query.size(0)}, ScalarType::Float);
  if (out.numel() == 0) return {out, stats};
  query = unit_rows(query);
  key = unit_rows(key);
  value = unit_rows(value);
  run_attention_fwd(arguments_of(query, key, value, dropout, is_causal, scale),
                    sequences_of(query, key, cu_seqlens_q, cu_seqlens_k), out, stats);
  return {out, stats};
}

std::tuple<Tensor, Tensor, Tensor> varlen_attention_bwd(Tensor dout, Tensor query, Tensor key, Tensor value,
                                                        Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                                        std::optional<Tensor> seed, Tensor out, Tensor stats,
                                                        double dropout_p, bool is_causal, double scale) {
  check_heads(query, key, value, 3);
  check_saved(dout, out, stats, query);
  const auto dropout = dropout_of(seed, dropout_p, kStreamAttention);
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
  const AttentionArgs args = arguments_of(query, key, value, dropout, is_causal, scale);
  run_attention_bwd(backward_of(args, out, dout, stats, dquery, dkey, dvalue),
                    sequences_of(query, key, cu_seqlens_q, cu_seqlens_k), true, query.size(0));
  return {dquery, dkey, dvalue};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, CPU, m) {
  m.impl("varlen_attention_fwd_cpu", TORCH_BOX(&bertfast::varlen_attention_fwd));
  m.impl("varlen_attention_bwd_cpu", TORCH_BOX(&bertfast::varlen_attention_bwd));
}
