#include "attention_bwd.cuh"

namespace bertfast {

void launch_attention_bwd_fp16(const AttentionBwdArgs& args, cudaStream_t stream) {
  launch_attention_bwd_of<__half>(args, stream);
}

}  // namespace bertfast
