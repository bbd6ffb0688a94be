"""Linear layers of the backend `cpu`: which calls oneDNN takes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast.backends import order_on
from bertfast.nn.plain import is_plain
from bertfast.ops.linear_gelu import linear_on_cpu


def _is_on_cpu(x: Tensor) -> bool:
    """Whether the backend `cpu` comes first for `x`."""
    return x.device.type == "cpu" and order_on("cpu")[0] == "cpu"


def uses_prepacked(x: Tensor) -> bool:
    """Whether linear layers of `x` may multiply by reordered weights: on the backend `cpu`, where no gradient is
    recorded."""
    return not torch.is_grad_enabled() and _is_on_cpu(x)


def linear(x: Tensor, dense: nn.Module) -> Tensor:
    """dense(x): x (..., K) to (..., N), by oneDNN for a plain module where that serves the call."""
    if _is_on_cpu(x) and is_plain(dense, nn.Linear):
        out = linear_on_cpu(x, dense.weight, dense.bias)
        if out is not None:
            return out
    return dense(x)
