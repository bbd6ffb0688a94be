"""Device functions that all kernels share: rounding, dots, dropout masks.

The interpreter (`TRITON_INTERPRET=1`) differs from a GPU in two ways that are mended here and nowhere else: its bf16
`tl.dot` multiplies bit patterns, and its conversion of fp32 to bf16 truncates, and makes other numbers of subnormal
ones. A canary test says when it no longer does.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def store_cast(value, dtype: tl.constexpr):
    """An fp32 value as `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(value == value, rounded, (bits >> 16) | 0x40)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """An fp32 value as it reads back after it was stored as `dtype`."""
    return store_cast(value, dtype).to(tl.float32)


@triton.jit
def divide(x, N: tl.constexpr):
    """x / N, correctly rounded but for rare cases, where `/` multiplies by 1 / N: the mean of equal numbers is that
    number. One step of Markstein's division, which needs a fused multiply-add; IEEE's (`tl.div_rn`) costs registers."""
    if INTERPRETED:
        return x / N
    reciprocal: tl.constexpr = 1.0 / N
    quotient = x * reciprocal
    return tl.fma(tl.fma(-quotient, tl.full(x.shape, N, tl.float32), x), reciprocal, quotient)


@triton.jit
def dot(a, b, acc, INPUT_PRECISION: tl.constexpr):
    """acc + a @ b in fp32. `INPUT_PRECISION` ("ieee" or "tf32") counts for fp32 operands only."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=INPUT_PRECISION)


@triton.jit
def warp_uniform(x):
    """The int32 scalar x, known to be the same in all threads of a warp. ptxas cannot see that of the result of a
    reduction, and would compile loops bounded by it as divergent: twice the code, and registers for both."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def keep_mask(seed, o_m, column, last_dropped, STREAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which elements of a tile dropout keeps (`bertfast.dropout` has the specification).

    Args:
        seed: int64.
        o_m: [BLOCK_M] int64, rows.
        column: first column, a multiple of 4.
        last_dropped: floor(p * 2**32) - 1 as int32 bits: an unsigned 32-bit argument would be 64 bits wide from
            p = 0.5 on, and so another variant.
    """
    # One call makes the words of four neighbours: [BLOCK_M, BLOCK_N / 4]
    o_q = (column // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)
    c0 = tl.broadcast_to(o_q[None, :], (BLOCK_M, BLOCK_N // 4))
    c1 = tl.broadcast_to(o_m.to(tl.uint32)[:, None], (BLOCK_M, BLOCK_N // 4))
    c2 = tl.broadcast_to((o_m >> 32).to(tl.uint32)[:, None], (BLOCK_M, BLOCK_N // 4))
    c3 = tl.full((BLOCK_M, BLOCK_N // 4), STREAM, tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    # [BLOCK_M, BLOCK_N]
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return words > last_dropped.to(tl.uint32, bitcast=True)
