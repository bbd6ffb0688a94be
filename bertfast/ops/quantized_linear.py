"""quantized_linear: x W^T + b by an int8 GEMM, for inference on the CPU.

With W_n the row of the weight for output n, and rows x_m of the input, in exact arithmetic::

    s_m = max|x_m| / 127,  t_n = max|W_n| / 127
    out[m, n] = s_m * t_n * sum_k(round(x[m, k] / s_m) * round(W[n, k] / t_n)) + b[n]

The weight is rounded once, the input in each call ("dynamic"), and nothing is calibrated. The sum is exact: 32-bit
integers hold it for K up to 133,000. Rows of the input go to oneDNN as unsigned bytes with the zero point 128, because
its kernels for signed ones are reference code: on an AMD EPYC (AVX-512 VNNI) 4,000 times slower.

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
# Channels below it count as zeros: what they are multiplied by would overflow.
SMALLEST = 2.0**-120


def _rows_fake(x):
    rows = rows_of(x)
    return rows.new_empty(rows.shape, dtype=torch.uint8), rows.new_empty(rows.shape[:1], dtype=torch.float32)


def _scaled_fake(product, scale, bias, dtype):
    return product.new_empty(product.shape, dtype=dtype)


def _gelu_fake(product, scale, bias, activation):
    return _rows_fake(product)


# x (..., K) to bytes (M, K) and the scale of each row (M,), fp32.
QUANTIZE_ROWS = define("quantize_rows", "(Tensor x) -> (Tensor values, Tensor scale)", _rows_fake, ("cpu",))["cpu"]
# product (M, N) * scale[:, None] + bias, in a dtype.
SCALE_ROWS = define(
    "scale_rows", "(Tensor product, Tensor scale, Tensor? bias, ScalarType dtype) -> Tensor", _scaled_fake, ("cpu",)
)["cpu"]
# QUANTIZE_ROWS of a GELU, "gelu" or "gelu_tanh", of SCALE_ROWS in fp32.
SCALE_ROWS_GELU = define(
    "scale_rows_gelu",
    "(Tensor product, Tensor scale, Tensor? bias, str activation) -> (Tensor values, Tensor scale)",
    _gelu_fake,
    ("cpu",),
)["cpu"]


class PackedWeight(NamedTuple):
    """An int8 weight (N, K) as oneDNN lays it out, and the scale (N,) of each output in fp32."""

    values: Tensor
    scale: Tensor


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (N, K) as int8 and the scale of each row, (N,) fp32. A row with NaN or infinity has the scale NaN."""
    weight = weight.detach().float()
    largest = weight.abs().amax(dim=1) if weight.shape[1] else weight.new_zeros(weight.shape[0])
    usable = largest.isfinite() & (largest >= SMALLEST)
    inverse = torch.where(usable, LARGEST / largest, 0.0)
    values = (weight * inverse.unsqueeze(1)).nan_to_num(0.0).round_().to(torch.int8)
    scale = torch.where(usable, largest / LARGEST, torch.where(largest.isfinite(), 0.0, torch.nan))
    return values, scale


def prepack(values: Tensor) -> Tensor:
    """An int8 weight (N, K) as oneDNN lays it out."""
    return torch.ops.onednn.qlinear_prepack(values, None)


def _product(x: Tensor, weight: PackedWeight) -> Tensor:
    """Bytes (M, K) to fp32 (M, N), without the scales of the rows."""
    values, scale = weight
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, ZERO_POINT, values, scale, _no_shift(len(scale)), None, 1.0, 0, torch.float32, "none", [], ""
    )


@functools.cache
def _no_shift(size: int) -> Tensor:
    """The zero points of a weight: it has none."""
    with torch.inference_mode(False):
        return torch.zeros(size, dtype=torch.int32, device="cpu")


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x (..., K) and bias (N,) or None to (..., N) in the dtype of x."""
    values, scale = QUANTIZE_ROWS(x)
    return SCALE_ROWS(_product(values, weight), scale, bias, x.dtype).view(*x.shape[:-1], weight.scale.shape[0])


def feed_forward(
    x: Tensor, w_in: PackedWeight, b_in: Tensor | None, w_out: PackedWeight, b_out: Tensor | None, activation: str
) -> Tensor:
    """linear(gelu(linear(x))), x (..., N); the intermediate goes from fp32 to 8 bits, in any dtype of x.

    Args:
        activation: `"gelu"` or `"gelu_tanh"`.
    """
    values, scale = QUANTIZE_ROWS(x)
    values, scale = SCALE_ROWS_GELU(_product(values, w_in), scale, b_in, activation)
    return SCALE_ROWS(_product(values, w_out), scale, b_out, x.dtype).view(*x.shape[:-1], w_out.scale.shape[0])


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
            product = _product(x, PackedWeight(prepack(weight), torch.ones(32, device="cpu")))
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"oneDNN's int8 product, an operator private to PyTorch, fails with torch {torch.__version__}: {error}"
    if not (product == (255 - ZERO_POINT) * LARGEST * 64).all():
        return "the processor adds int8 products in 16 bits, which saturate (no VNNI instructions)"
    return None
