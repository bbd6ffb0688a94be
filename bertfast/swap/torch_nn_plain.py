"""Plain PyTorch in the place of ops, for fp32 and fp64 on the CPU, where it is the faster.

The GEMMs take nearly all of the time there, and calling an op costs 10 to 25 us more than calling stock PyTorch: for a
layer of width 64 on (1, 16) that is half of the time. torch's own layer in C++, which stock's fast path calls in
evaluation, saves as much again on such inputs. In a trace the functions are there to be fused.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertfast.activations import Activation, get_activation
from bertfast.backends import AUTO_ORDER, is_transformed, needs_grad, order_on
from bertfast.ops import varlen_attention
from bertfast.ops.attention import sdpa

__all__ = ["add_layer_norm", "attention", "call_native", "feed_forward", "is_better", "is_small", "varlen_attention"]

# Up to that many numbers, padding is computed in one call of the layer rather than taken out in several. Taking it out
# paid from (8, 16) on at width 256 and from (8, 128) on at width 64, in which half the tokens were padding.
SMALL = 16384
# torch's layer writes the scores. It takes 0.7 to 1.0 of the time of the functions up to that length, and 1.0 to 1.3
# from 256 on; a mask makes it slower.
MAX_LENGTH, MAX_MASKED_LENGTH = 128, 64


def is_better(x: Tensor) -> bool:
    """Whether plain PyTorch is to compute what `x` goes through: no backend is asked for, and stock LayerNorm keeps its
    statistics in fp32 or more."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return False
    return order_on("cpu") == AUTO_ORDER["cpu"]


def is_small(hidden_states: Tensor) -> bool:
    """Whether to keep padding in (B, S, N)."""
    return hidden_states.device.type == "cpu" and hidden_states.numel() <= SMALL


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
    hidden = get_activation(activation)(F.linear(x, w_in, b_in))
    return F.linear(F.dropout(hidden, dropout_p) if dropout_p else hidden, w_out, b_out)


def call_native(
    layer: nn.TransformerEncoderLayer,
    x: Tensor,
    activation: str | Activation,
    key_padding_mask: Tensor | None,
) -> Tensor | None:
    """`layer` on (B, S, N) without dropout by torch's layer in C++; None where that would not be right or not fast: it
    has no gradients, and not every form of a layer.

    Args:
        key_padding_mask: (B, S) bool, True where a key takes no part. Sequences that are padding altogether give NaN.
    """
    children = layer._modules
    attention, norm1, norm2 = children["self_attn"], children["norm1"], children["norm2"]
    if activation not in ("relu", "gelu") or norm1.eps != norm2.eps or attention.num_heads % 2:
        return None
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed() or torch.is_autocast_enabled("cpu"):
        return None
    if not torch.backends.mha.get_fastpath_enabled():
        return None
    if x.shape[1] > (MAX_LENGTH if key_padding_mask is None else MAX_MASKED_LENGTH):
        return None
    out, linear1, linear2 = attention.out_proj, children["linear1"], children["linear2"]
    projections = (attention.in_proj_weight, attention.in_proj_bias, out.weight, out.bias)
    norms = (norm1.weight, norm1.bias, norm2.weight, norm2.bias)
    feed_forward = (linear1.weight, linear1.bias, linear2.weight, linear2.bias)
    parameters = (*projections, *norms, *feed_forward)
    if any(p is None or p.dtype != x.dtype for p in parameters) or needs_grad(x, *parameters):
        return None
    return torch._transformer_encoder_layer_fwd(
        x,
        attention.embed_dim,
        attention.num_heads,
        *projections,
        activation == "gelu",
        layer.norm_first,
        norm1.eps,
        *norms,
        *feed_forward,
        key_padding_mask,
        None if key_padding_mask is None else 1,
    )
