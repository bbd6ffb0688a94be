"""Gradients of attention, padded and packed, with p recomputed from what the forward pass saved.

With m and ln(l) of each row, p = 2^(log2e (s - m - ln(l))) in the forward pass's units, and delta = sum(dout out):

    dv = p^T dout     dp = dout v^T     ds = p (dp - delta)     dq = scale ds k     dk = scale ds^T q     dmask = ds

dk and dv in a pass over queries for each block of keys, dq in a pass over keys for each block of queries, and dmask,
where a float mask wants it, in a pass over all that the mask is broadcast to for each block of the mask: three
recomputations instead of atomics, and no memory of the size of the scores. Dropout's mask is regenerated.

FLOPs: 4 GEMMs of 2 S_q S_k D for dk and dv, 3 for dq. Bytes: q, k, v and dout read, dq, dk and dv written,
(5 S_q + 4 S_k) D e a head, the floor, and q, k, v and dout once more because there are two passes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bertfast.kernels import tiles
from bertfast.kernels.attention import (
    LOG2E,
    STREAM,
    Mask,
    load_rows,
    locate,
    mask_of,
    masked_scores,
    strides_of,
    unit_rows,
)
from bertfast.kernels.common import dot, keep_mask, store_cast
from bertfast.kernels.gemm import input_precision
from bertfast.kernels.launch import Dropout, Launcher, device_of, dropout_of


@triton.jit(do_not_specialize=["length"])
def attention_bwd_kernel_delta(
    out_ptr,  # (B, H, S_q, D) or (T_q, H, D), contiguous
    dout_ptr,
    delta_ptr,  # (B, H, S_q) or (H, T_q) fp32
    stride_out_b,
    stride_out_h,
    stride_out_m,
    stride_dout_b,
    stride_dout_h,
    stride_dout_m,
    length,  # S_q or T_q
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    blocks = tl.cdiv(length, BLOCK_M)
    i_m, i_head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i_b, i_h = i_head // H, i_head % H
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    p_out = out_ptr + i_b * stride_out_b + i_h * stride_out_h
    p_dout = dout_ptr + i_b * stride_dout_b + i_h * stride_dout_h
    b_out = load_rows(p_out, o_m, stride_out_m, length, True, D, BLOCK_D).to(tl.float32)
    b_dout = load_rows(p_dout, o_m, stride_dout_m, length, True, D, BLOCK_D).to(tl.float32)
    tl.store(delta_ptr + i_head * length + o_m, tl.sum(b_out * b_dout, axis=1), mask=o_m < length)


@triton.jit
def probabilities(b_s, b_max, b_logsum, MASK: tl.constexpr):
    """p of scores from `masked_scores`; statistics in the shape that broadcasts against them."""
    # A row without any key: its scores are -inf, and -inf - -inf is NaN.
    b_pivot = tl.where(b_max == float("-inf"), 0.0, b_max)
    if MASK == "float":
        # Not in one sum: next to a mask of 1e38, ln(l) would vanish.
        return tl.exp2((b_s - b_pivot) * LOG2E - b_logsum * LOG2E)
    return tl.exp2(b_s - (b_pivot + b_logsum) * LOG2E)


@triton.jit
def add_dk_dv(
    b_dk,  # [BLOCK_N, BLOCK_D] fp32
    b_dv,
    b_k,  # [BLOCK_N, BLOCK_D]
    b_v,
    q_ptr,
    dout_ptr,
    mask_ptr,
    seed_ptr,
    stats_ptr,
    delta_ptr,
    first,
    o_n,
    stride_q_m,
    stride_dout_m,
    stride_mask_m,
    stride_mask_n,
    stride_stats,
    length_q,
    length_k,
    offset,
    plane,
    first_key,
    scale,
    last_dropped,
    keep_scale,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What the queries from `first` on add. Scores are keys by queries: p^T and ds^T then are what `dot` reads."""
    o_m = first + tl.arange(0, BLOCK_M)
    # Beyond the sequence q and dout are 0: so is what such rows add, whatever p is (finite, from statistics of 0).
    b_q = load_rows(q_ptr, o_m, stride_q_m, length_q, BOUNDED, D, BLOCK_D)
    b_dout = load_rows(dout_ptr, o_m, stride_dout_m, length_q, BOUNDED, D, BLOCK_D)
    b_max = tl.load(stats_ptr + o_m, mask=o_m < length_q, other=0.0)
    b_logsum = tl.load(stats_ptr + stride_stats + o_m, mask=o_m < length_q, other=0.0)
    b_delta = tl.load(delta_ptr + o_m, mask=o_m < length_q, other=0.0)
    # [BLOCK_N, BLOCK_M]
    zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    b_s = dot(b_k, b_q.T, zeros, INPUT_PRECISION) * scale
    b_s = masked_scores(
        b_s, mask_ptr, o_m[None, :], o_n[:, None], stride_mask_m, stride_mask_n, length_q, length_k, offset,
        MASK, MASK_ROWS, IS_CAUSAL, False,
    )  # fmt: skip
    b_p = probabilities(b_s, b_max[None, :], b_logsum[None, :], MASK)
    b_dp = dot(b_v, b_dout.T, zeros, INPUT_PRECISION)
    b_dropped = b_p
    if seed_ptr is not None:
        keep = keep_mask(tl.load(seed_ptr), plane + o_m, first_key, last_dropped, STREAM, BLOCK_M, BLOCK_N).T
        b_dropped = tl.where(keep, b_p * keep_scale, 0.0)
        b_dp = tl.where(keep, b_dp * keep_scale, 0.0)
    b_dv = dot(store_cast(b_dropped, b_dout.dtype), b_dout, b_dv, INPUT_PRECISION)
    b_ds = b_p * (b_dp - b_delta[None, :])
    b_dk = dot(store_cast(b_ds, b_q.dtype), b_q, b_dk, INPUT_PRECISION)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["length_q", "length_k", "blocks", "sequences", "last_dropped"])
def attention_bwd_kernel_dk_dv(
    q_ptr,  # as in the forward pass
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seed_ptr,
    dout_ptr,  # like q
    stats_ptr,  # of the forward pass
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
    length_q,
    length_k,
    blocks,  # of keys a head
    sequences,
    scale,
    factor,  # of dk: the scale in natural units
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
):
    i_block, i_head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    stats_ptr += i_head.to(tl.int64) * length_q
    delta_ptr += i_head.to(tl.int64) * length_q
    stride_stats = (tl.num_programs(0) // blocks).to(tl.int64) * length_q
    i_b, i_h, i_n, begin_q, begin_k, length_q, length_k, offset, plane = locate(
        cu_seqlens_k_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, i_block, i_head, length_q, length_k, sequences, H, BLOCK_N
    )
    if i_n * BLOCK_N >= length_k:
        return
    q_ptr += i_b * stride_q_b + i_h * stride_q_h + begin_q * stride_q_m
    k_ptr += i_b * stride_k_b + i_h * stride_k_h + begin_k * stride_k_n
    v_ptr += i_b * stride_v_b + i_h * stride_v_h + begin_k * stride_v_n
    dout_ptr += i_b * stride_dout_b + i_h * stride_dout_h + begin_q * stride_dout_m
    dk_ptr += i_b * stride_dk_b + i_h * stride_dk_h + begin_k * stride_dk_n
    dv_ptr += i_b * stride_dv_b + i_h * stride_dv_h + begin_k * stride_dv_n
    stats_ptr += begin_q
    delta_ptr += begin_q
    if mask_ptr is not None:
        mask_ptr += i_b * stride_mask_b + i_h * stride_mask_h
    first_key = i_n * BLOCK_N
    o_n = first_key + tl.arange(0, BLOCK_N)
    # Keys beyond the sequence are 0; what they get stays in their own rows and is not stored.
    b_k = load_rows(k_ptr, o_n, stride_k_n, length_k, True, D, BLOCK_D)
    b_v = load_rows(v_ptr, o_n, stride_v_n, length_k, True, D, BLOCK_D)
    b_dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    b_dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin = 0
    if IS_CAUSAL:
        begin = tl.maximum(first_key - offset, 0) // BLOCK_M * BLOCK_M
    whole = length_q // BLOCK_M * BLOCK_M
    for first in range(begin, whole, BLOCK_M):
        b_dk, b_dv = add_dk_dv(
            b_dk, b_dv, b_k, b_v, q_ptr, dout_ptr, mask_ptr, seed_ptr, stats_ptr, delta_ptr, first, o_n, stride_q_m,
            stride_dout_m, stride_mask_m, stride_mask_n, stride_stats, length_q, length_k, offset, plane, first_key,
            scale, last_dropped, keep_scale,
            MASK, MASK_ROWS, IS_CAUSAL, False, INPUT_PRECISION, D, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for first in range(tl.maximum(begin, whole), length_q, BLOCK_M):
        b_dk, b_dv = add_dk_dv(
            b_dk, b_dv, b_k, b_v, q_ptr, dout_ptr, mask_ptr, seed_ptr, stats_ptr, delta_ptr, first, o_n, stride_q_m,
            stride_dout_m, stride_mask_m, stride_mask_n, stride_stats, length_q, length_k, offset, plane, first_key,
            scale, last_dropped, keep_scale,
            MASK, MASK_ROWS, IS_CAUSAL, True, INPUT_PRECISION, D, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_n < length_k)[:, None] & (o_d < D)[None, :]
    o_row = o_n[:, None].to(tl.int64)
    tl.store(dk_ptr + o_row * stride_dk_n + o_d[None, :], store_cast(b_dk * factor, dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + o_row * stride_dv_n + o_d[None, :], store_cast(b_dv, dv_ptr.dtype.element_ty), mask=mask)


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
    o_n,
    stride_mask_m,
    stride_mask_n,
    length_q,
    length_k,
    offset,
    plane,
    first_key,
    scale,
    last_dropped,
    keep_scale,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """ds, [BLOCK_M, BLOCK_N] fp32."""
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b_s = dot(b_q, b_k.T, zeros, INPUT_PRECISION) * scale
    b_s = masked_scores(
        b_s, mask_ptr, o_m[:, None], o_n[None, :], stride_mask_m, stride_mask_n, length_q, length_k, offset,
        MASK, MASK_ROWS, IS_CAUSAL, BOUNDED,
    )  # fmt: skip
    b_p = probabilities(b_s, b_max[:, None], b_logsum[:, None], MASK)
    b_dp = dot(b_dout, b_v.T, zeros, INPUT_PRECISION)
    if seed_ptr is not None:
        keep = keep_mask(tl.load(seed_ptr), plane + o_m, first_key, last_dropped, STREAM, BLOCK_M, BLOCK_N)
        b_dp = tl.where(keep, b_dp * keep_scale, 0.0)
    return b_p * (b_dp - b_delta[:, None])


@triton.jit(do_not_specialize=["length_q", "length_k", "blocks", "sequences", "last_dropped"])
def attention_bwd_kernel_dq(
    q_ptr,  # as in the forward pass
    k_ptr,
    v_ptr,
    mask_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seed_ptr,
    dout_ptr,  # like q
    stats_ptr,  # of the forward pass
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
    stride_dout_b,
    stride_dout_h,
    stride_dout_m,
    stride_dq_b,
    stride_dq_h,
    stride_dq_m,
    length_q,
    length_k,
    blocks,  # of queries a head
    sequences,
    scale,
    factor,  # of dq: the scale in natural units
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
):
    i_block, i_head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    stats_ptr += i_head.to(tl.int64) * length_q
    delta_ptr += i_head.to(tl.int64) * length_q
    stride_stats = (tl.num_programs(0) // blocks).to(tl.int64) * length_q
    i_b, i_h, i_m, begin_q, begin_k, length_q, length_k, offset, plane = locate(
        cu_seqlens_q_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, i_block, i_head, length_q, length_k, sequences, H, BLOCK_M
    )
    if i_m * BLOCK_M >= length_q:
        return
    q_ptr += i_b * stride_q_b + i_h * stride_q_h + begin_q * stride_q_m
    k_ptr += i_b * stride_k_b + i_h * stride_k_h + begin_k * stride_k_n
    v_ptr += i_b * stride_v_b + i_h * stride_v_h + begin_k * stride_v_n
    dout_ptr += i_b * stride_dout_b + i_h * stride_dout_h + begin_q * stride_dout_m
    dq_ptr += i_b * stride_dq_b + i_h * stride_dq_h + begin_q * stride_dq_m
    if mask_ptr is not None:
        mask_ptr += i_b * stride_mask_b + i_h * stride_mask_h
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < length_q
    b_q = load_rows(q_ptr, o_m, stride_q_m, length_q, True, D, BLOCK_D)
    b_dout = load_rows(dout_ptr, o_m, stride_dout_m, length_q, True, D, BLOCK_D)
    b_max = tl.load(stats_ptr + begin_q + o_m, mask=m_m, other=0.0)
    b_logsum = tl.load(stats_ptr + begin_q + stride_stats + o_m, mask=m_m, other=0.0)
    b_delta = tl.load(delta_ptr + begin_q + o_m, mask=m_m, other=0.0)
    b_dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end, whole = length_k, length_k // BLOCK_N * BLOCK_N
    if IS_CAUSAL:
        end = tl.minimum(end, tl.maximum((i_m + 1) * BLOCK_M + offset, 0))
        whole = tl.minimum(whole, tl.maximum(i_m * BLOCK_M + offset + 1, 0) // BLOCK_N * BLOCK_N)
    for first in range(0, whole, BLOCK_N):
        o_n = first + tl.arange(0, BLOCK_N)
        b_k = load_rows(k_ptr, o_n, stride_k_n, length_k, False, D, BLOCK_D)
        b_v = load_rows(v_ptr, o_n, stride_v_n, length_k, False, D, BLOCK_D)
        b_ds = score_gradients(
            b_q, b_dout, b_k, b_v, b_max, b_logsum, b_delta, mask_ptr, seed_ptr, o_m, o_n, stride_mask_m,
            stride_mask_n, length_q, length_k, offset, plane, first, scale, last_dropped, keep_scale,
            MASK, MASK_ROWS, False, False, INPUT_PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        b_dq = dot(store_cast(b_ds, b_k.dtype), b_k, b_dq, INPUT_PRECISION)
    for first in range(whole, end, BLOCK_N):
        o_n = first + tl.arange(0, BLOCK_N)
        b_k = load_rows(k_ptr, o_n, stride_k_n, length_k, True, D, BLOCK_D)
        b_v = load_rows(v_ptr, o_n, stride_v_n, length_k, True, D, BLOCK_D)
        b_ds = score_gradients(
            b_q, b_dout, b_k, b_v, b_max, b_logsum, b_delta, mask_ptr, seed_ptr, o_m, o_n, stride_mask_m,
            stride_mask_n, length_q, length_k, offset, plane, first, scale, last_dropped, keep_scale,
            MASK, MASK_ROWS, IS_CAUSAL, True, INPUT_PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        b_dq = dot(store_cast(b_ds, b_k.dtype), b_k, b_dq, INPUT_PRECISION)
    o_d = tl.arange(0, BLOCK_D)
    p_dq = dq_ptr + o_m[:, None].to(tl.int64) * stride_dq_m + o_d[None, :]
    tl.store(p_dq, store_cast(b_dq * factor, dq_ptr.dtype.element_ty), mask=m_m[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=["length_q", "length_k", "blocks_m", "blocks_n", "last_dropped", "sum_b", "sum_h"])
def attention_bwd_kernel_dmask(
    q_ptr,  # as in the forward pass, padded
    k_ptr,
    v_ptr,
    mask_ptr,  # float
    seed_ptr,
    dout_ptr,  # like q
    stats_ptr,  # of the forward pass
    delta_ptr,  # (B, H, S_q) fp32
    dmask_ptr,  # contiguous, the mask's own shape
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
    length_q,
    length_k,
    blocks_m,  # of queries a head
    blocks_n,
    sum_b,  # how many batch entries and heads one of the mask's stands for
    sum_h,
    scale,
    last_dropped,
    keep_scale,
    SUM_M: tl.constexpr,  # whether one of the mask's rows stands for all queries
    SUM_N: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    own_m, steps_m = (1, blocks_m) if SUM_M else (blocks_m, 1)
    own_n, steps_n = (1, blocks_n) if SUM_N else (blocks_n, 1)
    i_n, rest = tl.program_id(0) % own_n, tl.program_id(0) // own_n
    i_m, i_mask = rest % own_m, rest // own_m
    masks_h = H // sum_h
    stride_stats = length_q.to(tl.int64) * B * H
    # [BLOCK_M, BLOCK_N]
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(0, sum_b * sum_h * steps_m * steps_n):
        j_n, j_m = i_n + i % steps_n, i_m + i // steps_n % steps_m
        j_h = i_mask % masks_h + i // (steps_n * steps_m) % sum_h
        j_b = i_mask // masks_h + i // (steps_n * steps_m * sum_h)
        i_b, i_h = j_b.to(tl.int64), j_h.to(tl.int64)
        plane = (i_b * H + i_h) << 32
        o_m, o_n = j_m * BLOCK_M + tl.arange(0, BLOCK_M), j_n * BLOCK_N + tl.arange(0, BLOCK_N)
        m_m = o_m < length_q
        b_q = load_rows(q_ptr + i_b * stride_q_b + i_h * stride_q_h, o_m, stride_q_m, length_q, True, D, BLOCK_D)
        b_k = load_rows(k_ptr + i_b * stride_k_b + i_h * stride_k_h, o_n, stride_k_n, length_k, True, D, BLOCK_D)
        b_v = load_rows(v_ptr + i_b * stride_v_b + i_h * stride_v_h, o_n, stride_v_n, length_k, True, D, BLOCK_D)
        p_dout = dout_ptr + i_b * stride_dout_b + i_h * stride_dout_h
        b_dout = load_rows(p_dout, o_m, stride_dout_m, length_q, True, D, BLOCK_D)
        o_row = (i_b * H + i_h) * length_q + o_m
        b_max = tl.load(stats_ptr + o_row, mask=m_m, other=0.0)
        b_logsum = tl.load(stats_ptr + stride_stats + o_row, mask=m_m, other=0.0)
        b_delta = tl.load(delta_ptr + o_row, mask=m_m, other=0.0)
        b_sum += score_gradients(
            b_q, b_dout, b_k, b_v, b_max, b_logsum, b_delta,
            mask_ptr + i_b * stride_mask_b + i_h * stride_mask_h, seed_ptr, o_m, o_n, stride_mask_m, stride_mask_n,
            length_q, length_k, 0, plane, j_n * BLOCK_N, scale, last_dropped, keep_scale,
            "float", MASK_ROWS, IS_CAUSAL, True, INPUT_PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    rows, columns = (1 if SUM_M else length_q), (1 if SUM_N else length_k)
    if SUM_M:
        b_sum = tl.sum(b_sum, axis=0, keep_dims=True)
    if SUM_N:
        b_sum = tl.sum(b_sum, axis=1, keep_dims=True)
    o_m = tl.zeros((1,), tl.int32) if SUM_M else i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.zeros((1,), tl.int32) if SUM_N else i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (o_m < rows)[:, None] & (o_n < columns)[None, :]
    o_mask = (i_mask.to(tl.int64) * rows + o_m[:, None]) * columns + o_n[None, :]
    tl.store(dmask_ptr + o_mask, store_cast(b_sum, dmask_ptr.dtype.element_ty), mask=mask)


_delta = Launcher(attention_bwd_kernel_delta)
_dk_dv = Launcher(attention_bwd_kernel_dk_dv)
_dq = Launcher(attention_bwd_kernel_dq)
_dmask = Launcher(attention_bwd_kernel_dmask)


def backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out: Tensor,
    stats: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout: Dropout,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Fills dq, dk and dv; returns delta, which the mask's gradient wants too."""
    heads, head_dim = query.shape[1], query.shape[-1]
    length_q, length_k = (x.shape[0 if x.dim() == 3 else 2] for x in (query, key))
    sequences = 0 if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    rows = heads * (1 if sequences else query.shape[0])
    mean_q, mean_k = length_q // max(sequences, 1), length_k // max(sequences, 1)
    delta = stats.new_empty(stats.shape[1:])
    precision, capability = input_precision(query.dtype), device_of(query).capability
    facts = head_dim, query.element_size(), mask.per_query, capability
    if dq.numel() > 0:
        tile = tiles.attention_fwd(mean_q, *facts)
        _delta(
            (tiles.cdiv(length_q, tile.block_m) * rows,),
            out,
            dout,
            delta,
            *strides_of(out),
            *strides_of(dout),
            length_q,
            heads,
            head_dim,
            tile.block_m,
            tile.block_d,
            num_warps=4,
        )
    inputs = query, key, value, mask.values, cu_seqlens_q, cu_seqlens_k, dropout.seed, dout, stats, delta
    strides = *strides_of(query), *strides_of(key), *strides_of(value), *mask.strides, *strides_of(dout)
    numbers = sequences, scale * mask.scale, scale, dropout.last_dropped, dropout.scale
    constants = mask.kind, mask.per_query, is_causal, precision, heads, head_dim
    if dk.numel() > 0:
        tile = tiles.attention_bwd_dk_dv(mean_k, *facts)
        blocks = tiles.attention_blocks(length_k, tile.block_n, sequences)
        _dk_dv(
            (blocks * rows,), *inputs, dk, dv, *strides, *strides_of(dk), *strides_of(dv), length_q, length_k, blocks,
            *numbers, *constants, tile.block_m, tile.block_n, tile.block_d,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    if dq.numel() > 0:
        tile = tiles.attention_bwd_dq(mean_q, *facts)
        blocks = tiles.attention_blocks(length_q, tile.block_m, sequences)
        _dq(
            (blocks * rows,), *inputs, dq, *strides, *strides_of(dq), length_q, length_k, blocks,
            *numbers, *constants, tile.block_m, tile.block_n, tile.block_d,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return delta


def mask_gradient(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    mask: Mask,
    stats: Tensor,
    delta: Tensor,
    dropout: Dropout,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """The gradient of a float mask, in its shape and dtype."""
    (batch, heads, s_q, head_dim), s_k = query.shape, key.shape[2]
    dmask = attn_mask.new_empty(attn_mask.shape)
    if dmask.numel() == 0:
        return dmask
    if query.numel() == 0 or s_k == 0:
        return dmask.zero_()
    own_b, own_h, own_m, own_n = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    sum_m, sum_n = own_m == 1 and s_q > 1, own_n == 1 and s_k > 1
    tile = tiles.attention_bwd_dq(s_q, head_dim, query.element_size(), True, device_of(query).capability)
    blocks_m, blocks_n = tiles.cdiv(s_q, tile.block_m), tiles.cdiv(s_k, tile.block_n)
    _dmask(
        (own_b * own_h * (1 if sum_m else blocks_m) * (1 if sum_n else blocks_n),),
        query, key, value, mask.values, dropout.seed, dout, stats, delta, dmask,
        *strides_of(query), *strides_of(key), *strides_of(value), *mask.strides, *strides_of(dout),
        s_q, s_k, blocks_m, blocks_n, batch // own_b, heads // own_h, scale, dropout.last_dropped, dropout.scale,
        sum_m, sum_n, mask.per_query, is_causal, input_precision(query.dtype), batch, heads, head_dim,
        tile.block_m, tile.block_n, tile.block_d, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return dmask


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
    need_dmask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous in their inputs' shapes, and the mask's gradient (empty unless needed)."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    query, key, value, dout = unit_rows(query), unit_rows(key), unit_rows(value), unit_rows(dout)
    mask = mask_of(attn_mask, (*query.shape[:3], key.shape[2]))
    dropout = dropout_of(seed, dropout_p)
    delta = backward(dout, query, key, value, mask, None, None, out, stats, dq, dk, dv, dropout, is_causal, scale)
    if not need_dmask:
        return dq, dk, dv, dout.new_empty(0)
    dmask = mask_gradient(dout, query, key, value, attn_mask, mask, stats, delta, dropout, is_causal, scale)
    return dq, dk, dv, dmask
