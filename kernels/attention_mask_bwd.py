"""The gradient of attention's float mask: ds (`attention_bwd`), added up over what the mask is broadcast to.

One program a block of the mask walks over the batch entries, heads, and blocks of queries or keys that share it, and
recomputes their ds: no atomics, and no memory beyond the mask's own.

FLOPs: 2 GEMMs of 2 S_q S_k D a head. Bytes: q, k, v and dout of every head once per block of the mask; the mask read
and its gradient written, 2 e bytes an element.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bertfast.kernels import tiles
from bertfast.kernels.attention import call_of, load_rows, mask_of, rows_at, strides_of, unit_rows
from bertfast.kernels.attention_bwd import load_stats, score_gradients
from bertfast.kernels.common import store_cast
from bertfast.kernels.launch import Launcher, device_of


@triton.jit(
    do_not_specialize=[
        "stride_stats",
        "length_q",
        "length_k",
        "blocks_m",
        "blocks_n",
        "last_dropped",
        "sum_b",
        "sum_h",
    ]
)
def attention_bwd_kernel_dmask(
    q_ptr,  # as in the forward pass, padded
    k_ptr,
    v_ptr,
    mask_ptr,  # float
    seed_ptr,
    stats_ptr,
    dout_ptr,  # like q
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
    stride_stats,
    length_q,
    length_k,
    blocks_m,  # of queries a head
    blocks_n,
    sum_b,  # how many batch entries and heads one of the mask's stands for
    sum_h,
    scale,
    last_dropped,
    keep_scale,
    MASK: tl.constexpr,  # "float"
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    SUM_M: tl.constexpr,  # whether one of the mask's rows stands for all queries
    SUM_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    own_m, steps_m = (1, blocks_m) if SUM_M else (blocks_m, 1)
    own_n, steps_n = (1, blocks_n) if SUM_N else (blocks_n, 1)
    i_n, rest = tl.program_id(0) % own_n, tl.program_id(0) // own_n
    i_m, i_mask = rest % own_m, rest // own_m
    masks_h = H // sum_h
    # [BLOCK_M, BLOCK_N]
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(0, sum_b * sum_h * steps_m * steps_n):
        first_key = (i_n + i % steps_n) * BLOCK_N
        i_h = (i_mask % masks_h + i // (steps_n * steps_m) % sum_h).to(tl.int64)
        i_b = (i_mask // masks_h + i // (steps_n * steps_m * sum_h)).to(tl.int64)
        o_m = (i_m + i // steps_n % steps_m) * BLOCK_M + tl.arange(0, BLOCK_M)
        o_n = first_key + tl.arange(0, BLOCK_N)
        p_q = rows_at(q_ptr, i_b, i_h, 0, stride_q_b, stride_q_h, 0)
        p_k = rows_at(k_ptr, i_b, i_h, 0, stride_k_b, stride_k_h, 0)
        p_v = rows_at(v_ptr, i_b, i_h, 0, stride_v_b, stride_v_h, 0)
        p_dout = rows_at(dout_ptr, i_b, i_h, 0, stride_dout_b, stride_dout_h, 0)
        p_mask = rows_at(mask_ptr, i_b, i_h, 0, stride_mask_b, stride_mask_h, 0)
        # [BLOCK_M, BLOCK_D], [BLOCK_N, BLOCK_D]
        b_q = load_rows(p_q, o_m, stride_q_m, length_q, True, D, BLOCK_D)
        b_dout = load_rows(p_dout, o_m, stride_dout_m, length_q, True, D, BLOCK_D)
        b_k = load_rows(p_k, o_n, stride_k_n, length_k, True, D, BLOCK_D)
        b_v = load_rows(p_v, o_n, stride_v_n, length_k, True, D, BLOCK_D)
        stats_row = (i_b * H + i_h) * length_q
        b_max, b_logsum = load_stats(stats_ptr + stats_row, o_m, stride_stats, length_q)
        b_delta = tl.load(delta_ptr + stats_row + o_m, mask=o_m < length_q, other=0.0)
        b_sum += score_gradients(
            b_q, b_dout, b_k, b_v, b_max, b_logsum, b_delta, p_mask, seed_ptr, o_m, first_key, stride_mask_m,
            stride_mask_n, length_q, length_k, 0, (i_b * H + i_h) << 32, scale, last_dropped, keep_scale,
            True, MASK, MASK_ROWS, IS_CAUSAL, INPUT_PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    rows, columns = (1 if SUM_M else length_q), (1 if SUM_N else length_k)
    if SUM_M:
        b_sum = tl.sum(b_sum, axis=0, keep_dims=True)
    if SUM_N:
        b_sum = tl.sum(b_sum, axis=1, keep_dims=True)
    o_m = tl.zeros((1,), tl.int32) if SUM_M else i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.zeros((1,), tl.int32) if SUM_N else i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mask = (o_m < rows)[:, None] & (o_n < columns)[None, :]
    o_mask = (i_mask.to(tl.int64) * rows + o_m[:, None]) * columns + o_n[None, :]
    tl.store(dmask_ptr + o_mask, store_cast(b_sum, dmask_ptr.dtype.element_ty), mask=m_mask)


_dmask = Launcher(attention_bwd_kernel_dmask)


def attention_mask_bwd(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    seed: Tensor | None,
    stats: Tensor,
    delta: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """The gradient of a float mask, contiguous in its shape and of its dtype."""
    (batch, heads, s_q, head_dim), s_k = query.shape, key.shape[2]
    dmask = attn_mask.new_empty(attn_mask.shape)
    if dmask.numel() == 0 or query.numel() == 0 or s_k == 0:
        return dmask.zero_()
    mask = mask_of(attn_mask, (batch, heads, s_q, s_k))
    call = call_of(query, key, value, mask, None, None, seed, dropout_p, is_causal, scale)
    dout, query = unit_rows(dout), call.query
    own_b, own_h, own_m, own_n = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    sum_m, sum_n = own_m == 1 and s_q > 1, own_n == 1 and s_k > 1
    tile = tiles.attention_mask_bwd(s_q, head_dim, query.element_size(), device_of(query).capability)
    blocks_m, blocks_n = tiles.cdiv(s_q, tile.block_m), tiles.cdiv(s_k, tile.block_n)
    _dmask(
        (own_b * own_h * (1 if sum_m else blocks_m) * (1 if sum_n else blocks_n),),
        query, call.key, call.value, mask.values, call.dropout.seed, stats, dout, delta, dmask,
        *call.strides, *strides_of(dout), stats.stride(0), s_q, s_k, blocks_m, blocks_n, batch // own_b, heads // own_h,
        call.score_scale, call.dropout.last_dropped, call.dropout.scale, *call.constants, sum_m, sum_n,
        tile.block_m, tile.block_n, tile.block_d, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return dmask
