"""Gradients of attention, padded and packed, with p recomputed from what the forward pass saved.

With m and ln(l) of each row, p = e^(s - m - ln(l)), and delta = sum(dout out):

    dv = p^T dout     dp = dout v^T     ds = p (dp - delta)     dq = scale ds k     dk = scale ds^T q

dq in a pass over keys for each block of queries, which leaves delta too; then dk and dv in a pass over queries for each
block of keys: two recomputations instead of atomics, and no memory of the size of the scores. Dropout's mask is
regenerated. The gradient of a float mask is `attention_mask_bwd`'s.

FLOPs: 3 GEMMs of 2 S_q S_k D a head for dq, 4 for dk and dv. Bytes: q, k, v, out and dout read, dq, dk and dv written,
(4 S_q + 4 S_k) D e a head, the floor, and q, k, v and dout once more because there are two passes.

As in the forward pass, the block that may reach beyond the sequence comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bertfast.kernels import tiles
from bertfast.kernels.attention import (
    LOG2E,
    STREAM,
    AttentionCall,
    block_of_program,
    call_of,
    empty_by_position,
    last_key_block,
    load_rows,
    mask_of,
    masked_scores,
    rows_at,
    store_rows,
    strides_of,
    unit_rows,
)
from bertfast.kernels.common import dot, keep_mask, store_cast
from bertfast.kernels.launch import Launcher, device_of


@triton.jit
def load_stats(stats_ptr, o_m, stride_stats, length):
    """Maxima and logarithms of sums, [BLOCK]. Rows beyond the sequence get the maximum +inf, so that every p of theirs
    is 0."""
    b_max = tl.load(stats_ptr + o_m, mask=o_m < length, other=float("inf"))
    b_logsum = tl.load(stats_ptr + stride_stats + o_m, mask=o_m < length, other=0.0)
    # A row without any key: maximum and scores are -inf, and -inf - -inf is NaN.
    return tl.where(b_max == float("-inf"), 0.0, b_max), b_logsum


@triton.jit
def probabilities(b_s, b_max, b_logsum, scale, MASK: tl.constexpr):
    """p of what `masked_scores` returns; statistics in the shape that broadcasts against it."""
    if MASK == "float":
        # Not in one sum: next to a mask of 1e38, ln(l) would vanish.
        return tl.exp2((b_s - b_max) * LOG2E - b_logsum * LOG2E)
    return tl.exp2(b_s * scale - (b_max + b_logsum) * LOG2E)


@triton.jit
def score_gradients(
    b_q,  # [BLOCK_M, BLOCK_D]
    b_dout,
    b_k,  # [BLOCK_N, BLOCK_D]
    b_v,
    b_max,  # [BLOCK_M] fp32
    b_logsum,
    b_delta,
    mask_ptr,
    seed_ptr,
    o_m,
    first,
    stride_mask_m,
    stride_mask_n,
    length_q,
    length_k,
    causal_offset,
    dropout_row,
    scale,
    last_dropped,
    keep_scale,
    BOUNDED: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """ds of the keys from `first` on, [BLOCK_M, BLOCK_N] fp32."""
    o_n = first + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_N]
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b_s = dot(b_q, b_k.T, zeros, INPUT_PRECISION)
    b_s = masked_scores(
        b_s, mask_ptr, o_m[:, None], o_n[None, :], stride_mask_m, stride_mask_n, length_q, length_k, causal_offset,
        scale, MASK, MASK_ROWS, IS_CAUSAL, BOUNDED,
    )  # fmt: skip
    b_p = probabilities(b_s, b_max[:, None], b_logsum[:, None], scale, MASK)
    b_dp = dot(b_dout, b_v.T, zeros, INPUT_PRECISION)
    if seed_ptr is not None:
        m_kept = keep_mask(tl.load(seed_ptr), dropout_row + o_m, first, last_dropped, STREAM, BLOCK_M, BLOCK_N)
        b_dp = tl.where(m_kept, b_dp * keep_scale, 0.0)
    return b_p * (b_dp - b_delta[:, None])


@triton.jit(do_not_specialize=["stride_stats", "length_q", "length_k", "blocks", "sequences", "last_dropped"])
def attention_bwd_kernel_dq(
    q_ptr,  # as in the forward pass, to `stats_ptr`
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seed_ptr,
    out_ptr,
    stats_ptr,
    dout_ptr,  # like q
    delta_ptr,  # (B, H, S_q) or (H, T_q) fp32
    dq_ptr,  # like q
    stride_q_b,
    stride_q_h,
    stride_q_m,
    stride_k_b,
    stride_k_h,
    stride_k_n,
    stride_v_b,
    stride_v_h,
    stride_v_n,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_out_b,
    stride_out_h,
    stride_out_m,
    stride_dout_b,
    stride_dout_h,
    stride_dout_m,
    stride_dq_b,
    stride_dq_h,
    stride_dq_m,
    stride_stats,
    length_q,
    length_k,
    blocks,  # of queries a head
    sequences,
    scale,
    dq_scale,  # in natural units
    last_dropped,
    keep_scale,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    i_b, i_h, i_m, begin_q, begin_k, length_q, length_k, causal_offset, stats_row, dropout_row = block_of_program(
        cu_seqlens_q_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, blocks, length_q, length_k, length_q, sequences,
        H, BLOCK_M, SEQUENCES,
    )  # fmt: skip
    if i_m < 0:
        return
    stats_ptr += stats_row
    delta_ptr += stats_row
    q_ptr = rows_at(q_ptr, i_b, i_h, begin_q, stride_q_b, stride_q_h, stride_q_m)
    k_ptr = rows_at(k_ptr, i_b, i_h, begin_k, stride_k_b, stride_k_h, stride_k_n)
    v_ptr = rows_at(v_ptr, i_b, i_h, begin_k, stride_v_b, stride_v_h, stride_v_n)
    out_ptr = rows_at(out_ptr, i_b, i_h, begin_q, stride_out_b, stride_out_h, stride_out_m)
    dout_ptr = rows_at(dout_ptr, i_b, i_h, begin_q, stride_dout_b, stride_dout_h, stride_dout_m)
    dq_ptr = rows_at(dq_ptr, i_b, i_h, begin_q, stride_dq_b, stride_dq_h, stride_dq_m)
    if mask_ptr is not None:
        mask_ptr = rows_at(mask_ptr, i_b, i_h, 0, stride_mask_b, stride_mask_h, 0)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    last = last_key_block(i_m, length_k, causal_offset, IS_CAUSAL, BLOCK_M, BLOCK_N)
    o_n = last + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_D]
    b_q = load_rows(q_ptr, o_m, stride_q_m, length_q, True, D, BLOCK_D)
    b_dout = load_rows(dout_ptr, o_m, stride_dout_m, length_q, True, D, BLOCK_D)
    b_out = load_rows(out_ptr, o_m, stride_out_m, length_q, True, D, BLOCK_D)
    b_delta = tl.sum(b_out.to(tl.float32) * b_dout.to(tl.float32), axis=1)
    tl.store(delta_ptr + o_m, b_delta, mask=o_m < length_q)
    b_max, b_logsum = load_stats(stats_ptr, o_m, stride_stats, length_q)
    # [BLOCK_N, BLOCK_D]
    b_k = load_rows(k_ptr, o_n, stride_k_n, length_k, True, D, BLOCK_D)
    b_v = load_rows(v_ptr, o_n, stride_v_n, length_k, True, D, BLOCK_D)
    b_ds = score_gradients(
        b_q, b_dout, b_k, b_v, b_max, b_logsum, b_delta, mask_ptr, seed_ptr, o_m, last, stride_mask_m, stride_mask_n,
        length_q, length_k, causal_offset, dropout_row, scale, last_dropped, keep_scale,
        True, MASK, MASK_ROWS, IS_CAUSAL, INPUT_PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    # [BLOCK_M, BLOCK_D]
    b_dq = dot(store_cast(b_ds, b_k.dtype), b_k, tl.zeros((BLOCK_M, BLOCK_D), tl.float32), INPUT_PRECISION)
    for first in range(0, last, BLOCK_N):
        b_k = load_rows(k_ptr, first + tl.arange(0, BLOCK_N), stride_k_n, length_k, False, D, BLOCK_D)
        b_v = load_rows(v_ptr, first + tl.arange(0, BLOCK_N), stride_v_n, length_k, False, D, BLOCK_D)
        b_ds = score_gradients(
            b_q, b_dout, b_k, b_v, b_max, b_logsum, b_delta, mask_ptr, seed_ptr, o_m, first, stride_mask_m,
            stride_mask_n, length_q, length_k, causal_offset, dropout_row, scale, last_dropped, keep_scale,
            False, MASK, MASK_ROWS, IS_CAUSAL, INPUT_PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        b_dq = dot(store_cast(b_ds, b_k.dtype), b_k, b_dq, INPUT_PRECISION)
    store_rows(dq_ptr, o_m, stride_dq_m, length_q, b_dq * dq_scale, D, BLOCK_D)


@triton.jit
def add_dk_dv(
    b_dk,  # [BLOCK_N, BLOCK_D] fp32
    b_dv,
    b_k,  # [BLOCK_N, BLOCK_D]
    b_v,
    b_q,  # [BLOCK_M, BLOCK_D], 0 beyond the sequence, as is dout
    b_dout,
    mask_ptr,
    seed_ptr,
    stats_ptr,
    delta_ptr,
    first,
    o_n,
    stride_mask_m,
    stride_mask_n,
    stride_stats,
    length_q,
    length_k,
    causal_offset,
    dropout_row,
    first_key,
    scale,
    last_dropped,
    keep_scale,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What the queries from `first` on add. Scores are keys by queries: p^T and ds^T then are what `dot` reads. What
    keys beyond the sequence get stays in their own rows, which are not stored."""
    o_m = first + tl.arange(0, BLOCK_M)
    b_max, b_logsum = load_stats(stats_ptr, o_m, stride_stats, length_q)
    b_delta = tl.load(delta_ptr + o_m, mask=o_m < length_q, other=0.0)
    # [BLOCK_N, BLOCK_M]
    zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    b_s = dot(b_k, b_q.T, zeros, INPUT_PRECISION)
    b_s = masked_scores(
        b_s, mask_ptr, o_m[None, :], o_n[:, None], stride_mask_m, stride_mask_n, length_q, length_k, causal_offset,
        scale, MASK, MASK_ROWS, IS_CAUSAL, False,
    )  # fmt: skip
    b_p = probabilities(b_s, b_max[None, :], b_logsum[None, :], scale, MASK)
    b_dp = dot(b_v, b_dout.T, zeros, INPUT_PRECISION)
    b_dropped = b_p
    if seed_ptr is not None:
        m_kept = keep_mask(tl.load(seed_ptr), dropout_row + o_m, first_key, last_dropped, STREAM, BLOCK_M, BLOCK_N).T
        b_dropped = tl.where(m_kept, b_p * keep_scale, 0.0)
        b_dp = tl.where(m_kept, b_dp * keep_scale, 0.0)
    b_dv = dot(store_cast(b_dropped, b_dout.dtype), b_dout, b_dv, INPUT_PRECISION)
    b_ds = b_p * (b_dp - b_delta[None, :])
    b_dk = dot(store_cast(b_ds, b_q.dtype), b_q, b_dk, INPUT_PRECISION)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["stride_stats", "length_q", "length_k", "blocks", "sequences", "last_dropped"])
def attention_bwd_kernel_dk_dv(
    q_ptr,  # as in the forward pass, to `stats_ptr`
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seed_ptr,
    stats_ptr,
    dout_ptr,  # like q
    delta_ptr,  # (B, H, S_q) or (H, T_q) fp32
    dk_ptr,  # like k
    dv_ptr,
    stride_q_b,
    stride_q_h,
    stride_q_m,
    stride_k_b,
    stride_k_h,
    stride_k_n,
    stride_v_b,
    stride_v_h,
    stride_v_n,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_dout_b,
    stride_dout_h,
    stride_dout_m,
    stride_dk_b,
    stride_dk_h,
    stride_dk_n,
    stride_dv_b,
    stride_dv_h,
    stride_dv_n,
    stride_stats,
    length_q,
    length_k,
    blocks,  # of keys a head
    sequences,
    scale,
    dk_scale,  # in natural units
    last_dropped,
    keep_scale,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    i_b, i_h, i_n, begin_q, begin_k, length_q, length_k, causal_offset, stats_row, dropout_row = block_of_program(
        cu_seqlens_k_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, blocks, length_q, length_k, length_k, sequences,
        H, BLOCK_N, SEQUENCES,
    )  # fmt: skip
    if i_n < 0:
        return
    stats_ptr += stats_row
    delta_ptr += stats_row
    q_ptr = rows_at(q_ptr, i_b, i_h, begin_q, stride_q_b, stride_q_h, stride_q_m)
    k_ptr = rows_at(k_ptr, i_b, i_h, begin_k, stride_k_b, stride_k_h, stride_k_n)
    v_ptr = rows_at(v_ptr, i_b, i_h, begin_k, stride_v_b, stride_v_h, stride_v_n)
    dout_ptr = rows_at(dout_ptr, i_b, i_h, begin_q, stride_dout_b, stride_dout_h, stride_dout_m)
    dk_ptr = rows_at(dk_ptr, i_b, i_h, begin_k, stride_dk_b, stride_dk_h, stride_dk_n)
    dv_ptr = rows_at(dv_ptr, i_b, i_h, begin_k, stride_dv_b, stride_dv_h, stride_dv_n)
    if mask_ptr is not None:
        mask_ptr = rows_at(mask_ptr, i_b, i_h, 0, stride_mask_b, stride_mask_h, 0)
    first_key = i_n * BLOCK_N
    o_n = first_key + tl.arange(0, BLOCK_N)
    last = tl.maximum(length_q - 1, 0) // BLOCK_M * BLOCK_M
    o_m = last + tl.arange(0, BLOCK_M)
    # [BLOCK_N, BLOCK_D]
    b_k = load_rows(k_ptr, o_n, stride_k_n, length_k, True, D, BLOCK_D)
    b_v = load_rows(v_ptr, o_n, stride_v_n, length_k, True, D, BLOCK_D)
    # [BLOCK_M, BLOCK_D]
    b_q = load_rows(q_ptr, o_m, stride_q_m, length_q, True, D, BLOCK_D)
    b_dout = load_rows(dout_ptr, o_m, stride_dout_m, length_q, True, D, BLOCK_D)
    # [BLOCK_N, BLOCK_D]
    b_dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    b_dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # What a masked key gets, infinite or not, stays in its own row, which becomes 0 at the end.
    BY_KEY: tl.constexpr = MASK == "bool" and not MASK_ROWS
    SCORED: tl.constexpr = "none" if BY_KEY else MASK
    b_dk, b_dv = add_dk_dv(
        b_dk, b_dv, b_k, b_v, b_q, b_dout, mask_ptr, seed_ptr, stats_ptr, delta_ptr, last, o_n, stride_mask_m,
        stride_mask_n, stride_stats, length_q, length_k, causal_offset, dropout_row, first_key, scale, last_dropped,
        keep_scale, SCORED, MASK_ROWS, IS_CAUSAL, INPUT_PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    begin = 0
    if IS_CAUSAL:
        begin = tl.maximum(first_key - causal_offset, 0) // BLOCK_M * BLOCK_M
    # With D > 64 the compiler would hoist k and v into registers as operands for the whole loop, and spill.
    for first in tl.range(begin, last, BLOCK_M, disable_licm=D > 64):
        b_q = load_rows(q_ptr, first + tl.arange(0, BLOCK_M), stride_q_m, length_q, False, D, BLOCK_D)
        b_dout = load_rows(dout_ptr, first + tl.arange(0, BLOCK_M), stride_dout_m, length_q, False, D, BLOCK_D)
        b_dk, b_dv = add_dk_dv(
            b_dk, b_dv, b_k, b_v, b_q, b_dout, mask_ptr, seed_ptr, stats_ptr, delta_ptr, first, o_n, stride_mask_m,
            stride_mask_n, stride_stats, length_q, length_k, causal_offset, dropout_row, first_key, scale,
            last_dropped, keep_scale, SCORED, MASK_ROWS, IS_CAUSAL, INPUT_PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if BY_KEY:
        m_keys = tl.load(mask_ptr + o_n.to(tl.int64) * stride_mask_n, mask=o_n < length_k, other=0) != 0
        b_dk = tl.where(m_keys[:, None], b_dk, 0.0)
        b_dv = tl.where(m_keys[:, None], b_dv, 0.0)
    store_rows(dk_ptr, o_n, stride_dk_n, length_k, b_dk * dk_scale, D, BLOCK_D)
    store_rows(dv_ptr, o_n, stride_dv_n, length_k, b_dv, D, BLOCK_D)


_dq = Launcher(attention_bwd_kernel_dq)
_dk_dv = Launcher(attention_bwd_kernel_dk_dv)


def launch_bwd(
    call: AttentionCall, dout: Tensor, out: Tensor, stats: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> Tensor:
    """Fills dq, dk and dv; returns delta, of shape stats.shape[1:]."""
    query, sequences, dout = call.query, call.sequences, unit_rows(dout)
    (length_q, length_k), (queries, keys) = call.lengths, call.mean_lengths
    delta = stats.new_empty(stats.shape[1:])
    facts = query.shape[-1], query.element_size(), call.crowded, device_of(query).capability
    dropout = call.dropout.last_dropped, call.dropout.scale
    if dq.numel() > 0:
        tile = tiles.attention_bwd_dq(queries, *facts)
        blocks = tiles.attention_blocks(length_q, tile.block_m, sequences)
        _dq(
            (blocks * call.rows,), *call.inputs, out, stats, dout, delta, dq,
            *call.strides, *strides_of(out), *strides_of(dout), *strides_of(dq), stats.stride(0),
            length_q, length_k, blocks, sequences, call.score_scale, call.dq_scale, *dropout, *call.constants,
            tile.block_m, tile.block_n, tile.block_d, tiles.attention_sequences(sequences),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    if length_q == 0:
        # A mask may be read by key alone, but one of no queries has no memory.
        dk.zero_()
        dv.zero_()
    elif dk.numel() > 0:
        tile = tiles.attention_bwd_dk_dv(keys, *facts)
        blocks = tiles.attention_blocks(length_k, tile.block_n, sequences)
        _dk_dv(
            (blocks * call.rows,), *call.inputs, stats, dout, delta, dk, dv,
            *call.strides, *strides_of(dout), *strides_of(dk), *strides_of(dv), stats.stride(0),
            length_q, length_k, blocks, sequences, call.score_scale, call.scale, *dropout, *call.constants,
            tile.block_m, tile.block_n, tile.block_d, tiles.attention_sequences(sequences),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return delta


def attention_bwd(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    stats: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and dv like `attention_fwd`'s out, and delta (B, H, S_q) fp32, for `attention_mask_bwd`."""
    dq, dk, dv = map(empty_by_position, (query, key, value))
    mask = mask_of(attn_mask, (*query.shape[:3], key.shape[2]))
    call = call_of(query, key, value, mask, None, None, seed, dropout_p, is_causal, scale)
    return dq, dk, dv, launch_bwd(call, dout, out, stats, dq, dk, dv)
