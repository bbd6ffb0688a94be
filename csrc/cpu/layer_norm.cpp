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
#include "parallel.h"
#include "philox.h"
#include "simd.h"
#include "tensor.h"
#include "vector.h"

namespace bertfast {
namespace {

constexpr int64_t kMinChunkRows = 64;
constexpr int64_t kMaxChunks = 64;  // their partial sums, 3 N each, must stay in cache

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

  BERTFAST_INLINE void row(int64_t i, float* x_buffer, float* residual_buffer, float* z_buffer, uint32_t* words) const {
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
      dropout_row(*dropout, i, n, x_buffer, words);
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
    if (out.is_half() && (residual || x_bias || dropout)) {
      // Backward reads the stored sum, so the statistics must be of the rounded one: of a row that is constant but for
      // its rounding it would else see differences that rstd, up to 1e6, blows up.
      out.round(z);
      total = sum_of(n, [&](int64_t j) { return z[j]; });
    }
    // The sum of equal numbers is rounded, and rstd, up to 1e6, would make a deviation of it.
    const float rough = total / n;
    const float m = rough + sum_of(n, [&](int64_t j) { return z[j] - rough; }) / n;
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
  const auto dropout = make_dropout(seed, dropout_p);

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
                        weights.data(),
                        biases.data(),
                        x_biases.data(),
                        dropout,
                        static_cast<float>(eps),
                        MutableRows(out, n),
                        need_sum ? MutableRows(sum, n) : MutableRows(),
                        mean.mutable_data_ptr<float>(),
                        rstd.mutable_data_ptr<float>()};
  parallel_rows(m, n, [&](int64_t begin, int64_t end) {
    std::vector<float> buffers(3 * n);
    std::vector<uint32_t> words(forward.dropout ? n + 3 : 0);
    float* buffer = buffers.data();
    with_best_isa([&]() __attribute__((always_inline)) {
      for (int64_t i = begin; i < end; ++i) forward.row(i, buffer, buffer + n, buffer + 2 * n, words.data());
    });
  });
  return {out, sum, mean, rstd};
}

struct Backward {
  Rows dout, dsum, sum;
  const float *mean, *rstd, *weight;
  std::optional<Dropout> dropout;
  MutableRows dx, dresidual;

  // Adds the row to the sums over rows; without x_bias, dx_bias is null.
  BERTFAST_INLINE void row(int64_t i, float* buffers, uint32_t* words, float* dweight, float* dbias,
                           float* dx_bias) const {
    const int64_t n = sum.width;
    const float* pd = dout.read(i, buffers);
    const float* pz = sum.read(i, buffers + n);
    const float* ps = dsum ? dsum.read(i, buffers + 2 * n) : nullptr;
    const float* pw = weight;  // GCC 12 does not vectorise a lambda that reads a member
    const float m = mean[i], r = rstd[i];
    const float mean_g = sum_of(n, [&](int64_t j) { return pd[j] * pw[j]; }) / n;
    const float mean_g_xhat = sum_of(n, [&](int64_t j) { return pd[j] * pw[j] * ((pz[j] - m) * r); }) / n;
    const MutableRows& first = dropout && dresidual ? dresidual : dx;
    float* dz = first.target(i, buffers + 3 * n);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      const float xhat = (pz[j] - m) * r;
      dz[j] = r * (pd[j] * pw[j] - mean_g - xhat * mean_g_xhat);
      dweight[j] += pd[j] * xhat;
      dbias[j] += pd[j];
    }
    if (ps) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) dz[j] += ps[j];
    }
    float* through_dropout = dz;
    if (dropout) {
      if (dresidual) {
        dresidual.store(i, dz);
        through_dropout = dx.target(i, buffers + 4 * n);
        std::copy(dz, dz + n, through_dropout);
      }
      dropout_row(*dropout, i, n, through_dropout, words);
    }
    dx.store(i, through_dropout);
    if (dx_bias) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) dx_bias[j] += through_dropout[j];
    }
  }
};

// `partials` holds the (3, N) sums of each chunk, and after that of all chunks in its first.
void add_up(std::vector<float>& partials, int64_t chunks, int64_t size) {
  with_best_isa([&]() __attribute__((always_inline)) {
    for (int64_t chunk = 1; chunk < chunks; ++chunk) {
      const float* part = partials.data() + chunk * size;
      float* total = partials.data();
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) total[j] += part[j];
    }
  });
}

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
  const auto dropout = make_dropout(seed, dropout_p);

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
                          mean.const_data_ptr<float>(),
                          rstd.const_data_ptr<float>(),
                          weights.data(),
                          dropout,
                          MutableRows(dx, n),
                          separate ? MutableRows(dresidual, n) : MutableRows()};
  const int64_t chunk_rows = std::max(kMinChunkRows, (m + kMaxChunks - 1) / kMaxChunks);
  const int64_t chunks = std::max<int64_t>(1, (m + chunk_rows - 1) / chunk_rows);
  std::vector<float> partials(chunks * 3 * n);
  parallel_rows(m == 0 ? 0 : chunks, n * chunk_rows, [&](int64_t begin, int64_t end) {
    std::vector<float> buffers(5 * n);
    std::vector<uint32_t> words(backward.dropout ? n + 3 : 0);
    with_best_isa([&]() __attribute__((always_inline)) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        float* part = partials.data() + chunk * 3 * n;
        for (int64_t i = chunk * chunk_rows; i < std::min(m, (chunk + 1) * chunk_rows); ++i) {
          backward.row(i, buffers.data(), words.data(), part, part + n, has_x_bias ? part + 2 * n : nullptr);
        }
      }
    });
  });
  add_up(partials, chunks, 3 * n);
  const float* total = partials.data();
  std::copy(total, total + n, dweight.mutable_data_ptr<float>());
  std::copy(total + n, total + 2 * n, dbias.mutable_data_ptr<float>());
  if (has_x_bias) std::copy(total + 2 * n, total + 3 * n, dx_bias.mutable_data_ptr<float>());
  return {dx, dresidual, dweight, dbias, dx_bias};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, CPU, m) {
  m.impl("add_layer_norm_fwd_cpu", TORCH_BOX(&bertfast::add_layer_norm_fwd));
  m.impl("add_layer_norm_bwd_cpu", TORCH_BOX(&bertfast::add_layer_norm_bwd));
}
