// The second stage of sums over rows, and how many sums the first leaves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace bertfast {

// How many blocks walk over the rows of a backward pass that normalises, and leave as many partial sums.
int64_t row_programs(int64_t rows, int width, int multiprocessors);

// The sums over the middle dimension of `partial` (count, programs, width), into `count` vectors (width,); count <= 3.
void launch_column_sum(const float* partial, int count, int64_t programs, int width, float* const (&sums)[3],
                       cudaStream_t stream);

}  // namespace bertfast
