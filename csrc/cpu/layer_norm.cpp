// Residual add, dropout and LayerNorm in one pass over memory.
//
// Forward, per row of width N, all in fp32 whatever the storage:
//     z    = residual + dropout(x + x_bias)
//     mean = sum(z) / N, and sum(z - mean) / N more: equal numbers have their mean exactly
//     var  = sum((z - mean)^2) / N                  passes over z in L1: the one-pass form cancels
//     out  = (z - mean) * rstd * weight + bias      rstd = 1 / sqrt(var + eps)
// Bytes moved for fp32: x and residual read, out written (and the sum when asked for): 12 N (16 N) a row. Eager writes
// and reads the sum in between, 20 N, and once more for x + x_bias.
//
// Backward, with xhat = (z - mean) * rstd and g = dout * weight:
//     dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum
//     dresidual = dz, dx = dropout'(dz)
//     dweight = sum_rows(dout * xhat), dbias = sum_rows(dout), dx_bias = sum_rows(dx)
// Bytes moved for fp32: dout and the sum read, dx written (and dresidual where dropout makes it differ): 12 N (16 N) a
// row, and dsum read where there is one.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "dropout.h"
#include "normalise.h"
#include "parallel.h"
#include "philox.h"
#include "simd.h"
#include "tensor.h"
#include "vector.h"

namespace bertfast {
namespace {

struct Forward {
  Rows x, residual;
  const float* x_bias;
  std::optional<Dropout> dropout;
  Normalise normalise;
  MutableRows out, sum;

  static constexpr int kBuffers = 3;

  BERTFAST_INLINE void row(int64_t i, RowBuffers& buffers, uint32_t* words) const {
    const int64_t n = x.width;
    float* x_buffer = buffers[0];
    const float* px = x.read(i, x_buffer);
    const float* pb = x_bias;
    if (dropout) {
      if (pb) {
        for (int64_t j = 0; j < n; ++j) x_buffer[j] = px[j] + pb[j];
        pb = nullptr;
      } else if (px != x_buffer) {
        std::copy(px, px + n, x_buffer);
      }
      dropout_row(*dropout, i, n, x_buffer, words);
      px = x_buffer;
    }
    float* z = sum ? sum.target(i, buffers[2]) : buffers[2];
    float total;
    if (residual) {
      const float* pr = residual.read(i, buffers[1]);
      total = pb ? fill(n, z, [&](int64_t j) { return pr[j] + (px[j] + pb[j]); })
                 : fill(n, z, [&](int64_t j) { return pr[j] + px[j]; });
    } else {
      total = pb ? fill(n, z, [&](int64_t j) { return px[j] + pb[j]; }) : fill(n, z, [&](int64_t j) { return px[j]; });
    }
    if (sum) sum.store(i, z);
    if (out.is_half() && (residual || x_bias || dropout)) {
      // Backward reads the stored sum, so the statistics must be of the rounded one: of a row that is constant but for
      // its rounding it would else see differences that rstd, up to 1e6, blows up.
      out.round(z);
      total = sum_of(n, [&](int64_t j) { return z[j]; });
    }
    float* y = out.target(i, x_buffer);
    normalise.row(i, n, z, total, y);
    out.store(i, y);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd(Tensor x, std::optional<Tensor> residual, Tensor weight,
                                                              Tensor bias, std::optional<Tensor> x_bias,
                                                              std::optional<Tensor> seed, double eps, double dropout_p,
                                                              bool need_sum) {
  check_float("x", x);
  check_min_dim("x", x, 1);
  const std::vector<int64_t> sizes = sizes_of(x);
  const int64_t n = sizes.back();
  const int64_t m = rows_of(sizes);
  check_vector("weight", weight, n);
  check_vector("bias", bias, n);
  if (residual) {
    check_float("residual", *residual);
    check_same_shape("residual", *residual, "x", x);
  }
  if (x_bias) check_vector("x_bias", *x_bias, n);
  const auto dropout = dropout_of(seed, dropout_p, kStreamAddLayerNorm);

  const ScalarType dtype = residual ? promote(x.scalar_type(), residual->scalar_type()) : x.scalar_type();
  const std::vector<int64_t> row_sizes(sizes.begin(), sizes.end() - 1);
  Tensor out = new_empty(x, sizes, dtype);
  Tensor sum = need_sum ? new_empty(x, sizes, dtype) : new_empty(x, {0}, dtype);
  Tensor mean = new_empty(x, row_sizes, ScalarType::Float);
  Tensor rstd = new_empty(x, row_sizes, ScalarType::Float);
  if (x.numel() == 0) return {out, sum, mean, rstd};

  x = as_contiguous(x);
  if (residual) residual = as_contiguous(*residual);
  const FloatVector weights(weight), biases(bias), x_biases(x_bias);
  const Forward forward{Rows(x, n),
                        residual ? Rows(*residual, n) : Rows(),
                        x_biases.data(),
                        dropout,
                        {weights.data(), biases.data(), static_cast<float>(eps), mean.mutable_data_ptr<float>(),
                         rstd.mutable_data_ptr<float>()},
                        MutableRows(out, n),
                        need_sum ? MutableRows(sum, n) : MutableRows()};
  normalise_rows(m, n, forward);
  return {out, sum, mean, rstd};
}

struct Backward {
  Rows dout, dsum, sum;
  NormaliseBwd normalise;
  std::optional<Dropout> dropout;
  MutableRows dx, dresidual;

  static constexpr int kBuffers = 5;

  // `sums` are those of dweight, dbias and, where it is wanted, dx_bias.
  BERTFAST_INLINE void row(int64_t i, RowBuffers& buffers, uint32_t* words, const std::vector<float*>& sums) const {
    const int64_t n = sum.width;
    const MutableRows& first = dropout && dresidual ? dresidual : dx;
    float* dz = first.target(i, buffers[2]);
    normalise.row(i, n, dout.read(i, buffers[0]), sum.read(i, buffers[1]), dz, sums[0], sums[1]);
    if (dsum) add(n, dsum.read(i, buffers[3]), dz);
    float* through_dropout = dz;
    if (dropout) {
      if (dresidual) {
        dresidual.store(i, dz);
        through_dropout = dx.target(i, buffers[4]);
        std::copy(dz, dz + n, through_dropout);
      }
      dropout_row(*dropout, i, n, through_dropout, words);
    }
    dx.store(i, through_dropout);
    if (sums.size() > 2) add(n, through_dropout, sums[2]);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_layer_norm_bwd(Tensor dout, std::optional<Tensor> dsum,
                                                                      Tensor sum, Tensor mean, Tensor rstd,
                                                                      Tensor weight, std::optional<Tensor> seed,
                                                                      double dropout_p, bool has_residual,
                                                                      bool has_x_bias) {
  check_float("sum", sum);
  check_min_dim("sum", sum, 1);
  const std::vector<int64_t> sizes = sizes_of(sum);
  const int64_t n = sizes.back();
  const int64_t m = rows_of(sizes);
  check_float("dout", dout);
  check_same_shape("dout", dout, "sum", sum);
  if (dsum) {
    check_float("dsum", *dsum);
    check_same_shape("dsum", *dsum, "sum", sum);
  }
  check_statistics("mean", mean, m);
  check_statistics("rstd", rstd, m);
  check_vector("weight", weight, n);
  const auto dropout = dropout_of(seed, dropout_p, kStreamAddLayerNorm);

  const ScalarType dtype = sum.scalar_type();
  const bool separate = has_residual && dropout;
  Tensor dx = new_empty(sum, sizes, dtype);
  Tensor dresidual = new_empty(sum, separate ? sizes : std::vector<int64_t>{0}, dtype);
  Tensor dweight = new_empty(sum, {n}, ScalarType::Float);
  Tensor dbias = new_empty(sum, {n}, ScalarType::Float);
  Tensor dx_bias = new_empty(sum, {has_x_bias ? n : 0}, ScalarType::Float);

  dout = as_contiguous(dout);
  sum = as_contiguous(sum);
  if (dsum) dsum = as_contiguous(*dsum);
  mean = as_contiguous(mean);
  rstd = as_contiguous(rstd);
  const FloatVector weights(weight);
  const Backward backward{Rows(dout, n),
                          dsum ? Rows(*dsum, n) : Rows(),
                          Rows(sum, n),
                          {mean.const_data_ptr<float>(), rstd.const_data_ptr<float>(), weights.data()},
                          dropout,
                          MutableRows(dx, n),
                          separate ? MutableRows(dresidual, n) : MutableRows()};
  std::vector<float*> sums{dweight.mutable_data_ptr<float>(), dbias.mutable_data_ptr<float>()};
  if (has_x_bias) sums.push_back(dx_bias.mutable_data_ptr<float>());
  sum_over_rows(m, n, sums, backward);
  return {dx, dresidual, dweight, dbias, dx_bias};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, CPU, m) {
  m.impl("add_layer_norm_fwd_cpu", TORCH_BOX(&bertfast::add_layer_norm_fwd));
  m.impl("add_layer_norm_bwd_cpu", TORCH_BOX(&bertfast::add_layer_norm_bwd));
}
