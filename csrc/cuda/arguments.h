// Tensors as the launchers' arguments.
#pragma once

#include <optional>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "device.h"
#include "tensor.h"

namespace bertfast {

inline Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return Dtype::kHalf;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    default:
      STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, "expected float32, bfloat16 or float16, got ",
                      torch::headeronly::toString(tensor.scalar_type()));
      return Dtype::kFloat;
  }
}

inline ConstArray array_of(const Tensor& tensor) {
  return {data(tensor), dtype_of(tensor)};
}
inline ConstArray array_of(const std::optional<Tensor>& tensor) {
  return tensor ? array_of(*tensor) : ConstArray();
}

// What is written; null where it is empty, which is how ops return what was not asked for.
inline Array mutable_array_of(const Tensor& tensor) {
  return tensor.numel() == 0 ? Array() : Array{mutable_data(tensor), dtype_of(tensor)};
}

// (..., N) as (M, N) with unit stride in the last dimension, copied only where no such view exists.
inline Tensor as_rows(const Tensor& tensor) {
  const std::vector<int64_t> sizes = sizes_of(tensor);
  const Tensor rows = torch::stable::reshape(tensor, {rows_of(sizes), sizes.back()});
  return rows.stride(1) == 1 || sizes.back() <= 1 ? rows : torch::stable::contiguous(rows);
}
inline std::optional<Tensor> as_rows(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(as_rows(*tensor)) : std::nullopt;
}
inline int64_t row_stride(const std::optional<Tensor>& rows) {
  return rows ? rows->stride(0) : 0;
}

inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(as_contiguous(*tensor)) : std::nullopt;
}

inline void check_width(int64_t width) {
  STD_TORCH_CHECK(width <= kMaxWidth, "width: expected at most ", kMaxWidth, ", got ", width);
}

// Of the shape and dtype of another, as gradients are.
inline void check_like(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  check_same_shape(name, tensor, other_name, other);
  check_same_dtype(name, tensor, other_name, other);
}

// Without a seed nothing is dropped.
inline DropoutArgs dropout_of(const std::optional<Tensor>& seed, double p) {
  check_probability("dropout_p", p);
  if (!seed) {
    STD_TORCH_CHECK(p == 0, "seed: expected an int64 tensor of one element with dropout, got None");
    return {};
  }
  check_seed("seed", seed);
  return {data<int64_t>(*seed), p};
}

}  // namespace bertfast
