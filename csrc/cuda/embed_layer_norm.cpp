// The ops embed_layer_norm_{fwd,bwd} on CUDA.
#include "embed_layer_norm.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "column_sum.h"
#include "embeddings.h"

namespace bertfast {
namespace {

IdsArray ids_of(const std::optional<Tensor>& ids) {
  if (!ids) return {};
  return {data(*ids), ids->scalar_type() == ScalarType::Long, ids->stride(0), ids->stride(1)};
}

TableArray table_of(const std::optional<Tensor>& rows) {
  if (!rows) return {};
  return {array_of(*rows), rows->size(0), rows->stride(0)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> embed_layer_norm_fwd(
    std::optional<Tensor> input_ids, std::optional<Tensor> token_type_ids, std::optional<Tensor> position_ids,
    std::optional<Tensor> inputs_embeds, Tensor word, Tensor position, std::optional<Tensor> token_type, Tensor weight,
    Tensor bias, std::optional<Tensor> seed, double eps, double dropout_p, ScalarType dtype, bool need_sum) {
  const std::vector<int64_t> tokens =
      check_embeddings(input_ids, inputs_embeds, word, position, token_type, weight, bias, dtype);
  const int64_t width = word.size(1);
  check_width(width);
  std::vector<int64_t> sizes = tokens;
  sizes.push_back(width);
  const OnDevice on(word);
  Tensor out = new_empty(word, sizes, dtype);
  Tensor sum = new_empty(word, need_sum ? sizes : std::vector<int64_t>{0}, dtype);
  Tensor mean = new_empty(word, tokens, ScalarType::Float);
  Tensor rstd = new_empty(word, tokens, ScalarType::Float);
  if (out.numel() == 0) return {out, sum, mean, rstd};

  input_ids = by_sequence("input_ids", input_ids, tokens);
  token_type_ids = by_sequence("token_type_ids", token_type_ids, tokens);
  position_ids = by_sequence("position_ids", position_ids, tokens);
  inputs_embeds = as_rows(inputs_embeds);
  token_type = as_rows(token_type);
  word = as_rows(word);
  position = as_rows(position);
  weight = as_contiguous(weight);
  bias = as_contiguous(bias);
  EmbedLayerNormFwdArgs args{};
  args.input_ids = ids_of(input_ids);
  args.token_type_ids = ids_of(token_type_ids);
  args.position_ids = ids_of(position_ids);
  args.embeds = table_of(inputs_embeds);
  if (!inputs_embeds) args.word = table_of(word);
  args.position = table_of(position);
  args.token_type = table_of(token_type);
  args.weight = array_of(weight);
  args.bias = array_of(bias);
  args.out = mutable_array_of(out);
  args.sum = mutable_array_of(sum);
  args.mean = mutable_data<float>(mean);
  args.rstd = mutable_data<float>(rstd);
  args.dropout = dropout_of(seed, dropout_p);
  args.rows = mean.numel();
  args.length = tokens.back();
  args.width = static_cast<int>(width);
  args.eps = static_cast<float>(eps);
  launch_embed_layer_norm_fwd(args, on.stream());
  return {out, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> embed_layer_norm_bwd(Tensor dout, Tensor sum, Tensor mean, Tensor rstd,
                                                        Tensor weight, std::optional<Tensor> seed, double dropout_p) {
  check_float("sum", sum);
  check_min_dim("sum", sum, 1);
  const std::vector<int64_t> sizes = sizes_of(sum);
  const int64_t width = sizes.back();
  const int64_t rows = rows_of(sizes);
  check_width(width);
  check_like("dout", dout, "sum", sum);
  check_statistics("mean", mean, rows);
  check_statistics("rstd", rstd, rows);
  check_vector("weight", weight, width);
  const OnDevice on(sum);
  Tensor dsum = new_empty(sum, sizes, sum.scalar_type());
  Tensor dweight = new_empty(sum, {width}, ScalarType::Float);
  Tensor dbias = new_empty(sum, {width}, ScalarType::Float);
  if (sum.numel() == 0) return {dsum, torch::stable::zero_(dweight), torch::stable::zero_(dbias)};

  dout = as_rows(dout);
  sum = as_rows(sum);
  mean = as_contiguous(mean);
  rstd = as_contiguous(rstd);
  weight = as_contiguous(weight);
  EmbedLayerNormBwdArgs args{};
  args.width = static_cast<int>(width);
  args.programs = row_programs(rows, args.width, on.multiprocessors());
  const Tensor partial = new_empty(sum, {2, args.programs, width}, ScalarType::Float);
  args.dout = array_of(dout);
  args.sum = array_of(sum);
  args.weight = array_of(weight);
  args.mean = data<float>(mean);
  args.rstd = data<float>(rstd);
  args.dsum = mutable_array_of(dsum);
  args.partial = mutable_data<float>(partial);
  args.dropout = dropout_of(seed, dropout_p);
  args.rows = rows;
  args.stride_dout = dout.stride(0);
  args.stride_sum = sum.stride(0);
  launch_embed_layer_norm_bwd(args, on.stream());
  launch_column_sum(args.partial, 2, args.programs, args.width,
                    {mutable_data<float>(dweight), mutable_data<float>(dbias), nullptr}, on.stream());
  return {dsum, dweight, dbias};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, BERTFAST_CUDA_KEY, m) {
  m.impl("embed_layer_norm_fwd_cuda", TORCH_BOX(&bertfast::embed_layer_norm_fwd));
  m.impl("embed_layer_norm_bwd_cuda", TORCH_BOX(&bertfast::embed_layer_norm_bwd));
}
