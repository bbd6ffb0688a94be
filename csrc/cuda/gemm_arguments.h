// Tensors as the arguments of a GEMM, and its launches.
#pragma once

#include <optional>
#include <vector>

#include "arguments.h"
#include "gemm.h"

namespace bertfast {

// Whether the kernel takes a matrix as it lies: half precision, rows in whole pieces of 16 bytes.
inline bool fits_gemm(const Tensor& matrix) {
  const ScalarType dtype = matrix.scalar_type();
  if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16) return false;
  if (matrix.size(1) % 8 != 0 || (matrix.stride(1) != 1 && matrix.size(1) > 1)) return false;
  return matrix.stride(0) % 8 == 0 && reinterpret_cast<uintptr_t>(data(matrix)) % 16 == 0;
}

// x as (M, K) if the kernel takes it so; of rows without unit stride a copy, which it does.
inline std::optional<Tensor> gemm_rows(const Tensor& x) {
  if (x.scalar_type() == ScalarType::Float) return std::nullopt;
  const Tensor rows = as_rows(x);
  return fits_gemm(rows) ? std::optional(rows) : std::nullopt;
}

inline int checked_size(const char* name, int64_t size) {
  // A step beyond the last must not overflow.
  constexpr int64_t kMost = 0x7fffffff - 1024;
  STD_TORCH_CHECK(size <= kMost, name, ": expected at most ", kMost, ", got ", size);
  return static_cast<int>(size);
}

// Fills in what is left of `args`, and launches. `x` (M, K) and weights (N, K) fit the kernel, biases are contiguous;
// `out` is (..., weights * N) and not empty.
inline void run_gemm(GemmArgs args, const Tensor& x, const std::vector<Tensor>& weights,
                     const std::vector<std::optional<Tensor>>& biases, const Tensor& out, const OnDevice& on) {
  const auto count = static_cast<int64_t>(weights.size());
  const int columns = checked_size("columns of the output", count * weights[0].size(0));
  args.x = array_of(x);
  args.rows = x.size(0);
  args.stride_x = x.stride(0);
  args.count = static_cast<int>(count);
  args.width = static_cast<int>(columns / count);
  args.width_in = checked_size("columns of x", x.size(1));
  for (size_t i = 0; i < weights.size(); ++i) {
    args.weights[i] = array_of(weights[i]);
    args.biases[i] = array_of(biases[i]);
    args.strides_weight[i] = weights[i].stride(0);
  }
  args.plan = gemm_plan(args.rows, args.width, args.count, args.width_in, on.multiprocessors());
  if (args.plan.splits == 1) return launch_gemm(args, on.stream());

  const Tensor partial = new_empty(out, {args.plan.splits, args.rows, columns}, ScalarType::Float);
  args.partial = mutable_data<float>(partial);
  launch_gemm(args, on.stream());
  BiasActivationSplitsArgs sum{};
  sum.partial = args.partial;
  sum.out = args.out;
  sum.pre = args.pre;
  sum.dropout = args.dropout;
  sum.formula = args.formula;
  sum.rows = args.rows;
  sum.splits = args.plan.splits;
  sum.width = columns;
  launch_bias_activation_fwd_splits(sum, on.stream());
}

}  // namespace bertfast
