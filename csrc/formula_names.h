// Activations by the names that ops get.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <string>
#include <utility>

#include "formula.h"

namespace bertfast {

inline Formula formula_of(const std::string& name) {
  static constexpr std::pair<const char*, Formula> kFormulas[] = {
      {"gelu", Formula::kGelu}, {"gelu_tanh", Formula::kGeluTanh}, {"quick_gelu", Formula::kQuickGelu},
      {"relu", Formula::kRelu}, {"relu6", Formula::kRelu6},        {"leaky_relu", Formula::kLeakyRelu},
      {"elu", Formula::kElu},   {"silu", Formula::kSilu},          {"mish", Formula::kMish},
      {"tanh", Formula::kTanh}, {"sigmoid", Formula::kSigmoid},    {"linear", Formula::kLinear},
  };
  for (const auto& [known, formula] : kFormulas) {
    if (name == known) return formula;
  }
  STD_TORCH_CHECK(false, "activation: expected a formula of bertfast.activations.FORMULAS, got ", name);
}

}  // namespace bertfast
