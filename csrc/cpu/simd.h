// Rows of fp32, bf16 and fp16 as fp32, and the choice of instruction set at run time: one binary serves every x86-64
// (and, without the choice, aarch64), so nothing is compiled for the machine that builds.
//
// Code under with_best_isa() is compiled once per instruction set. All that it calls must be inlined into it
// (BERTFAST_INLINE), else it is compiled for the baseline. Loops are vectorised by the compiler: `#pragma omp simd`
// allows it to reorder the reductions that it names, and nothing else.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define BERTFAST_INLINE __attribute__((always_inline)) inline

namespace bertfast {

using torch::headeronly::ScalarType;

enum class Isa { baseline, avx2, avx512, avx512bf16 };

// The best that this machine has, or less where BERTFAST_CPU_ISA says so (one of these names), for tests.
Isa best_isa();

#if defined(__x86_64__)
template <class Body>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512"))) void run_avx512(
    const Body& body) {
  body();
}

template <class Body>
__attribute__((target("avx2,fma,f16c"))) void run_avx2(const Body& body) {
  body();
}

template <class Body>
void with_best_isa(const Body& body) {
  switch (best_isa()) {
    case Isa::avx512bf16:
    case Isa::avx512:
      return run_avx512(body);
    case Isa::avx2:
      return run_avx2(body);
    case Isa::baseline:
      return body();
  }
}
#else
template <class Body>
void with_best_isa(const Body& body) {
  body();
}
#endif

template <class To, class From>
BERTFAST_INLINE To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// The conversions below equal torch's, written without branches and calls so that the compiler vectorises them; GCC 12
// vectorises neither _Float16 nor torch's own.
BERTFAST_INLINE uint16_t bfloat16_bits(float value) {
  const auto bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// The addition of `base` rounds at the fp16 mantissa: its exponent is 13 above that of the value.
BERTFAST_INLINE uint16_t half_bits(float value) {
  const auto bits = bits_as<uint32_t>(value);
  const uint32_t twice = bits + bits;  // without the sign
  const uint32_t exponent = std::max(twice & 0xff000000u, 0x71000000u);
  const float scaled = (std::fabs(value) * 0x1.0p+112f) * 0x1.0p-110f;  // overflows to infinity where fp16 does
  const auto rounded = bits_as<uint32_t>(bits_as<float>((exponent >> 1) + 0x07800000u) + scaled);
  const uint32_t magnitude = ((rounded >> 13) & 0x7c00) + (rounded & 0x0fff);
  return static_cast<uint16_t>(((bits & 0x80000000u) >> 16) | (twice > 0xff000000u ? 0x7e00u : magnitude));
}

BERTFAST_INLINE float bfloat16_value(uint16_t bits) {
  return bits_as<float>(uint32_t{bits} << 16);
}

BERTFAST_INLINE float half_value(uint16_t bits) {
  const uint32_t high = uint32_t{bits} << 16;
  const uint32_t twice = high + high;
  const float normal = bits_as<float>((twice >> 4) + 0x70000000u) * 0x1.0p-112f;
  const float denormal = bits_as<float>((twice >> 17) | 0x3f000000u) - 0.5f;
  const auto magnitude = bits_as<uint32_t>(twice < 0x08000000u ? denormal : normal);
  return bits_as<float>((high & 0x80000000u) | magnitude);
}

template <class Convert>
BERTFAST_INLINE void to_floats(const uint16_t* source, int64_t size, float* target, const Convert& convert) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) target[i] = convert(source[i]);
}

template <class Convert>
BERTFAST_INLINE void from_floats(const float* source, int64_t size, uint16_t* target, const Convert& convert) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) target[i] = convert(source[i]);
}

// The rows of a contiguous (rows, width) tensor, read as fp32.
struct Rows {
  const char* data = nullptr;
  ScalarType dtype = ScalarType::Float;
  int64_t width = 0;

  Rows() = default;
  Rows(const torch::stable::Tensor& tensor, int64_t width)
      : data(static_cast<const char*>(tensor.const_data_ptr())), dtype(tensor.scalar_type()), width(width) {}

  explicit operator bool() const { return data != nullptr; }

  // The row itself when it is fp32, else its conversion in `buffer`.
  BERTFAST_INLINE const float* read(int64_t row, float* buffer) const {
    if (dtype == ScalarType::Float) return reinterpret_cast<const float*>(data) + row * width;
    const uint16_t* source = reinterpret_cast<const uint16_t*>(data) + row * width;
    if (dtype == ScalarType::BFloat16) {
      to_floats(source, width, buffer, bfloat16_value);
    } else {
      to_floats(source, width, buffer, half_value);
    }
    return buffer;
  }
};

// The same for rows that are written: fill target(row, buffer), then store(row, target).
struct MutableRows {
  char* data = nullptr;
  ScalarType dtype = ScalarType::Float;
  int64_t width = 0;

  MutableRows() = default;
  MutableRows(const torch::stable::Tensor& tensor, int64_t width)
      : data(static_cast<char*>(tensor.mutable_data_ptr())), dtype(tensor.scalar_type()), width(width) {}

  explicit operator bool() const { return data != nullptr; }

  BERTFAST_INLINE float* target(int64_t row, float* buffer) const {
    return dtype == ScalarType::Float ? reinterpret_cast<float*>(data) + row * width : buffer;
  }

  BERTFAST_INLINE bool is_half() const { return dtype != ScalarType::Float; }

  // What store() would keep of a row.
  BERTFAST_INLINE void round(float* values) const {
    if (dtype == ScalarType::BFloat16) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) values[i] = bfloat16_value(bfloat16_bits(values[i]));
    } else if (dtype == ScalarType::Half) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) values[i] = half_value(half_bits(values[i]));
    }
  }

  BERTFAST_INLINE void store(int64_t row, const float* filled) const {
    uint16_t* target = reinterpret_cast<uint16_t*>(data) + row * width;
    if (dtype == ScalarType::BFloat16) {
      from_floats(filled, width, target, bfloat16_bits);
    } else if (dtype == ScalarType::Half) {
      from_floats(filled, width, target, half_bits);
    }
  }
};

}  // namespace bertfast
