"""What the ops' `torch` backend computes, called without their dispatch: for fp32 and fp64 on the CPU. The feed-forward
multiplies by reordered weights in inference (`prepacked`), as the ops do.

The GEMMs take nearly all of the time there, so that no kernel gains much, and calling an op costs 10 to 25 us more than
calling PyTorch. Layers of torch.nn take them always, those of transformers for small batches. On one core, a layer of
width 64 under `use_backend("torch")` took 1.11 to 1.17 of the time of these functions in evaluation on (1, 160), 1.12
to 1.16 in training on (1, 16); of stock's speed that is 0.86 and 0.96 instead of 0.97 and 1.11.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast import prepacked
from bertfast.activations import FORMULAS, GELU_FORMS, Activation, get_activation
from bertfast.backends import is_pinned
from bertfast.ops import varlen_attention
from bertfast.ops.attention import sdpa
from bertfast.ops.linear_gelu import linear_on

__all__ = ["add_layer_norm", "attention", "feed_forward", "is_preferred", "varlen_attention"]


def is_preferred(x: Tensor) -> bool:
    """Whether these functions are to compute what `x` goes through: no backend is asked for, and stock LayerNorm keeps
    its statistics in fp32 or more."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return False
    return not is_pinned()


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """As `ops.attention`."""
    return sdpa(query, key, value, attn_mask, dropout_p, is_causal, None, None)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    dropout_p: float = 0.0,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `ops.add_layer_norm`, also without a bias."""
    total = F.dropout(x, dropout_p) if dropout_p else x
    total = total if residual is None else residual + total
    out = F.layer_norm(total, weight.shape, weight, bias, eps)
    return (out, total) if return_sum else out


def feed_forward(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    activation: str | Activation,
    *,
    dropout_p: float = 0.0,
) -> Tensor:
    """As `ops.feed_forward`."""
    form = GELU_FORMS.get(activation) if isinstance(activation, str) else None
    hidden = None if form is None else prepacked.linear(x, (w_in,), (b_in,), FORMULAS[activation])
    if hidden is None:
        hidden = get_activation(activation)(F.linear(x, w_in, b_in))
    hidden = F.dropout(hidden, dropout_p) if dropout_p else hidden
    return linear_on("cpu", hidden, w_out, b_out)
