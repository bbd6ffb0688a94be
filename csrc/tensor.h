// What the stable ABI's tensors lack for kernels that allocate, check and launch.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace bertfast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// An uninitialised tensor on the device of `like`. torch::stable::empty goes through the boxed dispatcher, which costs
// 3 us a call where this typed shim costs 1.
inline Tensor new_empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  auto dtype_code = static_cast<int32_t>(dtype);
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_aten_new_empty(like.get(), sizes.data(), static_cast<int64_t>(sizes.size()),
                                                          &dtype_code, nullptr, nullptr, 0, nullptr, &handle));
  return Tensor(handle);
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// How many rows a tensor of these sizes has: all dimensions but the last, which may be 0, together.
inline int64_t rows_of(const std::vector<int64_t>& sizes) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  return rows;
}

inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace bertfast
