"""Attention of packed sequences: the kernels of `attention` and `attention_bwd`, given where sequences begin.

A block of queries belongs to one sequence and meets that sequence's keys only, so that the work is that of the tokens:
4 D sum(length_q length_k) FLOPs a head. Blocks are found on the device (`attention.sequence_of`): the host knows the
number of tokens and of sequences, and no length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertfast.kernels.attention import forward, mask_of, unit_rows
from bertfast.kernels.attention_bwd import backward
from bertfast.kernels.launch import dropout_of


def varlen_attention_fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (T_q, H, D) and stats (2, H, T_q) fp32 as `attention_fwd`."""
    total, heads, head_dim = query.shape
    out = query.new_empty(query.shape)
    stats = query.new_empty((2, heads, total), dtype=torch.float32)
    if out.numel() > 0:
        query, key, value = unit_rows(query), unit_rows(key), unit_rows(value)
        ends = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
        forward(query, key, value, mask_of(None, ()), *ends, out, stats, dropout_of(seed, dropout_p), is_causal, scale)
    return out, stats


def varlen_attention_bwd(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seed: Tensor | None,
    out: Tensor,
    stats: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    query, key, value, dout = unit_rows(query), unit_rows(key), unit_rows(value), unit_rows(dout)
    ends = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    dropout = dropout_of(seed, dropout_p)
    backward(dout, query, key, value, mask_of(None, ()), *ends, out, stats, dq, dk, dv, dropout, is_causal, scale)
    return dq, dk, dv
