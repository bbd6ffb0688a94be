// Parameters of one dimension, such as a bias, as fp32 whatever they are stored in.
#pragma once

#include <optional>
#include <vector>

#include "simd.h"
#include "tensor.h"

namespace bertfast {

// A (N,) tensor as fp32, converted only if it has to be. Empty without a tensor.
class FloatVector {
 public:
  explicit FloatVector(const std::optional<Tensor>& tensor) {
    if (!tensor) return;
    held_ = as_contiguous(*tensor);
    converted_.resize(held_->scalar_type() == ScalarType::Float ? 0 : held_->numel());
    data_ = Rows(*held_, held_->numel()).read(0, converted_.data());
  }

  const float* data() const { return data_; }

 private:
  std::optional<Tensor> held_;
  std::vector<float> converted_;
  const float* data_ = nullptr;
};

}  // namespace bertfast
