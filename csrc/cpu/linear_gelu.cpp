// out = gelu(x weight^T + bias): the GEMM is torch's, bias and GELU run in place on what it wrote.
//
// Bytes moved after the GEMM, fp32: 8 N a row. Eager copies the bias into the output in front of the GEMM and writes
// another tensor behind it: 20 N.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "activations.h"
#include "check.h"
#include "linear.h"
#include "parallel.h"
#include "simd.h"
#include "tensor.h"
#include "vector.h"

namespace bertfast {
namespace {

template <class Form>
void bias_activation(const Tensor& out, const float* bias, const Form& form) {
  const int64_t n = out.size(out.dim() - 1);
  const Rows in(out, n);
  const MutableRows rows(out, n);
  parallel_rows(out.numel() / n, n, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(n);
    with_best_isa([&]() __attribute__((always_inline)) {
      for (int64_t i = begin; i < end; ++i) {
        const float* x = in.read(i, buffer.data());
        float* y = rows.target(i, buffer.data());
        if (bias) {
#pragma omp simd
          for (int64_t j = 0; j < n; ++j) y[j] = form(x[j] + bias[j]);
        } else {
#pragma omp simd
          for (int64_t j = 0; j < n; ++j) y[j] = form(x[j]);
        }
        rows.store(i, y);
      }
    });
  });
}

std::tuple<Tensor, Tensor> linear_gelu_fwd(Tensor x, Tensor weight, std::optional<Tensor> bias, std::string activation,
                                           std::optional<Tensor> seed, double dropout_p, bool need_pre) {
  check_float("x", x);
  check_min_dim("x", x, 1);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == x.size(x.dim() - 1), "weight: expected shape (N, ",
                  x.size(x.dim() - 1), "), got ", shape_of(weight));
  if (bias) check_vector("bias", *bias, weight.size(0));
  STD_TORCH_CHECK(activation == "gelu" || activation == "gelu_tanh", "activation: expected gelu or gelu_tanh, got ",
                  activation);
  STD_TORCH_CHECK(!seed && dropout_p == 0, "dropout_p: expected 0 and no seed, got ", dropout_p);
  STD_TORCH_CHECK(!need_pre, "need_pre: expected false, there is no backward pass");
  const Tensor pre = new_empty(x, {0}, x.scalar_type());
  // The bias may cancel the product: in half precision it belongs in front of the rounding, in fp32 it rides along.
  const bool bias_first = bias && x.scalar_type() != ScalarType::Float;
  // Nobody else has seen the product, so the rest runs in place.
  const Tensor out = as_contiguous(linear(x, weight, bias_first ? bias : std::nullopt));
  if (out.numel() == 0) return {out, pre};
  const FloatVector biases(bias_first ? std::nullopt : bias);
  if (activation == "gelu_tanh") {
    bias_activation(out, biases.data(), [](float v) __attribute__((always_inline)) { return gelu_tanh(v); });
  } else {
    bias_activation(out, biases.data(), [](float v) __attribute__((always_inline)) { return gelu(v); });
  }
  return {out, pre};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, CPU, m) {
  m.impl("linear_gelu_fwd_cpu", TORCH_BOX(&bertfast::linear_gelu_fwd));
}
