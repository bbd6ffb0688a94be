// The op qkv_projection_fwd on CUDA: one GEMM over three weights where they lie.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "arguments.h"
#include "gemm_arguments.h"
#include "linear.h"

namespace bertfast {
namespace {

Tensor qkv_projection_fwd(Tensor x, Tensor weight_q, Tensor weight_k, Tensor weight_v, std::optional<Tensor> bias_q,
                          std::optional<Tensor> bias_k, std::optional<Tensor> bias_v) {
  static constexpr const char *kWeights[] = {"weight_q", "weight_k", "weight_v"},
                              *kBiases[] = {"bias_q", "bias_k", "bias_v"};
  check_float("x", x);
  check_min_dim("x", x, 1);
  const int64_t width_in = x.size(x.dim() - 1);
  STD_TORCH_CHECK(weight_q.dim() == 2, "weight_q: expected shape (N, ", width_in, "), got ", shape_of(weight_q));
  const int64_t width = weight_q.size(0);
  std::vector<Tensor> weights{weight_q, weight_k, weight_v};
  std::vector<std::optional<Tensor>> biases{bias_q, bias_k, bias_v};
  for (size_t i = 0; i < weights.size(); ++i) {
    STD_TORCH_CHECK(weights[i].dim() == 2 && weights[i].size(0) == width && weights[i].size(1) == width_in, kWeights[i],
                    ": expected shape (", width, ", ", width_in, "), got ", shape_of(weights[i]));
    check_same_dtype(kWeights[i], weights[i], "x", x);
    if (!biases[i]) continue;
    check_vector(kBiases[i], *biases[i], width);
    check_same_dtype(kBiases[i], *biases[i], "x", x);
  }
  const OnDevice on(x);
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = 3 * width;
  Tensor out = new_empty(x, sizes, x.scalar_type());
  if (out.numel() == 0) return out;

  const std::optional<Tensor> rows =
      std::all_of(weights.begin(), weights.end(), fits_gemm) ? gemm_rows(x) : std::nullopt;
  if (!rows) {
    for (int64_t i = 0; i < 3; ++i) {
      Tensor part = torch::stable::narrow(out, out.dim() - 1, i * width, width);
      torch::stable::copy_(part, linear(x, weights[i], biases[i]));
    }
    return out;
  }
  for (std::optional<Tensor>& bias : biases) bias = as_contiguous(bias);
  GemmArgs args{};
  args.out = mutable_array_of(out);
  args.formula = Formula::kLinear;
  run_gemm(args, *rows, weights, biases, out, on);
  return out;
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, BERTFAST_CUDA_KEY, m) {
  m.impl("qkv_projection_fwd_cuda", TORCH_BOX(&bertfast::qkv_projection_fwd));
}
