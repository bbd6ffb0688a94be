#include "attention_bwd.cuh"

namespace bertfast {

void launch_attention_bwd_bf16(const AttentionBwdArgs& args, cudaStream_t stream) {
  launch_attention_bwd_of<__nv_bfloat16>(args, stream);
}

}  // namespace bertfast
