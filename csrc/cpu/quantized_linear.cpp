// What surrounds an int8 GEMM: rows to 8 bits with a scale each, and its product back to floating point, or through a
// GELU to 8 bits again.
//
// A row x becomes round(x / scale) + 128 in uint8, scale = max|x| / 127: oneDNN multiplies unsigned by signed bytes and
// takes the 128 back exactly. A row that holds NaN or infinity gets the scale NaN, and so a result of NaN.
//
// Bytes moved, fp32: 5 K a row to 8 bits, 8 N a row of the product to fp32. The intermediate of a feed-forward is read
// once as fp32 and written once as bytes, 5 F, where eager PyTorch would take 8 F to scale it, 8 F for the GELU, and 5
// F.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "activations.h"
#include "check.h"
#include "parallel.h"
#include "simd.h"
#include "tensor.h"
#include "vector.h"

namespace bertfast {
namespace {

constexpr float kLargest = 127.0f;
// Rows below it count as zeros: the reciprocal of their scale would overflow.
constexpr float kSmallest = 0x1.0p-120f;

// 8-bit rows (rows, width) with a scale each.
struct Quantized {
  Tensor values, scales;
  uint8_t* bytes;
  float* scale;
  int64_t width;

  Quantized(const Tensor& like, int64_t rows, int64_t width)
      : values(new_empty(like, {rows, width}, ScalarType::Byte)),
        scales(new_empty(like, {rows}, ScalarType::Float)),
        bytes(values.mutable_data_ptr<uint8_t>()),
        scale(scales.mutable_data_ptr<float>()),
        width(width) {}

  BERTFAST_INLINE void store(int64_t row, const float* x) const {
    // As integers magnitudes have the order of their values, and NaN is above infinity: no maximum of floats keeps it.
    int32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < width; ++j) largest = std::max(largest, bits_as<int32_t>(x[j]) & 0x7fffffff);
    uint8_t* target = bytes + row * width;
    const float magnitude = bits_as<float>(largest);
    if (largest >= 0x7f800000 || magnitude < kSmallest) {
      std::fill(target, target + width, uint8_t{128});
      scale[row] = largest >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
      return;
    }
    scale[row] = magnitude / kLargest;
    const float inverse = kLargest / magnitude;
    // The last bits of 1.5 * 2^23 + k are those of the integer k, and the sum rounds to it.
    constexpr float kShift = 0x1.8p+23f + 128.0f;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) target[j] = static_cast<uint8_t>(bits_as<uint32_t>(x[j] * inverse + kShift));
  }
};

std::tuple<Tensor, Tensor> quantize_rows(Tensor x) {
  check_float("x", x);
  check_min_dim("x", x, 1);
  const std::vector<int64_t> sizes = sizes_of(x);
  const int64_t width = sizes.back(), rows = rows_of(sizes);
  const Quantized out(x, rows, width);
  x = as_contiguous(x);
  const Rows in(x, width);
  parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(width);
    with_best_isa([&]() __attribute__((always_inline)) {
      for (int64_t i = begin; i < end; ++i) out.store(i, in.read(i, buffer.data()));
    });
  });
  return {out.values, out.scales};
}

void check_product(const Tensor& product, const Tensor& scale, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(product.scalar_type() == ScalarType::Float && product.dim() == 2 && product.is_contiguous(),
                  "product: expected a contiguous float32 matrix, got ",
                  torch::headeronly::toString(product.scalar_type()), " of shape ", shape_of(product));
  check_statistics("scale", scale, product.size(0));
  STD_TORCH_CHECK(scale.is_contiguous(), "scale: expected a contiguous vector");
  if (bias) check_vector("bias", *bias, product.size(1));
}

// y = form(product * scale + bias) of one row.
template <class Form>
BERTFAST_INLINE void scaled_row(const float* product, float scale, const float* bias, int64_t width, float* y,
                                const Form& form) {
  if (bias) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) y[j] = form(product[j] * scale + bias[j]);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) y[j] = form(product[j] * scale);
  }
}

Tensor scale_rows(Tensor product, Tensor scale, std::optional<Tensor> bias, ScalarType dtype) {
  check_product(product, scale, bias);
  check_float_type("dtype", dtype);
  const int64_t rows = product.size(0), width = product.size(1);
  const Tensor out = new_empty(product, {rows, width}, dtype);
  const FloatVector biases(bias);
  const Rows in(product, width);
  const MutableRows target(out, width);
  const float* scales = scale.const_data_ptr<float>();
  parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(width);
    with_best_isa([&]() __attribute__((always_inline)) {
      for (int64_t i = begin; i < end; ++i) {
        float* y = target.target(i, buffer.data());
        scaled_row(in.read(i, nullptr), scales[i], biases.data(), width, y,
                   [](float v) __attribute__((always_inline)) { return v; });
        target.store(i, y);
      }
    });
  });
  return out;
}

template <class Form>
void gelu_rows(const Rows& product, const float* scales, const float* bias, int64_t rows, const Quantized& out,
               const Form& form) {
  const int64_t width = out.width;
  parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(width);
    with_best_isa([&]() __attribute__((always_inline)) {
      for (int64_t i = begin; i < end; ++i) {
        scaled_row(product.read(i, nullptr), scales[i], bias, width, buffer.data(), form);
        out.store(i, buffer.data());
      }
    });
  });
}

std::tuple<Tensor, Tensor> scale_rows_gelu(Tensor product, Tensor scale, std::optional<Tensor> bias,
                                           std::string activation) {
  check_product(product, scale, bias);
  STD_TORCH_CHECK(activation == "gelu" || activation == "gelu_tanh", "activation: expected gelu or gelu_tanh, got ",
                  activation);
  const int64_t rows = product.size(0), width = product.size(1);
  const Quantized out(product, rows, width);
  const FloatVector biases(bias);
  const Rows in(product, width);
  const float* scales = scale.const_data_ptr<float>();
  if (activation == "gelu_tanh") {
    gelu_rows(in, scales, biases.data(), rows, out,
              [](float v) __attribute__((always_inline)) { return gelu_tanh(v); });
  } else {
    gelu_rows(in, scales, biases.data(), rows, out, [](float v) __attribute__((always_inline)) { return gelu(v); });
  }
  return {out.values, out.scales};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, CPU, m) {
  m.impl("quantize_rows_cpu", TORCH_BOX(&bertfast::quantize_rows));
  m.impl("scale_rows_cpu", TORCH_BOX(&bertfast::scale_rows));
  m.impl("scale_rows_gelu_cpu", TORCH_BOX(&bertfast::scale_rows_gelu));
}
