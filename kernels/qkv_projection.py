"""Query, key and value in one GEMM launch that reads three weights and three biases where they lie.

out[:, i N : (i + 1) N] = x weight_i^T + bias_i for i = 0, 1, 2; x (M, K), weights (N, K), out (M, 3 N).

FLOPs: 6 M N K. Bytes with e-byte elements: (M K + 3 N K + 3 M N) e, the floor; three GEMMs read x twice more and run
3 M N / tile programs in three waves that each end on idle multiprocessors. Columns of tiles never cross weights, so a
program reads one of them. Where tiles are few, S programs a tile sum S parts of K into a workspace, 24 S M N bytes
there and back, the first of them with the bias; `bias_activation` adds them up, always in the same order.

The other way to one GEMM is torch's on a packed copy of the weights (`bertfast.weight_cache`). Its copy is held to the
weights by `update_pack`: each program compares 64 spread-out values of its own rows of weights with the pack, two of
each of 32 rows, and copies these rows if one differs. The biases it always copies. That moves some 4 KB a program and
needs no word from the device to the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertfast.kernels import tiles
from bertfast.kernels.bias_activation import bias_activation_fwd
from bertfast.kernels.common import store_cast
from bertfast.kernels.gemm import accumulate, input_precision, is_aligned, tile_of
from bertfast.kernels.launch import Launcher, as_rows, device_of


@triton.jit
def _one_of(i, first, second, third):
    return first if i == 0 else (second if i == 1 else third)


@triton.jit(do_not_specialize=["M"])
def qkv_projection_fwd_kernel(
    x_ptr,  # (M, K)
    weight_q_ptr,  # (N, K), as the next two
    weight_k_ptr,
    weight_v_ptr,
    bias_q_ptr,  # (N,) or None, as the next two
    bias_k_ptr,
    bias_v_ptr,
    out_ptr,  # (PARTS, M, 3 * N) contiguous, the dtype of x, or fp32 where K is split
    M,
    stride_x_m,
    stride_weight_q_n,
    stride_weight_k_n,
    stride_weight_v_n,
    N: tl.constexpr,
    K: tl.constexpr,
    K_PART: tl.constexpr,  # of K, what a program sums: a multiple of BLOCK_K, or K
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_m, i_column = tile_of(tl.program_id(0), (M - 1) // BLOCK_M + 1, 3 * tiles_n, GROUP_M)
    i_weight, i_n = i_column // tiles_n, i_column % tiles_n
    i_part = tl.program_id(1)
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    if K_PART >= K:
        k_begin, k_end = 0, K
    else:
        k_begin, k_end = i_part * K_PART, tl.minimum(i_part * K_PART + K_PART, K)
    # [BLOCK_M, BLOCK_N]
    b_out = accumulate(
        x_ptr,
        _one_of(i_weight, weight_q_ptr, weight_k_ptr, weight_v_ptr),
        tl.minimum(o_m, M - 1),
        tl.minimum(o_n, N - 1),
        stride_x_m,
        _one_of(i_weight, stride_weight_q_n, stride_weight_k_n, stride_weight_v_n),
        k_begin,
        k_end,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        INPUT_PRECISION,
    )
    if bias_q_ptr is not None:
        p_bias = _one_of(i_weight, bias_q_ptr, bias_k_ptr, bias_v_ptr) + o_n
        b_bias = tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)
        if K_PART < K:
            b_bias = tl.where(i_part == 0, b_bias, 0.0)
        b_out += b_bias[None, :]
    p_out = out_ptr + (i_part.to(tl.int64) * M + o_m[:, None]) * (3 * N) + (i_weight * N + o_n)[None, :]
    tl.store(p_out, store_cast(b_out, out_ptr.dtype.element_ty), mask=(o_m < M)[:, None] & m_n[None, :])


@triton.jit
def update_pack_kernel(
    weight_q_ptr,  # (N, K), as the next two
    weight_k_ptr,
    weight_v_ptr,
    bias_q_ptr,  # (N,) or None, as the next two
    bias_k_ptr,
    bias_v_ptr,
    pack_ptr,  # (3 * N, K) contiguous
    bias_pack_ptr,  # (3 * N,), or None
    stride_weight_q_n,
    stride_weight_k_n,
    stride_weight_v_n,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i_weight = tl.program_id(1)
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    p_weight = _one_of(i_weight, weight_q_ptr, weight_k_ptr, weight_v_ptr)
    p_weight += o_n[:, None] * _one_of(i_weight, stride_weight_q_n, stride_weight_k_n, stride_weight_v_n)
    p_pack = pack_ptr + (i_weight * N + o_n)[:, None] * K
    # Two of each row, half a row apart; from row to row elsewhere: [BLOCK_N, 2]
    o_sample = (o_n[:, None] * 37 + tl.arange(0, 2)[None, :] * ((K + 1) // 2)) % K
    b_differs = tl.load(p_weight + o_sample, mask=m_n[:, None], other=0.0) != tl.load(
        p_pack + o_sample, mask=m_n[:, None], other=0.0
    )
    differs = tl.max(tl.max(b_differs.to(tl.int32), axis=1), axis=0)
    if bias_q_ptr is not None:
        p_bias_pack = bias_pack_ptr + i_weight * N + o_n
        b_bias = tl.load(_one_of(i_weight, bias_q_ptr, bias_k_ptr, bias_v_ptr) + o_n, mask=m_n, other=0.0)
        tl.store(p_bias_pack, b_bias, mask=m_n)
    if differs != 0:
        for k in range(0, K, BLOCK_K):
            o_k = k + tl.arange(0, BLOCK_K)
            mask = m_n[:, None] & (o_k < K)[None, :]
            # [BLOCK_N, BLOCK_K]
            tl.store(p_pack + o_k[None, :], tl.load(p_weight + o_k[None, :], mask=mask, other=0.0), mask=mask)


_fwd = Launcher(qkv_projection_fwd_kernel)
_update_pack = Launcher(update_pack_kernel)


def qkv_projection_fwd(
    x: Tensor,
    weight_q: Tensor,
    weight_k: Tensor,
    weight_v: Tensor,
    bias_q: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
) -> Tensor:
    """(..., 3 N), query, key and value side by side; shapes as `ops.qkv_projection`."""
    width = weight_q.shape[0]
    out = x.new_empty((*x.shape[:-1], 3 * width))
    if out.numel() == 0:
        return out
    x, *weights = (as_rows(t) for t in (x, weight_q, weight_k, weight_v))
    biases = [None if bias is None else bias.contiguous() for bias in (bias_q, bias_k, bias_v)]
    rows, width_in = x.shape
    tile, splits = tiles.qkv_projection_fwd(
        rows, width, width_in, x.element_size(), is_aligned(x, *weights), *device_of(x)
    )
    partial = out if splits == 1 else x.new_empty((splits, rows, 3 * width), dtype=torch.float32)
    _fwd(
        (tiles.cdiv(rows, tile.block_m) * 3 * tiles.cdiv(width, tile.block_n), splits),
        x,
        *weights,
        *biases,
        partial,
        rows,
        x.stride(0),
        *(weight.stride(0) for weight in weights),
        width,
        width_in,
        width_in if splits == 1 else tiles.cdiv(tiles.cdiv(width_in, tile.block_k), splits) * tile.block_k,
        input_precision(x.dtype),
        tile.block_m,
        tile.block_n,
        tile.block_k,
        tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        bias_activation_fwd(partial, None, "linear", None, 0.0, out, out.new_empty(0))
    return out


def update_pack(
    weight_q: Tensor,
    weight_k: Tensor,
    weight_v: Tensor,
    bias_q: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    pack: Tensor,
    bias_pack: Tensor | None,
) -> None:
    """Copies rows of weights (N, K), N and K above 0, into `pack` (3 N, K) where a sample differs, and the biases."""
    width, width_in = weight_q.shape
    weights = [as_rows(weight) for weight in (weight_q, weight_k, weight_v)]
    tile = tiles.update_pack()
    _update_pack(
        (tiles.cdiv(width, tile.block_m), 3),
        *weights,
        *(None if bias is None else bias.contiguous() for bias in (bias_q, bias_k, bias_v)),
        pack,
        bias_pack,
        *(weight.stride(0) for weight in weights),
        width,
        width_in,
        tile.block_m,
        tile.block_n,
        num_warps=tile.num_warps,
    )
