#include "attention.cuh"

namespace bertfast {

void launch_attention_fwd_bf16(const AttentionFwdArgs& args, cudaStream_t stream) {
  launch_attention_fwd_of<__nv_bfloat16>(args, stream);
}

}  // namespace bertfast
