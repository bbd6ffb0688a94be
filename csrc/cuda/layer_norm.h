// The launchers of layer_norm.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "arrays.h"

namespace bertfast {

// Rows are (rows, width) with unit stride in the last dimension; `stride_x` and so on are those of rows, in elements.
// What is written is contiguous. Residual, x_bias, sum and dsum may be null.
struct AddLayerNormFwdArgs {
  ConstArray x, residual;
  ConstArray weight, bias, x_bias;  // (width,)
  Array out, sum;                   // of the same dtype
  float *mean, *rstd;               // (rows,)
  DropoutArgs dropout;
  int64_t rows, stride_x, stride_residual;
  int width;
  float eps;
};

struct AddLayerNormBwdArgs {
  ConstArray dout, dsum, sum;
  ConstArray weight;
  const float *mean, *rstd;
  Array dx, dresidual;  // dresidual null where it is dx
  float* partial;       // (2 or 3, programs, width): sums over rows for dweight, dbias and dx_bias
  DropoutArgs dropout;
  bool has_x_bias;
  int64_t rows, stride_dout, stride_dsum, stride_sum;
  int64_t programs;
  int width;
};

void launch_add_layer_norm_fwd(const AddLayerNormFwdArgs& args, cudaStream_t stream);
void launch_add_layer_norm_bwd(const AddLayerNormBwdArgs& args, cudaStream_t stream);

}  // namespace bertfast
