"""The second stage of sums over rows: (K, P, N) partial sums to K vectors (N,), in one order whatever runs beside it.

Bytes: 4 K P N read, 4 K N written; P is a few hundred at most, so this is a few per cent of what made the partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bertfast.kernels import tiles
from bertfast.kernels.launch import Launcher


@triton.jit(do_not_specialize=["P"])
def column_sum_kernel(
    partial_ptr,  # (1 to 3, P, N) fp32
    first_ptr,  # (N,) fp32, for the sums of the first, and of the second and third where there are such
    second_ptr,
    third_ptr,
    P,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_k = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    p_column = partial_ptr + i_k.to(tl.int64) * P * N + o_n
    # [BLOCK_P, BLOCK_N]
    b_sum = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for i_p in range(0, P, BLOCK_P):
        o_p = i_p + tl.arange(0, BLOCK_P).to(tl.int64)
        mask = (o_p < P)[:, None] & m_n[None, :]
        b_sum += tl.load(p_column[None, :] + o_p[:, None] * N, mask=mask, other=0.0)
    out_ptr = first_ptr
    if second_ptr is not None:
        out_ptr = second_ptr if i_k == 1 else out_ptr
    if third_ptr is not None:
        out_ptr = third_ptr if i_k == 2 else out_ptr
    tl.store(out_ptr + o_n, tl.sum(b_sum, axis=0), mask=m_n)


_column_sum = Launcher(column_sum_kernel)


def column_sum(partial: Tensor) -> list[Tensor]:
    """The sums over the middle dimension of `partial` (K, P, N) fp32, contiguous, K <= 3, as K tensors (N,)."""
    count, programs, width = partial.shape
    sums = [partial.new_empty(width) for _ in range(count)]
    tile = tiles.column_sum(width)
    _column_sum(
        (tiles.cdiv(width, tile.block_n), count),
        partial,
        *sums,
        *(None,) * (3 - count),
        programs,
        width,
        tile.block_p,
        tile.block_n,
        num_warps=tile.num_warps,
    )
    return sums
