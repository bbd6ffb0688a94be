// Ids and tables of embeddings: what the op checks and allocates on any device.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "check.h"
#include "tensor.h"

namespace bertfast {

// ids broadcast to `tokens`, as (B, S) with stride 0 where they are broadcast.
inline std::optional<Tensor> by_sequence(const char* name, const std::optional<Tensor>& ids,
                                         const std::vector<int64_t>& tokens) {
  if (!ids) return std::nullopt;
  STD_TORCH_CHECK(ids->scalar_type() == ScalarType::Int || ids->scalar_type() == ScalarType::Long, name,
                  ": expected int32 or int64, got ", torch::headeronly::toString(ids->scalar_type()));
  if (tokens.size() == 2 && sizes_of(*ids) == tokens) return ids;
  std::array<StableIValue, 3> stack{torch::stable::detail::from(*ids), torch::stable::detail::from(tokens),
                                    torch::stable::detail::from(false)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::expand", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::reshape(torch::stable::detail::to<Tensor>(stack[0]), {-1, tokens.back()});
}

inline void check_table(const char* name, const Tensor& table, int64_t width) {
  check_float(name, table);
  STD_TORCH_CHECK(table.dim() == 2 && table.size(1) == width, name, ": expected shape (rows, ", width, "), got ",
                  shape_of(table));
}

// The shape of the tokens, (..., S).
inline std::vector<int64_t> check_embeddings(const std::optional<Tensor>& input_ids,
                                             const std::optional<Tensor>& inputs_embeds, const Tensor& word,
                                             const Tensor& position, const std::optional<Tensor>& token_type,
                                             const Tensor& weight, const Tensor& bias, ScalarType dtype) {
  check_min_dim("word", word, 2);
  const int64_t width = word.size(1);
  check_table("word", word, width);
  check_table("position", position, width);
  if (token_type) check_table("token_type", *token_type, width);
  check_vector("weight", weight, width);
  check_vector("bias", bias, width);
  STD_TORCH_CHECK(input_ids.has_value() != inputs_embeds.has_value(),
                  "input_ids and inputs_embeds: expected exactly one of them");
  check_float_type("dtype", dtype);
  if (input_ids) {
    check_min_dim("input_ids", *input_ids, 1);
    return sizes_of(*input_ids);
  }
  check_float("inputs_embeds", *inputs_embeds);
  check_min_dim("inputs_embeds", *inputs_embeds, 2);
  std::vector<int64_t> sizes = sizes_of(*inputs_embeds);
  STD_TORCH_CHECK(sizes.back() == width, "inputs_embeds: expected width ", width, ", got ", shape_of(*inputs_embeds));
  sizes.pop_back();
  return sizes;
}

}  // namespace bertfast
