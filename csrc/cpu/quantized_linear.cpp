// What surrounds an int8 GEMM: rows quantised to 8 bits, and the product scaled to floating point, or activated and
// quantised again.
//
// A row x becomes round(x / s) + z in uint8: s such that its range, which 0 belongs to, has 255 steps, and z a whole
// number, so that 0 stays 0. Values seldom reach as far on one side of 0 as on the other, and a symmetric range would
// cost a GELU's output up to a bit. oneDNN multiplies unsigned by signed bytes and takes one zero point for all rows,
// 128, which it subtracts exactly; the rest, c = (128 - z) s, costs c times the sum of the weight's row. A row that
// holds NaN or infinity has the scale NaN, and so a result of NaN.
//
// Bytes moved, fp32: 5 K a row to 8 bits, 8 N a row of the product to fp32. The intermediate of a feed-forward is read
// once as fp32 and written once as bytes, 5 F; with a tensor between it would be 18 F.
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
#include "formula_names.h"
#include "parallel.h"
#include "simd.h"
#include "tensor.h"
#include "vector.h"

namespace bertfast {
namespace {

constexpr float kSteps = 255.0f;
constexpr int32_t kZeroPoint = 128;
// A row with a smaller scale counts as zeros: the reciprocal would overflow.
constexpr float kSmallest = 0x1.0p-120f;

// Bits of floats as integers in the order of their values, and back. NaN lies beyond the infinities: a maximum of
// floats may lose it, and is not vectorised either.
BERTFAST_INLINE int32_t ordered(int32_t bits) {
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

constexpr int32_t kInfinityBits = 0x7f800000;

// 8-bit rows (rows, width), and in `affine` (2, rows) their s, then their c.
struct Quantized {
  Tensor values, affine;
  uint8_t* bytes;
  float *scale, *shift;
  int64_t width;

  Quantized(const Tensor& like, int64_t rows, int64_t width)
      : values(new_empty(like, {rows, width}, ScalarType::Byte)),
        affine(new_empty(like, {2, rows}, ScalarType::Float)),
        bytes(values.mutable_data_ptr<uint8_t>()),
        scale(affine.mutable_data_ptr<float>()),
        shift(scale + rows),
        width(width) {}

  BERTFAST_INLINE void store(int64_t row, const float* x) const {
    int32_t least = 0, greatest = 0;
#pragma omp simd reduction(min : least) reduction(max : greatest)
    for (int64_t j = 0; j < width; ++j) {
      const int32_t key = ordered(bits_as<int32_t>(x[j]));
      least = std::min(least, key);
      greatest = std::max(greatest, key);
    }
    const bool finite = greatest < kInfinityBits && least > ordered(bits_as<int32_t>(0xff800000u));
    const float low = bits_as<float>(ordered(least)), high = bits_as<float>(greatest);
    const float s = high * (1.0f / kSteps) - low * (1.0f / kSteps);  // the difference may overflow
    uint8_t* target = bytes + row * width;
    if (!finite || s < kSmallest) {
      std::fill(target, target + width, uint8_t{kZeroPoint});
      scale[row] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      shift[row] = 0.0f;
      return;
    }
    const float inverse = 1.0f / s;
    const float zero = std::nearbyint(-low * inverse);
    scale[row] = s;
    shift[row] = (kZeroPoint - zero) * s;
    // The last bits of 1.5 * 2^23 + k are those of the integer k, and the sum rounds to it.
    constexpr float kRound = 0x1.8p+23f;
    const auto first = bits_as<int32_t>(kRound);
    const float offset = kRound + zero;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const auto step = bits_as<int32_t>(x[j] * inverse + offset) - first;
      target[j] = static_cast<uint8_t>(std::min(std::max(step, 0), 255));
    }
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
  return {out.values, out.affine};
}

// product * s + c * sum + bias of one row.
struct Affine {
  Rows product;
  const float *scale, *shift, *sum, *bias;

  template <class Form>
  BERTFAST_INLINE void row(int64_t i, float* y, const Form& form) const {
    const float* p = product.read(i, nullptr);
    const float *ps = sum, *pb = bias;
    const float s = scale[i], c = shift[i];
    if (pb) {
#pragma omp simd
      for (int64_t j = 0; j < product.width; ++j) y[j] = form(p[j] * s + (c * ps[j] + pb[j]));
    } else {
#pragma omp simd
      for (int64_t j = 0; j < product.width; ++j) y[j] = form(p[j] * s + c * ps[j]);
    }
  }
};

// What a call reads, checked and as fp32.
class Inputs {
 public:
  Inputs(const Tensor& product, const Tensor& affine, const Tensor& sum, const std::optional<Tensor>& bias)
      : product_(product), affine_(affine), sum_(sum), bias_(bias) {
    STD_TORCH_CHECK(product.scalar_type() == ScalarType::Float && product.dim() == 2 && product.is_contiguous(),
                    "product: expected a contiguous float32 matrix, got ",
                    torch::headeronly::toString(product.scalar_type()), " of shape ", shape_of(product));
    check_statistics("affine", affine, 2 * product.size(0));
    STD_TORCH_CHECK(affine.is_contiguous(), "affine: expected it contiguous");
    check_vector("sum", sum, product.size(1));
    if (bias) check_vector("bias", *bias, product.size(1));
  }

  int64_t rows() const { return product_.size(0); }
  int64_t width() const { return product_.size(1); }
  Affine affine() const {
    const float* scale = affine_.const_data_ptr<float>();
    return {Rows(product_, width()), scale, scale + rows(), sum_.data(), bias_.data()};
  }

 private:
  Tensor product_, affine_;
  FloatVector sum_, bias_;
};

Tensor scale_rows(Tensor product, Tensor affine, Tensor sum, std::optional<Tensor> bias, ScalarType dtype) {
  const Inputs inputs(product, affine, sum, bias);
  check_float_type("dtype", dtype);
  const int64_t width = inputs.width();
  const Tensor out = new_empty(product, {inputs.rows(), width}, dtype);
  const Affine rows = inputs.affine();
  const MutableRows target(out, width);
  parallel_rows(inputs.rows(), width, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(width);
    with_best_isa([&]() __attribute__((always_inline)) {
      for (int64_t i = begin; i < end; ++i) {
        float* y = target.target(i, buffer.data());
        rows.row(i, y, [](float v) __attribute__((always_inline)) { return v; });
        target.store(i, y);
      }
    });
  });
  return out;
}

template <class Form>
void quantize_activated(const Affine& in, int64_t rows, const Quantized& out, const Form& form) {
  parallel_rows(rows, out.width, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(out.width);
    with_best_isa([&]() __attribute__((always_inline)) {
      for (int64_t i = begin; i < end; ++i) {
        in.row(i, buffer.data(), form);
        out.store(i, buffer.data());
      }
    });
  });
}

std::tuple<Tensor, Tensor> scale_rows_activation(Tensor product, Tensor affine, Tensor sum, std::optional<Tensor> bias,
                                                 std::string activation) {
  const Inputs inputs(product, affine, sum, bias);
  const Formula formula = formula_of(activation);
  const Quantized out(product, inputs.rows(), inputs.width());
  const Affine in = inputs.affine();
  with_activation(formula, [&](auto form) {
    quantize_activated(in, inputs.rows(), out,
                       [](float v) __attribute__((always_inline)) { return decltype(form)::value(v); });
  });
  return {out.values, out.affine};
}

}  // namespace
}  // namespace bertfast

STABLE_TORCH_LIBRARY_IMPL(bertfast, CPU, m) {
  m.impl("quantize_rows_cpu", TORCH_BOX(&bertfast::quantize_rows));
  m.impl("scale_rows_cpu", TORCH_BOX(&bertfast::scale_rows));
  m.impl("scale_rows_activation_cpu", TORCH_BOX(&bertfast::scale_rows_activation));
}
