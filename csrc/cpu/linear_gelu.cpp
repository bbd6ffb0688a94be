// The ops linear_gelu_fwd, activation_fwd and linear_gelu_bwd on the CPU. The GEMM of the first is torch's; bias,
// activation and dropout are one pass over what it wrote.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bias_activation.h"
#include "check.h"
#include "dropout.h"
#include "formula_names.h"
#include "linear.h"
#include "tensor.h"
#include "vector.h"

namespace bertfast {
namespace {

std::tuple<Tensor, Tensor> linear_gelu_fwd(Tensor x, Tensor weight, std::optional<Tensor> bias, std::string activation,
                                           std::optional<Tensor> seed, double dropout_p, bool need_pre) {
  check_float("x", x);
  check_min_dim("x", x, 1);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == x.size(x.dim() - 1), "weight: expected shape (N, ",
                  x.size(x.dim() - 1), "), got ", shape_of(weight));
  if (bias) check_vector("bias", *bias, weight.size(0));
  const Formula formula = formula_of(activation);
  const auto dropout = dropout_of(seed, dropout_p, kStreamFeedForward);
  // The bias may cancel the product: in half precision it belongs in front of the rounding, in fp32 it rides along.
  const bool bias_first = bias && x.scalar_type() != ScalarType::Float;
  // Nobody else has seen the product: where it is not kept, the rest runs in place.
  const Tensor product = as_contiguous(linear(x, weight, bias_first ? bias : std::nullopt));
  const int64_t n = weight.size(0);
  const Tensor out = need_pre ? new_empty(product, sizes_of(product), product.scalar_type()) : product;
  const Tensor pre = need_pre ? product : new_empty(product, {0}, product.scalar_type());
  if (product.numel() == 0) return {out, pre};

  const FloatVector biases(bias_first ? std::nullopt : bias);
  bias_activation_fwd({Rows(product, n), biases.data(), dropout, formula, product.numel() / n, MutableRows(out, n),
                       need_pre ? MutableRows(pre, n) : MutableRows()});
  return {out, pre};
}

Tensor activation_fwd(Tensor pre, std::string activation, std::optional<Tensor> seed, double dropout_p) {
  check_float("pre", pre);
  check_min_dim("pre", pre, 1);
  const Formula formula = formula_of(activation);
  const auto dropout = dropout_of(seed, dropout_p, kStreamFeedForward);
  const Tensor out = new_empty(pre, sizes_of(pre), pre.scalar_type());
  if (pre.numel() == 0) return out;

  pre = as_contiguous(pre);
  const int64_t n = pre.size(pre.dim() - 1);
  bias_activation_fwd({Rows(pre, n), nullptr, dropout, formula, pre.numel() / n, MutableRows(out, n), MutableRows()});
  return out;
}

std::tuple<Tensor, Tensor, Tensor> linear_gelu_bwd(Tensor dout, Tensor pre, std::string activation,
                                                   std::optional<Tensor> seed, double dropout_p, bool need_out,
                                                   bool has_bias) {
  check_float("pre", pre);
  check_min_dim("pre", pre, 1);
  check_float("dout", dout);
  check_same_shape("dout", dout, "pre", pre);
  const Formula formula = formula_of(activation);
  const auto dropout = dropout_of(seed, dropout_p, kStreamFeedForward);
  const std::vector<int64_t> sizes = sizes_of(pre);
  const int64_t n = sizes.back();
  const Tensor dpre = new_empty(pre, sizes, pre.scalar_type());
  const Tensor out = new_empty(pre, need_out ? sizes : std::vector<int64_t>{0}, pre.scalar_type());
  Tensor dbias = new_empty(pre, {has_bias ? n : 0}, ScalarType::Float);
  if (pre.numel() == 0) return {dpre, out, torch::stable::zero_(dbias)};

  dout = as_contiguous(dout);
  pre = as_contiguous(pre);
  bias_activation_bwd({Rows(dout, n), Rows(pre, n), dropout, formula, pre.numel() / n, MutableRows(dpre, n),
                       need_out ? MutableRows(out, n) : MutableRows(),
                       has_bias ? dbias.mutable_data_ptr<float>() : nullptr});
  return {dpre, out, dbias};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, CPU, m) {
  m.impl("linear_gelu_fwd_cpu", TORCH_BOX(&bertfast::linear_gelu_fwd));
  m.impl("activation_fwd_cpu", TORCH_BOX(&bertfast::activation_fwd));
  m.impl("linear_gelu_bwd_cpu", TORCH_BOX(&bertfast::linear_gelu_bwd));
}
