// The passes over memory around a linear layer's activation.
#pragma once

#include <cstdint>
#include <optional>

#include "formula.h"
#include "philox.h"
#include "simd.h"

namespace bertfast {

struct BiasActivationFwdArgs {
  Rows product;       // (rows, width)
  const float* bias;  // (width,), or null
  std::optional<Dropout> dropout;
  Formula formula;
  int64_t rows;
  MutableRows out, pre;  // either may be `product`; pre null where it is product, or not wanted
};

struct BiasActivationBwdArgs {
  Rows dout, pre;  // (rows, width)
  std::optional<Dropout> dropout;
  Formula formula;
  int64_t rows;
  MutableRows dpre, out;  // out may be null
  float* dbias;           // (width,), or null
};

void bias_activation_fwd(const BiasActivationFwdArgs& args);
void bias_activation_bwd(const BiasActivationBwdArgs& args);

}  // namespace bertfast
