#include "attention_mask_bwd.cuh"

namespace bertfast {

void launch_attention_mask_bwd_bf16(const AttentionMaskBwdArgs& args, cudaStream_t stream) {
  launch_attention_mask_bwd_of<__nv_bfloat16>(args, stream);
}

}  // namespace bertfast
