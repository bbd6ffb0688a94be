"""Tile sizes, warps and stages as pure functions of shape, item size and compute capability.

No Triton import: on any machine the tests hold every number to the limit it meets.

Limits, by compute capability: shared memory a block may have (KiB), registers a thread may have (255 everywhere, 65,536
a multiprocessor), and multiprocessors of the card that tiles are counted against where no card is present.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_WIDTH = 8192
MAX_HEAD_DIM = 256

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
    addresses. Width 8,192 has 16 values a thread with 16 warps, and just fits into the 128 registers that each of 512
    threads may have.
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


def gemm_tile(
    rows: int, width_out: int, item_size: int, capability: int, multiprocessors: int, aligned: bool = True
) -> GemmTile:
    """Tile of the GEMMs that read by pointer, for rows x width_out outputs.

    Half precision: 128 x 128 reads 1 byte per 64 FLOPs from L2, which the tensor cores of none of these cards outrun.
    8 warps have 64 accumulators a thread; with 4 warps the epilogue's erf spills. `mma.sync` (80, 86, 89, 120) takes 32
    of K a step: 4 stages of 16 KiB leave room for two programs where a block may have 163 KiB, so that one's epilogue
    hides behind the other's sum, and fit once into 99. `wgmma` and `tcgen05` (90, 100) take 64 of K a step in 3 stages
    of 32 KiB. Where 128 x 128 leaves multiprocessors without a tile, 64 x 64 makes four times as many: (1, 128) into
    3,072 gives 96 instead of 24, for as many bytes more from L2 as split sums would move through a workspace, and
    without their second launch. Few rows take few rows of tile: 16 is the least that `mma` computes. Then 5 stages of
    64 of K have as many bytes in flight as 3 of 128, with which sums of parts of K spill.

    Not `aligned` (`gemm.is_aligned`): rows are loaded element by element through registers, of which 32 of K leave
    enough.

    fp32 without TF32 runs on FMAs: 64 x 64 outputs by 4 warps are 32 accumulators a thread, and 16 of K a step keep
    the operands in registers.
    """
    if item_size == 4:
        return GemmTile(max(16, min(next_power_of_2(rows), 64)), 64, 16, _GROUP_M, 4, 3)
    block_m = max(16, min(next_power_of_2(rows), 128))
    if block_m <= 32:
        return GemmTile(block_m, 64, 64, _GROUP_M, 4, 5 if aligned else 3)
    if block_m == 64 or width_out <= 64 or cdiv(rows, 128) * cdiv(width_out, 128) < multiprocessors:
        return GemmTile(64, 64, 64 if aligned else 32, _GROUP_M, 4, 4)
    if 90 <= capability < 120 and aligned:
        return GemmTile(128, 128, 64, _GROUP_M, 8, 3)
    return GemmTile(128, 128, 32, _GROUP_M, 8, 4)


def gemm_splits(rows: int, width_out: int, width_in: int, tile: GemmTile, multiprocessors: int) -> int:
    """Into how many parts K is split, each summed by programs of its own.

    Only where tiles leave half of the multiprocessors idle or more. A part is 256 of K or more (4 steps of 64), which
    fill the pipeline once, and 8 parts are the most, because each costs 8 bytes an output through the workspace.
    """
    programs = cdiv(rows, tile.block_m) * cdiv(width_out, tile.block_n)
    parts = min(multiprocessors // max(programs, 1), width_in // 256, 8)
    if parts < 2:
        return 1
    steps = cdiv(width_in, tile.block_k)
    return cdiv(steps, cdiv(steps, parts))


def persistent_tile(rows: int, width_out: int, multiprocessors: int) -> GemmTile:
    """Tile of the persistent GEMMs on tensor descriptors, half precision.

    128 x 256 by 8 warps has 128 accumulators a thread (on 100 in tensor memory) and reads 1 byte per 85 FLOPs; 3 stages
    of 48 KiB and half of the outputs at a time, 32 KiB, fit into 227. It is taken where it leaves a tile for each
    multiprocessor.
    """
    if cdiv(rows, 128) * cdiv(width_out, 256) >= multiprocessors:
        return GemmTile(128, 256, 64, _GROUP_M, 8, 3)
    return GemmTile(128, 128, 64, _GROUP_M, 8, 4)


class GemmPlan(NamedTuple):
    """Which kernels compute a linear layer with an activation.

    Attributes:
        form: "tile" (one program a tile), "split" (K in parts, and a second kernel), "persistent" (descriptors), or
            "separate" (torch's GEMM, and a second kernel).
        splits: parts of K, 1 except in "split".
    """

    form: str
    tile: GemmTile
    splits: int


# The largest K where one kernel is expected to beat torch's GEMM and a second pass, by capability. The second pass
# reads and writes the outputs, 4 bytes each in half precision; the GEMM does 2 K FLOPs for each. So its share of the
# GEMM's time is 2 F / (B K) with F FLOP/s and B byte/s: 325 / K on 80 (290e12, 1.8e12), 367 / K on 90 (790e12,
# 4.3e12), 430 / K on 100 (1.6e15, 7.4e12), 230 / K on 120 (210e12, 1.8e12). Against it stands what cuBLAS gains over
# these kernels, taken as 8 % with mma.sync, 12 % with wgmma and 20 % with tcgen05. Reasoned, not measured.
_FUSED_UP_TO = {80: 4096, 90: 3072, 100: 2048, 120: 3072}


def linear_gelu_fwd(
    rows: int,
    width_out: int,
    width_in: int,
    item_size: int,
    tensor_cores: bool,
    dropout: bool,
    aligned: bool,
    descriptors: bool,
    capability: int,
    multiprocessors: int,
) -> GemmPlan:
    """How linear_gelu's forward runs.

    * Dropout: "separate". Its random words want another layout than accumulators have.
    * fp32 without TF32 beyond 64 rows: "separate". cuBLAS's FMA loop is better by more than the second pass costs.
    * Few tiles: "split", also up to 64 rows of fp32: such calls wait for weights and launches, not for arithmetic.
    * K beyond `_FUSED_UP_TO`: "separate".
    * Else one kernel: "persistent" on 90 and 100 where descriptors can hold the tensors, or "tile". On 120 two programs
      of "tile" fit into 99 KiB and hide each other's epilogues, as one persistent program would (which spills there
      with Triton 3.6).

    Args:
        tensor_cores: half precision, or fp32 with TF32 allowed.
        aligned: `gemm.is_aligned` of x and weight.
        descriptors: rows of x, weight and output begin at multiples of 16 bytes, and neither x nor weight is expanded.
    """
    tile = gemm_tile(rows, width_out, 2 if tensor_cores else 4, capability, multiprocessors, aligned)
    # TF32 takes as many bytes of K a step as half precision does.
    tile = tile._replace(block_k=2 * tile.block_k // item_size) if tensor_cores else tile
    splits = gemm_splits(rows, width_out, width_in, tile, multiprocessors)
    if dropout or (rows > 64 and not tensor_cores):
        return GemmPlan("separate", tile, 1)
    if splits > 1:
        return GemmPlan("split", tile, splits)
    if rows > 64 and width_in > _FUSED_UP_TO[max(known for known in _FUSED_UP_TO if known <= capability)]:
        return GemmPlan("separate", tile, 1)
    if 90 <= capability < 120 and descriptors and item_size == 2 and tile.block_m == 128:
        return GemmPlan("persistent", persistent_tile(rows, width_out, multiprocessors), 1)
    return GemmPlan("tile", tile, 1)


class ElementTile(NamedTuple):
    """BLOCK_M x BLOCK_N values of an elementwise kernel."""

    block_m: int
    block_n: int
    num_warps: int


def bias_activation(width: int) -> ElementTile:
    """Tile of the activation's own passes over memory, forward and backward: 2,048 values for 4 warps, 16 a thread,
    which are two 128-bit accesses a tensor in half precision. 256 columns are whole lines of 128 bytes and repeat the
    bias or the sums over rows every 8 rows only."""
    block_n = min(next_power_of_2(max(width, 16)), 256)
    return ElementTile(2048 // block_n, block_n, 4)


def linear_gelu_bwd_programs(rows: int, width: int, tile: ElementTile, multiprocessors: int) -> int:
    """Programs that share the rows of one block of columns: 4 a multiprocessor in all, as many as fit at 128 registers
    a thread, each with 4 steps or more, so that partial sums cost a small part of what the rows do."""
    columns = cdiv(width, tile.block_n)
    return max(1, min(cdiv(rows, 4 * tile.block_m), cdiv(4 * multiprocessors, columns)))


def qkv_projection_fwd(
    rows: int, width_out: int, width_in: int, item_size: int, aligned: bool, capability: int, multiprocessors: int
) -> tuple[GemmTile, int]:
    """Tile and parts of K of the launch that computes query, key and value, `width_out` columns each. Tiles are counted
    over all three: (1, 128) at width 768 makes 72 of 64 x 64, which fill more than half of 132 multiprocessors."""
    columns = 3 * width_out
    tile = gemm_tile(rows, columns, item_size, capability, multiprocessors, aligned)
    return tile, gemm_splits(rows, columns, width_in, tile, multiprocessors)


# Products of one projection, rows x columns x K, from which on torch's GEMM on packed weights is expected to win, by
# capability. cuBLAS gains 12 % with wgmma and 20 % with tcgen05 (as `_FUSED_UP_TO` takes it), and must gain 4 us: twice
# the kernel that holds the pack to the weights. 4e-6 s x 790e12 / (2 x 0.12) = 1.3e10 on 90, or 7,440 tokens of
# BERT-base; 4e-6 s x 1.6e15 / (2 x 0.2) = 1.6e10 on 100. With mma.sync (80, 86, 89, 120) the gain does not pay for
# memory: the packs are a quarter of an encoder's weights. Reasoned, not measured.
_PACKED_FROM = {75: None, 90: 1.3e10, 100: 1.6e10, 120: None}


def qkv_weights_are_packed(rows: int, columns: int, width_in: int, capability: int) -> bool:
    """Whether query, key and value (`columns` in all) come from torch's GEMM on a packed copy of the weights, in half
    precision and without gradients, or from the launch that reads the weights where they lie."""
    least = _PACKED_FROM[max(known for known in _PACKED_FROM if known <= capability)]
    return least is not None and rows * columns * width_in >= least


def update_pack() -> ElementTile:
    """Tile of the kernel that holds a pack to its weights: two samples of each of 32 rows are the 64 values that a
    program compares, and 72 programs at width 768 are all in flight at once. A copy takes 64 columns a step, 16 values
    a thread; 32 spill on 100 where rows are unaligned."""
    return ElementTile(32, 64, 4)


class AttentionTile(NamedTuple):
    """BLOCK_M queries by BLOCK_N keys, head dims in BLOCK_D."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def attention_blocks(length: int, block: int, sequences: int) -> int:
    """Blocks of queries or keys of one head; packed, enough for the ends of all sequences (see `sequence_of`)."""
    return length // block + sequences if sequences else cdiv(length, block)


def attention_sequences(sequences: int) -> int:
    """How many sequences a program that looks for its own takes a step: two sizes, because each is a variant."""
    return 64 if sequences <= 64 else 1024


def attention_descriptors(keys: int, item_size: int, capability: int) -> bool:
    """Whether whole blocks of keys come by tensor descriptors, on 90 and 100: from 256 keys on, where each program
    loads three such blocks or more. A launch with descriptors costs the host some microseconds more."""
    return item_size == 2 and _warpgroups(capability) and keys >= 256


def _warpgroups(capability: int) -> bool:
    """Whether matrix products are asynchronous, of 64 rows and more: `wgmma`, `tcgen05`."""
    return 90 <= capability < 120


def _attention_tile(block_m: int, block_n: int, head_dim: int, num_warps: int, num_stages: int) -> AttentionTile:
    # 16 is the least that a matrix product takes.
    return AttentionTile(block_m, block_n, max(16, next_power_of_2(head_dim)), num_warps, num_stages)


def _fp32_attention_tile(head_dim: int) -> AttentionTile:
    """fp32 runs on FMAs, which keep operands in registers: small tiles, many warps, no pipeline."""
    return _attention_tile(32, 32, head_dim, 8, 1) if head_dim <= 64 else _attention_tile(16, 16, head_dim, 8, 1)


def attention_fwd(queries: int, head_dim: int, item_size: int, crowded: bool, capability: int) -> AttentionTile:
    """Tile of attention's forward for sequences of `queries`; `crowded`: registers also hold what a mask adds to each
    score or says of it, dropout's random words, or unaligned rows.

    Head dims to 64, where BERT is: a thread has 32 scores, 16 halves of p and 32 sums of out, and two programs or more
    share a multiprocessor, so that one's exponentials run beside the other's products.

    * `wgmma` and `tcgen05`: 128 queries by two warpgroups read each key once for 128 queries. Long sequences ask L2 for
      32 bytes a clock and multiprocessor at most; 64 queries would ask for 64, which no card has. Up to 64 queries take
      one warpgroup. 3 stages of 16 KiB; 2 on 100, where a third spills.
    * `mma.sync`: 64 queries by 4 warps, 16 each. 128 by 4 warps spill. 64 keys a step, or 32 where `crowded`. 2 stages;
      3 on 80, where with 2 and a mask of keys ptxas spills 16 bytes to fit a third program (Triton 3.8).

    Wider heads keep fewer scores (and on `mma.sync` fewer queries), because sums of out and the queries take what they
    leave.
    """
    if item_size == 4:
        return _fp32_attention_tile(head_dim)
    if head_dim > 128 and (crowded or not _warpgroups(capability) or queries <= 16):
        return _attention_tile(16, 32, head_dim, 4, 2)
    if queries <= 16:
        return _attention_tile(16, 64, head_dim, 4, 2)
    if _warpgroups(capability):
        block_m, num_warps = (64, 4) if queries <= 64 else (128, 8)
        if head_dim > 64:
            block_n = 32 if crowded or head_dim > 128 or queries <= 64 else 64
            return _attention_tile(block_m, block_n, head_dim, num_warps, 2)
        return _attention_tile(block_m, 64, head_dim, num_warps, 3 if capability < 100 else 2)
    block_n = 32 if crowded else 64
    num_stages = 3 if capability == 80 and head_dim <= 64 and not crowded else 2
    return _attention_tile(64 if head_dim <= 64 else 32, block_n, head_dim, 4, num_stages)


def attention_bwd_dq(queries: int, head_dim: int, item_size: int, crowded: bool, capability: int) -> AttentionTile:
    """Tile of the pass over keys that gives dq, for sequences of `queries`: as `attention_fwd`'s, with half the keys
    on `mma.sync`, because scores and their gradients are live together. Wider heads share dq among 8 warps, on
    `mma.sync` two for the same queries; with asynchronous products they keep 128 queries and 32 keys, 16 where
    `crowded`. Above 128 there is room for 16 queries only, which is `mma.sync` on every card."""
    if item_size == 4:
        return _fp32_attention_tile(head_dim)
    if queries <= 16 or head_dim > 128:
        return _attention_tile(16, 32, head_dim, 4 if head_dim <= 128 else 8, 2)
    if not _warpgroups(capability):
        return _attention_tile(64, 32, head_dim, 4, 2) if head_dim <= 64 else _attention_tile(32, 32, head_dim, 8, 2)
    if head_dim > 64 and crowded:
        return _attention_tile(128, 16, head_dim, 8, 2)
    block_m, num_warps = (64, 4) if queries <= 64 else (128, 8)
    block_n = 32 if head_dim > 64 or (crowded and capability >= 100) else 64
    return _attention_tile(block_m, block_n, head_dim, num_warps, 2)


def attention_bwd_dk_dv(keys: int, head_dim: int, item_size: int, crowded: bool, capability: int) -> AttentionTile:
    """Tile of the pass over queries that gives dk and dv, for sequences of `keys`.

    Two sums, dk and dv, take 64 registers of a thread where keys are 16 a warp and head dims 64, so only 32 queries
    a step fit beside them. Asynchronous products have their 64 rows in the keys. Wide heads split the sums among 8
    warps; what `mma.sync` then holds of keys and values leaves room for 16 queries a step. 100 has its sums in tensor
    memory.
    """
    if item_size == 4:
        return _fp32_attention_tile(head_dim)
    if head_dim <= 64:
        if _warpgroups(capability) and keys > 64:
            return _attention_tile(32, 128, head_dim, 8, 2)
        return _attention_tile(32, 64 if _warpgroups(capability) or not crowded else 32, head_dim, 4, 2)
    if _warpgroups(capability) and capability >= 100:
        wide = head_dim > 128 or keys <= 64
        return _attention_tile(32, 64 if wide else 128, head_dim, 8, 2)
    if head_dim > 128:
        return _attention_tile(16, 16, head_dim, 8, 1)
    if _warpgroups(capability):
        return _attention_tile(16, 64 if crowded or keys <= 64 else 128, head_dim, 8, 2)
    return _attention_tile(16 if crowded else 32, 32, head_dim, 8, 2)


def attention_mask_bwd(queries: int, head_dim: int, item_size: int, capability: int) -> AttentionTile:
    """Tile of the float mask's gradient, for `queries`. Every step reads queries, keys and mask anew, and adds to one
    sum of the scores' shape. These, not the products, fill the registers, so that tiles are the largest ones that do
    not spill with dropout (`crowded` would only save a few queries), and a pipeline would not fit."""
    if item_size == 4:
        return _fp32_attention_tile(head_dim)
    if queries <= 16 or head_dim > 128 or (head_dim > 64 and not _warpgroups(capability)):
        return _attention_tile(16, 32, head_dim, 8 if head_dim > 128 else 4, 1)
    if _warpgroups(capability):
        return _attention_tile(128, 32 if head_dim <= 64 else 16, head_dim, 8, 1)
    return _attention_tile(64, 32, head_dim, 4, 1)
