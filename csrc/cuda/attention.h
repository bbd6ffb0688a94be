// The launchers of attention.cuh, attention_bwd.cuh and attention_mask_bwd.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "arrays.h"

namespace bertfast {

// The widest head that kernels serve.
constexpr int kMaxHeadDim = 128;

// (B, H, S, D) by strides in elements, D of them 1 apart; packed (T, H, D), where stride_batch is 0.
template <class A>
struct HeadsOf {
  A array;
  int64_t stride_batch = 0, stride_head = 0, stride_row = 0;
};
using ConstHeads = HeadsOf<ConstArray>;
using Heads = HeadsOf<Array>;

// (B, H, S_q, S_k) by strides in elements: bool as bytes, or float. Null where all keys take part.
struct MaskArray {
  ConstArray array;
  bool is_bool = false;
  int64_t stride_batch = 0, stride_head = 0, stride_query = 0, stride_key = 0;
};

// (sequences + 1,) int32 or int64, contiguous.
struct EndsArray {
  const void* data = nullptr;
  bool is_long = false;
};

// What all kernels are given. Packed, `ends_q` is not null, and there is no mask.
struct AttentionArgs {
  ConstHeads query, key, value;
  MaskArray mask;
  EndsArray ends_q, ends_k;
  int batch, heads, head_dim;
  int length_q, length_k;  // S_q and S_k; packed, T_q and T_k
  int sequences;           // packed
  bool is_causal;
  float scale;  // of the scores, in natural units, as it was given
  DropoutArgs dropout;
};

struct AttentionFwdArgs {
  AttentionArgs inputs;
  Heads out;
  float*
      stats;  // (2, B, H, S_q) or (2, H, T_q): the rows' maxima, in units of scores, and the logarithms of their sums
};

struct AttentionBwdArgs {
  AttentionArgs inputs;
  ConstHeads out, dout;
  const float* stats;
  Heads dquery, dkey, dvalue;
  float* delta;  // (B, H, S_q) or (H, T_q)
};

struct AttentionMaskBwdArgs {
  AttentionArgs inputs;
  ConstHeads dout;
  const float *stats, *delta;
  Array dmask;                               // contiguous
  int mask_batch, mask_heads, mask_queries;  // its sizes, which are the mask's own; it is of all keys
};

// Kernels of one element type are compiled in a unit of their own, side by side with the others.
void launch_attention_fwd_fp16(const AttentionFwdArgs& args, cudaStream_t stream);
void launch_attention_fwd_bf16(const AttentionFwdArgs& args, cudaStream_t stream);
// dquery and delta, then dkey and dvalue, which need delta. The kernel of outputs that are null is left out.
void launch_attention_bwd_fp16(const AttentionBwdArgs& args, cudaStream_t stream);
void launch_attention_bwd_bf16(const AttentionBwdArgs& args, cudaStream_t stream);
void launch_attention_mask_bwd_fp16(const AttentionMaskBwdArgs& args, cudaStream_t stream);
void launch_attention_mask_bwd_bf16(const AttentionMaskBwdArgs& args, cudaStream_t stream);

inline bool is_fp16(const AttentionArgs& args) {
  return args.query.array.dtype == Dtype::kHalf;
}
inline void launch_attention_fwd(const AttentionFwdArgs& args, cudaStream_t stream) {
  is_fp16(args.inputs) ? launch_attention_fwd_fp16(args, stream) : launch_attention_fwd_bf16(args, stream);
}
inline void launch_attention_bwd(const AttentionBwdArgs& args, cudaStream_t stream) {
  is_fp16(args.inputs) ? launch_attention_bwd_fp16(args, stream) : launch_attention_bwd_bf16(args, stream);
}
inline void launch_attention_mask_bwd(const AttentionMaskBwdArgs& args, cudaStream_t stream) {
  is_fp16(args.inputs) ? launch_attention_mask_bwd_fp16(args, stream) : launch_attention_mask_bwd_bf16(args, stream);
}

}  // namespace bertfast
