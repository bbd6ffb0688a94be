// Three gathers, their sum, LayerNorm and dropout in one pass over memory, and the way back to the sum.
//
// Forward, per token with its ids, in fp32 whatever the storage:
//     z   = word[input_id] + token_type[token_type_id] + position[position_id]       rounded to its own dtype
//     out = dropout((z - mean) * rstd * weight + bias)
// An id outside its table is not read and makes its row NaN. Bytes for M tokens of e-byte elements: a word row read and
// out written, 2 M N e, the floor, and M N e more where backward wants the sum; the position and token type rows that a
// batch uses stay in L2.
//
// Backward: dout through dropout, then LayerNorm's backward (`normalise.cuh`), which gives dz, dweight and dbias in 3 M
// N e bytes. Tables' gradients are dz summed by id, which is torch's.
#include "column_sum.cuh"
#include "embed_layer_norm.h"
#include "normalise.cuh"
#include "packed.cuh"
#include "philox.cuh"
#include "rows.cuh"

namespace bertfast {
namespace {

struct Ids {
  Global<const void> data;
  bool is_long;
  int64_t stride_batch, stride_sequence;

  __host__ explicit Ids(const IdsArray& a)
      : data(a.data), is_long(a.is_long), stride_batch(a.stride_batch), stride_sequence(a.stride_sequence) {}

  __device__ __forceinline__ int64_t at(int64_t batch, int64_t place, int64_t otherwise) const {
    if (data == nullptr) return otherwise;
    const int64_t i = batch * stride_batch + place * stride_sequence;
    return is_long ? reinterpret<const int64_t>(data)[i] : reinterpret<const int32_t>(data)[i];
  }
};

template <class T>
struct Table {
  Source<T> source;
  int64_t rows, stride;

  __host__ explicit Table(const TableArray& a) : source(a.array), rows(a.rows), stride(a.stride) {}

  __device__ __forceinline__ explicit operator bool() const { return rows >= 0; }
};

template <class T>
struct Forward {
  Ids input_ids, token_type_ids, position_ids;
  Table<T> embeds, word, position, token_type;
  Source<T> weight, bias;
  Target<T> out, sum;
  Global<float> mean, rstd;
  Dropout<kStreamEmbedLayerNorm> dropout;
  int64_t rows, length;
  int width;
  float eps;

  __host__ explicit Forward(const EmbedLayerNormFwdArgs& a)
      : input_ids(a.input_ids),
        token_type_ids(a.token_type_ids),
        position_ids(a.position_ids),
        embeds(a.embeds),
        word(a.word),
        position(a.position),
        token_type(a.token_type),
        weight(a.weight),
        bias(a.bias),
        out(a.out),
        sum(a.sum),
        mean(a.mean),
        rstd(a.rstd),
        dropout(a.dropout),
        rows(a.rows),
        length(a.length),
        width(a.width),
        eps(a.eps) {}
};

// Loads a row of a table; false for an id outside it, of which nothing is read.
template <class R, class T>
__device__ __forceinline__ bool gather(const R& row, const Table<T>& table, int64_t id, RowPackets<R, T>& packets) {
  const bool inside = id >= 0 && id < table.rows;
  if (inside) row.load(table.source, id * table.stride, packets);
  return inside;
}

template <class T, bool kIsNarrow, bool kVector, class R = ForwardRow<T, kIsNarrow, kVector>>
__global__ void __launch_bounds__(R::kBlock, R::kMinBlocks) embed_layer_norm_fwd_kernel(const Forward<T> args) {
  const R row{args.width};
  SharedMemory shared;
  typename R::Team team(shared);
  const int64_t i = R::first();
  if (i >= args.rows) return;
  const int64_t batch = i / args.length;
  const int64_t place = i - batch * args.length;
  // Ids first, then rows: all of them are under way before one is waited for.
  const int64_t word_id = args.embeds ? i : args.input_ids.at(batch, place, 0);
  const int64_t position_id = args.position_ids.at(batch, place, place);
  const int64_t type_id = args.token_type ? args.token_type_ids.at(batch, place, 0) : 0;
  RowPackets<R, T> word, position, types;
  bool inside = gather(row, args.embeds ? args.embeds : args.word, word_id, word);
  inside = gather(row, args.position, position_id, position) && inside;
  if (args.token_type) inside = gather(row, args.token_type, type_id, types) && inside;
  RowValues<R> z;
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
    for (int k = 0; k < R::N; ++k) {
      const float words = args.token_type ? word[p][k] + types[p][k] : word[p][k];
      z[p][k] = inside ? words + position[p][k] : NAN;
    }
    args.out.round(z[p]);
    if (args.sum) row.store(args.sum, i * args.width, p, z[p]);
  }
  RowPackets<R, T> weight, bias;
  row.load(args.weight, 0, weight);
  row.load(args.bias, 0, bias);
  float mean, rstd;
  normalise(row, team, z, args.eps, mean, rstd);
  scale_and_shift<R>(weight, bias, z);
  const auto key = args.dropout.key();
#pragma unroll
  for (int p = 0; p < R::kPackets; ++p) {
    if (args.dropout) args.dropout.apply(key, i, R::column(p), z[p]);
    row.store(args.out, i * args.width, p, z[p]);
  }
  if (R::Team::thread() == 0) {
    args.mean[i] = mean;
    args.rstd[i] = rstd;
  }
}

template <class T>
struct Backward {
  Source<T> dout, sum;
  Source<AnyType> weight;
  Global<const float> mean, rstd;
  Target<T> dsum;
  Global<float> partial;
  Dropout<kStreamEmbedLayerNorm> dropout;
  int64_t rows, stride_dout, stride_sum;
  int width;

  __host__ explicit Backward(const EmbedLayerNormBwdArgs& a)
      : dout(a.dout),
        sum(a.sum),
        weight(a.weight),
        mean(a.mean),
        rstd(a.rstd),
        dsum(a.dsum),
        partial(a.partial),
        dropout(a.dropout),
        rows(a.rows),
        stride_dout(a.stride_dout),
        stride_sum(a.stride_sum),
        width(a.width) {}
};

template <class T, bool kIsNarrow, bool kVector, class R = BackwardRow<T, kIsNarrow, kVector>>
__global__ void __launch_bounds__(R::kBlock, R::kMinBlocks) embed_layer_norm_bwd_kernel(const Backward<T> args) {
  const R row{args.width};
  SharedMemory shared;
  typename R::Team team(shared);
  ColumnSum<R> dweight(shared, args.width), dbias(shared, args.width);
  const auto key = args.dropout.key();
  const Weight<R> weight(row, args.weight);
  for (int64_t i = R::first(); i < args.rows; i += R::step()) {
    RowPackets<R, T> loaded, z;
    row.load(args.dout, i * args.stride_dout, loaded);
    row.load(args.sum, i * args.stride_sum, z);
    RowValues<R> dout, dz;
#pragma unroll
    for (int p = 0; p < R::kPackets; ++p) {
#pragma unroll
      for (int k = 0; k < R::N; ++k) dout[p][k] = loaded[p][k];
      if (args.dropout) args.dropout.apply(key, i, R::column(p), dout[p]);
    }
    normalise_bwd(row, team, dout, z, args.mean[i], args.rstd[i], weight, dz, dweight, dbias);
#pragma unroll
    for (int p = 0; p < R::kPackets; ++p) row.store(args.dsum, i * args.width, p, dz[p]);
  }
  Global<float> partial = args.partial + static_cast<int64_t>(blockIdx.x) * args.width;
  dweight.store(row, partial);
  dbias.store(row, partial + static_cast<int64_t>(gridDim.x) * args.width);
}

}  // namespace

void launch_embed_layer_norm_fwd(const EmbedLayerNormFwdArgs& a, cudaStream_t stream) {
  const auto arrays = {RowsArray{a.out, a.width},
                       {a.sum, a.width},
                       {a.embeds.array, a.embeds.stride},
                       {a.word.array, a.word.stride},
                       {a.position.array, a.position.stride},
                       {a.token_type.array, a.token_type.stride},
                       {a.weight},
                       {a.bias}};
  with_rows(arrays, a.width, [&](auto type, auto vector, auto narrow) {
    using T = decltype(type);
    using R = ForwardRow<T, narrow.value, vector.value>;
    launch("embed_layer_norm_fwd", embed_layer_norm_fwd_kernel<T, narrow.value, vector.value>,
           (a.rows - 1) / R::kTeams + 1, 1, R::kBlock, R::Team::kSharedBytes, stream, Forward<T>(a));
  });
}

void launch_embed_layer_norm_bwd(const EmbedLayerNormBwdArgs& a, cudaStream_t stream) {
  const auto arrays = {RowsArray{a.sum, a.stride_sum}, {a.dout, a.stride_dout}, {a.dsum, a.width}, {a.weight}};
  with_dtype(a.sum.dtype, [&](auto type) {
    with_row_form(arrays, a.width, kPacket<decltype(type)>, [&](auto vector, auto narrow) {
      using T = decltype(type);
      using R = BackwardRow<T, narrow.value, vector.value>;
      launch("embed_layer_norm_bwd", embed_layer_norm_bwd_kernel<T, narrow.value, vector.value>, a.programs, 1,
             R::kBlock, R::Team::kSharedBytes + 2 * shared_bytes<float>(ColumnSum<R>::shared_count(a.width)), stream,
             Backward<T>(a));
    });
  });
}

}  // namespace bertfast
