"""flash-attn's functions of rows without a mask and of packed sequences; not run on a GPU yet."""

from __future__ import annotations

from torch import Tensor

from bertfast.benchmarks.cases import Forward, Inputs
from bertfast.benchmarks.records import Cell


def attention(cell: Cell) -> Forward:
    """Of query, key and value (B, S, H, D), the output (B, H, S, D) as a view.

    Raises:
        ImportError: flash-attn is missing.
    """
    from flash_attn import flash_attn_func

    def formula(inputs: Inputs) -> Tensor:
        return flash_attn_func(inputs["query"], inputs["key"], inputs["value"]).transpose(1, 2)

    return formula


def varlen_attention(cell: Cell) -> Forward:
    """Of query, key and value (T, H, D), with int32 ends of sequences, the output (T, H, D).

    Raises:
        ImportError: flash-attn is missing.
    """
    from flash_attn import flash_attn_varlen_func

    def formula(inputs: Inputs) -> Tensor:
        ends, longest = inputs["ends"], inputs["longest"]
        return flash_attn_varlen_func(
            inputs["query"],
            inputs["key"],
            inputs["value"],
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )

    return formula
