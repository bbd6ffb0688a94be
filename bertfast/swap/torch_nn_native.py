"""torch's own encoder layer in C++, and when it is the better way for small inputs on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast.activations import Activation
from bertfast.backends import is_transformed, needs_grad
from bertfast.swap.plain_ops import is_preferred

# In fp32 on the CPU, up to that many numbers, padding is computed in one call of the layer rather than taken out in
# several. Taking it out paid from (8, 16) on at width 256 and from (8, 128) on at width 64, in which half the tokens
# were padding.
SMALL = 16384
# The layer writes the scores. It takes 0.7 to 1.0 of the time of plain PyTorch up to that length, and 1.0 to 1.3 from
# 256 on; a mask makes it slower.
MAX_LENGTH, MAX_MASKED_LENGTH = 128, 64


def is_small(hidden_states: Tensor) -> bool:
    """Whether to keep padding in (B, S, N)."""
    return hidden_states.dtype == torch.float32 and hidden_states.numel() <= SMALL and is_preferred(hidden_states)


def call_native(
    layer: nn.TransformerEncoderLayer,
    x: Tensor,
    activation: str | Activation,
    key_padding_mask: Tensor | None,
) -> Tensor | None:
    """`layer` on (B, S, N) without dropout by torch's layer in C++; None where that would not be right or not fast: it
    has no gradients, and not every form of a layer.

    It is chosen here and not among the backends, which serve one op at a time: no `use_backend` reaches it, so callers
    ask `is_preferred` first, as `layer_forward` does.

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
