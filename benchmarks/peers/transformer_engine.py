"""TransformerEngine's LayerNorm of a sum that PyTorch adds, and its attention; not run on a GPU yet.

Its GELU is the tanh form, which is not BERT's, and its fused feed-forward begins with a LayerNorm: there is nothing to
compare with a linear layer and GELU, or with the feed-forward.
"""

from __future__ import annotations

from torch import Tensor

from bertfast.benchmarks.bench_layer_norm import EPS
from bertfast.benchmarks.cases import HEAD_DIM, HEADS, WIDTH, Forward, Inputs
from bertfast.benchmarks.records import Cell


def add_layer_norm(cell: Cell) -> Forward:
    """Of x and residual (..., N), and weight and bias that are parameters, the output (..., N).

    Raises:
        ImportError: transformer-engine is missing.
    """
    import transformer_engine.pytorch as te

    # One for each set of inputs: a backward pass reads the weight that the module then has.
    norms: dict[int, te.LayerNorm] = {}

    def formula(inputs: Inputs) -> Tensor:
        weight = inputs["weight"]
        norm = norms.get(id(weight))
        if norm is None:
            norm = norms[id(weight)] = te.LayerNorm(WIDTH, eps=EPS, device=weight.device, dtype=weight.dtype)
            norm.weight, norm.bias = weight, inputs["bias"]
        return norm(inputs["x"] + inputs["residual"])

    return formula


def attention(cell: Cell) -> Forward:
    """Of query, key and value (B, S, H, D), the output (B, H, S, D) as a view.

    Raises:
        ImportError: transformer-engine is missing.
    """
    attend = _attention(cell, qkv_format="bshd", attn_mask_type="no_mask")

    def formula(inputs: Inputs) -> Tensor:
        out = attend(inputs["query"], inputs["key"], inputs["value"])
        return out.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)

    return formula


def varlen_attention(cell: Cell) -> Forward:
    """Of query, key and value (T, H, D), with int32 ends of sequences, the output (T, H, D).

    Raises:
        ImportError: transformer-engine is missing.
    """
    attend = _attention(cell, qkv_format="thd", attn_mask_type="padding")

    def formula(inputs: Inputs) -> Tensor:
        ends, longest = inputs["ends"], inputs["longest"]
        out = attend(
            inputs["query"],
            inputs["key"],
            inputs["value"],
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return out.unflatten(-1, (HEADS, HEAD_DIM))

    return formula


def _attention(cell: Cell, **options: str):
    import transformer_engine.pytorch as te

    # In train mode a forward pass also writes what only a backward pass reads.
    return te.DotProductAttention(HEADS, HEAD_DIM, attention_dropout=0.0, **options).train(cell.pass_ != "forward")
