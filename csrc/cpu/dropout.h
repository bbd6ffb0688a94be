// The dropout of an op, from its arguments.
#pragma once

#include <cstdint>
#include <optional>

#include "check.h"
#include "philox.h"
#include "tensor.h"

namespace bertfast {

// None where p = 0; else `seed` is checked and read.
inline std::optional<Dropout> dropout_of(const std::optional<Tensor>& seed, double p, uint32_t stream) {
  check_probability("dropout_p", p);
  if (p == 0) return std::nullopt;
  check_seed("seed", seed);
  return Dropout(*seed->const_data_ptr<int64_t>(), stream, p);
}

}  // namespace bertfast
