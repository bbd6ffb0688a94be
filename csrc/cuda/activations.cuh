// Activations and their derivatives on fp32 values, by the formula names of bertfast.activations.FORMULAS.
//
// Exponentials are taken of negative numbers only, so that nothing overflows on the way: with e = exp(-|z|),
//     sigmoid(z)  = 1 / (1 + e) for z >= 0, else e / (1 + e)             sigmoid'(z) = e / (1 + e)^2
//     (1 + tanh(y)) / 2 = sigmoid(2 y)                                   tanh'(x) = 4 sigmoid'(2 x)
//     tanh(log(1 + exp(x))) = (1 + 2 e) / (1 + 2 e + 2 e^2) for x >= 0, else (e^2 + 2 e) / (e^2 + 2 e + 2)
// Denominators are between 1 and 5. NaN stays NaN everywhere: comparisons are written so that it falls on the side that
// passes it on.
#pragma once

#include <cmath>
#include <cstdint>

#include "bias_activation.h"
#include "intrinsics.cuh"

namespace bertfast {

constexpr float kSqrtHalf = 0.7071067811865476f;
constexpr float kInverseSqrt2Pi = 0.3989422804014327f;
constexpr float kSqrt2OverPi = 0.7978845608028654f;
constexpr float kCubic = 0.044715f;

__device__ __forceinline__ float sigmoid(float z) {
  const float e = expf(-fabsf(z));
  return (z >= 0 ? 1.0f : e) * reciprocal(1.0f + e);
}

__device__ __forceinline__ float sigmoid_slope(float z) {
  const float e = expf(-fabsf(z));
  const float r = reciprocal(1.0f + e);
  return e * r * r;
}

// 2 sqrt(2 / pi) (x + 0.044715 x^3). Beyond |x| = 16 its exponential is 0 and stays 0, so x is held there: its cube is
// finite and has no part in 0 x infinity.
__device__ __forceinline__ float tanh_argument(float x) {
  const float t = x < -16.0f ? -16.0f : x > 16.0f ? 16.0f : x;
  return t * (2.0f * kSqrt2OverPi) * (1.0f + t * t * kCubic);
}

// Of a formula, both at x; `derivative` is that of `value`.
template <Formula>
struct Activation;

template <>
struct Activation<Formula::kGelu> {
  __device__ __forceinline__ static float value(float x) { return 0.5f * x * (1.0f + erff(x * kSqrtHalf)); }
  __device__ __forceinline__ static float derivative(float x) {
    const float density = expf(-0.5f * x * x) * kInverseSqrt2Pi;
    return 0.5f * (1.0f + erff(x * kSqrtHalf)) + x * density;
  }
};

template <>
struct Activation<Formula::kGeluTanh> {
  __device__ __forceinline__ static float value(float x) { return x * sigmoid(tanh_argument(x)); }
  __device__ __forceinline__ static float derivative(float x) {
    const float z = tanh_argument(x);
    const float t = fminf(fabsf(x), 16.0f);
    const float slope = (1.0f + t * t * (3.0f * kCubic)) * (2.0f * kSqrt2OverPi);
    return sigmoid(z) + x * (sigmoid_slope(z) * slope);
  }
};

template <>
struct Activation<Formula::kQuickGelu> {
  __device__ __forceinline__ static float value(float x) { return x * sigmoid(1.702f * x); }
  __device__ __forceinline__ static float derivative(float x) {
    return sigmoid(1.702f * x) + x * (1.702f * sigmoid_slope(1.702f * x));
  }
};

template <>
struct Activation<Formula::kRelu> {
  __device__ __forceinline__ static float value(float x) { return x <= 0 ? 0.0f : x; }
  __device__ __forceinline__ static float derivative(float x) { return x <= 0 ? 0.0f : 1.0f; }
};

template <>
struct Activation<Formula::kRelu6> {
  __device__ __forceinline__ static float value(float x) { return x <= 0 ? 0.0f : x >= 6 ? 6.0f : x; }
  __device__ __forceinline__ static float derivative(float x) { return x <= 0 || x >= 6 ? 0.0f : 1.0f; }
};

template <>
struct Activation<Formula::kLeakyRelu> {
  __device__ __forceinline__ static float value(float x) { return x <= 0 ? 0.01f * x : x; }
  __device__ __forceinline__ static float derivative(float x) { return x > 0 ? 1.0f : 0.01f; }
};

template <>
struct Activation<Formula::kElu> {
  __device__ __forceinline__ static float value(float x) { return x <= 0 ? expm1f(x) : x; }
  __device__ __forceinline__ static float derivative(float x) { return x <= 0 ? expf(x) : 1.0f; }
};

template <>
struct Activation<Formula::kSilu> {
  __device__ __forceinline__ static float value(float x) { return x * sigmoid(x); }
  __device__ __forceinline__ static float derivative(float x) { return sigmoid(x) + x * sigmoid_slope(x); }
};

template <>
struct Activation<Formula::kMish> {
  __device__ __forceinline__ static float value(float x) {
    const float e = expf(-fabsf(x));
    const float n = x >= 0 ? 1.0f + 2.0f * e : e * (e + 2.0f);
    return x * (n * reciprocal(n + (x >= 0 ? 2.0f * e * e : 2.0f)));
  }
  __device__ __forceinline__ static float derivative(float x) {
    const float e = expf(-fabsf(x));
    const float n = x >= 0 ? 1.0f + 2.0f * e : e * (e + 2.0f);
    const float r = reciprocal(n + (x >= 0 ? 2.0f * e * e : 2.0f));
    return n * r + x * (4.0f * (1.0f + e) * (x >= 0 ? e * e : e) * r * r);
  }
};

template <>
struct Activation<Formula::kTanh> {
  __device__ __forceinline__ static float value(float x) { return tanhf(x); }
  __device__ __forceinline__ static float derivative(float x) { return 4.0f * sigmoid_slope(2.0f * x); }
};

template <>
struct Activation<Formula::kSigmoid> {
  __device__ __forceinline__ static float value(float x) { return sigmoid(x); }
  __device__ __forceinline__ static float derivative(float x) { return sigmoid_slope(x); }
};

template <>
struct Activation<Formula::kLinear> {
  __device__ __forceinline__ static float value(float x) { return x; }
  __device__ __forceinline__ static float derivative(float) { return 1.0f; }
};

// body(Activation<formula>()). The choice is the same for all threads, so a branch and no instantiation for each.
template <class Body>
__device__ __forceinline__ void with_activation(Formula formula, const Body& body) {
  switch (formula) {
    case Formula::kGelu:
      return body(Activation<Formula::kGelu>());
    case Formula::kGeluTanh:
      return body(Activation<Formula::kGeluTanh>());
    case Formula::kQuickGelu:
      return body(Activation<Formula::kQuickGelu>());
    case Formula::kRelu:
      return body(Activation<Formula::kRelu>());
    case Formula::kRelu6:
      return body(Activation<Formula::kRelu6>());
    case Formula::kLeakyRelu:
      return body(Activation<Formula::kLeakyRelu>());
    case Formula::kElu:
      return body(Activation<Formula::kElu>());
    case Formula::kSilu:
      return body(Activation<Formula::kSilu>());
    case Formula::kMish:
      return body(Activation<Formula::kMish>());
    case Formula::kTanh:
      return body(Activation<Formula::kTanh>());
    case Formula::kSigmoid:
      return body(Activation<Formula::kSigmoid>());
    case Formula::kLinear:
      return body(Activation<Formula::kLinear>());
  }
}

}  // namespace bertfast
