// The ops add_layer_norm_{fwd,bwd} on CUDA.
#include "layer_norm.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "column_sum.h"

namespace bertfast {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd(Tensor x, std::optional<Tensor> residual, Tensor weight,
                                                              Tensor bias, std::optional<Tensor> x_bias,
                                                              std::optional<Tensor> seed, double eps, double dropout_p,
                                                              bool need_sum) {
  check_float("x", x);
  check_min_dim("x", x, 1);
  const std::vector<int64_t> sizes = sizes_of(x);
  const int64_t width = sizes.back();
  check_width(width);
  check_vector("weight", weight, width);
  check_vector("bias", bias, width);
  if (x_bias) check_vector("x_bias", *x_bias, width);
  if (residual) {
    check_float("residual", *residual);
    check_same_shape("residual", *residual, "x", x);
  }
  const OnDevice on(x);
  const ScalarType dtype = residual ? promote(x.scalar_type(), residual->scalar_type()) : x.scalar_type();
  Tensor out = new_empty(x, sizes, dtype);
  Tensor sum = new_empty(x, need_sum ? sizes : std::vector<int64_t>{0}, dtype);
  Tensor mean = new_empty(x, {sizes.begin(), sizes.end() - 1}, ScalarType::Float);
  Tensor rstd = new_empty(mean, sizes_of(mean), ScalarType::Float);
  if (x.numel() == 0) return {out, sum, mean, rstd};

  x = as_rows(x);
  residual = as_rows(residual);
  weight = as_contiguous(weight);
  bias = as_contiguous(bias);
  x_bias = as_contiguous(x_bias);
  AddLayerNormFwdArgs args{};
  args.x = array_of(x);
  args.residual = array_of(residual);
  args.weight = array_of(weight);
  args.bias = array_of(bias);
  args.x_bias = array_of(x_bias);
  args.out = mutable_array_of(out);
  args.sum = mutable_array_of(sum);
  args.mean = mutable_data<float>(mean);
  args.rstd = mutable_data<float>(rstd);
  args.dropout = dropout_of(seed, dropout_p);
  args.rows = x.size(0);
  args.stride_x = x.stride(0);
  args.stride_residual = row_stride(residual);
  args.width = static_cast<int>(width);
  args.eps = static_cast<float>(eps);
  launch_add_layer_norm_fwd(args, on.stream());
  return {out, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_layer_norm_bwd(Tensor dout, std::optional<Tensor> dsum,
                                                                      Tensor sum, Tensor mean, Tensor rstd,
                                                                      Tensor weight, std::optional<Tensor> seed,
                                                                      double dropout_p, bool has_residual,
                                                                      bool has_x_bias) {
  check_float("sum", sum);
  check_min_dim("sum", sum, 1);
  const std::vector<int64_t> sizes = sizes_of(sum);
  const int64_t width = sizes.back();
  const int64_t rows = rows_of(sizes);
  check_width(width);
  check_like("dout", dout, "sum", sum);
  if (dsum) check_like("dsum", *dsum, "sum", sum);
  check_statistics("mean", mean, rows);
  check_statistics("rstd", rstd, rows);
  check_vector("weight", weight, width);
  const OnDevice on(sum);
  const bool separate = has_residual && seed.has_value();
  const ScalarType dtype = sum.scalar_type();
  Tensor dx = new_empty(sum, sizes, dtype);
  Tensor dresidual = new_empty(sum, separate ? sizes : std::vector<int64_t>{0}, dtype);
  Tensor sums[3];
  for (int i = 0; i < 3; ++i) sums[i] = new_empty(sum, {i < 2 || has_x_bias ? width : 0}, ScalarType::Float);
  if (sum.numel() == 0) {
    for (Tensor& zeros : sums) torch::stable::zero_(zeros);
    return {dx, dresidual, sums[0], sums[1], sums[2]};
  }

  dout = as_rows(dout);
  dsum = as_rows(dsum);
  sum = as_rows(sum);
  mean = as_contiguous(mean);
  rstd = as_contiguous(rstd);
  weight = as_contiguous(weight);
  const int count = has_x_bias ? 3 : 2;
  AddLayerNormBwdArgs args{};
  args.width = static_cast<int>(width);
  args.programs = row_programs(rows, args.width, on.multiprocessors());
  const Tensor partial = new_empty(sum, {count, args.programs, width}, ScalarType::Float);
  args.dout = array_of(dout);
  args.dsum = array_of(dsum);
  args.sum = array_of(sum);
  args.weight = array_of(weight);
  args.mean = data<float>(mean);
  args.rstd = data<float>(rstd);
  args.dx = mutable_array_of(dx);
  args.dresidual = mutable_array_of(dresidual);
  args.partial = mutable_data<float>(partial);
  args.dropout = dropout_of(seed, dropout_p);
  args.has_x_bias = has_x_bias;
  args.rows = rows;
  args.stride_dout = dout.stride(0);
  args.stride_dsum = row_stride(dsum);
  args.stride_sum = sum.stride(0);
  launch_add_layer_norm_bwd(args, on.stream());
  launch_column_sum(
      args.partial, count, args.programs, args.width,
      {mutable_data<float>(sums[0]), mutable_data<float>(sums[1]), has_x_bias ? mutable_data<float>(sums[2]) : nullptr},
      on.stream());
  return {dx, dresidual, sums[0], sums[1], sums[2]};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, BERTFAST_CUDA_KEY, m) {
  m.impl("add_layer_norm_fwd_cuda", TORCH_BOX(&bertfast::add_layer_norm_fwd));
  m.impl("add_layer_norm_bwd_cuda", TORCH_BOX(&bertfast::add_layer_norm_bwd));
}
