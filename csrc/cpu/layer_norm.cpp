// Residual add, dropout and LayerNorm in one pass over memory.
//
// Forward, per row of width N, all in fp32 whatever the storage:
//     z    = residual + dropout(x + x_bias)
//     mean = sum(z) / N
//     var  = sum((z - mean)^2) / N                  two passes over z in L1: the one-pass form cancels
//     out  = (z - mean) * rstd * weight + bias      rstd = 1 / sqrt(var + eps)
// Bytes moved for fp32: x and residual read, out written (and the sum when asked for): 12 N (16 N) a row. Eager writes
// and reads the sum in between, 20 N, and once more for x + x_bias.
//
// Backward, with xhat = (z - mean) * rstd and g = dout * weight:
//     dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum
//     dresidual = dz, dx = dropout'(dz)
//     dweight = sum_rows(dout * xhat), dbias = sum_rows(dout), dx_bias = sum_rows(dx)
// The sums over rows are taken in chunks of rows that depend on the shape alone, then added up in order: the result is
// the same for any number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "philox.h"
#include "simd.h"

namespace bertfast {
namespace {

using torch::stable::Tensor;

constexpr int64_t kGrain = 16384;  // values that pay for waking another thread
constexpr int64_t kMaxChunks = 32;

// Four independent accumulators: with one, the latency of an addition and not the loads would set the pace.
template <class Term>
BERTFAST_INLINE float sum_of(int64_t size, const Term& term) {
  const int64_t quarter = size / 4;
  float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int64_t i = 0; i < quarter; ++i) {
    s0 += term(i);
    s1 += term(i + quarter);
    s2 += term(i + 2 * quarter);
    s3 += term(i + 3 * quarter);
  }
  for (int64_t i = 4 * quarter; i < size; ++i) s0 += term(i);
  return (s0 + s1) + (s2 + s3);
}

Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

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

std::optional<Dropout> make_dropout(const std::optional<Tensor>& seed, double p) {
  check_probability("dropout_p", p);
  if (p == 0) return std::nullopt;
  check_seed("seed", seed);
  return Dropout(*seed->const_data_ptr<int64_t>(), kStreamAddLayerNorm, p);
}

struct Forward {
  Rows x, residual;
  const float *weight, *bias, *x_bias;
  std::optional<Dropout> dropout;
  float eps;
  MutableRows out, sum;
  float *mean, *rstd;

  BERTFAST_INLINE void row(int64_t i, float* x_buffer, float* residual_buffer, float* z_buffer) const {
    const int64_t n = x.width;
    const float* px = x.read(i, x_buffer);
    const float* pb = x_bias;
    if (dropout) {
      if (pb) {
        for (int64_t j = 0; j < n; ++j) x_buffer[j] = px[j] + pb[j];
        pb = nullptr;
      } else if (px != x_buffer) {
        std::copy(px, px + n, x_buffer);
      }
      dropout_row(*dropout, i, n, x_buffer);
      px = x_buffer;
    }
    float* z = sum ? sum.target(i, z_buffer) : z_buffer;
    float total;
    if (residual) {
      const float* pr = residual.read(i, residual_buffer);
      total = pb ? sum_of(n, [&](int64_t j) { return z[j] = pr[j] + (px[j] + pb[j]); })
                 : sum_of(n, [&](int64_t j) { return z[j] = pr[j] + px[j]; });
    } else {
      total = pb ? sum_of(n, [&](int64_t j) { return z[j] = px[j] + pb[j]; })
                 : sum_of(n, [&](int64_t j) { return z[j] = px[j]; });
    }
    if (sum) sum.store(i, z);
    const float m = total / n;
    const float variance = sum_of(n, [&](int64_t j) { return (z[j] - m) * (z[j] - m); }) / n;
    const float r = 1.0f / std::sqrt(variance + eps);
    float* y = out.target(i, x_buffer);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) y[j] = (z[j] - m) * r * weight[j] + bias[j];
    out.store(i, y);
    mean[i] = m;
    rstd[i] = r;
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd(Tensor x, std::optional<Tensor> residual, Tensor weight,
                                                              Tensor bias, std::optional<Tensor> x_bias,
                                                              std::optional<Tensor> seed, double eps, double dropout_p,
                                                              bool need_sum) {
  check_float("x", x);
  check_min_dim("x", x, 1);
  const auto sizes = x.sizes().vec();
  const int64_t n = sizes.back();
  const int64_t m = n == 0 ? 0 : x.numel() / n;
  check_vector("weight", weight, n);
  check_vector("bias", bias, n);
  if (residual) {
    check_float("residual", *residual);
    check_same_shape("residual", *residual, "x", x);
  }
  if (x_bias) check_vector("x_bias", *x_bias, n);
  const auto dropout = make_dropout(seed, dropout_p);

  const ScalarType dtype = residual ? promote(x.scalar_type(), residual->scalar_type()) : x.scalar_type();
  const std::vector<int64_t> row_sizes(sizes.begin(), sizes.end() - 1);
  Tensor out = torch::stable::empty(sizes, dtype);
  Tensor sum = need_sum ? torch::stable::empty(sizes, dtype) : torch::stable::empty({0}, dtype);
  Tensor mean = torch::stable::empty(row_sizes, ScalarType::Float);
  Tensor rstd = torch::stable::empty(row_sizes, ScalarType::Float);
  if (m == 0) return {out, sum, mean, rstd};

  x = as_contiguous(x);
  if (residual) residual = as_contiguous(*residual);
  const FloatVector weights(weight), biases(bias), x_biases(x_bias);
  const Forward forward{Rows(x, n),
                        residual ? Rows(*residual, n) : Rows(),
                        weights.data(),
                        biases.data(),
                        x_biases.data(),
                        dropout,
                        static_cast<float>(eps),
                        MutableRows(out, n),
                        need_sum ? MutableRows(sum, n) : MutableRows(),
                        mean.mutable_data_ptr<float>(),
                        rstd.mutable_data_ptr<float>()};
  torch::stable::parallel_for(0, m, std::max<int64_t>(1, kGrain / n), [&](int64_t begin, int64_t end) {
    std::vector<float> buffers(3 * n);
    float* buffer = buffers.data();
    with_best_isa([&]() __attribute__((always_inline)) {
      for (int64_t i = begin; i < end; ++i) forward.row(i, buffer, buffer + n, buffer + 2 * n);
    });
  });
  return {out, sum, mean, rstd};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, CPU, m) {
  m.impl("add_layer_norm_fwd_cpu", TORCH_BOX(&bertfast::add_layer_norm_fwd));
}
