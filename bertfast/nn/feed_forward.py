"""FusedFeedForward: two linear layers with an activation between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from bertfast import ops, prepacked
from bertfast.activations import FORMULAS, GELU_FORMS, Activation, get_activation
from bertfast.nn import frozen, quantized
from bertfast.nn.linear import linear, uses_prepacked
from bertfast.nn.plain import is_plain


def feed_forward(
    x: Tensor,
    dense_in: nn.Module,
    dense_out: nn.Module,
    activation: str | Activation,
    op: Callable[..., Tensor] = ops.feed_forward,
) -> Tensor:
    """activation(x W_in^T + b_in) W_out^T + b_out, (..., N) to (..., N): by `op` where both modules are plain, by int8
    or frozen layers, else by calling the modules."""
    if is_plain(dense_in, nn.Linear) and is_plain(dense_out, nn.Linear):
        if uses_prepacked(x) and isinstance(activation, str) and activation in GELU_FORMS:
            # The op would come to the same, behind checks that take as long as a small product.
            hidden = prepacked.linear(x, (dense_in.weight,), (dense_in.bias,), FORMULAS[activation])
            if hidden is not None:
                return linear(hidden, dense_out)
        return op(x, dense_in.weight, dense_in.bias, dense_out.weight, dense_out.bias, activation)
    if isinstance(activation, str) and activation in FORMULAS and quantized.may_fuse(dense_in, dense_out):
        return quantized.feed_forward(x, dense_in, dense_out, FORMULAS[activation])
    if isinstance(activation, str) and activation in GELU_FORMS and frozen.may_fuse(dense_in):
        return dense_out(frozen.product(x, dense_in, FORMULAS[activation]))
    return dense_out(get_activation(activation)(dense_in(x)))


def dense_activation(x: Tensor, dense: nn.Module, activation: str | Activation) -> Tensor:
    """activation(dense(x)), as one op where `dense` is plain and the activation an exact or tanh GELU."""
    approximate = GELU_FORMS.get(activation) if isinstance(activation, str) else None
    if approximate is not None and is_plain(dense, nn.Linear):
        return ops.linear_gelu(x, dense.weight, dense.bias, approximate)
    return get_activation(activation)(dense(x))


class FusedFeedForward(nn.Module):
    """activation(x W_in^T + b_in) W_out^T + b_out as one module with the children `dense_in` and `dense_out`.

    Args:
        hidden_size: N, of input and output.
        intermediate_size: F.
        activation: a configuration name or a callable.
        recompute_activation: keep no intermediate for backward, which makes it again by another GEMM (see
            `ops.feed_forward`). An attribute of the same name can be set at any time.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str | Activation = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute_activation: bool = False,
    ) -> None:
        super().__init__()
        get_activation(activation)
        self.activation = activation
        self.recompute_activation = recompute_activation
        self.dense_in = nn.Linear(hidden_size, intermediate_size, device=device, dtype=dtype)
        self.dense_out = nn.Linear(intermediate_size, hidden_size, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., N) to (..., N)."""
        op = partial(ops.feed_forward, recompute_activation=self.recompute_activation)
        return feed_forward(x, self.dense_in, self.dense_out, self.activation, op)
