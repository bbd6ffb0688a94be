#include "attention.cuh"

namespace bertfast {

void launch_attention_fwd_fp16(const AttentionFwdArgs& args, cudaStream_t stream) {
  launch_attention_fwd_of<__half>(args, stream);
}

}  // namespace bertfast
