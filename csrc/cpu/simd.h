// Rows of fp32, bf16 and fp16 as fp32, and the choice of instruction set at run time: one binary serves every x86-64
// (and, without the choice, aarch64), so nothing is compiled for the machine that builds.
//
// Code under with_best_isa() is compiled once per instruction set. All that it calls must be inlined into it
// (BERTFAST_INLINE), else it is compiled for the baseline. Loops are vectorised by the compiler: `#pragma omp simd`
// allows it to reorder the reductions that it names, and nothing else.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#define BERTFAST_INLINE __attribute__((always_inline)) inline

namespace bertfast {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;

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
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512) {
    run_avx512(body);
  } else if (has_avx2) {
    run_avx2(body);
  } else {
    body();
  }
}
#else
template <class Body>
void with_best_isa(const Body& body) {
  body();
}
#endif

template <class T>
BERTFAST_INLINE void to_float(const T* source, int64_t size, float* target) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) target[i] = static_cast<float>(source[i]);
}

template <class T>
BERTFAST_INLINE void from_float(const float* source, int64_t size, T* target) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) target[i] = static_cast<T>(source[i]);
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
    if (dtype == ScalarType::BFloat16) {
      to_float(reinterpret_cast<const BFloat16*>(data) + row * width, width, buffer);
    } else {
      to_float(reinterpret_cast<const Half*>(data) + row * width, width, buffer);
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

  BERTFAST_INLINE void store(int64_t row, const float* filled) const {
    if (dtype == ScalarType::BFloat16) {
      from_float(filled, width, reinterpret_cast<BFloat16*>(data) + row * width);
    } else if (dtype == ScalarType::Half) {
      from_float(filled, width, reinterpret_cast<Half*>(data) + row * width);
    }
  }
};

}  // namespace bertfast
