#include "attention_mask_bwd.cuh"

namespace bertfast {

void launch_attention_mask_bwd_fp16(const AttentionMaskBwdArgs& args, cudaStream_t stream) {
  launch_attention_mask_bwd_of<__half>(args, stream);
}

}  // namespace bertfast
