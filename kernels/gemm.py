"""x weight^T tile by tile: the order of tiles, the loop over K, and how fp32 is multiplied. Shared by all GEMM kernels.

x is (M, K) and weight (N, K) as `nn.Linear.weight`, both with unit stride along K, so that tiles of both are read in
whole 16-byte pieces. Sums are fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertfast.kernels.common import dot


@triton.jit
def tile_of(i_tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the tile number `i_tile`. Tiles go down GROUP_M rows before they go one column on, so that the
    tiles in flight share few rows of x and few rows of weight, which then come from L2."""
    per_group = GROUP_M * tiles_n
    first = (i_tile // per_group) * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    return first + (i_tile % per_group) % rows, (i_tile % per_group) // rows


@triton.jit
def accumulate(
    x_ptr,  # (M, K), unit stride along K
    weight_ptr,  # (N, K), unit stride along K
    o_m,  # [BLOCK_M] int64
    o_n,  # [BLOCK_N] int64
    stride_x_m,
    stride_weight_n,
    k_begin,
    k_end,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """x[o_m, k_begin:k_end] @ weight[o_n, k_begin:k_end]^T, [BLOCK_M, BLOCK_N] fp32.

    Rows must exist: the caller clamps them to the last one instead of masking them, and does not store what is beyond.
    `k_begin` is a multiple of BLOCK_K, and so is `k_end` unless it is K.
    """
    o_k = tl.arange(0, BLOCK_K)
    p_x = x_ptr + o_m[:, None] * stride_x_m + (k_begin + o_k)[None, :]
    p_weight = weight_ptr + o_n[None, :] * stride_weight_n + (k_begin + o_k)[:, None]
    # [BLOCK_M, BLOCK_N]
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        if K % BLOCK_K == 0:
            # [BLOCK_M, BLOCK_K] and [BLOCK_K, BLOCK_N]
            b_x = tl.load(p_x)
            b_weight = tl.load(p_weight)
        else:
            m_k = k + o_k < K
            b_x = tl.load(p_x, mask=m_k[None, :], other=0.0)
            b_weight = tl.load(p_weight, mask=m_k[:, None], other=0.0)
        b_acc = dot(b_x, b_weight, b_acc, INPUT_PRECISION)
        p_x += BLOCK_K
        p_weight += BLOCK_K
    return b_acc


def input_precision(dtype: torch.dtype) -> str:
    """`dot`'s INPUT_PRECISION: fp32 is multiplied as IEEE has it unless the user allowed TF32."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def is_aligned(*matrices: Tensor) -> bool:
    """Whether Triton reads the rows of matrices with unit stride along them in whole 16-byte pieces: what it knows is
    whether addresses are multiples of 16 bytes, and strides of 16 elements."""
    return all(
        x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and x.shape[1] * x.element_size() % 16 == 0 for x in matrices
    )
