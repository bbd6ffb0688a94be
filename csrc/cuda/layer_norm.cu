// Residual add, dropout and LayerNorm in one pass over memory, forward and backward.
//
// Forward, per row of width N, in fp32 whatever the storage:
//     z    = residual + dropout(x + x_bias)             rounded to its own dtype: backward reads it from memory
//     mean = sum(z) / N, and sum(z - mean) / N more: equal numbers have their mean exactly
//     var  = sum((z - mean)^2) / N                      z stays in registers; the one-pass form cancels
//     out  = (z - mean) * rstd * weight + bias          rstd = 1 / sqrt(var + eps)
// Bytes for M rows of e-byte elements: x and residual read, out written, 3 M N e, and M N e more where the sum is
// wanted: the floor.
//
// Backward, with xhat = (z - mean) * rstd and g = dout * weight:
//     dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum
//     dresidual = dz, dx = dropout'(dz)
//     dweight = sum_rows(dout * xhat), dbias = sum_rows(dout), dx_bias = sum_rows(dx)
// Bytes: dout and z read, dx written, 3 M N e, and M N e for dresidual where dropout makes it differ. Sums over rows go
// in two stages without atomics: each block adds up the rows that it walks over anyway, then column_sum adds up the
// blocks, always in the same order.
#include "column_sum.cuh"
#include "layer_norm.h"
#include "normalise.cuh"
#include "packed.cuh"
#include "philox.cuh"
#include "rows.cuh"

namespace bertfast {
namespace {

template <class T>
struct Forward {
  Source<T> x, residual;
  Source<T> weight, bias, x_bias;
  Target<T> out, sum;
  Global<float> mean, rstd;
  Dropout<kStreamAddLayerNorm> dropout;
  int64_t rows, stride_x, stride_residual;
  int width;
  float eps;

  __host__ explicit Forward(const AddLayerNormFwdArgs& a)
      : x(a.x),
        residual(a.residual),
        weight(a.weight),
        bias(a.bias),
        x_bias(a.x_bias),
        out(a.out),
        sum(a.sum),
        mean(a.mean),
        rstd(a.rstd),
        dropout(a.dropout),
        rows(a.rows),
        stride_x(a.stride_x),
        stride_residual(a.stride_residual),
        width(a.width),
        eps(a.eps) {}
};

template <class T, bool kIsNarrow, bool kVector, class R = ForwardRow<T, kIsNarrow, kVector>>
__global__ void __launch_bounds__(R::kBlock, R::kMinBlocks) add_layer_norm_fwd_kernel(const Forward<T> args) {
  const R row{args.width};
  SharedMemory shared;
  typename R::Team team(shared);
  const int64_t i = R::first();
  if (i >= args.rows) return;
  const auto key = args.dropout.key();
  RowPackets<R, T> x, residual, weight, bias;
  row.load(args.x, i * args.stride_x, x);
  if (args.residual) row.load(args.residual, i * args.stride_residual, residual);
  RowValues<R> z;
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
    for (int k = 0; k < R::N; ++k) z[p][k] = x[p][k];
  }
  if (args.x_bias) {
    row.load(args.x_bias, 0, x);
#pragma unroll
    for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
      for (int k = 0; k < R::N; ++k) z[p][k] += x[p][k];
    }
  }
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
    if (args.dropout) args.dropout.apply(key, i, R::column(p), z[p]);
    if (args.residual) {
#pragma unroll
      for (int k = 0; k < R::N; ++k) z[p][k] = residual[p][k] + z[p][k];
    }
    args.out.round(z[p]);
    if (args.sum) row.store(args.sum, i * args.width, p, z[p]);
  }
  // Under way while the statistics are summed.
  row.load(args.weight, 0, weight);
  row.load(args.bias, 0, bias);
  float mean, rstd;
  normalise(row, team, z, args.eps, mean, rstd);
  scale_and_shift<R>(weight, bias, z);
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) row.store(args.out, i * args.width, p, z[p]);
  if (R::Team::thread() == 0) {
    args.mean[i] = mean;
    args.rstd[i] = rstd;
  }
}

template <class T>
struct Backward {
  Source<T> dout, dsum, sum;
  Source<AnyType> weight;
  Global<const float> mean, rstd;
  Target<T> dx, dresidual;
  Global<float> partial;
  Dropout<kStreamAddLayerNorm> dropout;
  int64_t rows, stride_dout, stride_dsum, stride_sum;
  int width;

  __host__ explicit Backward(const AddLayerNormBwdArgs& a)
      : dout(a.dout),
        dsum(a.dsum),
        sum(a.sum),
        weight(a.weight),
        mean(a.mean),
        rstd(a.rstd),
        dx(a.dx),
        dresidual(a.dresidual),
        partial(a.partial),
        dropout(a.dropout),
        rows(a.rows),
        stride_dout(a.stride_dout),
        stride_dsum(a.stride_dsum),
        stride_sum(a.stride_sum),
        width(a.width) {}
};

template <class T, bool kIsNarrow, bool kVector, bool kXBias, class R = BackwardRow<T, kIsNarrow, kVector>>
__global__ void __launch_bounds__(R::kBlock, R::kMinBlocks) add_layer_norm_bwd_kernel(const Backward<T> args) {
  const R row{args.width};
  SharedMemory shared;
  typename R::Team team(shared);
  ColumnSum<R> dweight(shared, args.width), dbias(shared, args.width);
  std::conditional_t<kXBias, ColumnSum<R>, NoColumnSum<R>> dx_bias(shared, args.width);
  const auto key = args.dropout.key();
  const Weight<R> weight(row, args.weight);
  for (int64_t i = R::first(); i < args.rows; i += R::step()) {
    RowPackets<R, T> dout, z;
    row.load(args.dout, i * args.stride_dout, dout);
    row.load(args.sum, i * args.stride_sum, z);
    RowValues<R> dz;
    normalise_bwd(row, team, dout, z, args.mean[i], args.rstd[i], weight, dz, dweight, dbias);
#pragma unroll
    for (int p = 0; p < R::kPackets; ++p) {
      if (args.dsum) {
        const auto dsum = row.load(args.dsum, i * args.stride_dsum, p);
#pragma unroll
        for (int k = 0; k < R::N; ++k) dz[p][k] += dsum[k];
      }
      if (args.dresidual) row.store(args.dresidual, i * args.width, p, dz[p]);
      if (args.dropout) args.dropout.apply(key, i, R::column(p), dz[p]);
      row.store(args.dx, i * args.width, p, dz[p]);
#pragma unroll
      for (int k = 0; k < R::N; ++k) dx_bias.add(p, k, dz[p][k]);
    }
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * args.width;
  Global<float> partial = args.partial + static_cast<int64_t>(blockIdx.x) * args.width;
  dweight.store(row, partial);
  dbias.store(row, partial + stride);
  dx_bias.store(row, partial + 2 * stride);
}

}  // namespace

void launch_add_layer_norm_fwd(const AddLayerNormFwdArgs& a, cudaStream_t stream) {
  const auto arrays = {RowsArray{a.out, a.width},
                       {a.x, a.stride_x},
                       {a.residual, a.stride_residual},
                       {a.sum, a.width},
                       {a.weight},
                       {a.bias},
                       {a.x_bias}};
  with_rows(arrays, a.width, [&](auto type, auto vector, auto narrow) {
    using T = decltype(type);
    using R = ForwardRow<T, narrow.value, vector.value>;
    launch("add_layer_norm_fwd", add_layer_norm_fwd_kernel<T, narrow.value, vector.value>, (a.rows - 1) / R::kTeams + 1,
           1, R::kBlock, R::Team::kSharedBytes, stream, Forward<T>(a));
  });
}

void launch_add_layer_norm_bwd(const AddLayerNormBwdArgs& a, cudaStream_t stream) {
  const auto arrays = {RowsArray{a.sum, a.stride_sum}, {a.dout, a.stride_dout},
                       {a.dsum, a.stride_dsum},        {a.dx, a.width},
                       {a.dresidual, a.width},         {a.weight}};
  with_dtype(a.sum.dtype, [&](auto type) {
    with_row_form(arrays, a.width, kPacket<decltype(type)>, [&](auto vector, auto narrow) {
      using T = decltype(type);
      using R = BackwardRow<T, narrow.value, vector.value>;
      const auto run = [&](auto x_bias) {
        launch(
            "add_layer_norm_bwd", add_layer_norm_bwd_kernel<T, narrow.value, vector.value, x_bias.value>, a.programs, 1,
            R::kBlock,
            R::Team::kSharedBytes + (x_bias.value ? 3 : 2) * shared_bytes<float>(ColumnSum<R>::shared_count(a.width)),
            stream, Backward<T>(a));
      };
      a.has_x_bias ? run(std::true_type()) : run(std::false_type());
    });
  });
}

}  // namespace bertfast
