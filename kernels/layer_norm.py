"""Residual add, dropout and LayerNorm in one pass over memory, forward and backward.

Forward, per row of width N, in fp32 whatever the storage:

    z    = residual + dropout(x + x_bias)             rounded to its own dtype: backward reads it from memory
    mean = sum(z) / N, and sum(z - mean) / N more: equal numbers have their mean exactly
    var  = sum((z - mean)^2) / N                      z stays in registers; the one-pass form cancels
    out  = (z - mean) * rstd * weight + bias          rstd = 1 / sqrt(var + eps)

Bytes for M rows of e-byte elements: x and residual read, out written, 3 M N e, and M N e more where the sum is wanted:
the floor. Eager adds, drops and normalises in 8 M N e and more.

Backward, with xhat = (z - mean) * rstd and g = dout * weight:

    dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum
    dresidual = dz, dx = dropout'(dz)
    dweight = sum_rows(dout * xhat), dbias = sum_rows(dout), dx_bias = sum_rows(dx)

Bytes: dout and z read, dx written, 3 M N e, and M N e for dresidual where dropout makes it differ. Sums over rows go
in two stages without atomics: P programs add up the rows that they walk over anyway, then one small kernel adds up
their P partial rows, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertfast.dropout import STREAMS
from bertfast.kernels import tiles
from bertfast.kernels.column_sum import column_sum
from bertfast.kernels.common import divide, keep_mask, round_to, store_cast
from bertfast.kernels.launch import Launcher, as_rows, device_of, dropout_of

_STREAM: tl.constexpr = tl.constexpr(STREAMS["add_layer_norm"])


@triton.jit
def normalise(z, m_n, eps, N: tl.constexpr):
    """(z - mean) * rstd of the rows of z [BLOCK_M, BLOCK_N], 0 beyond the width, and mean and rstd [BLOCK_M]."""
    mean = divide(tl.sum(z, axis=1), N)
    # The sum of equal numbers is rounded, and rstd, up to 1e6, would make a deviation of it.
    mean += divide(tl.sum(tl.where(m_n[None, :], z - mean[:, None], 0.0), axis=1), N)
    centred = tl.where(m_n[None, :], z - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(divide(tl.sum(centred * centred, axis=1), N) + eps)
    return centred * rstd[:, None], mean, rstd


@triton.jit
def normalise_bwd(dout, xhat, rstd, weight, N: tl.constexpr):
    """The gradient of z from that of the output; dout and weight are 0 beyond the width."""
    g = dout * weight[None, :]
    mean_g, mean_g_xhat = divide(tl.sum(g, axis=1), N), divide(tl.sum(g * xhat, axis=1), N)
    return rstd[:, None] * (g - mean_g[:, None] - xhat * mean_g_xhat[:, None])


@triton.jit(do_not_specialize=["M", "last_dropped"])
def add_layer_norm_fwd_kernel(
    x_ptr,  # (M, N)
    residual_ptr,  # (M, N) or None
    weight_ptr,  # (N,)
    bias_ptr,  # (N,)
    x_bias_ptr,  # (N,) or None
    seed_ptr,  # (1,) or None
    out_ptr,  # (M, N) contiguous, its dtype that of z
    sum_ptr,  # (M, N) contiguous, or None
    mean_ptr,  # (M,) fp32
    rstd_ptr,  # (M,) fp32
    M,
    stride_x_m,
    stride_residual_m,
    eps,
    last_dropped,
    keep_scale,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < M, o_n < N
    mask = m_m[:, None] & m_n[None, :]
    # [BLOCK_M, BLOCK_N]
    b_z = tl.load(x_ptr + o_m[:, None] * stride_x_m + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
    if x_bias_ptr is not None:
        b_z += tl.load(x_bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if seed_ptr is not None:
        keep = keep_mask(tl.load(seed_ptr), o_m, 0, last_dropped, _STREAM, BLOCK_M, BLOCK_N)
        b_z = tl.where(keep, b_z * keep_scale, 0.0)
    if residual_ptr is not None:
        p_residual = residual_ptr + o_m[:, None] * stride_residual_m + o_n[None, :]
        b_z = tl.load(p_residual, mask=mask, other=0.0).to(tl.float32) + b_z
    o_out = o_m[:, None] * N + o_n[None, :]
    b_z = round_to(b_z, out_ptr.dtype.element_ty)
    if sum_ptr is not None:
        tl.store(sum_ptr + o_out, store_cast(b_z, sum_ptr.dtype.element_ty), mask=mask)
    b_xhat, b_mean, b_rstd = normalise(b_z, m_n, eps, N)
    b_weight = tl.load(weight_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_bias = tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_out = b_xhat * b_weight[None, :] + b_bias[None, :]
    tl.store(out_ptr + o_out, store_cast(b_out, out_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + o_m, b_mean, mask=m_m)
    tl.store(rstd_ptr + o_m, b_rstd, mask=m_m)


@triton.jit(do_not_specialize=["M", "last_dropped"])
def add_layer_norm_bwd_kernel(
    dout_ptr,  # (M, N)
    dsum_ptr,  # (M, N) or None
    sum_ptr,  # (M, N)
    mean_ptr,  # (M,) fp32
    rstd_ptr,  # (M,) fp32
    weight_ptr,  # (N,)
    seed_ptr,  # (1,) or None
    dx_ptr,  # (M, N) contiguous
    dresidual_ptr,  # (M, N) contiguous, or None where it is dx
    partial_ptr,  # (2 or 3, P, N) fp32: the programs' sums for dweight, dbias and dx_bias
    M,
    stride_dout_m,
    stride_dsum_m,
    stride_sum_m,
    last_dropped,
    keep_scale,
    HAS_X_BIAS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_p = tl.program_id(0)
    n_programs = tl.num_programs(0)
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_weight = tl.load(weight_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    # [BLOCK_M, BLOCK_N]
    b_dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b_dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b_dx_bias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Not `tl.cdiv`: M + BLOCK_M - 1 overflows near 2**31 rows.
    for i_m in range(i_p, (M - 1) // BLOCK_M + 1, n_programs):
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        m_m = o_m < M
        mask = m_m[:, None] & m_n[None, :]
        b_dout = tl.load(dout_ptr + o_m[:, None] * stride_dout_m + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        b_sum = tl.load(sum_ptr + o_m[:, None] * stride_sum_m + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        b_mean = tl.load(mean_ptr + o_m, mask=m_m, other=0.0)
        b_rstd = tl.load(rstd_ptr + o_m, mask=m_m, other=0.0)
        # Beyond the width it is no number of the row's, but meets a gradient of 0.
        b_xhat = (b_sum - b_mean[:, None]) * b_rstd[:, None]
        b_dweight += b_dout * b_xhat
        b_dbias += b_dout
        b_dz = normalise_bwd(b_dout, b_xhat, b_rstd, b_weight, N)
        if dsum_ptr is not None:
            p_dsum = dsum_ptr + o_m[:, None] * stride_dsum_m + o_n[None, :]
            b_dz += tl.load(p_dsum, mask=mask, other=0.0).to(tl.float32)
        o_out = o_m[:, None] * N + o_n[None, :]
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + o_out, store_cast(b_dz, dresidual_ptr.dtype.element_ty), mask=mask)
        if seed_ptr is not None:
            keep = keep_mask(tl.load(seed_ptr), o_m, 0, last_dropped, _STREAM, BLOCK_M, BLOCK_N)
            b_dz = tl.where(keep, b_dz * keep_scale, 0.0)
        tl.store(dx_ptr + o_out, store_cast(b_dz, dx_ptr.dtype.element_ty), mask=mask)
        if HAS_X_BIAS:
            b_dx_bias += b_dz
    p_partial = partial_ptr + i_p.to(tl.int64) * N + o_n
    stride_partial = n_programs.to(tl.int64) * N
    tl.store(p_partial, tl.sum(b_dweight, axis=0), mask=m_n)
    tl.store(p_partial + stride_partial, tl.sum(b_dbias, axis=0), mask=m_n)
    if HAS_X_BIAS:
        tl.store(p_partial + 2 * stride_partial, tl.sum(b_dx_bias, axis=0), mask=m_n)


_fwd = Launcher(add_layer_norm_fwd_kernel)
_bwd = Launcher(add_layer_norm_bwd_kernel)


def add_layer_norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    x_bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    need_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, sum (empty unless needed), mean and rstd; shapes and dtypes as `ops.add_layer_norm`."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out = x.new_empty(x.shape, dtype=dtype)
    total = x.new_empty(x.shape if need_sum else (0,), dtype=dtype)
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if x.numel() == 0:
        return out, total, mean, rstd
    width = x.shape[-1]
    x = as_rows(x)
    residual = None if residual is None else as_rows(residual)
    dropout = dropout_of(seed, dropout_p)
    tile = tiles.layer_norm_fwd(width)
    _fwd(
        (tiles.cdiv(x.shape[0], tile.block_m),),
        x,
        residual,
        weight.contiguous(),
        bias.contiguous(),
        None if x_bias is None else x_bias.contiguous(),
        dropout.seed,
        out,
        total if need_sum else None,
        mean,
        rstd,
        x.shape[0],
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        dropout.last_dropped,
        dropout.scale,
        width,
        tile.block_m,
        tile.block_n,
        num_warps=tile.num_warps,
    )
    return out, total, mean, rstd


def add_layer_norm_bwd(
    dout: Tensor,
    dsum: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    has_residual: bool,
    has_x_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dresidual (empty where it is dx), and in fp32 dweight, dbias and dx_bias (empty without one)."""
    width = total.shape[-1]
    dx = total.new_empty(total.shape)
    separate = has_residual and seed is not None
    dresidual = total.new_empty(total.shape if separate else (0,))
    if total.numel() == 0:
        dweight, dbias, dx_bias = (total.new_zeros(width, dtype=torch.float32) for _ in range(3))
        return dx, dresidual, dweight, dbias, dx_bias if has_x_bias else dx_bias.new_empty(0)
    dout, rows = as_rows(dout), as_rows(total)
    dsum = None if dsum is None else as_rows(dsum)
    dropout = dropout_of(seed, dropout_p)
    tile = tiles.layer_norm_bwd(width)
    programs = tiles.layer_norm_bwd_programs(rows.shape[0], tile.block_m, device_of(rows).multiprocessors)
    partial = rows.new_empty((3 if has_x_bias else 2, programs, width), dtype=torch.float32)
    _bwd(
        (programs,),
        dout,
        dsum,
        rows,
        mean.contiguous(),
        rstd.contiguous(),
        weight.contiguous(),
        dropout.seed,
        dx,
        dresidual if separate else None,
        partial,
        rows.shape[0],
        dout.stride(0),
        0 if dsum is None else dsum.stride(0),
        rows.stride(0),
        dropout.last_dropped,
        dropout.scale,
        has_x_bias,
        width,
        tile.block_m,
        tile.block_n,
        num_warps=tile.num_warps,
    )
    sums = column_sum(partial)
    return dx, dresidual, *sums, *(() if has_x_bias else (partial.new_empty(0),))
