// torch's GEMM.
#pragma once

#include <array>
#include <optional>

#include "tensor.h"

namespace bertfast {

// x weight^T + bias.
inline Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace bertfast
