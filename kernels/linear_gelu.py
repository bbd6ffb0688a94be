"""out = act(x weight^T + bias)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bertfast.kernels import tiles
from bertfast.kernels.activations import activate
from bertfast.kernels.common import store_cast
from bertfast.kernels.gemm import accumulate, input_precision, tile_of
from bertfast.kernels.launch import Launcher, as_rows, device_of


@triton.jit(do_not_specialize=["M"])
def linear_gelu_fwd_kernel(
    x_ptr,  # (M, K)
    weight_ptr,  # (N, K)
    bias_ptr,  # (N,) or None
    out_ptr,  # (M, N) contiguous
    pre_ptr,  # (M, N) contiguous, or None
    M,
    stride_x_m,
    stride_weight_n,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMULA: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    i_m, i_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    # [BLOCK_M, BLOCK_N]
    b_pre = accumulate(
        x_ptr,
        weight_ptr,
        tl.minimum(o_m, M - 1),
        tl.minimum(o_n, N - 1),
        stride_x_m,
        stride_weight_n,
        0,
        K,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        INPUT_PRECISION,
    )
    if bias_ptr is not None:
        b_pre += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    o_out = o_m[:, None] * N + o_n[None, :]
    mask = (o_m < M)[:, None] & m_n[None, :]
    if pre_ptr is not None:
        tl.store(pre_ptr + o_out, store_cast(b_pre, pre_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + o_out, store_cast(activate(b_pre, FORMULA), out_ptr.dtype.element_ty), mask=mask)


_fwd = Launcher(linear_gelu_fwd_kernel)


def linear_gelu_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    seed: Tensor | None,
    dropout_p: float,
    need_pre: bool,
) -> tuple[Tensor, Tensor]:
    """out, and in front of the activation what backward needs (empty unless wanted)."""
    width = weight.shape[0]
    out = x.new_empty((*x.shape[:-1], width))
    pre = x.new_empty(out.shape if need_pre else (0,))
    if out.numel() == 0:
        return out, pre
    x, weight = as_rows(x), as_rows(weight)
    rows, width_in = x.shape
    tile = tiles.gemm_tile(rows, width, x.element_size(), device_of(x).capability)
    _fwd(
        (tiles.cdiv(rows, tile.block_m) * tiles.cdiv(width, tile.block_n),),
        x,
        weight,
        None if bias is None else bias.contiguous(),
        out,
        pre if need_pre else None,
        rows,
        x.stride(0),
        weight.stride(0),
        width,
        width_in,
        activation,
        input_precision(x.dtype),
        tile.block_m,
        tile.block_n,
        tile.block_k,
        tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, pre
