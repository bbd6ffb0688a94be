// The launchers of embed_layer_norm.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "arrays.h"

namespace bertfast {

// (B, S) int32 or int64, any strides, 0 where ids are broadcast; null for the default.
struct IdsArray {
  const void* data = nullptr;
  bool is_long = false;
  int64_t stride_batch = 0, stride_sequence = 0;
};

// (rows, width) with unit stride in the last dimension; one without rows is there all the same, and every id outside
// it.
struct TableArray {
  ConstArray array;
  int64_t rows = -1, stride = 0;
};

struct EmbedLayerNormFwdArgs {
  IdsArray input_ids, token_type_ids, position_ids;  // null for embeds, for type 0, for 0 .. S - 1
  TableArray embeds;                                 // (B S, width), in place of words; or null
  TableArray word, position, token_type;             // token_type may be null
  ConstArray weight, bias;                           // (width,)
  Array out, sum;                                    // (B S, width) contiguous, of the same dtype; sum may be null
  float *mean, *rstd;                                // (B S,)
  DropoutArgs dropout;
  int64_t rows, length;  // B S and S
  int width;
  float eps;
};

struct EmbedLayerNormBwdArgs {
  ConstArray dout, sum;  // (B S, width), unit stride in the last dimension
  ConstArray weight;
  const float *mean, *rstd;
  Array dsum;      // contiguous
  float* partial;  // (2, programs, width): sums over rows for dweight and dbias
  DropoutArgs dropout;
  int64_t rows, stride_dout, stride_sum;
  int64_t programs;
  int width;
};

void launch_embed_layer_norm_fwd(const EmbedLayerNormFwdArgs& args, cudaStream_t stream);
void launch_embed_layer_norm_bwd(const EmbedLayerNormBwdArgs& args, cudaStream_t stream);

}  // namespace bertfast
