// The ops linear_gelu_fwd, linear_gelu_separate_fwd and linear_gelu_bwd on CUDA. The GEMM of the first has bias,
// activation and dropout with it; that of the second is torch's, and they are one pass behind it.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "bias_activation.h"
#include "column_sum.h"
#include "formula_names.h"
#include "gemm_arguments.h"
#include "linear.h"

namespace bertfast {
namespace {

void check_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_float("x", x);
  check_min_dim("x", x, 1);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == x.size(x.dim() - 1), "weight: expected shape (N, ",
                  x.size(x.dim() - 1), "), got ", shape_of(weight));
  check_same_dtype("weight", weight, "x", x);
  if (!bias) return;
  check_vector("bias", *bias, weight.size(0));
  check_same_dtype("bias", *bias, "x", x);
}

std::tuple<Tensor, Tensor> linear_gelu_separate_fwd(Tensor x, Tensor weight, std::optional<Tensor> bias,
                                                    std::string activation, std::optional<Tensor> seed,
                                                    double dropout_p, bool need_pre) {
  check_linear(x, weight, bias);
  const Formula formula = formula_of(activation);
  const OnDevice on(x);
  // The bias may cancel the product: in half precision it belongs in front of the rounding, in fp32 it rides along.
  const bool bias_first = bias && x.scalar_type() != ScalarType::Float;
  const Tensor product = as_contiguous(linear(x, weight, bias_first ? bias : std::nullopt));
  const std::vector<int64_t> sizes = sizes_of(product);
  if (bias_first) bias.reset();
  const bool product_is_pre = need_pre && !bias;
  const Tensor out = new_empty(product, sizes, product.scalar_type());
  const Tensor pre =
      product_is_pre ? product : new_empty(product, need_pre ? sizes : std::vector<int64_t>{0}, product.scalar_type());
  if (out.numel() == 0) return {out, pre};

  bias = as_contiguous(bias);
  BiasActivationFwdArgs args{};
  args.product = array_of(product);
  args.bias = array_of(bias);
  args.out = mutable_array_of(out);
  if (!product_is_pre) args.pre = mutable_array_of(pre);
  args.dropout = dropout_of(seed, dropout_p);
  args.formula = formula;
  args.rows = rows_of(sizes);
  args.width = checked_size("weight's rows", weight.size(0));
  launch_bias_activation_fwd(args, on.stream());
  return {out, pre};
}

std::tuple<Tensor, Tensor> linear_gelu_fwd(Tensor x, Tensor weight, std::optional<Tensor> bias, std::string activation,
                                           std::optional<Tensor> seed, double dropout_p, bool need_pre) {
  check_linear(x, weight, bias);
  const OnDevice on(x);
  const std::optional<Tensor> rows = fits_gemm(weight) ? gemm_rows(x) : std::nullopt;
  if (!rows) return linear_gelu_separate_fwd(x, weight, bias, activation, seed, dropout_p, need_pre);

  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = weight.size(0);
  const Tensor out = new_empty(x, sizes, x.scalar_type());
  const Tensor pre = new_empty(x, need_pre ? sizes : std::vector<int64_t>{0}, x.scalar_type());
  bias = as_contiguous(bias);
  GemmArgs args{};
  args.out = mutable_array_of(out);
  args.pre = mutable_array_of(pre);
  args.dropout = dropout_of(seed, dropout_p);
  args.formula = formula_of(activation);
  if (out.numel() == 0) return {out, pre};
  run_gemm(args, *rows, {weight}, {bias}, out, on);
  return {out, pre};
}

std::tuple<Tensor, Tensor, Tensor> linear_gelu_bwd(Tensor dout, Tensor pre, std::string activation,
                                                   std::optional<Tensor> seed, double dropout_p, bool need_out,
                                                   bool has_bias) {
  check_float("pre", pre);
  check_min_dim("pre", pre, 1);
  check_like("dout", dout, "pre", pre);
  const Formula formula = formula_of(activation);
  const std::vector<int64_t> sizes = sizes_of(pre);
  const int64_t width = sizes.back();
  const OnDevice on(pre);
  const Tensor dpre = new_empty(pre, sizes, pre.scalar_type());
  const Tensor out = new_empty(pre, need_out ? sizes : std::vector<int64_t>{0}, pre.scalar_type());
  Tensor dbias = new_empty(pre, {has_bias ? width : 0}, ScalarType::Float);
  if (pre.numel() == 0) return {dpre, out, torch::stable::zero_(dbias)};

  dout = as_rows(dout);
  pre = as_rows(pre);
  BiasActivationBwdArgs args{};
  args.rows = pre.size(0);
  args.width = static_cast<int>(width);
  args.programs = bias_activation_bwd_programs(args.rows, args.width, dtype_of(pre), on.multiprocessors());
  const Tensor partial = new_empty(pre, {1, has_bias ? args.programs : 0, width}, ScalarType::Float);
  args.dout = array_of(dout);
  args.pre = array_of(pre);
  args.dpre = mutable_array_of(dpre);
  args.out = mutable_array_of(out);
  args.partial = has_bias ? mutable_data<float>(partial) : nullptr;
  args.dropout = dropout_of(seed, dropout_p);
  args.formula = formula;
  args.stride_dout = dout.stride(0);
  args.stride_pre = pre.stride(0);
  launch_bias_activation_bwd(args, on.stream());
  if (has_bias) {
    launch_column_sum(args.partial, 1, args.programs, args.width, {mutable_data<float>(dbias), nullptr, nullptr},
                      on.stream());
  }
  return {dpre, out, dbias};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, BERTFAST_CUDA_KEY, m) {
  m.impl("linear_gelu_fwd_cuda", TORCH_BOX(&bertfast::linear_gelu_fwd));
  m.impl("linear_gelu_separate_fwd_cuda", TORCH_BOX(&bertfast::linear_gelu_separate_fwd));
  m.impl("linear_gelu_bwd_cuda", TORCH_BOX(&bertfast::linear_gelu_bwd));
}
