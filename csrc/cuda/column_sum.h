// The launcher of column_sum.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace bertfast {

// The sums over the middle dimension of `partial` (count, programs, width), into `count` vectors (width,); count <= 3.
void launch_column_sum(const float* partial, int count, int64_t programs, int width, float* const (&sums)[3],
                       cudaStream_t stream);

}  // namespace bertfast
