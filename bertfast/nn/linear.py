"""A linear module in inference on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast import prepacked
from bertfast.backends import order_on
from bertfast.nn.plain import is_plain


def uses_prepacked(x: Tensor) -> bool:
    """Whether linear layers of `x` may multiply by reordered weights: the backend `cpu` comes first, and no gradient is
    recorded."""
    return x.device.type == "cpu" and not torch.is_grad_enabled() and order_on("cpu")[0] == "cpu"


def linear(x: Tensor, dense: nn.Module) -> Tensor:
    """dense(x): x (..., K) to (..., N), by the reordered weight of a plain module where there can be one."""
    if uses_prepacked(x) and is_plain(dense, nn.Linear):
        out = prepacked.linear(x, (dense.weight,), (dense.bias,))
        if out is not None:
            return out
    return dense(x)
