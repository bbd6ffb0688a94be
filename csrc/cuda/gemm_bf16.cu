#include "gemm.cuh"

namespace bertfast {

void launch_gemm_bf16(const GemmArgs& args, cudaStream_t stream) {
  launch_gemm_of<__nv_bfloat16>(args, stream);
}

}  // namespace bertfast
