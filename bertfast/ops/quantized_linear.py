"""quantized_linear: x W^T + b by an int8 GEMM, for inference on the CPU.

With the row W_n of the weight for output n, a row x_m of the input, and all arithmetic exact::

    s_m = (max(x_m, 0) - min(x_m, 0)) / 255,  z_m = round(-min(x_m, 0) / s_m),  t_n = max|W_n| / 127
    q[m, k] = round(x[m, k] / s_m) + z_m in 0 ... 255,  w[n, k] = round(W[n, k] / t_n) in -127 ... 127
    out[m, n] = s_m * t_n * sum_k((q[m, k] - z_m) * w[n, k]) + b[n]

The weight is rounded once, the input in each call ("dynamic"), and nothing is calibrated. The sum is exact: 32-bit
integers hold it for K up to `MAX_K`. oneDNN takes one zero point for all rows, so it gets 128, and the rest is added
behind it: c_m * sum_k(t_n * w[n, k]) with c_m = s_m * (128 - z_m). Its kernels for signed inputs, which need none, are
reference code: on an AMD EPYC (AVX-512 VNNI) 4,000 times slower.

Its two operators are private to PyTorch, so a product with the largest values is tried once: without VNNI instructions
pairs of products are added in 16 bits, which saturate.

FLOPs: 2 M N K. Memory floor: x and out once each, and one byte for each weight.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from bertfast.ops._library import define, extension_unavailable
from bertfast.ops.linear_gelu import rows_of

ZERO_POINT = 128
LARGEST = 127
MAX_K = (2**31 - 1) // (255 * LARGEST)
# Channels below it count as zeros: what they are multiplied by would overflow.
SMALLEST = 2.0**-120


def _rows_fake(x):
    rows = rows_of(x)
    return rows.new_empty(rows.shape, dtype=torch.uint8), rows.new_empty((2, len(rows)), dtype=torch.float32)


def _scaled_fake(product, affine, sum, bias, dtype):
    return product.new_empty(product.shape, dtype=dtype)


def _activation_fake(product, affine, sum, bias, activation):
    return _rows_fake(product)


# x (..., K) to q as bytes (M, K), and s and c, (2, M) fp32.
QUANTIZE_ROWS = define("quantize_rows", "(Tensor x) -> (Tensor values, Tensor affine)", _rows_fake, ("cpu",))["cpu"]
# product (M, N) * s + c * sum + bias in a dtype: `sum` and `bias` (N,).
SCALE_ROWS = define(
    "scale_rows",
    "(Tensor product, Tensor affine, Tensor sum, Tensor? bias, ScalarType dtype) -> Tensor",
    _scaled_fake,
    ("cpu",),
)["cpu"]
# QUANTIZE_ROWS of an activation, a value of `bertfast.activations.FORMULAS`, of SCALE_ROWS in fp32.
SCALE_ROWS_ACTIVATION = define(
    "scale_rows_activation",
    "(Tensor product, Tensor affine, Tensor sum, Tensor? bias, str activation) -> (Tensor values, Tensor affine)",
    _activation_fake,
    ("cpu",),
)["cpu"]


class QuantizedWeight(NamedTuple):
    """An int8 weight (N, K), w or as oneDNN lays it out, and of each output t and the sum of t * w, (N,) fp32."""

    values: Tensor
    scale: Tensor
    sum: Tensor


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """A weight (N, K) to 8 bits. A row with NaN or infinity has the scale NaN."""
    weight = weight.detach().float().contiguous()
    largest = weight.abs().amax(dim=1) if weight.shape[1] else weight.new_zeros(weight.shape[0])
    usable = largest.isfinite() & (largest >= SMALLEST)
    inverse = torch.where(usable, LARGEST / largest, 0.0)
    values = (weight * inverse.unsqueeze(1)).nan_to_num(0.0).round_().to(torch.int8)
    scale = torch.where(usable, largest / LARGEST, torch.where(largest.isfinite(), 0.0, torch.nan))
    return QuantizedWeight(values, scale, values.sum(dim=1) * scale)


def prepack(values: Tensor) -> Tensor:
    """An int8 weight (N, K) as oneDNN lays it out."""
    return torch.ops.onednn.qlinear_prepack(values.contiguous(), None)


def _product(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Bytes (M, K) by a weight as oneDNN lays it out: t_n * sum_k((q[m, k] - 128) * w[n, k]), (M, N) fp32."""
    zeros = _no_shift(len(scale))
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, ZERO_POINT, values, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


@functools.cache
def _no_shift(size: int) -> Tensor:
    """The zero points of a weight: it has none."""
    with torch.inference_mode(False):
        return torch.zeros(size, dtype=torch.int32, device="cpu")


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x (..., K) to (..., N) in the dtype of x; the weight as oneDNN lays it out."""
    values, affine = QUANTIZE_ROWS(x)
    product = _product(values, weight.values, weight.scale)
    return SCALE_ROWS(product, affine, weight.sum, bias, x.dtype).view(*x.shape[:-1], product.shape[1])


def feed_forward(
    x: Tensor,
    w_in: QuantizedWeight,
    b_in: Tensor | None,
    w_out: QuantizedWeight,
    b_out: Tensor | None,
    activation: str,
) -> Tensor:
    """linear(activation(linear(x))); the intermediate goes from fp32 to 8 bits, whatever the dtype of x.

    Args:
        activation: a value of `bertfast.activations.FORMULAS`.
    """
    values, affine = QUANTIZE_ROWS(x)
    product = _product(values, w_in.values, w_in.scale)
    values, affine = SCALE_ROWS_ACTIVATION(product, affine, w_in.sum, b_in, activation)
    product = _product(values, w_out.values, w_out.scale)
    return SCALE_ROWS(product, affine, w_out.sum, b_out, x.dtype).view(*x.shape[:-1], product.shape[1])


@functools.cache
def unavailable() -> str | None:
    """Why there are no int8 products on this machine, or None."""
    reason = extension_unavailable()
    if reason is not None:
        return reason
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch is built without oneDNN"
    x = torch.full((16, 64), 255, dtype=torch.uint8, device="cpu")
    weight = torch.full((32, 64), LARGEST, dtype=torch.int8, device="cpu")
    try:
        with torch.inference_mode(False), torch.no_grad():
            product = _product(x, prepack(weight), torch.ones(32, device="cpu"))
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"oneDNN's int8 product, an operator private to PyTorch, fails with torch {torch.__version__}: {error}"
    if not (product == (255 - ZERO_POINT) * LARGEST * 64).all():
        return "the processor adds int8 products in 16 bits, which saturate (no VNNI instructions)"
    return None
