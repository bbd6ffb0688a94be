"""Tile sizes, warps and stages as pure functions of shape, item size and compute capability.

No Triton import: on any machine the tests hold every number to the limit it meets.

Limits, by compute capability: shared memory a block may have (KiB), registers a thread may have (255 everywhere, 65,536
a multiprocessor), and multiprocessors of the card that tiles are counted against where no card is present.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_WIDTH = 8192

# KiB of shared memory a block can opt in to (CUDA programming guide, table of technical specifications).
SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
# Multiprocessors of the largest card of each capability: T4, A100, RTX A6000, RTX 4090, H100/H200, B200, RTX 5090.
MULTIPROCESSORS = {75: 40, 80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170}


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class RowTile(NamedTuple):
    """BLOCK_M rows of BLOCK_N columns, all of a row's columns in one program."""

    block_m: int
    block_n: int
    num_warps: int


def _row_tile(width: int, values_per_thread: int) -> RowTile:
    block_n = next_power_of_2(max(width, 16))
    # Narrow rows share a program until it has 2,048 values: below that a launch is mostly scheduling.
    block_m = max(1, 2048 // block_n)
    num_warps = min(max(block_m * block_n // (32 * values_per_thread), 1), 16)
    return RowTile(block_m, block_n, num_warps)


def layer_norm_fwd(width: int) -> RowTile:
    """Tile of the row kernels' forward.

    16 values a thread: two 128-bit loads a tensor in half precision, four in fp32, which is what keeps enough bytes in
    flight (latency x bandwidth is some 40 KB a multiprocessor on an H100); z, weight and bias live together in fewer
    than 64 registers, so that two thirds of the warps a multiprocessor can hold are resident. From width 8,192 on, 16
    warps hold 16 values a thread.
    """
    return _row_tile(width, 16)


def layer_norm_bwd(width: int) -> RowTile:
    """Tile of the row kernels' backward.

    8 values a thread: xhat, g and up to three running sums over rows are live at once, 5 x 8 registers and the
    addresses. Width 8,192 has 16 values a thread with 16 warps, 80 registers of 128 that 512 threads may have.
    """
    return _row_tile(width, 8)


def layer_norm_bwd_programs(rows: int, block_m: int, multiprocessors: int) -> int:
    """Programs of the first stage: two a multiprocessor hide each other's latency; each leaves one partial row of sums,
    so that a third of the rows' own bytes is the most that partial sums may cost."""
    return max(1, min(cdiv(rows, 4 * block_m), 2 * multiprocessors))


class ColumnTile(NamedTuple):
    """BLOCK_P partial rows by BLOCK_N columns a step."""

    block_p: int
    block_n: int
    num_warps: int


def column_sum(width: int) -> ColumnTile:
    """Tile of the second stage of column sums: 16 fp32 loads in flight a thread.

    32 columns are one 128-byte line, and 24 programs a vector at width 768: narrow, because columns are all there is to
    share out. From width 4,096 on wider tiles leave 64 programs or more.
    """
    block_n = min(max(next_power_of_2(width) // 64, 32), 128)
    return ColumnTile(2048 // block_n, block_n, 4)


class GemmTile(NamedTuple):
    """BLOCK_M x BLOCK_N outputs a program, BLOCK_K of the sum a step; GROUP_M rows of tiles before the next column."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


# 8 tiles down before one across: 64 neighbours read 8 + 8 panels instead of 1 + 64.
_GROUP_M = 8


def gemm_tile(rows: int, width_out: int, item_size: int, capability: int, aligned: bool = True) -> GemmTile:
    """Tile of the GEMMs that read by pointer, for rows x width_out outputs.

    Half precision: 128 x 128 reads 1 byte per 64 FLOPs from L2, which the tensor cores of none of these cards outrun.
    8 warps have 64 accumulators a thread; with 4 warps the epilogue's erf spills. `mma.sync` (80, 86, 89, 120) takes 32
    of K a step: 4 stages of 16 KiB leave room for two programs where a block may have 163 KiB, so that one's epilogue
    hides behind the other's sum, and fit once into 99. `wgmma` and `tcgen05` (90, 100) take 64 of K a step in 3 stages
    of 32 KiB. Few rows take few rows of tile: 16 is the least that `mma` computes.

    Not `aligned`: rows that begin off 16 bytes are loaded element by element through registers, of which 32 of K leave
    enough.

    fp32 without TF32 runs on FMAs: 64 x 64 outputs by 4 warps are 32 accumulators a thread, and 16 of K a step keep
    the operands in registers.
    """
    if item_size == 4:
        return GemmTile(max(16, min(next_power_of_2(rows), 64)), 64, 16, _GROUP_M, 4, 3)
    block_m = max(16, min(next_power_of_2(rows), 128))
    if block_m <= 32:
        return GemmTile(block_m, 64, 128 if aligned else 64, _GROUP_M, 4, 3)
    if block_m == 64 or width_out <= 64:
        return GemmTile(block_m, 64, 64 if aligned else 32, _GROUP_M, 4, 4)
    if 90 <= capability < 120 and aligned:
        return GemmTile(128, 128, 64, _GROUP_M, 8, 3)
    return GemmTile(128, 128, 32, _GROUP_M, 8, 4)
