// GELU, exact and by tanh.
//
// With t = |x| and P the normal distribution function, gelu(x) = x P(x), P(-t) = exp(-t^2 / 2) R(t), P(t) = 1 - P(-t).
// R falls slowly (it is half of erfcx(t / sqrt 2)), and a polynomial in 1 / (1 + 0.3 t) gives it to 6e-8 of its value
// on [0, 14]; beyond 13.2, where P(-t) is 4e-40, it is taken as 0. So one exponential and one division serve all x
// without a branch, and the error stays below that of 0.5 x (1 + erf(x / sqrt 2)) with an erf rounded to fp32. The
// coefficients are a least squares fit in float64, reweighted until the relative error is level.
//
// The tanh form is x / (1 + exp(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3), which overflows nowhere.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "simd.h"

namespace bertfast {

constexpr float kLog2e = 1.44269504f;

// 2^-z for z in [0, 126], a normal number; 0 beyond. Relative error 2e-9 before rounding.
BERTFAST_INLINE float exp2_negative(float z) {
  const float whole = std::nearbyint(std::min(z, 126.0f));
  const float f = whole - z;
  float p = 0.00015345795f;
  p = p * f + 0.0013399932f;
  p = p * f + 0.009618489f;
  p = p * f + 0.055503286f;
  p = p * f + 0.24022646f;
  p = p * f + 0.6931472f;
  p = p * f + 1.0f;
  p *= bits_as<float>((127 - static_cast<int32_t>(whole)) << 23);
  return z < 126.0f ? p : 0.0f;
}

BERTFAST_INLINE float gelu(float x) {
  const float t = std::fabs(x);
  const float u = 1.0f / (1.0f + 0.3f * t);
  float r = 0.038378745f;
  r = r * u - 0.16916823f;
  r = r * u + 0.22866425f;
  r = r * u - 0.076510973f;
  r = r * u + 0.14253843f;
  r = r * u + 0.09468238f;
  r = r * u + 0.12192061f;
  r = r * u + 0.11948766f;
  r = r * u + 7.1706377e-06f;
  const float lower = r * exp2_negative(t * t * (0.5f * kLog2e));
  return x * (x > 0 ? 1.0f - lower : lower);
}

BERTFAST_INLINE float gelu_tanh(float x) {
  const float t = std::fabs(x);
  const float y = 0.7978845608f * (t + 0.044715f * t * t * t);
  const float e = exp2_negative(y * (2.0f * kLog2e));
  return x * ((x > 0 ? 1.0f : e) / (1.0f + e));
}

}  // namespace bertfast
