// LayerNorm of rows in registers, forward and backward.
#pragma once

#include "column_sum.cuh"
#include "packed.cuh"
#include "rows.cuh"

namespace bertfast {

// This thread's part of the sum of term(packet, k) over the values of a row. Behind its end terms may be anything and
// do not enter.
template <class R, class Term>
__device__ __forceinline__ float part_of_sum(const R& row, const Term& term) {
  float sum = 0;
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
    float packet = 0;
#pragma unroll
    for (int k = 0; k < R::N; ++k) {
      const float value = term(p, k);
      packet += R::kVector || row.has(p, k) ? value : 0.0f;
    }
    sum += row.has(p, 0) ? packet : 0.0f;
  }
  return sum;
}

template <class R, class Term>
__device__ __forceinline__ float row_sum(const R& row, typename R::Team& team, const Term& term) {
  return team.sum(part_of_sum(row, term));
}

// Replaces z by (z - mean) * rstd.
template <class R>
__device__ __forceinline__ void normalise(const R& row, typename R::Team& team, RowValues<R>& z, float eps, float& mean,
                                          float& rstd) {
  mean = row_sum(row, team, [&](int p, int k) { return z[p][k]; }) / row.width;
  // The sum of equal numbers is rounded, and rstd, up to 1e6, would make a deviation of it. Taken together with the
  // squares, which would save a round of shuffles, this sum leaves of a constant row a variance that eps does not hide.
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

template <class R, class Vector>
__device__ __forceinline__ void scale_and_shift(const Vector& weight, const Vector& bias, RowValues<R>& xhat) {
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
    for (int k = 0; k < R::N; ++k) xhat[p][k] = xhat[p][k] * weight[p][k] + bias[p][k];
  }
}

// The weights of a backward pass, kept beside the rows that a block walks over where there are registers for them.
template <class R>
class Weight {
 public:
  __device__ __forceinline__ Weight(const R& row, const Source<AnyType>& weight) : row_(row), weight_(weight) {
    if constexpr (kIsKept) row.load(weight, 0, kept_);
  }

  __device__ __forceinline__ Packet<float, R::N> packet(int p) const {
    if constexpr (kIsKept) {
      return kept_[p];
    } else {
      return row_.load(weight_, 0, p);
    }
  }

 private:
  static constexpr bool kIsKept = R::kTeams > 1;
  const R& row_;
  const Source<AnyType>& weight_;
  Packet<float, R::N> kept_[R::kPackets];
};

// A row of the LayerNorm's backward pass: dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dout * weight, and
// what the row adds to the gradients of weight and bias.
template <class R, class Dout, class Z>
__device__ __forceinline__ void normalise_bwd(const R& row, typename R::Team& team, const Dout& dout, const Z& z,
                                              float mean, float rstd, const Weight<R>& weight, RowValues<R>& dz,
                                              ColumnSum<R>& dweight, ColumnSum<R>& dbias) {
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
    const auto w = weight.packet(p);
#pragma unroll
    for (int k = 0; k < R::N; ++k) {
      dweight.add(p, k, dout[p][k] * ((z[p][k] - mean) * rstd));
      dbias.add(p, k, dout[p][k]);
      dz[p][k] = dout[p][k] * w[k];
    }
  }
  float sums[2] = {part_of_sum(row, [&](int p, int k) { return dz[p][k]; }),
                   part_of_sum(row, [&](int p, int k) { return dz[p][k] * ((z[p][k] - mean) * rstd); })};
  team.sum(sums);
  const float mean_g = sums[0] / row.width, mean_g_xhat = sums[1] / row.width;
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
    for (int k = 0; k < R::N; ++k) {
      dz[p][k] = rstd * (dz[p][k] - mean_g - (z[p][k] - mean) * rstd * mean_g_xhat);
    }
  }
}

}  // namespace bertfast
