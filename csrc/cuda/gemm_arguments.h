// Tensors as the arguments of a GEMM, and its launches.
#pragma once

#include <optional>
#include <vector>

#include "arguments.h"
#include "gemm.h"

namespace bertfast {

// Whether the kernel takes rows of K as they lie: half precision, in whole pieces of 16 bytes.
inline bool fits_gemm(const Tensor& rows) {
  const ScalarType dtype = rows.scalar_type();
  if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16) return false;
  return rows.size(1) % 8 == 0 && rows.stride(0) % 8 == 0 && reinterpret_cast<uintptr_t>(data(rows)) % 16 == 0;
}

// Fills in what is left of `args`, and launches. `x` (rows, K) and weights (N, K) fit the kernel, biases are
// contiguous; `out` is (..., weights * N) and not empty.
inline void run_gemm(GemmArgs args, const Tensor& x, const std::vector<Tensor>& weights,
                     const std::vector<std::optional<Tensor>>& biases, const Tensor& out, const OnDevice& on) {
  args.x = array_of(x);
  args.rows = x.size(0);
  args.stride_x = x.stride(0);
  args.count = static_cast<int>(weights.size());
  args.width = static_cast<int>(weights[0].size(0));
  args.width_in = static_cast<int>(x.size(1));
  for (size_t i = 0; i < weights.size(); ++i) {
    args.weights[i] = array_of(weights[i]);
    args.biases[i] = array_of(biases[i]);
    args.strides_weight[i] = weights[i].stride(0);
  }
  args.plan = gemm_plan(args.rows, args.width, args.count, args.width_in, on.multiprocessors());
  if (args.plan.parts == 1) return launch_gemm(args, on.stream());

  const int64_t width = static_cast<int64_t>(args.count) * args.width;
  const Tensor partial = new_empty(out, {args.plan.parts, args.rows, width}, ScalarType::Float);
  args.partial = mutable_data<float>(partial);
  launch_gemm(args, on.stream());
  BiasActivationPartsArgs sum{};
  sum.partial = args.partial;
  sum.out = args.out;
  sum.pre = args.pre;
  sum.dropout = args.dropout;
  sum.formula = args.formula;
  sum.rows = args.rows;
  sum.parts = args.plan.parts;
  sum.width = static_cast<int>(width);
  launch_bias_activation_fwd_parts(sum, on.stream());
}

}  // namespace bertfast
