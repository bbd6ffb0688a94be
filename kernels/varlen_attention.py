"""`attention`'s kernels on packed sequences.

Padding costs nothing: there are T // BLOCK + sequences blocks at most, whatever the lengths, found by each program in
cu_seqlens (`attention.sequence_of`), and nothing has to be known on the host. FLOPs: 4 D sum(len_q len_k) a head;
bytes: (2 T_q + 2 T_k) D e a head, the floor, and 8 T_q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertfast.kernels.attention import NO_MASK, call_of, launch_fwd
from bertfast.kernels.attention_bwd import launch_bwd


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
    total, heads, _ = query.shape
    out = query.new_empty(query.shape)
    stats = query.new_empty((2, heads, total), dtype=torch.float32)
    if out.numel() > 0:
        call = call_of(query, key, value, NO_MASK, cu_seqlens_q, cu_seqlens_k, seed, dropout_p, is_causal, scale)
        launch_fwd(call, out, stats)
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
    call = call_of(query, key, value, NO_MASK, cu_seqlens_q, cu_seqlens_k, seed, dropout_p, is_causal, scale)
    launch_bwd(call, dout, out, stats, dq, dk, dv)
    return dq, dk, dv
