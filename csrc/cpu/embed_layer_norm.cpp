// Three gathers, their sum, LayerNorm and dropout in one pass over memory, and the way back to the sum.
//
// Forward, per token with its ids, in fp32 whatever the storage:
//     z   = word[input_id] + token_type[token_type_id] + position[position_id]       rounded to the output's dtype
//     out = dropout((z - mean) * rstd * weight + bias)
// An id outside its table is not read and makes its row NaN. Bytes for M tokens of e-byte elements: a word row read and
// out written, 2 M N e, the floor, and M N e more where backward wants the sum; the position and token type rows that a
// batch uses stay in cache. Eager writes and reads each gathered row and each sum, about 12 M N e.
//
// Backward: dout through dropout, then LayerNorm's backward (normalise.h), which gives dz, dweight and dbias in 3 M N e
// bytes. Tables' gradients are dz summed by id, which is torch's.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "dropout.h"
#include "embeddings.h"
#include "normalise.h"
#include "parallel.h"
#include "philox.h"
#include "simd.h"
#include "tensor.h"
#include "vector.h"

namespace bertfast {
namespace {

// (B, S) int32 or int64 of any strides; without ids all are the default.
struct Ids {
  std::optional<Tensor> held;
  const void* data = nullptr;
  bool is_long = false;
  int64_t stride_batch = 0, stride_sequence = 0;

  Ids(const char* name, const std::optional<Tensor>& ids, const std::vector<int64_t>& tokens)
      : held(by_sequence(name, ids, tokens)) {
    if (!held) return;
    data = held->const_data_ptr();
    is_long = held->scalar_type() == ScalarType::Long;
    stride_batch = held->stride(0);
    stride_sequence = held->stride(1);
  }

  BERTFAST_INLINE int64_t at(int64_t batch, int64_t place, int64_t otherwise) const {
    if (!data) return otherwise;
    const int64_t i = batch * stride_batch + place * stride_sequence;
    return is_long ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// rows = 0 is a table in which no id exists; -1 is no table.
struct Table {
  Rows source;
  int64_t rows = -1;

  Table() = default;
  explicit Table(const Tensor& table) : source(table, table.size(1)), rows(table.size(0)) {}

  explicit operator bool() const { return rows >= 0; }
  BERTFAST_INLINE bool has(int64_t id) const { return id >= 0 && id < rows; }
};

struct Forward {
  Ids input_ids, token_type_ids, position_ids;
  Rows embeds;
  Table word, position, token_type;
  std::optional<Dropout> dropout;
  Normalise normalise;
  MutableRows out, sum;
  int64_t length;

  static constexpr int kBuffers = 4;

  BERTFAST_INLINE void row(int64_t i, RowBuffers& buffers, uint32_t* words) const {
    const int64_t n = out.width, batch = i / length, place = i - batch * length;
    const int64_t word_id = embeds ? 0 : input_ids.at(batch, place, 0);
    const int64_t type_id = token_type ? token_type_ids.at(batch, place, 0) : 0;
    const int64_t position_id = position_ids.at(batch, place, place);
    float* z = sum ? sum.target(i, buffers[3]) : buffers[3];
    float total;
    if ((embeds || word.has(word_id)) && (!token_type || token_type.has(type_id)) && position.has(position_id)) {
      const float* pw = embeds ? embeds.read(i, buffers[0]) : word.source.read(word_id, buffers[0]);
      const float* pp = position.source.read(position_id, buffers[1]);
      if (token_type) {
        const float* pt = token_type.source.read(type_id, buffers[2]);
        total = fill(n, z, [&](int64_t j) { return (pw[j] + pt[j]) + pp[j]; });
      } else {
        total = fill(n, z, [&](int64_t j) { return pw[j] + pp[j]; });
      }
    } else {
      total = NAN;
      std::fill(z, z + n, total);
    }
    if (sum) sum.store(i, z);
    if (out.is_half()) {
      out.round(z);  // as in add_layer_norm: backward reads the stored sum
      total = sum_of(n, [&](int64_t j) { return z[j]; });
    }
    float* y = out.target(i, buffers[0]);
    normalise.row(i, n, z, total, y);
    if (dropout) dropout_row(*dropout, i, n, y, words);
    out.store(i, y);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> embed_layer_norm_fwd(
    std::optional<Tensor> input_ids, std::optional<Tensor> token_type_ids, std::optional<Tensor> position_ids,
    std::optional<Tensor> inputs_embeds, Tensor word, Tensor position, std::optional<Tensor> token_type, Tensor weight,
    Tensor bias, std::optional<Tensor> seed, double eps, double dropout_p, ScalarType dtype, bool need_sum) {
  const std::vector<int64_t> tokens =
      check_embeddings(input_ids, inputs_embeds, word, position, token_type, weight, bias, dtype);
  const int64_t n = word.size(1);
  const auto dropout = dropout_of(seed, dropout_p, kStreamEmbedLayerNorm);
  std::vector<int64_t> sizes = tokens;
  sizes.push_back(n);
  Tensor out = new_empty(word, sizes, dtype);
  Tensor sum = new_empty(word, need_sum ? sizes : std::vector<int64_t>{0}, dtype);
  Tensor mean = new_empty(word, tokens, ScalarType::Float);
  Tensor rstd = new_empty(word, tokens, ScalarType::Float);
  if (out.numel() == 0) return {out, sum, mean, rstd};

  if (inputs_embeds) inputs_embeds = as_contiguous(*inputs_embeds);
  if (token_type) token_type = as_contiguous(*token_type);
  word = as_contiguous(word);
  position = as_contiguous(position);
  const FloatVector weights(weight), biases(bias);
  const Forward forward{Ids("input_ids", input_ids, tokens),
                        Ids("token_type_ids", token_type_ids, tokens),
                        Ids("position_ids", position_ids, tokens),
                        inputs_embeds ? Rows(*inputs_embeds, n) : Rows(),
                        Table(word),
                        Table(position),
                        token_type ? Table(*token_type) : Table(),
                        dropout,
                        {weights.data(), biases.data(), static_cast<float>(eps), mean.mutable_data_ptr<float>(),
                         rstd.mutable_data_ptr<float>()},
                        MutableRows(out, n),
                        need_sum ? MutableRows(sum, n) : MutableRows(),
                        tokens.back()};
  normalise_rows(mean.numel(), n, forward);
  return {out, sum, mean, rstd};
}

struct Backward {
  Rows dout, sum;
  NormaliseBwd normalise;
  std::optional<Dropout> dropout;
  MutableRows dsum;

  static constexpr int kBuffers = 3;

  // `sums` are those of dweight and dbias.
  BERTFAST_INLINE void row(int64_t i, RowBuffers& buffers, uint32_t* words, const std::vector<float*>& sums) const {
    const int64_t n = sum.width;
    float* kept = buffers[0];
    const float* pd = dout.read(i, kept);
    if (dropout) {
      if (pd != kept) std::copy(pd, pd + n, kept);
      dropout_row(*dropout, i, n, kept, words);
      pd = kept;
    }
    float* dz = dsum.target(i, buffers[2]);
    normalise.row(i, n, pd, sum.read(i, buffers[1]), dz, sums[0], sums[1]);
    dsum.store(i, dz);
  }
};

std::tuple<Tensor, Tensor, Tensor> embed_layer_norm_bwd(Tensor dout, Tensor sum, Tensor mean, Tensor rstd,
                                                        Tensor weight, std::optional<Tensor> seed, double dropout_p) {
  check_float("sum", sum);
  check_min_dim("sum", sum, 1);
  const std::vector<int64_t> sizes = sizes_of(sum);
  const int64_t n = sizes.back();
  const int64_t m = rows_of(sizes);
  check_float("dout", dout);
  check_same_shape("dout", dout, "sum", sum);
  check_statistics("mean", mean, m);
  check_statistics("rstd", rstd, m);
  check_vector("weight", weight, n);
  const auto dropout = dropout_of(seed, dropout_p, kStreamEmbedLayerNorm);
  Tensor dsum = new_empty(sum, sizes, sum.scalar_type());
  Tensor dweight = new_empty(sum, {n}, ScalarType::Float);
  Tensor dbias = new_empty(sum, {n}, ScalarType::Float);

  dout = as_contiguous(dout);
  sum = as_contiguous(sum);
  mean = as_contiguous(mean);
  rstd = as_contiguous(rstd);
  const FloatVector weights(weight);
  const Backward backward{Rows(dout, n),
                          Rows(sum, n),
                          {mean.const_data_ptr<float>(), rstd.const_data_ptr<float>(), weights.data()},
                          dropout,
                          MutableRows(dsum, n)};
  sum_over_rows(m, n, {dweight.mutable_data_ptr<float>(), dbias.mutable_data_ptr<float>()}, backward);
  return {dsum, dweight, dbias};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, CPU, m) {
  m.impl("embed_layer_norm_fwd_cpu", TORCH_BOX(&bertfast::embed_layer_norm_fwd));
  m.impl("embed_layer_norm_bwd_cpu", TORCH_BOX(&bertfast::embed_layer_norm_bwd));
}
