"""The passes over memory around a linear layer's activation.

Forward, behind a GEMM that left one product, or S partial sums of it:

    pre = sum_s partial[s] + bias,    out = dropout(act(pre))

Bytes for M rows of width N: S M N p + M N e for p-byte partial sums and e-byte outputs, M N e more where pre is wanted:
the floor. The epilogue of one GEMM kernel saves all but the writes, so this serves where few tiles split K, where
torch's GEMM is the faster one, and where dropout is wanted.

Backward, in front of the two GEMMs of dx and dweight:

    dpre = dropout'(dout) * act'(pre),    dbias = sum_rows(dpre)
    out  = dropout(act(pre)), for the gradient of the next layer's weight, where nobody kept it

Bytes: dout and pre read, dpre written, 3 M N e, and M N e for out. dbias is summed as `column_sum` says, without
atomics. The dropout mask is regenerated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertfast.dropout import STREAMS
from bertfast.kernels import tiles
from bertfast.kernels.activations import activate, derivative
from bertfast.kernels.column_sum import column_sum
from bertfast.kernels.common import keep_mask, store_cast
from bertfast.kernels.launch import Launcher, as_rows, device_of, dropout_of

_STREAM: tl.constexpr = tl.constexpr(STREAMS["feed_forward"])


@triton.jit(do_not_specialize=["M", "last_dropped"])
def bias_activation_fwd_kernel(
    partial_ptr,  # (PARTS, M, N) contiguous, fp32 or the dtype of out
    bias_ptr,  # (N,) or None
    seed_ptr,  # (1,) or None
    out_ptr,  # (M, N) contiguous
    pre_ptr,  # (M, N) contiguous, or None
    M,
    last_dropped,
    keep_scale,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    FORMULA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    o_m = (tl.program_id(0) // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % blocks_n) * BLOCK_N
    o_n = column + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    mask = (o_m < M)[:, None] & m_n[None, :]
    o_out = o_m[:, None] * N + o_n[None, :]
    # [BLOCK_M, BLOCK_N]
    b_pre = tl.load(partial_ptr + o_out, mask=mask, other=0.0).to(tl.float32)
    stride_part = tl.cast(M, tl.int64) * N
    for i_part in tl.static_range(1, PARTS):
        b_pre += tl.load(partial_ptr + i_part * stride_part + o_out, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        b_pre += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if pre_ptr is not None:
        tl.store(pre_ptr + o_out, store_cast(b_pre, pre_ptr.dtype.element_ty), mask=mask)
    b_out = activate(b_pre, FORMULA)
    if seed_ptr is not None:
        keep = keep_mask(tl.load(seed_ptr), o_m, column, last_dropped, _STREAM, BLOCK_M, BLOCK_N)
        b_out = tl.where(keep, b_out * keep_scale, 0.0)
    tl.store(out_ptr + o_out, store_cast(b_out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "last_dropped"])
def bias_activation_bwd_kernel(
    dout_ptr,  # (M, N)
    pre_ptr,  # (M, N)
    seed_ptr,  # (1,) or None
    dpre_ptr,  # (M, N) contiguous
    out_ptr,  # (M, N) contiguous, or None
    partial_ptr,  # (1, P, N) fp32, the programs' sums for dbias, or None
    M,
    stride_dout_m,
    stride_pre_m,
    last_dropped,
    keep_scale,
    N: tl.constexpr,
    FORMULA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_p = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N
    o_n = column + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    # [BLOCK_M, BLOCK_N]
    b_dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i_m in range(i_p, (M - 1) // BLOCK_M + 1, tl.num_programs(1)):
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (o_m < M)[:, None] & m_n[None, :]
        b_dout = tl.load(dout_ptr + o_m[:, None] * stride_dout_m + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        b_pre = tl.load(pre_ptr + o_m[:, None] * stride_pre_m + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        o_out = o_m[:, None] * N + o_n[None, :]
        if seed_ptr is not None:
            keep = keep_mask(tl.load(seed_ptr), o_m, column, last_dropped, _STREAM, BLOCK_M, BLOCK_N)
            b_dout = tl.where(keep, b_dout * keep_scale, 0.0)
        b_dpre = b_dout * derivative(b_pre, FORMULA)
        tl.store(dpre_ptr + o_out, store_cast(b_dpre, dpre_ptr.dtype.element_ty), mask=mask)
        if out_ptr is not None:
            b_out = activate(b_pre, FORMULA)
            if seed_ptr is not None:
                b_out = tl.where(keep, b_out * keep_scale, 0.0)
            tl.store(out_ptr + o_out, store_cast(b_out, out_ptr.dtype.element_ty), mask=mask)
        if partial_ptr is not None:
            b_dbias += b_dpre
    if partial_ptr is not None:
        tl.store(partial_ptr + i_p.to(tl.int64) * N + o_n, tl.sum(b_dbias, axis=0), mask=m_n)


_fwd = Launcher(bias_activation_fwd_kernel)
_bwd = Launcher(bias_activation_bwd_kernel)


def bias_activation_fwd(
    partial: Tensor,
    bias: Tensor | None,
    activation: str,
    seed: Tensor | None,
    dropout_p: float,
    out: Tensor,
    pre: Tensor,
) -> None:
    """Writes `out` (M, N), and `pre` unless it is empty, from `partial` (S, M, N); all contiguous, M and N above 0."""
    parts, rows, width = partial.shape
    dropout = dropout_of(seed, dropout_p)
    tile = tiles.bias_activation(width)
    _fwd(
        (tiles.cdiv(rows, tile.block_m) * tiles.cdiv(width, tile.block_n),),
        partial,
        None if bias is None else bias.contiguous(),
        dropout.seed,
        out,
        pre if pre.numel() else None,
        rows,
        dropout.last_dropped,
        dropout.scale,
        parts,
        width,
        activation,
        tile.block_m,
        tile.block_n,
        num_warps=tile.num_warps,
    )


def linear_gelu_bwd(
    dout: Tensor,
    pre: Tensor,
    activation: str,
    seed: Tensor | None,
    dropout_p: float,
    need_out: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dpre, out (empty unless needed), and dbias in fp32 (empty without a bias)."""
    width = pre.shape[-1]
    dpre = pre.new_empty(pre.shape)
    out = pre.new_empty(pre.shape if need_out else (0,))
    if pre.numel() == 0:
        return dpre, out, pre.new_zeros(width if has_bias else 0, dtype=torch.float32)
    dout, pre = as_rows(dout), as_rows(pre)
    rows = pre.shape[0]
    dropout = dropout_of(seed, dropout_p)
    tile = tiles.bias_activation(width)
    programs = tiles.linear_gelu_bwd_programs(rows, width, tile, device_of(pre).multiprocessors)
    partial = pre.new_empty((1, programs, width) if has_bias else (0,), dtype=torch.float32)
    _bwd(
        (tiles.cdiv(width, tile.block_n), programs),
        dout,
        pre,
        dropout.seed,
        dpre,
        out if need_out else None,
        partial if has_bias else None,
        rows,
        dout.stride(0),
        pre.stride(0),
        dropout.last_dropped,
        dropout.scale,
        width,
        activation,
        tile.block_m,
        tile.block_n,
        num_warps=tile.num_warps,
    )
    return dpre, out, column_sum(partial)[0] if has_bias else partial
