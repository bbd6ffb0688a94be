// LayerNorm of rows in registers, forward and backward.
#pragma once

#include "column_sum.cuh"
#include "packed.cuh"
#include "rows.cuh"

namespace bertfast {

// The sum of term(packet, k) over the values of a row. Behind its end terms may be anything and do not enter.
template <class R, class Term>
__device__ __forceinline__ float row_sum(const R& row, typename R::Team& team, const Term& term) {
  float sum = 0;
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
    for (int k = 0; k < R::N; ++k) sum += row.has(p, k) ? term(p, k) : 0.0f;
  }
  return team.sum(sum);
}

// Replaces z by (z - mean) * rstd.
template <class R>
__device__ __forceinline__ void normalise(const R& row, typename R::Team& team, RowValues<R>& z, float eps, float& mean,
                                          float& rstd) {
  mean = row_sum(row, team, [&](int p, int k) { return z[p][k]; }) / row.width;
  // The sum of equal numbers is rounded, and rstd, up to 1e6, would make a deviation of it.
  mean += row_sum(row, team, [&](int p, int k) { return z[p][k] - mean; }) / row.width;
  const float variance =
      row_sum(row, team, [&](int p, int k) { return (z[p][k] - mean) * (z[p][k] - mean); }) / row.width;
  rstd = 1.0f / sqrtf(variance + eps);
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
    for (int k = 0; k < R::N; ++k) z[p][k] = (z[p][k] - mean) * rstd;
  }
}

template <class R>
__device__ __forceinline__ void scale_and_shift(const R& row, const Source<AnyType>& weight,
                                                const Source<AnyType>& bias, RowValues<R>& xhat) {
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
    const auto w = row.load(weight, 0, p);
    const auto b = row.load(bias, 0, p);
#pragma unroll
    for (int k = 0; k < R::N; ++k) xhat[p][k] = xhat[p][k] * w[k] + b[k];
  }
}

// A row of the LayerNorm's backward pass: dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dout * weight, and
// what the row adds to the gradients of weight and bias.
template <class R, class Dout, class Z>
__device__ __forceinline__ void normalise_bwd(const R& row, typename R::Team& team, const Dout& dout, const Z& z,
                                              float mean, float rstd, const Source<AnyType>& weight, RowValues<R>& dz,
                                              ColumnSum<R>& dweight, ColumnSum<R>& dbias) {
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
    const auto w = row.load(weight, 0, p);
#pragma unroll
    for (int k = 0; k < R::N; ++k) {
      dweight.add(p, k, dout[p][k] * ((z[p][k] - mean) * rstd));
      dbias.add(p, k, dout[p][k]);
      dz[p][k] = dout[p][k] * w[k];
    }
  }
  const float mean_g = row_sum(row, team, [&](int p, int k) { return dz[p][k]; }) / row.width;
  const float mean_g_xhat =
      row_sum(row, team, [&](int p, int k) { return dz[p][k] * ((z[p][k] - mean) * rstd); }) / row.width;
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
    for (int k = 0; k < R::N; ++k) {
      dz[p][k] = rstd * (dz[p][k] - mean_g - (z[p][k] - mean) * rstd * mean_g_xhat);
    }
  }
}

}  // namespace bertfast
