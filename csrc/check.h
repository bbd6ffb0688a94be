// Argument checks. Messages name the tensor, what was expected and what came.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>

namespace bertfast {

using torch::headeronly::ScalarType;

inline std::string shape_of(const torch::stable::Tensor& tensor) {
  std::string text = "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + ")";
}

inline void check_float_type(const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name,
                  ": expected float32, bfloat16 or float16, got ", torch::headeronly::toString(dtype));
}

inline void check_float(const char* name, const torch::stable::Tensor& tensor) {
  check_float_type(name, tensor.scalar_type());
}

inline void check_min_dim(const char* name, const torch::stable::Tensor& tensor, int64_t dim) {
  STD_TORCH_CHECK(tensor.dim() >= dim, name, ": expected at least ", dim, " dimension(s), got shape ",
                  shape_of(tensor));
}

inline void check_vector(const char* name, const torch::stable::Tensor& tensor, int64_t size) {
  check_float(name, tensor);
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == size, name, ": expected shape (", size, "), got ",
                  shape_of(tensor));
}

inline void check_same_shape(const char* name, const torch::stable::Tensor& tensor, const char* other_name,
                             const torch::stable::Tensor& other) {
  bool same = tensor.dim() == other.dim();
  for (int64_t i = 0; same && i < tensor.dim(); ++i) same = tensor.size(i) == other.size(i);
  STD_TORCH_CHECK(same, name, ": expected the shape of ", other_name, ", ", shape_of(other), ", got ",
                  shape_of(tensor));
}

inline void check_same_dtype(const char* name, const torch::stable::Tensor& tensor, const char* other_name,
                             const torch::stable::Tensor& other) {
  STD_TORCH_CHECK(tensor.scalar_type() == other.scalar_type(), name, ": expected the dtype of ", other_name, ", ",
                  torch::headeronly::toString(other.scalar_type()), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()));
}

inline void check_statistics(const char* name, const torch::stable::Tensor& tensor, int64_t rows) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, name, ": expected float32, got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.numel() == rows, name, ": expected one value per row, ", rows, ", got shape ",
                  shape_of(tensor));
}

inline void check_probability(const char* name, double p) {
  STD_TORCH_CHECK(p >= 0 && p <= 1, name, ": expected a probability in [0, 1], got ", p);
}

inline void check_seed(const char* name, const std::optional<torch::stable::Tensor>& seed) {
  STD_TORCH_CHECK(seed.has_value(), name, ": expected an int64 tensor of one element with dropout, got None");
  STD_TORCH_CHECK(seed->scalar_type() == ScalarType::Long && seed->numel() == 1, name,
                  ": expected an int64 tensor of one element, got ", torch::headeronly::toString(seed->scalar_type()),
                  " of shape ", shape_of(*seed));
}

// torch.promote_types of two of fp32, bf16 and fp16.
inline ScalarType promote(ScalarType a, ScalarType b) {
  return a == b ? a : ScalarType::Float;
}

}  // namespace bertfast
