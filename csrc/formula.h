// The activations that kernels know.
#pragma once

#include <cstdint>

namespace bertfast {

// Values of bertfast.activations.FORMULAS.
enum class Formula : int32_t {
  kGelu,
  kGeluTanh,
  kQuickGelu,
  kRelu,
  kRelu6,
  kLeakyRelu,
  kElu,
  kSilu,
  kMish,
  kTanh,
  kSigmoid,
  kLinear,
};

}  // namespace bertfast
