#include "intrinsics.cuh"

namespace bertfast {
namespace {

__global__ void doubled(Global<const float> in, Global<const float> bias, Global<float> out, int64_t rows,
                        int64_t width, int64_t stride) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      out[row * width + i] = 2 * in[row * stride + i] + (bias ? bias[i] : 0.0f);
    }
  }
}

}  // namespace

void launch_doubled(const float* in, const float* bias, float* out, int64_t rows, int64_t width, int64_t stride,
                    int blocks, cudaStream_t stream) {
  launch("doubled", doubled, blocks, 1, 64, 0, stream, in, bias, out, rows, width, stride);
}

}  // namespace bertfast
