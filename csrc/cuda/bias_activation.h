// The launchers of bias_activation.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "arrays.h"
#include "formula.h"

namespace bertfast {

struct BiasActivationFwdArgs {
  ConstArray product;  // (rows, width) contiguous
  ConstArray bias;     // (width,), or null
  Array out, pre;      // contiguous; pre null where it is product, or not wanted. All are of one dtype
  DropoutArgs dropout;
  Formula formula;
  int64_t rows;
  int width;
};

struct BiasActivationSplitsArgs {
  const float* partial;  // (splits, rows, width): with bias, what the activation gets is their sum
  Array out, pre;        // (rows, width) contiguous, of one dtype in half precision; pre null where it is not wanted
  DropoutArgs dropout;
  Formula formula;
  int64_t rows;
  int splits, width;
};

struct BiasActivationBwdArgs {
  ConstArray dout, pre;  // (rows, width), unit stride in the last dimension
  Array dpre, out;       // contiguous, all four of one dtype; out may be null
  float* partial;        // (1, programs, width): sums over rows for dbias, or null
  DropoutArgs dropout;
  Formula formula;
  int64_t rows, stride_dout, stride_pre;
  int64_t programs;
  int width;
};

void launch_bias_activation_fwd(const BiasActivationFwdArgs& args, cudaStream_t stream);
void launch_bias_activation_fwd_splits(const BiasActivationSplitsArgs& args, cudaStream_t stream);
void launch_bias_activation_bwd(const BiasActivationBwdArgs& args, cudaStream_t stream);

// How many blocks walk over the rows of each stripe of columns in a backward pass, and leave as many partial sums.
int64_t bias_activation_bwd_programs(int64_t rows, int width, Dtype dtype, int multiprocessors);

}  // namespace bertfast
