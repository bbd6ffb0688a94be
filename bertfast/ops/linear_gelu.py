"""linear_gelu: gelu(x weight^T + bias), the first half of the feed-forward.

FLOPs: 2 M N K for x (M, K) and weight (N, K). Memory floor: x, weight and out once each.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bertfast.backends import FLOAT, Capability, choose, describe, needs_grad, register
from bertfast.ops._autocast import to_autocast
from bertfast.ops._checks import check_rank, check_required, check_same_dtype, check_shape, check_tensors
from bertfast.ops._library import define, extension_unavailable


def _fwd_fake(x, weight, bias, approximate):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_FWD = define(
    "linear_gelu_fwd", "(Tensor x, Tensor weight, Tensor? bias, str approximate) -> Tensor", _fwd_fake, ("cpu",)
)


def linear_gelu_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, backend: str) -> Tensor:
    """The private forward op of a fused backend; not differentiable."""
    return _FWD[backend](x, weight, bias, approximate)


def _fused(x, weight, bias, approximate):
    return linear_gelu_fwd(x, weight, bias, approximate, "cpu")


def _torch(x, weight, bias, approximate):
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    approximate: str = "none",
    *,
    backend: str | None = None,
) -> Tensor:
    """GELU of a linear layer.

    Equivalent PyTorch::

        return F.gelu(F.linear(x, weight, bias), approximate=approximate)

    Args:
        x: (..., K) fp16, bf16, fp32 or fp64.
        weight: (N, K) as `nn.Linear.weight`, in the dtype of `x` (autocast makes it so).
        bias: (N,) in the same dtype, or None.
        approximate: `"none"` for the exact form by erf, `"tanh"` for the tanh form.
        backend: a backend's name, or None for the one in force.

    Returns:
        (..., N) in the dtype of `x` (autocast's dtype under autocast).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown `approximate`.
        TypeError: an input that is not floating point.
        BackendError: `backend` cannot serve these inputs.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    check_linear(x, weight, bias, ("x", "weight", "bias"))
    x, weight, bias = to_autocast(x, weight, bias)
    check_same_dtype(("x", "weight", "bias"), x, weight, bias)
    call = describe("linear_gelu", (x, weight, bias), grad=needs_grad(x, weight, bias))
    return choose(call, backend).implementation(x, weight, bias, approximate)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, names: tuple[str, str, str]) -> None:
    """Raises ValueError or TypeError unless `weight` and `bias` make a linear layer on `x`."""
    check_required(names[:2], x, weight)
    check_tensors(names, x, weight, bias)
    check_rank(names[0], x, 1)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{names[1]} must have shape (N, {x.shape[-1]}), got {tuple(weight.shape)}")
    check_shape(names[2], bias, (weight.shape[0],))


register(Capability("linear_gelu", "torch", _torch))
register(
    Capability(
        "linear_gelu",
        "cpu",
        _fused,
        devices=frozenset({"cpu"}),
        dtypes=FLOAT,
        backward=False,
        unavailable=extension_unavailable,
    )
)
