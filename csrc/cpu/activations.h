// Activations and their derivatives on fp32 values, by formula, without branches or calls, so that loops over them are
// vectorised.
//
// Exponentials are taken of negative numbers only, so that nothing overflows on the way: with e = exp(-|z|),
//     sigmoid(z) = 1 / (1 + e) for z >= 0, else e / (1 + e)              sigmoid'(z) = e / (1 + e)^2
//     (1 + tanh(y)) / 2 = sigmoid(2 y)                                   tanh'(x) = 4 sigmoid'(2 x)
//     tanh(log(1 + exp(x))) = (1 + 2 e) / (1 + 2 e + 2 e^2) for x >= 0, else (e^2 + 2 e) / (e^2 + 2 e + 2)
// NaN stays NaN in values: comparisons are written so that it falls on the side that passes it on. A derivative by
// cases is a number there.
//
// GELU: with t = |x| and P the normal distribution function, gelu(x) = x P(x), P(-t) = exp(-t^2 / 2) R(t),
// P(t) = 1 - P(-t). R falls slowly (it is half of erfcx(t / sqrt 2)), and a polynomial in 1 / (1 + 0.3 t) gives it to
// 6e-8 of its value on [0, 14]; beyond 13.2, where P(-t) is 4e-40, it is taken as 0. So one exponential and one
// division serve all x, the derivative P(x) + x P'(x) included, and the error stays below that of
// 0.5 x (1 + erf(x / sqrt 2)) with an erf rounded to fp32. The coefficients are a least squares fit in float64,
// reweighted until the relative error is level.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "exp2.h"
#include "formula.h"
#include "simd.h"

namespace bertfast {

constexpr float kInverseSqrt2Pi = 0.3989422804f;
constexpr float kSqrt2OverPi = 0.7978845608f;
constexpr float kCubic = 0.044715f;

// 2^-z as scale (1 + rest) for z in [0, 126]: a power of 2 and a number of [-0.3, 0.42].
struct Exp2 {
  float scale, rest;

  BERTFAST_INLINE explicit Exp2(float z) {
    const float whole = std::nearbyint(std::min(126.0f, z));  // in this order NaN becomes 126
    const float f = whole - z;
    float p = kExp2Terms[5];
    p = p * f + kExp2Terms[4];
    p = p * f + kExp2Terms[3];
    p = p * f + kExp2Terms[2];
    p = p * f + kExp2Terms[1];
    p = p * f + kExp2Terms[0];
    rest = p * f;
    scale = bits_as<float>((127 - static_cast<int32_t>(whole)) << 23);
  }
};

// 2^-z for z in [0, 126], a normal number; 0 beyond.
BERTFAST_INLINE float exp2_of_minus(float z) {
  const Exp2 power(z);
  const float value = power.scale * power.rest + power.scale;
  return z >= 126.0f ? 0.0f : value;
}

// exp(-t) for t >= 0.
BERTFAST_INLINE float exp_of_minus(float t) {
  return exp2_of_minus(t * kLog2e);
}

// exp(-t) - 1 for t >= 0, exact to the last bits of small t too.
BERTFAST_INLINE float expm1_of_minus(float t) {
  const float z = t * kLog2e;
  const Exp2 power(z);
  const float value = power.scale * power.rest + (power.scale - 1.0f);
  return z >= 126.0f ? -1.0f : value;
}

BERTFAST_INLINE float sigmoid(float z) {
  const float e = exp_of_minus(std::fabs(z));
  return (z >= 0 ? 1.0f : e) / (1.0f + e);
}

BERTFAST_INLINE float sigmoid_slope(float z) {
  const float e = exp_of_minus(std::fabs(z));
  const float r = 1.0f / (1.0f + e);
  return e * r * r;
}

// Of a formula, both at x; `derivative` is that of `value`.
template <Formula>
struct Activation;

template <>
struct Activation<Formula::kGelu> {
  BERTFAST_INLINE static float value(float x) { return x * probability(x, density(x)); }

  BERTFAST_INLINE static float derivative(float x) {
    const float e = density(x);
    return probability(x, e) + x * (kInverseSqrt2Pi * e);
  }

 private:
  BERTFAST_INLINE static float density(float x) { return exp2_of_minus(x * x * (0.5f * kLog2e)); }

  BERTFAST_INLINE static float probability(float x, float e) {
    const float u = 1.0f / (1.0f + 0.3f * std::fabs(x));
    float r = 0.038378745f;
    r = r * u - 0.16916823f;
    r = r * u + 0.22866425f;
    r = r * u - 0.076510973f;
    r = r * u + 0.14253843f;
    r = r * u + 0.09468238f;
    r = r * u + 0.12192061f;
    r = r * u + 0.11948766f;
    r = r * u + 7.1706377e-06f;
    const float lower = r * e;
    return x > 0 ? 1.0f - lower : lower;
  }
};

// x sigmoid(z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
template <>
struct Activation<Formula::kGeluTanh> {
  BERTFAST_INLINE static float value(float x) { return x * sigmoid(argument(x)); }

  BERTFAST_INLINE static float derivative(float x) {
    const float z = argument(x), t = held(x);
    const float slope = (1.0f + t * t * (3.0f * kCubic)) * (2.0f * kSqrt2OverPi);
    return sigmoid(z) + x * (sigmoid_slope(z) * slope);
  }

 private:
  // Beyond |x| = 16 the exponential is 0 and stays 0, so x is held there: its cube is finite and has no part in
  // 0 x infinity.
  BERTFAST_INLINE static float held(float x) { return x < -16.0f ? -16.0f : x > 16.0f ? 16.0f : x; }

  BERTFAST_INLINE static float argument(float x) {
    const float t = held(x);
    return t * (2.0f * kSqrt2OverPi) * (1.0f + t * t * kCubic);
  }
};

template <>
struct Activation<Formula::kQuickGelu> {
  BERTFAST_INLINE static float value(float x) { return x * sigmoid(1.702f * x); }
  BERTFAST_INLINE static float derivative(float x) {
    return sigmoid(1.702f * x) + x * (1.702f * sigmoid_slope(1.702f * x));
  }
};

template <>
struct Activation<Formula::kRelu> {
  BERTFAST_INLINE static float value(float x) { return x <= 0 ? 0.0f : x; }
  BERTFAST_INLINE static float derivative(float x) { return x <= 0 ? 0.0f : 1.0f; }
};

template <>
struct Activation<Formula::kRelu6> {
  BERTFAST_INLINE static float value(float x) { return x <= 0 ? 0.0f : x >= 6 ? 6.0f : x; }
  BERTFAST_INLINE static float derivative(float x) { return (x <= 0) | (x >= 6) ? 0.0f : 1.0f; }
};

template <>
struct Activation<Formula::kLeakyRelu> {
  BERTFAST_INLINE static float value(float x) { return x <= 0 ? 0.01f * x : x; }
  BERTFAST_INLINE static float derivative(float x) { return x > 0 ? 1.0f : 0.01f; }
};

template <>
struct Activation<Formula::kElu> {
  BERTFAST_INLINE static float value(float x) { return x <= 0 ? expm1_of_minus(std::fabs(x)) : x; }
  BERTFAST_INLINE static float derivative(float x) { return x <= 0 ? exp_of_minus(std::fabs(x)) : 1.0f; }
};

template <>
struct Activation<Formula::kSilu> {
  BERTFAST_INLINE static float value(float x) { return x * sigmoid(x); }
  BERTFAST_INLINE static float derivative(float x) { return sigmoid(x) + x * sigmoid_slope(x); }
};

template <>
struct Activation<Formula::kMish> {
  BERTFAST_INLINE static float value(float x) {
    const float e = exp_of_minus(std::fabs(x));
    const float n = x >= 0 ? 1.0f + 2.0f * e : e * (e + 2.0f);
    return x * (n / (n + (x >= 0 ? 2.0f * e * e : 2.0f)));
  }

  BERTFAST_INLINE static float derivative(float x) {
    const float e = exp_of_minus(std::fabs(x));
    const float n = x >= 0 ? 1.0f + 2.0f * e : e * (e + 2.0f);
    const float r = 1.0f / (n + (x >= 0 ? 2.0f * e * e : 2.0f));
    return n * r + x * (4.0f * (1.0f + e) * (x >= 0 ? e * e : e) * r * r);
  }
};

template <>
struct Activation<Formula::kTanh> {
  BERTFAST_INLINE static float value(float x) {
    const float m = expm1_of_minus(2.0f * std::fabs(x));
    return std::copysign(m / (2.0f + m), x);
  }

  BERTFAST_INLINE static float derivative(float x) { return 4.0f * sigmoid_slope(2.0f * x); }
};

template <>
struct Activation<Formula::kSigmoid> {
  BERTFAST_INLINE static float value(float x) { return sigmoid(x); }
  BERTFAST_INLINE static float derivative(float x) { return sigmoid_slope(x); }
};

template <>
struct Activation<Formula::kLinear> {
  BERTFAST_INLINE static float value(float x) { return x; }
  BERTFAST_INLINE static float derivative(float) { return 1.0f; }
};

// body(Activation<formula>()).
template <class Body>
void with_activation(Formula formula, const Body& body) {
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
