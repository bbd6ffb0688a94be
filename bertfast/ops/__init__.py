"""The ops: functional, fused, with a backend chosen for each call (see `bertfast.backends`)."""

from bertfast.dropout import dropout_mask
from bertfast.ops.attention import attention
from bertfast.ops.embed_layer_norm import embed_layer_norm
from bertfast.ops.feed_forward import feed_forward
from bertfast.ops.layer_norm import add_layer_norm
from bertfast.ops.linear_gelu import linear_gelu
from bertfast.ops.qkv_projection import qkv_projection
from bertfast.ops.varlen_attention import varlen_attention

__all__ = [
    "add_layer_norm",
    "attention",
    "dropout_mask",
    "embed_layer_norm",
    "feed_forward",
    "linear_gelu",
    "qkv_projection",
    "varlen_attention",
]
