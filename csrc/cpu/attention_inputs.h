// What attention.cpp and varlen_attention.cpp share: checks, arrays and kernels.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "attention.h"
#include "attention_units.h"
#include "check.h"
#include "heads.h"
#include "tensor.h"

namespace bertfast {

// The kernel of that name for the best instruction set, and a dtype.
#if defined(__x86_64__)
template <class Kernel>
Kernel best_kernel(ScalarType dtype, Kernel of_baseline, Kernel of_avx2, Kernel of_avx512, Kernel of_avx512bf16) {
  const Isa isa = best_isa();
  if (isa == Isa::avx512bf16 && dtype == ScalarType::BFloat16) return of_avx512bf16;
  return isa >= Isa::avx512 ? of_avx512 : isa == Isa::avx2 ? of_avx2 : of_baseline;
}
#define BERTFAST_BEST_KERNEL(name, dtype) \
  best_kernel(dtype, &baseline::name, &avx2::name, &avx512::name, &avx512bf16::name)
#else
#define BERTFAST_BEST_KERNEL(name, dtype) (&baseline::name)
#endif

inline void check_heads(const Tensor& query, const Tensor& key, const Tensor& value, int64_t dim) {
  check_float("query", query);
  check_same_heads(query, key, value, dim);
}

inline void check_saved(const Tensor& dout, const Tensor& out, const Tensor& stats, const Tensor& query) {
  check_same_dtype("dout", dout, "query", query);
  check_same_shape("dout", dout, "query", query);
  check_same_dtype("out", out, "query", query);
  check_same_shape("out", out, "query", query);
  check_stats(stats, query);
}

inline HeadsArray heads_of(const Tensor& heads) {
  const bool is_packed = heads.dim() == 3;
  return {static_cast<char*>(heads.data_ptr()), is_packed ? 0 : heads.stride(0), heads.stride(position_dim(heads)),
          heads.stride(1)};
}

inline AttentionArgs arguments_of(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const std::optional<Dropout>& dropout, bool is_causal, double scale) {
  AttentionArgs args{query.scalar_type(), query.size(query.dim() - 1), heads_of(query), heads_of(key), heads_of(value)};
  args.is_causal = is_causal;
  args.scale = static_cast<float>(scale);
  args.dropout = dropout ? &*dropout : nullptr;
  args.heads = query.size(1);
  return args;
}

inline int64_t longest_keys(const std::vector<Sequence>& sequences) {
  int64_t longest = 0;
  for (const Sequence& sequence : sequences) longest = std::max(longest, sequence.length_k);
  return longest;
}

// Fills out and stats (2, ...).
inline void run_attention_fwd(const AttentionArgs& in, const std::vector<Sequence>& sequences, const Tensor& out,
                              const Tensor& stats) {
  const bool is_packed = out.dim() == 3;
  float* maxima = stats.mutable_data_ptr<float>();
  const AttentionFwd args{in, heads_of(out), maxima, maxima + stats.numel() / 2};
  const auto units = units_of(sequences, in.heads, is_packed, out.size(position_dim(out)), is_packed,
                              unit_queries(sequences, in.heads));
  run_units(BERTFAST_BEST_KERNEL(attention_fwd, in.dtype), args, units, work_of(units, in.head_dim),
            fwd_workspace(in.head_dim, longest_keys(sequences)));
}

inline void run_attention_bwd(const AttentionBwd& args, const std::vector<Sequence>& sequences, bool is_packed,
                              int64_t rows_q) {
  // Gradients of keys and values are sums over all queries.
  const auto units = units_of(sequences, args.in.heads, is_packed, rows_q, is_packed, kAllQueries);
  run_units(BERTFAST_BEST_KERNEL(attention_bwd, args.in.dtype), args, units, 3 * work_of(units, args.in.head_dim),
            bwd_workspace(args.in.head_dim, longest_keys(sequences)));
}

inline AttentionBwd backward_of(const AttentionArgs& in, const Tensor& out, const Tensor& dout, const Tensor& stats,
                                const Tensor& dquery, const Tensor& dkey, const Tensor& dvalue) {
  const float* maxima = stats.const_data_ptr<float>();
  return {in,
          heads_of(out),
          heads_of(dout),
          heads_of(dquery),
          heads_of(dkey),
          heads_of(dvalue),
          maxima,
          maxima + stats.numel() / 2,
          nullptr};
}

}  // namespace bertfast
