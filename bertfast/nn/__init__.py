"""Drop-in modules that build a BERT encoder from the fused ops."""

from bertfast.nn.attention import FusedSelfAttention
from bertfast.nn.embeddings import FusedBertEmbeddings
from bertfast.nn.encoder import BertEncoder, BertEncoderLayer
from bertfast.nn.feed_forward import FusedFeedForward
from bertfast.nn.frozen import FrozenLinear
from bertfast.nn.layer_norm import FusedAddLayerNorm
from bertfast.nn.quantized import QuantizedLinear

__all__ = [
    "BertEncoder",
    "BertEncoderLayer",
    "FrozenLinear",
    "FusedAddLayerNorm",
    "FusedBertEmbeddings",
    "FusedFeedForward",
    "FusedSelfAttention",
    "QuantizedLinear",
]
