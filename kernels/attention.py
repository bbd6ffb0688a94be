"""softmax(scale q k^T + mask) v, padded and packed, without the scores in memory: forward.

One program per block of queries, in one pass over the keys (online softmax, Milakov and Gimelshein 2018), in base 2
with log2(e) folded into the scale:

    s = log2(e) scale q k^T     m = max(s)     p = 2^(s - m)     l = sum(p)     out = p v / l

A float mask is added in natural units, and log2(e) applied to s - m: its largest finite values, which are arithmetic
and no masking, would overflow in base 2. A row without any key has m = -inf; 0 is subtracted instead, so that p = 0
and out = 0. Saved are m (natural units) and ln(l), not their sum, which is lse: where m is as large as such a mask,
ln(l) would drown in it, and backward would take the wrong p.

The last block of keys comes first. It alone meets the end of the sequence, so only its loads are masked (what is beyond
may be NaN, and 0 x NaN is NaN), and it rescales nothing. A sequence of at most BLOCK_N keys is done with it; all other
blocks are whole, and may be loaded through a tensor descriptor.

FLOPs: 4 S_q S_k D a head. Bytes, with e-byte elements: (2 S_q + 2 S_k) D e a head, the floor, and 8 S_q.

Exponentials count beside FLOPs. Read from machine code (Triton 3.9, bf16, no mask, head dim 64, 64 keys a step), a
thread's 32 scores take

    8.0    399 instructions: 64 HMMA, 34 MUFU.EX2, 36 FMNMX, 36 FADD, 34 FFMA, 34 FMUL (out rescaled), 16 F2FP, 32 LDSM
    9.0    299:               8 HGMMA, 34 MUFU.EX2, 36 FMNMX, 36 FADD, 34 FFMA, 34 FMUL, 16 F2FP
    10.0   292:               8 UTCHMMA, 33 MUFU.EX2, 19 FMNMX and FMNMX3, 18 FADD and FADD2, 33 FFMA, 33 FMUL, 16 F2FP

and a scheduler, which issues one a clock and makes 4 exponentials, has of a tile's step

    8.0    one warp,  64 queries: 512 clocks of products, 272 of exponentials, 399 of issue
    9.0    two warps, 128:        512,                    544,                 598
    10.0   two warps, 128:        256,                    528,                 584

so that 8.0 is bound by products, 9.0 by three nearly equal limits, which have to overlap, 10.0 by exponentials and
issue. Hence tiles that are small enough for two programs on a multiprocessor, one's exponentials beside the other's
products, and a scale that costs no instruction.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bertfast.dropout import STREAMS
from bertfast.kernels import tiles
from bertfast.kernels.common import dot, keep_mask, store_cast, warp_uniform
from bertfast.kernels.gemm import input_precision
from bertfast.kernels.launch import Dropout, Launcher, device_of, dropout_of

LOG2E: tl.constexpr = tl.constexpr(math.log2(math.e))
LN2: tl.constexpr = tl.constexpr(math.log(2.0))
STREAM: tl.constexpr = tl.constexpr(STREAMS["attention"])


@triton.jit
def sequence_bounds(cu_seqlens_ptr, o_s, m_s, total):
    """First token and length of sequences `o_s`, clipped to the tensor: on a GPU nobody has validated cu_seqlens."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + o_s, mask=m_s, other=0), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + o_s + 1, mask=m_s, other=0), begin), total)
    return begin.to(tl.int64), (end - begin).to(tl.int32)


@triton.jit
def sequence_of(cu_seqlens_ptr, i_block, sequences, total, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr):
    """The sequence that block number `i_block` belongs to, and the block's number in it: -1 beyond the last block.

    Sequences longer than twice the mean come first, so that none of them starts when the others are done. Blocks are
    total // BLOCK + sequences at most, whatever the lengths. Each program counts anew, SEQUENCES a step: a map made by
    another kernel would be one launch more for each layer, or have to be held to what it was made from.
    """
    twice_mean = 2 * (total // sequences)
    long_blocks = 0
    for first in range(0, sequences, SEQUENCES):
        o_s = first + tl.arange(0, SEQUENCES)
        _, b_length = sequence_bounds(cu_seqlens_ptr, o_s, o_s < sequences, total)
        long_blocks += tl.sum(tl.where(b_length > twice_mean, tl.cdiv(b_length, BLOCK), 0))
    is_long = i_block < long_blocks
    i_block -= tl.where(is_long, 0, long_blocks)
    i_s, i_m, before = 0, -1, 0
    for first in range(0, sequences, SEQUENCES):
        o_s = first + tl.arange(0, SEQUENCES)
        _, b_length = sequence_bounds(cu_seqlens_ptr, o_s, o_s < sequences, total)
        b_blocks = tl.where((b_length > twice_mean) == is_long, tl.cdiv(b_length, BLOCK), 0)
        b_end = before + tl.cumsum(b_blocks)
        m_own = (b_end - b_blocks <= i_block) & (i_block < b_end)
        i_s += tl.sum(tl.where(m_own, o_s, 0))
        i_m += tl.sum(tl.where(m_own, i_block - (b_end - b_blocks) + 1, 0))
        before += tl.sum(b_blocks)
    return warp_uniform(i_s), warp_uniform(i_m)


@triton.jit
def block_of_program(
    cu_seqlens_ptr,  # of what blocks are cut from, queries or keys; None where sequences are padded
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    blocks,
    length_q,
    length_k,
    total,  # length_q or length_k, of what blocks are cut from
    sequences,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Batch entry and head, a block's number in its sequence (-1: none), where the sequence's queries and keys begin,
    their lengths, by how many keys causality is shifted (packed, the last query sees the last key), the first row of
    the sequence in a plane of the statistics, and of dropout. Indices within one sequence are int32, all others int64.

    Padded, the blocks of one head run next to each other and share its keys in L2. Packed, the heads of one block do:
    otherwise long sequences would not start first.
    """
    if cu_seqlens_ptr is None:
        i_block, i_row = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
        i_b, i_h = i_row // H, i_row % H
        begin_q, begin_k, causal_offset = i_row * 0, i_row * 0, 0
        stats_row, dropout_row = i_row * length_q, i_row << 32
    else:
        i_block, i_h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
        i_b, stats_row = i_h * 0, i_h * length_q
        i_s, i_block = sequence_of(cu_seqlens_ptr, i_block, sequences, total, BLOCK, SEQUENCES)
        begin_q, length_q = sequence_bounds(cu_seqlens_q_ptr, i_s, True, length_q)
        begin_k, length_k = sequence_bounds(cu_seqlens_k_ptr, i_s, True, length_k)
        causal_offset = length_k - length_q
        stats_row, dropout_row = stats_row + begin_q, (i_s.to(tl.int64) * H + i_h) << 32
    return i_b, i_h, i_block, begin_q, begin_k, length_q, length_k, causal_offset, stats_row, dropout_row


@triton.jit
def rows_at(ptr, i_b, i_h, begin, stride_b, stride_h, stride_m):
    return ptr + i_b * stride_b + i_h * stride_h + begin * stride_m


@triton.jit
def last_key_block(i_m, length_k, causal_offset, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key of the last block that queries of block `i_m` see, 0 where they see none."""
    end = length_k
    if IS_CAUSAL:
        end = tl.minimum(end, (i_m + 1) * BLOCK_M + causal_offset)
    return tl.maximum(end - 1, 0) // BLOCK_N * BLOCK_N


@triton.jit
def load_rows(ptr, o_m, stride_m, length, BOUNDED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK, BLOCK_D] rows of length D, 0 beyond them, and `BOUNDED` also beyond the sequence."""
    o_d = tl.arange(0, BLOCK_D)
    p_rows = ptr + o_m[:, None].to(tl.int64) * stride_m + o_d[None, :]
    if BOUNDED and D != BLOCK_D:
        return tl.load(p_rows, mask=(o_m < length)[:, None] & (o_d < D)[None, :], other=0.0)
    if BOUNDED:
        return tl.load(p_rows, mask=(o_m < length)[:, None], other=0.0)
    if D != BLOCK_D:
        return tl.load(p_rows, mask=(o_d < D)[None, :], other=0.0)
    return tl.load(p_rows)


@triton.jit
def store_rows(ptr, o_m, stride_m, length, b_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores [BLOCK, BLOCK_D] fp32 within `length` and D."""
    o_d = tl.arange(0, BLOCK_D)
    p_rows = ptr + o_m[:, None].to(tl.int64) * stride_m + o_d[None, :]
    tl.store(p_rows, store_cast(b_rows, ptr.dtype.element_ty), mask=(o_m < length)[:, None] & (o_d < D)[None, :])


@triton.jit
def load_block(
    desc,  # (B, H, S, D) in blocks of (1, 1, BLOCK, BLOCK_D), or None
    ptr,
    i_b,
    i_h,
    begin,
    first,
    stride_m,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """[BLOCK, BLOCK_D]: rows from `first` on of the sequence that begins at `begin`, none of them beyond its end."""
    if desc is not None:
        b_rows = desc.load([i_b.to(tl.int32), i_h.to(tl.int32), (first + begin).to(tl.int32), 0])
        return b_rows.reshape(BLOCK, BLOCK_D)
    return load_rows(ptr, first + tl.arange(0, BLOCK), stride_m, 0, False, D, BLOCK_D)


@triton.jit
def masked_scores(
    b_s,  # products of queries and keys, fp32; queries by keys, or the other way round
    mask_ptr,
    o_m,  # queries, a column (or row) of indices
    o_n,  # keys, a row (or column)
    stride_mask_m,
    stride_mask_n,
    length_q,
    length_k,
    causal_offset,
    scale,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Scores with what takes no part at -inf: masked keys, those beyond the sequence, and future keys under causality.
    They are multiplied by `scale` only with a float mask; otherwise the caller fuses that into its multiply-add."""
    if MASK != "none":
        p_mask = mask_ptr + o_n.to(tl.int64) * stride_mask_n
        m_mask = o_n < length_k
        if MASK_ROWS:
            p_mask += o_m.to(tl.int64) * stride_mask_m
            m_mask = m_mask & (o_m < length_q)
        if MASK == "bool":
            b_s = tl.where(tl.load(p_mask, mask=m_mask, other=0) != 0, b_s, float("-inf"))
        else:
            b_s = b_s * scale + tl.load(p_mask, mask=m_mask, other=0.0).to(tl.float32)
    if BOUNDED:
        b_s = tl.where(o_n < length_k, b_s, float("-inf"))
    if IS_CAUSAL:
        b_s = tl.where(o_n <= o_m + causal_offset, b_s, float("-inf"))
    return b_s


@triton.jit
def exponential(b_s, pivot, scale, MASK: tl.constexpr):
    """e^(score - pivot) of what `masked_scores` returns; the pivot in natural units with a float mask, else in base
    2."""
    return tl.exp2((b_s - pivot) * LOG2E if MASK == "float" else b_s * scale - pivot)


@triton.jit
def online_softmax_step(
    b_acc,  # [BLOCK_M, BLOCK_D] fp32
    b_max,  # [BLOCK_M] fp32
    b_sum,  # [BLOCK_M] fp32
    b_q,  # [BLOCK_M, BLOCK_D]
    b_k,  # [BLOCK_N, BLOCK_D]
    b_v,
    mask_ptr,
    seed_ptr,
    o_m,
    first,
    stride_mask_m,
    stride_mask_n,
    length_q,
    length_k,
    causal_offset,
    dropout_row,
    scale,
    last_dropped,
    FIRST: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One step of the online softmax: the keys from `first` on. The FIRST step, whose block alone may reach beyond the
    sequence, has nothing to rescale."""
    o_n = first + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_N]
    b_s = dot(b_q, b_k.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), INPUT_PRECISION)
    b_s = masked_scores(
        b_s, mask_ptr, o_m[:, None], o_n[None, :], stride_mask_m, stride_mask_n, length_q, length_k, causal_offset,
        scale, MASK, MASK_ROWS, IS_CAUSAL, FIRST,
    )  # fmt: skip
    b_new = tl.max(b_s, axis=1)
    if MASK != "float":
        b_new *= scale
    if not FIRST:
        b_new = tl.maximum(b_max, b_new)
    # Rows without a key so far have b_new = -inf, and -inf - -inf is NaN.
    b_pivot = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = exponential(b_s, b_pivot[:, None], scale, MASK)
    b_all = tl.sum(b_p, axis=1)
    if seed_ptr is not None:
        m_kept = keep_mask(tl.load(seed_ptr), dropout_row + o_m, first, last_dropped, STREAM, BLOCK_M, BLOCK_N)
        b_p = tl.where(m_kept, b_p, 0.0)
    if not FIRST:
        b_alpha = tl.exp2((b_max - b_pivot) * LOG2E if MASK == "float" else b_max - b_pivot)
        b_all += b_sum * b_alpha
        b_acc *= b_alpha[:, None]
    return dot(store_cast(b_p, b_v.dtype), b_v, b_acc, INPUT_PRECISION), b_new, b_all


@triton.jit(do_not_specialize=["stride_stats", "length_q", "length_k", "blocks", "sequences", "last_dropped"])
def attention_fwd_kernel(
    q_ptr,  # (B, H, S_q, D); packed: (T_q, H, D)
    k_ptr,  # (B, H, S_k, D); packed: (T_k, H, D)
    v_ptr,
    mask_ptr,  # (B, H, S_q, S_k) by strides, bool as uint8 or float, or None
    cu_seqlens_q_ptr,  # (sequences + 1,), or None where sequences are padded
    cu_seqlens_k_ptr,
    seed_ptr,  # (1,) or None
    k_desc,  # of k and v as (B, H, S_k, D), packed as (1, H, T_k, D), or None
    v_desc,
    out_ptr,  # like q
    stats_ptr,  # (2, B, H, S_q) or (2, H, T_q) fp32: the rows' maxima, natural units, and the log of their sums
    stride_q_b,
    stride_q_h,
    stride_q_m,
    stride_k_b,
    stride_k_h,
    stride_k_n,
    stride_v_b,
    stride_v_h,
    stride_v_n,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_out_b,
    stride_out_h,
    stride_out_m,
    stride_stats,
    length_q,  # S_q; packed: T_q
    length_k,
    blocks,  # of queries a head
    sequences,
    scale,  # positive; times log2(e) without a float mask
    last_dropped,
    keep_scale,
    MASK: tl.constexpr,  # "none", "bool" or "float"
    MASK_ROWS: tl.constexpr,  # whether queries have masks of their own
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    i_b, i_h, i_m, begin_q, begin_k, length_q, length_k, causal_offset, stats_row, dropout_row = block_of_program(
        cu_seqlens_q_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, blocks, length_q, length_k, length_q, sequences,
        H, BLOCK_M, SEQUENCES,
    )  # fmt: skip
    if i_m < 0:
        return
    stats_ptr += stats_row
    q_ptr = rows_at(q_ptr, i_b, i_h, begin_q, stride_q_b, stride_q_h, stride_q_m)
    k_ptr = rows_at(k_ptr, i_b, i_h, begin_k, stride_k_b, stride_k_h, stride_k_n)
    v_ptr = rows_at(v_ptr, i_b, i_h, begin_k, stride_v_b, stride_v_h, stride_v_n)
    out_ptr = rows_at(out_ptr, i_b, i_h, begin_q, stride_out_b, stride_out_h, stride_out_m)
    if mask_ptr is not None:
        mask_ptr = rows_at(mask_ptr, i_b, i_h, 0, stride_mask_b, stride_mask_h, 0)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    last = last_key_block(i_m, length_k, causal_offset, IS_CAUSAL, BLOCK_M, BLOCK_N)
    o_n = last + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_D]
    b_q = load_rows(q_ptr, o_m, stride_q_m, length_q, True, D, BLOCK_D)
    # [BLOCK_N, BLOCK_D]
    b_k = load_rows(k_ptr, o_n, stride_k_n, length_k, True, D, BLOCK_D)
    b_v = load_rows(v_ptr, o_n, stride_v_n, length_k, True, D, BLOCK_D)
    # [BLOCK_M, BLOCK_D]
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    b_acc, b_max, b_sum = online_softmax_step(
        b_acc, None, None, b_q, b_k, b_v, mask_ptr, seed_ptr, o_m, last, stride_mask_m, stride_mask_n, length_q,
        length_k, causal_offset, dropout_row, scale, last_dropped,
        True, MASK, MASK_ROWS, IS_CAUSAL, INPUT_PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    for first in range(0, last, BLOCK_N):
        b_k = load_block(k_desc, k_ptr, i_b, i_h, begin_k, first, stride_k_n, D, BLOCK_N, BLOCK_D)
        b_v = load_block(v_desc, v_ptr, i_b, i_h, begin_k, first, stride_v_n, D, BLOCK_N, BLOCK_D)
        b_acc, b_max, b_sum = online_softmax_step(
            b_acc, b_max, b_sum, b_q, b_k, b_v, mask_ptr, seed_ptr, o_m, first, stride_mask_m, stride_mask_n, length_q,
            length_k, causal_offset, dropout_row, scale, last_dropped,
            False, MASK, MASK_ROWS, IS_CAUSAL, INPUT_PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    store_rows(out_ptr, o_m, stride_out_m, length_q, b_acc * (keep_scale / b_sum)[:, None], D, BLOCK_D)
    m_m = o_m < length_q
    to_natural = 1.0 if MASK == "float" else LN2
    tl.store(stats_ptr + o_m, b_max * to_natural, mask=m_m)
    tl.store(stats_ptr + stride_stats + o_m, tl.log2(b_sum) * LN2, mask=m_m)


_fwd = Launcher(attention_fwd_kernel)

# Scales below that may become 0 in fp32, and -inf times 0 is NaN.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def strides_of(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and position of (B, H, S, D); of packed (T, H, D), which has no batch."""
    return (0, x.stride(1), x.stride(0)) if x.dim() == 3 else x.stride()[:3]


def empty_by_position(x: Tensor) -> Tensor:
    """(B, H, S, D) uninitialised, (B, S, H, D) in memory: heads next to each other, as the projections around attention
    read and write them."""
    batch, heads, length, head_dim = x.shape
    return x.new_empty((batch, length, heads, head_dim)).transpose(1, 2)


def unit_rows(x: Tensor) -> Tensor:
    """`x` with unit stride in its last dimension, copied if need be."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def descriptor_of(x: Tensor, block: int, block_d: int) -> TensorDescriptor | None:
    """`x` (B, H, S, D), or packed (T, H, D), for blocks of one head; None where its memory does not allow it."""
    x = x.transpose(0, 1).unsqueeze(0) if x.dim() == 3 else x
    steps = [stride * x.element_size() for stride in x.stride()[:3]]
    if x.stride(-1) != 1 or x.data_ptr() % 16 or any(step == 0 or step % 16 for step in steps):
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, block, block_d])


class Mask(NamedTuple):
    """An attention mask as kernels take it.

    Attributes:
        values: None, uint8 (bool) or float.
        strides: of its broadcast to (B, H, S_q, S_k).
        kind: MASK of the kernels.
        per_query: MASK_ROWS of the kernels.
    """

    values: Tensor | None
    strides: tuple[int, ...]
    kind: str
    per_query: bool

    @property
    def scale(self) -> float:
        """Into the units of the kernels' scores."""
        return 1.0 if self.kind == "float" else math.log2(math.e)


NO_MASK = Mask(None, (0,) * 4, "none", False)


def mask_of(attn_mask: Tensor | None, shape: tuple[int, ...]) -> Mask:
    """`attn_mask` broadcast to `shape` (B, H, S_q, S_k) by strides alone."""
    if attn_mask is None:
        return NO_MASK
    kind = "bool" if attn_mask.dtype == torch.bool else "float"
    values = attn_mask.view(torch.uint8) if kind == "bool" else attn_mask
    strides = values.expand(shape).stride()
    return Mask(values, strides, kind, strides[2] != 0 and shape[2] > 1)


class AttentionCall(NamedTuple):
    """What both passes of attention launch with.

    Attributes:
        query, key, value: (B, H, S, D), or packed (T, H, D); unit stride in the last dimension.
        mask: padded only.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) contiguous, or None where sequences are padded.
        scale: positive.
        dq_scale: of the queries' gradient, the scale as it was given.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    dropout: Dropout
    is_causal: bool
    scale: float
    dq_scale: float

    @property
    def sequences(self) -> int:
        """How many are packed; 0 where they are padded."""
        return 0 if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    @property
    def lengths(self) -> tuple[int, int]:
        """S_q and S_k; packed, T_q and T_k."""
        position = 2 if self.cu_seqlens_q is None else 0
        return self.query.shape[position], self.key.shape[position]

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Queries and keys of a sequence, packed of the mean one."""
        length_q, length_k = self.lengths
        sequences = max(self.sequences, 1)
        return length_q // sequences, length_k // sequences

    @property
    def crowded(self) -> bool:
        """Whether registers hold more than scores: what a mask adds to each or says of each, dropout's random words, or
        rows read by single elements, because nothing is known of their alignment."""
        inputs = self.query, self.key, self.value
        aligned = all(x.data_ptr() % 16 == 0 for x in inputs) and all(step % 16 == 0 for step in self.strides[:9])
        return self.mask.kind == "float" or self.mask.per_query or self.dropout.seed is not None or not aligned

    @property
    def rows(self) -> int:
        """Rows of the statistics: B H, or packed H."""
        return self.query.shape[1] * (self.query.shape[0] if self.cu_seqlens_q is None else 1)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """What every kernel reads first."""
        ends = self.cu_seqlens_q, self.cu_seqlens_k
        return self.query, self.key, self.value, self.mask.values, *ends, self.dropout.seed

    @property
    def strides(self) -> tuple[int, ...]:
        return *strides_of(self.query), *strides_of(self.key), *strides_of(self.value), *self.mask.strides

    @property
    def score_scale(self) -> float:
        """`scale` in the units of the kernels' scores."""
        return self.scale * self.mask.scale

    @property
    def constants(self) -> tuple:
        """Constant expressions of every kernel, up to D."""
        precision = input_precision(self.query.dtype)
        heads, head_dim = self.query.shape[1], self.query.shape[-1]
        return self.mask.kind, self.mask.per_query, self.is_causal, precision, heads, head_dim


def call_of(query, key, value, mask, cu_seqlens_q, cu_seqlens_k, seed, dropout_p, is_causal, scale) -> AttentionCall:
    """Arguments of the ops as kernels take them. Kernels take the maximum before they scale, so the scale's sign goes
    into the queries."""
    dq_scale = scale
    if abs(scale) < SMALLEST_SCALE:
        query, scale = torch.zeros_like(query), 1.0
    elif scale < 0:
        query, scale = query.neg(), -scale
    if cu_seqlens_q is not None and cu_seqlens_q.numel() < 2 and query.shape[0] + key.shape[0] > 0:
        raise ValueError(f"cu_seqlens_q must hold the ends of a sequence or more, got {cu_seqlens_q.numel()} values")
    ends = (None if t is None else t.contiguous() for t in (cu_seqlens_q, cu_seqlens_k))
    inputs = map(unit_rows, (query, key, value))
    return AttentionCall(*inputs, mask, *ends, dropout_of(seed, dropout_p), is_causal, scale, dq_scale)


def launch_fwd(call: AttentionCall, out: Tensor, stats: Tensor) -> None:
    """Fills out and stats."""
    query, key, value = call.query, call.key, call.value
    (length_q, length_k), (queries, keys), sequences = call.lengths, call.mean_lengths, call.sequences
    capability = device_of(query).capability
    tile = tiles.attention_fwd(queries, query.shape[-1], query.element_size(), call.crowded, capability)
    k_desc = v_desc = None
    if tiles.attention_descriptors(keys, query.element_size(), capability):
        k_desc, v_desc = (descriptor_of(x, tile.block_n, tile.block_d) for x in (key, value))
    blocks = tiles.attention_blocks(length_q, tile.block_m, sequences)
    _fwd(
        (blocks * call.rows,), *call.inputs, k_desc, v_desc, out, stats,
        *call.strides, *strides_of(out), stats.stride(0), length_q, length_k, blocks, sequences,
        call.score_scale, call.dropout.last_dropped, call.dropout.scale, *call.constants,
        tile.block_m, tile.block_n, tile.block_d, tiles.attention_sequences(sequences),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def attention_fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (B, H, S_q, D), (B, S_q, H, D) in memory, and stats (2, B, H, S_q) fp32: the rows' maxima and the logarithms
    of their sums, which add up to lse."""
    out = empty_by_position(query)
    stats = query.new_empty((2, *query.shape[:3]), dtype=torch.float32)
    if out.numel() > 0:
        mask = mask_of(attn_mask, (*query.shape[:3], key.shape[2]))
        launch_fwd(call_of(query, key, value, mask, None, None, seed, dropout_p, is_causal, scale), out, stats)
    return out, stats
