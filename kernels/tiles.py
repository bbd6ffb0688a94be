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


def column_sum() -> ColumnTile:
    """Tile of the second stage of column sums: 32 columns are one 128-byte line of fp32; narrow, because width / 32
    programs are all there are (24 at width 768)."""
    return ColumnTile(64, 32, 4)
