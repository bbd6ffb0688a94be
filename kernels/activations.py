"""Activations and their derivatives on fp32 values, by the formula names of `bertfast.activations.FORMULAS`.

Exponentials are taken of negative numbers only, so that nothing overflows on the way: with e = exp(-|z|),

    sigmoid(z)  = 1 / (1 + e) for z >= 0, else e / (1 + e)             sigmoid'(z) = e / (1 + e)^2
    (1 + tanh(y)) / 2 = sigmoid(2 y)                                   tanh'(x) = 4 sigmoid'(2 x)
    tanh(log(1 + exp(x))) = (1 + 2 e) / (1 + 2 e + 2 e^2) for x >= 0, else (e^2 + 2 e) / (e^2 + 2 e + 2)

NaN stays NaN everywhere: comparisons are written so that it falls on the side that passes it on.
"""

from __future__ import annotations

import triton
import triton.language as tl

SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2_PI: tl.constexpr = tl.constexpr(0.3989422804014327)
SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(0.7978845608028654)
CUBIC: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def _sigmoid(z):
    e = tl.exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def _sigmoid_slope(z):
    e = tl.exp(-tl.abs(z))
    return e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _expm1_negative(x):
    """exp(x) - 1 for x <= 0. Up to x = -0.35 by its series, whose next term is 2e-8 of the result there."""
    t = tl.maximum(x, -0.35)
    series = 1.0 + t * (1.0 / 7)
    series = 1.0 + t * (1.0 / 6) * series
    series = 1.0 + t * (1.0 / 5) * series
    series = 1.0 + t * (1.0 / 4) * series
    series = 1.0 + t * (1.0 / 3) * series
    series = 1.0 + t * (1.0 / 2) * series
    return tl.where(x > -0.35, x * series, tl.exp(x) - 1.0)


@triton.jit
def _tanh_argument(x):
    """2 sqrt(2 / pi) (x + 0.044715 x^3). Beyond |x| = 16 its exponential is 0 and stays 0, so x is held there: its cube
    is finite and has no part in 0 x infinity."""
    t = tl.minimum(tl.maximum(x, -16.0), 16.0)
    return t * (2.0 * SQRT_2_OVER_PI) * (1.0 + t * t * CUBIC)


@triton.jit
def activate(x, FORMULA: tl.constexpr):
    """The activation of fp32 values."""
    if FORMULA == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif FORMULA == "gelu_tanh":
        return x * _sigmoid(_tanh_argument(x))
    elif FORMULA == "quick_gelu":
        return x * _sigmoid(1.702 * x)
    elif FORMULA == "relu":
        return tl.where(x <= 0, 0.0, x)
    elif FORMULA == "relu6":
        return tl.where(x <= 0, 0.0, tl.where(x >= 6, 6.0, x))
    elif FORMULA == "leaky_relu":
        return tl.where(x <= 0, 0.01 * x, x)
    elif FORMULA == "elu":
        return tl.where(x <= 0, _expm1_negative(x), x)
    elif FORMULA == "silu":
        return x * _sigmoid(x)
    elif FORMULA == "mish":
        e = tl.exp(-tl.abs(x))
        n = tl.where(x >= 0, 1.0 + 2.0 * e, e * (e + 2.0))
        return x * (n / (n + tl.where(x >= 0, 2.0 * e * e, 2.0)))
    elif FORMULA == "tanh":
        n = _expm1_negative(-2.0 * tl.abs(x))
        return tl.where(x >= 0, -n, n) / (2.0 + n)
    elif FORMULA == "sigmoid":
        return _sigmoid(x)
    else:
        tl.static_assert(FORMULA == "linear", "unknown formula")
        return x


@triton.jit
def derivative(x, FORMULA: tl.constexpr):
    """The activation's derivative at fp32 values."""
    if FORMULA == "gelu":
        density = tl.exp(-0.5 * x * x) * INVERSE_SQRT_2_PI
        return 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * density
    elif FORMULA == "gelu_tanh":
        z = _tanh_argument(x)
        t = tl.minimum(tl.abs(x), 16.0)
        slope = (1.0 + t * t * (3.0 * CUBIC)) * (2.0 * SQRT_2_OVER_PI)
        return _sigmoid(z) + x * (_sigmoid_slope(z) * slope)
    elif FORMULA == "quick_gelu":
        return _sigmoid(1.702 * x) + x * (1.702 * _sigmoid_slope(1.702 * x))
    elif FORMULA == "relu":
        return tl.where(x <= 0, 0.0, 1.0)
    elif FORMULA == "relu6":
        return tl.where((x <= 0) | (x >= 6), 0.0, 1.0)
    elif FORMULA == "leaky_relu":
        return tl.where(x <= 0, 0.01, 1.0)
    elif FORMULA == "elu":
        return tl.exp(tl.minimum(x, 0.0))
    elif FORMULA == "silu":
        return _sigmoid(x) + x * _sigmoid_slope(x)
    elif FORMULA == "mish":
        e = tl.exp(-tl.abs(x))
        n = tl.where(x >= 0, 1.0 + 2.0 * e, e * (e + 2.0))
        d = n + tl.where(x >= 0, 2.0 * e * e, 2.0)
        return n / d + x * (4.0 * (1.0 + e) * tl.where(x >= 0, e * e, e) / (d * d))
    elif FORMULA == "tanh":
        return 4.0 * _sigmoid_slope(2.0 * x)
    elif FORMULA == "sigmoid":
        return _sigmoid_slope(x)
    else:
        tl.static_assert(FORMULA == "linear", "unknown formula")
        return tl.full(x.shape, 1.0, tl.float32)
