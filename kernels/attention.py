"""softmax(scale q k^T + mask) v, padded and packed, without the scores in memory: forward.

One program a block of queries, one pass over the keys (online softmax, Milakov and Gimelshein 2018), in base 2 with
log2(e) folded into the scale:

    s = log2e (scale q k^T)     m = max(s)     p = 2^(s - m)     l = sum(p)     out = p v / l

A float mask is added in natural units, and log2e applied to s - m: its largest finite values, which are arithmetic and
no masking, would overflow in base 2. A row without any key has m = -inf, for which 0 takes its place: p = 0, out = 0.
Saved are m (natural units) and ln(l), not their sum: where m is as large as such a mask, ln(l) would drown in it, and
backward would take the wrong p.

FLOPs: 4 S_q S_k D a head. Bytes, with e-byte elements: (2 S_q + 2 S_k) D e a head, the floor, and 8 S_q.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertfast.dropout import STREAMS
from bertfast.kernels import tiles
from bertfast.kernels.common import dot, keep_mask, store_cast
from bertfast.kernels.gemm import input_precision
from bertfast.kernels.launch import Dropout, Launcher, device_of, dropout_of

LOG2E: tl.constexpr = tl.constexpr(math.log2(math.e))
LN2: tl.constexpr = tl.constexpr(math.log(2.0))
STREAM: tl.constexpr = tl.constexpr(STREAMS["attention"])
SEQUENCES: tl.constexpr = tl.constexpr(1024)  # looked at a step by `sequence_of`; most batches have fewer


@triton.jit
def sequence_of(cu_seqlens_ptr, i_block, sequences, BLOCK: tl.constexpr):
    """The sequence that block number `i_block` belongs to.

    Sequence s owns the blocks from cu_seqlens[s] // BLOCK + s on: room for its ceil(length / BLOCK) blocks whatever
    the lengths are, in total // BLOCK + sequences blocks, with no sum over sequences and nothing to know on the host.
    """
    count = 0
    for first in range(0, sequences, SEQUENCES):
        o_s = first + tl.arange(0, SEQUENCES)
        m_s = o_s < sequences
        begin = tl.load(cu_seqlens_ptr + o_s, mask=m_s, other=0)
        count += tl.sum((m_s & (begin // BLOCK + o_s <= i_block)).to(tl.int32))
    return count - 1


@triton.jit
def span(cu_seqlens_ptr, total):
    """Where a sequence begins and how long it is; inside the tensor also where nobody has looked at the values."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + 1), begin), total)
    return begin.to(tl.int64), (end - begin).to(tl.int32)


@triton.jit
def locate(
    cu_seqlens_ptr,  # of the sequences that blocks are cut from: queries or keys
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    i_block,
    i_head,
    length_q,
    length_k,
    sequences,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What block `i_block` of row `i_head` works on: batch and head, the block's number in its sequence, where the
    sequence's queries and keys begin among the packed ones, their lengths, by how many keys causality is shifted
    (packed, the last query sees the last key), and batch * heads + head where `keep_mask` has a row's upper half."""
    if cu_seqlens_ptr is None:
        i_b, i_h, begin_q, begin_k, offset, plane = i_head // H, i_head % H, 0, 0, 0, i_head
    else:
        i_b, i_h = sequence_of(cu_seqlens_ptr, i_block, sequences, BLOCK), i_head
        i_block -= (tl.load(cu_seqlens_ptr + i_b) // BLOCK).to(tl.int32) + i_b
        begin_q, length_q = span(cu_seqlens_q_ptr + i_b, length_q)
        begin_k, length_k = span(cu_seqlens_k_ptr + i_b, length_k)
        offset = length_k - length_q
        plane = i_b * H + i_h
    return (
        i_b.to(tl.int64),
        i_h.to(tl.int64),
        i_block,
        begin_q,
        begin_k,
        length_q,
        length_k,
        offset,
        plane.to(tl.int64) << 32,
    )


@triton.jit
def load_rows(ptr, o_m, stride_m, length, BOUNDED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK, BLOCK_D] rows of length D. What is beyond the sequence may be NaN, and 0 x NaN is NaN: it is not read."""
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
def masked_scores(
    b_s,  # fp32, scaled; queries by keys, or the other way round
    mask_ptr,
    o_m,  # queries, a column (or row) of indices
    o_n,  # keys, a row (or column)
    stride_mask_m,
    stride_mask_n,
    length_q,
    length_k,
    offset,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """The scores with what takes no part at -inf: keys beyond the sequence, masked ones, and those behind the query."""
    if MASK != "none":
        p_mask = mask_ptr + o_n.to(tl.int64) * stride_mask_n
        inside = o_n < length_k
        if MASK_ROWS:
            p_mask += o_m.to(tl.int64) * stride_mask_m
            inside = inside & (o_m < length_q)
        if MASK == "bool":
            b_s = tl.where(tl.load(p_mask, mask=inside, other=0) != 0, b_s, float("-inf"))
        else:
            b_s += tl.load(p_mask, mask=inside, other=0.0).to(tl.float32)
    if BOUNDED:
        b_s = tl.where(o_n < length_k, b_s, float("-inf"))
    if IS_CAUSAL:
        b_s = tl.where(o_n <= o_m + offset, b_s, float("-inf"))
    return b_s


@triton.jit
def attend(
    b_acc,  # [BLOCK_M, BLOCK_D] fp32
    b_max,  # [BLOCK_M] fp32
    b_sum,  # [BLOCK_M] fp32
    b_q,  # [BLOCK_M, BLOCK_D]
    k_ptr,
    v_ptr,
    mask_ptr,
    seed_ptr,
    o_m,
    first,
    stride_k_n,
    stride_v_n,
    stride_mask_m,
    stride_mask_n,
    length_q,
    length_k,
    offset,
    plane,
    scale,
    last_dropped,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One step of the online softmax: the keys from `first` on."""
    o_n = first + tl.arange(0, BLOCK_N)
    # [BLOCK_N, BLOCK_D]
    b_k = load_rows(k_ptr, o_n, stride_k_n, length_k, BOUNDED, D, BLOCK_D)
    b_v = load_rows(v_ptr, o_n, stride_v_n, length_k, BOUNDED, D, BLOCK_D)
    # [BLOCK_M, BLOCK_N]
    b_s = dot(b_q, b_k.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), INPUT_PRECISION) * scale
    b_s = masked_scores(
        b_s, mask_ptr, o_m[:, None], o_n[None, :], stride_mask_m, stride_mask_n, length_q, length_k, offset,
        MASK, MASK_ROWS, IS_CAUSAL, BOUNDED,
    )  # fmt: skip
    b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
    # Of a row that has met no key yet: -inf - -inf is NaN.
    b_pivot = tl.where(b_new == float("-inf"), 0.0, b_new)
    to_base_2 = LOG2E if MASK == "float" else 1.0
    b_p = tl.exp2((b_s - b_pivot[:, None]) * to_base_2)
    b_alpha = tl.exp2((b_max - b_pivot) * to_base_2)
    b_sum = b_sum * b_alpha + tl.sum(b_p, axis=1)
    if seed_ptr is not None:
        keep = keep_mask(tl.load(seed_ptr), plane + o_m, first, last_dropped, STREAM, BLOCK_M, BLOCK_N)
        b_p = tl.where(keep, b_p, 0.0)
    b_acc = dot(store_cast(b_p, b_v.dtype), b_v, b_acc * b_alpha[:, None], INPUT_PRECISION)
    return b_acc, b_new, b_sum


@triton.jit(do_not_specialize=["length_q", "length_k", "blocks", "sequences", "last_dropped"])
def attention_fwd_kernel(
    q_ptr,  # (B, H, S_q, D); packed: (T_q, H, D)
    k_ptr,  # (B, H, S_k, D); packed: (T_k, H, D)
    v_ptr,
    mask_ptr,  # (B, H, S_q, S_k) by strides, bool as uint8 or float, or None
    cu_seqlens_q_ptr,  # (sequences + 1,), or None where sequences are padded
    cu_seqlens_k_ptr,
    seed_ptr,  # (1,) or None
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
    length_q,  # S_q; packed: T_q
    length_k,
    blocks,  # of queries a head
    sequences,
    scale,
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
):
    i_block, i_head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    stats_ptr += i_head.to(tl.int64) * length_q
    stride_stats = (tl.num_programs(0) // blocks).to(tl.int64) * length_q
    i_b, i_h, i_m, begin_q, begin_k, length_q, length_k, offset, plane = locate(
        cu_seqlens_q_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, i_block, i_head, length_q, length_k, sequences, H, BLOCK_M
    )
    if i_m * BLOCK_M >= length_q:
        return
    q_ptr += i_b * stride_q_b + i_h * stride_q_h + begin_q * stride_q_m
    k_ptr += i_b * stride_k_b + i_h * stride_k_h + begin_k * stride_k_n
    v_ptr += i_b * stride_v_b + i_h * stride_v_h + begin_k * stride_v_n
    out_ptr += i_b * stride_out_b + i_h * stride_out_h + begin_q * stride_out_m
    stats_ptr += begin_q
    if mask_ptr is not None:
        mask_ptr += i_b * stride_mask_b + i_h * stride_mask_h
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    b_q = load_rows(q_ptr, o_m, stride_q_m, length_q, True, D, BLOCK_D)
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    # Keys that every query of the block sees whole, and the rest: causality and bounds cost the rest only.
    end, whole = length_k, length_k // BLOCK_N * BLOCK_N
    if IS_CAUSAL:
        end = tl.minimum(end, tl.maximum((i_m + 1) * BLOCK_M + offset, 0))
        whole = tl.minimum(whole, tl.maximum(i_m * BLOCK_M + offset + 1, 0) // BLOCK_N * BLOCK_N)
    for first in range(0, whole, BLOCK_N):
        b_acc, b_max, b_sum = attend(
            b_acc, b_max, b_sum, b_q, k_ptr, v_ptr, mask_ptr, seed_ptr, o_m, first, stride_k_n, stride_v_n,
            stride_mask_m, stride_mask_n, length_q, length_k, offset, plane, scale, last_dropped,
            MASK, MASK_ROWS, False, False, INPUT_PRECISION, D, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for first in range(whole, end, BLOCK_N):
        b_acc, b_max, b_sum = attend(
            b_acc, b_max, b_sum, b_q, k_ptr, v_ptr, mask_ptr, seed_ptr, o_m, first, stride_k_n, stride_v_n,
            stride_mask_m, stride_mask_n, length_q, length_k, offset, plane, scale, last_dropped,
            MASK, MASK_ROWS, IS_CAUSAL, True, INPUT_PRECISION, D, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    m_m = o_m < length_q
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = b_acc * (keep_scale / b_sum)[:, None]
    o_d = tl.arange(0, BLOCK_D)
    p_out = out_ptr + o_m[:, None].to(tl.int64) * stride_out_m + o_d[None, :]
    tl.store(p_out, store_cast(b_out, out_ptr.dtype.element_ty), mask=m_m[:, None] & (o_d < D)[None, :])
    to_natural = 1.0 if MASK == "float" else LN2
    tl.store(stats_ptr + o_m, b_max * to_natural, mask=m_m)
    tl.store(stats_ptr + stride_stats + o_m, tl.log2(b_sum) * LN2, mask=m_m)


_fwd = Launcher(attention_fwd_kernel)


def strides_of(x: Tensor | None) -> tuple[int, int, int]:
    """Strides of batch, head and position of (B, H, S, D); of packed (T, H, D), which has no batch."""
    return (0, x.stride(1), x.stride(0)) if x.dim() == 3 else x.stride()[:3]


def unit_rows(x: Tensor) -> Tensor:
    """`x` with unit stride in its last dimension, copied if need be."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class Mask(NamedTuple):
    """An attention mask as kernels take it.

    Attributes:
        values: None, uint8 (bool) or float, with the strides of its broadcast to (B, H, S_q, S_k).
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


def mask_of(attn_mask: Tensor | None, shape: tuple[int, ...]) -> Mask:
    """`attn_mask` broadcast to `shape` (B, H, S_q, S_k) by strides alone."""
    if attn_mask is None:
        return Mask(None, (0,) * 4, "none", False)
    kind = "bool" if attn_mask.dtype == torch.bool else "float"
    values = attn_mask.view(torch.uint8) if kind == "bool" else attn_mask
    strides = values.expand(shape).stride()
    return Mask(values, strides, kind, strides[2] != 0 and shape[2] > 1)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out: Tensor,
    stats: Tensor,
    dropout: Dropout,
    is_causal: bool,
    scale: float,
) -> None:
    """Fills out and stats; padded (B, H, S, D) without `cu_seqlens`, packed (T, H, D) with them."""
    heads, head_dim = query.shape[1], query.shape[-1]
    length_q, length_k = (x.shape[0 if x.dim() == 3 else 2] for x in (query, key))
    sequences = 0 if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    mean = length_q // max(sequences, 1)
    tile = tiles.attention_fwd(mean, head_dim, query.element_size(), mask.per_query, device_of(query).capability)
    blocks = tiles.attention_blocks(length_q, tile.block_m, sequences)
    _fwd(
        (blocks * heads * (1 if sequences else query.shape[0]),),
        query,
        key,
        value,
        mask.values,
        cu_seqlens_q,
        cu_seqlens_k,
        dropout.seed,
        out,
        stats,
        *strides_of(query),
        *strides_of(key),
        *strides_of(value),
        *mask.strides,
        *strides_of(out),
        length_q,
        length_k,
        blocks,
        sequences,
        scale * mask.scale,
        dropout.last_dropped,
        dropout.scale,
        mask.kind,
        mask.per_query,
        is_causal,
        input_precision(query.dtype),
        heads,
        head_dim,
        tile.block_m,
        tile.block_n,
        tile.block_d,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


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
    """out (B, H, S_q, D), heads next to each other in memory as the output projection reads them, and stats
    (2, B, H, S_q) fp32: the rows' maxima and the logarithms of their sums, whose sum is lse."""
    batch, heads, s_q, head_dim = query.shape
    out = query.new_empty((batch, s_q, heads, head_dim)).transpose(1, 2)
    stats = query.new_empty((2, batch, heads, s_q), dtype=torch.float32)
    if out.numel() > 0:
        query, key, value = unit_rows(query), unit_rows(key), unit_rows(value)
        mask = mask_of(attn_mask, (batch, heads, s_q, key.shape[2]))
        dropout = dropout_of(seed, dropout_p)
        forward(query, key, value, mask, None, None, out, stats, dropout, is_causal, scale)
    return out, stats
