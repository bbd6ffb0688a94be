#include "gemm.cuh"

namespace bertfast {

void launch_gemm_fp16(const GemmArgs& args, cudaStream_t stream) {
  launch_gemm_of<__half>(args, stream);
}

}  // namespace bertfast
