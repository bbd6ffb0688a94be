"""Three gathers, their sum, LayerNorm and dropout in one pass over memory, forward and backward.

Forward, per token with its ids, in fp32 whatever the storage:

    z   = word[input_id] + token_type[token_type_id] + position[position_id]       rounded to its own dtype
    out = dropout((z - mean) * rstd * weight + bias)

Shapes: ids (B, S) of any strides, so that positions (1, S) against a batch are never expanded; tables (rows, N). An id
outside its table is not read and makes its row NaN. Bytes for M = B S tokens of e-byte elements: a word row read and
out written, 2 M N e, the floor, and M N e more where backward wants the sum; the position and token type rows that a
batch uses stay in L2. Eager reads and writes about 12 M N e: three gathers, two sums, LayerNorm, dropout and its mask.

Backward: dout through dropout, then LayerNorm's backward (`layer_norm`), which gives dz, dweight and dbias in
3 M N e bytes. The tables' gradients, dz summed by id, are torch's (`bertfast.ops.embed_layer_norm`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertfast.dropout import STREAMS
from bertfast.kernels import tiles
from bertfast.kernels.column_sum import column_sum
from bertfast.kernels.common import keep_mask, round_to, store_cast
from bertfast.kernels.launch import Launcher, as_rows, device_of, dropout_of
from bertfast.kernels.layer_norm import normalise, normalise_bwd

_STREAM: tl.constexpr = tl.constexpr(STREAMS["embed_layer_norm"])


@triton.jit
def gather(ids, m_m, table_ptr, rows, stride, o_n, m_n):
    """Rows of a table in fp32, [BLOCK_M, BLOCK_N]: NaN for an id outside it."""
    inside = (ids >= 0) & (ids < rows)
    mask = (m_m & inside)[:, None] & m_n[None, :]
    b_row = tl.load(table_ptr + ids[:, None] * stride + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.where(inside[:, None], b_row, float("nan"))


@triton.jit(
    do_not_specialize=[
        "S",
        "blocks",
        "last_dropped",
        "stride_input_ids_b",
        "stride_input_ids_s",
        "stride_token_type_ids_b",
        "stride_token_type_ids_s",
        "stride_position_ids_b",
        "stride_position_ids_s",
    ]
)
def embed_layer_norm_fwd_kernel(
    weight_ptr,  # (N,)
    bias_ptr,  # (N,)
    input_ids_ptr,  # (B, S), or None
    embeds_ptr,  # (B * S, N), or None; one of the two is given
    word_ptr,  # (word_rows, N)
    token_type_ids_ptr,  # (B, S), or None for 0
    token_type_ptr,  # (token_type_rows, N), or None
    position_ids_ptr,  # (B, S), or None for 0 .. S - 1
    position_ptr,  # (position_rows, N)
    seed_ptr,  # (1,) or None
    out_ptr,  # (B * S, N) contiguous, its dtype that of z
    sum_ptr,  # (B * S, N) contiguous, or None
    mean_ptr,  # (B * S,) fp32
    rstd_ptr,  # (B * S,) fp32
    S,
    blocks,  # of BLOCK_M tokens that a sequence has
    word_rows,
    token_type_rows,
    position_rows,
    stride_input_ids_b,
    stride_input_ids_s,
    stride_token_type_ids_b,
    stride_token_type_ids_s,
    stride_position_ids_b,
    stride_position_ids_s,
    stride_embeds_m,
    stride_word_v,
    stride_token_type_v,
    stride_position_v,
    eps,
    last_dropped,
    keep_scale,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Blocks do not cross sequences: a division for each program instead of one for each token.
    i_b = (tl.program_id(0) // blocks).to(tl.int64)
    o_s = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_m = i_b * S + o_s
    o_n = tl.arange(0, BLOCK_N)
    m_m, m_n = o_s < S, o_n < N
    mask = m_m[:, None] & m_n[None, :]
    # [BLOCK_M, BLOCK_N]
    if input_ids_ptr is not None:
        p_ids = input_ids_ptr + i_b * stride_input_ids_b + o_s * stride_input_ids_s
        ids = tl.load(p_ids, mask=m_m, other=0).to(tl.int64)
        b_z = gather(ids, m_m, word_ptr, word_rows, stride_word_v, o_n, m_n)
    else:
        p_embeds = embeds_ptr + o_m[:, None] * stride_embeds_m + o_n[None, :]
        b_z = tl.load(p_embeds, mask=mask, other=0.0).to(tl.float32)
    if token_type_ptr is not None:
        ids = tl.zeros_like(o_s)
        if token_type_ids_ptr is not None:
            p_ids = token_type_ids_ptr + i_b * stride_token_type_ids_b + o_s * stride_token_type_ids_s
            ids = tl.load(p_ids, mask=m_m, other=0).to(tl.int64)
        b_z += gather(ids, m_m, token_type_ptr, token_type_rows, stride_token_type_v, o_n, m_n)
    ids = o_s
    if position_ids_ptr is not None:
        p_ids = position_ids_ptr + i_b * stride_position_ids_b + o_s * stride_position_ids_s
        ids = tl.load(p_ids, mask=m_m, other=0).to(tl.int64)
    b_z += gather(ids, m_m, position_ptr, position_rows, stride_position_v, o_n, m_n)
    o_out = o_m[:, None] * N + o_n[None, :]
    b_z = round_to(b_z, out_ptr.dtype.element_ty)
    if sum_ptr is not None:
        tl.store(sum_ptr + o_out, store_cast(b_z, sum_ptr.dtype.element_ty), mask=mask)
    b_xhat, b_mean, b_rstd = normalise(b_z, m_n, eps, N)
    b_weight = tl.load(weight_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_bias = tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_out = b_xhat * b_weight[None, :] + b_bias[None, :]
    if seed_ptr is not None:
        keep = keep_mask(tl.load(seed_ptr), o_m, 0, last_dropped, _STREAM, BLOCK_M, BLOCK_N)
        b_out = tl.where(keep, b_out * keep_scale, 0.0)
    tl.store(out_ptr + o_out, store_cast(b_out, out_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + o_m, b_mean, mask=m_m)
    tl.store(rstd_ptr + o_m, b_rstd, mask=m_m)


@triton.jit(do_not_specialize=["M", "last_dropped"])
def embed_layer_norm_bwd_kernel(
    dout_ptr,  # (M, N)
    sum_ptr,  # (M, N)
    mean_ptr,  # (M,) fp32
    rstd_ptr,  # (M,) fp32
    weight_ptr,  # (N,)
    seed_ptr,  # (1,) or None
    dsum_ptr,  # (M, N) contiguous
    partial_ptr,  # (2, P, N) fp32: the programs' sums for dweight and dbias
    M,
    stride_dout_m,
    stride_sum_m,
    last_dropped,
    keep_scale,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_p = tl.program_id(0)
    n_programs = tl.num_programs(0)
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_weight = tl.load(weight_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    # [BLOCK_M, BLOCK_N]
    b_dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b_dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i_m in range(i_p, (M - 1) // BLOCK_M + 1, n_programs):
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        m_m = o_m < M
        mask = m_m[:, None] & m_n[None, :]
        b_dout = tl.load(dout_ptr + o_m[:, None] * stride_dout_m + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        if seed_ptr is not None:
            keep = keep_mask(tl.load(seed_ptr), o_m, 0, last_dropped, _STREAM, BLOCK_M, BLOCK_N)
            b_dout = tl.where(keep, b_dout * keep_scale, 0.0)
        b_sum = tl.load(sum_ptr + o_m[:, None] * stride_sum_m + o_n[None, :], mask=mask, other=0.0).to(tl.float32)
        b_mean = tl.load(mean_ptr + o_m, mask=m_m, other=0.0)
        b_rstd = tl.load(rstd_ptr + o_m, mask=m_m, other=0.0)
        # Beyond the width it is no number of the row's, but meets a gradient of 0.
        b_xhat = (b_sum - b_mean[:, None]) * b_rstd[:, None]
        b_dweight += b_dout * b_xhat
        b_dbias += b_dout
        b_dsum = normalise_bwd(b_dout, b_xhat, b_rstd, b_weight, N)
        p_dsum = dsum_ptr + o_m[:, None] * N + o_n[None, :]
        tl.store(p_dsum, store_cast(b_dsum, dsum_ptr.dtype.element_ty), mask=mask)
    p_partial = partial_ptr + i_p.to(tl.int64) * N + o_n
    tl.store(p_partial, tl.sum(b_dweight, axis=0), mask=m_n)
    tl.store(p_partial + n_programs.to(tl.int64) * N, tl.sum(b_dbias, axis=0), mask=m_n)


_fwd = Launcher(embed_layer_norm_fwd_kernel)
_bwd = Launcher(embed_layer_norm_bwd_kernel)


def embed_layer_norm_fwd(
    input_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    word: Tensor,
    position: Tensor,
    token_type: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    dtype: torch.dtype,
    need_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out and sum (empty unless needed) in `dtype`, mean and rstd; shapes as `ops.embed_layer_norm`."""
    tokens = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:-1]
    out = word.new_empty((*tokens, word.shape[1]), dtype=dtype)
    total = word.new_empty(out.shape if need_sum else (0,), dtype=dtype)
    mean = word.new_empty(tokens, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if out.numel() == 0:
        return out, total, mean, rstd
    width, length = out.shape[-1], tokens[-1]
    input_ids, token_type_ids, position_ids = (
        _by_sequence(t, tokens) for t in (input_ids, token_type_ids, position_ids)
    )
    embeds = None if inputs_embeds is None else as_rows(inputs_embeds)
    word, position = as_rows(word), as_rows(position)
    token_type = None if token_type is None else as_rows(token_type)
    dropout = dropout_of(seed, dropout_p)
    tile = tiles.layer_norm_fwd(width)
    blocks = tiles.cdiv(length, tile.block_m)
    _fwd(
        (mean.numel() // length * blocks,),
        weight.contiguous(),
        bias.contiguous(),
        input_ids,
        embeds,
        word,
        token_type_ids,
        token_type,
        position_ids,
        position,
        dropout.seed,
        out,
        total if need_sum else None,
        mean,
        rstd,
        length,
        blocks,
        word.shape[0],
        0 if token_type is None else token_type.shape[0],
        position.shape[0],
        *_strides(input_ids),
        *_strides(token_type_ids),
        *_strides(position_ids),
        0 if embeds is None else embeds.stride(0),
        word.stride(0),
        0 if token_type is None else token_type.stride(0),
        position.stride(0),
        eps,
        dropout.last_dropped,
        dropout.scale,
        width,
        tile.block_m,
        tile.block_n,
        num_warps=tile.num_warps,
    )
    return out, total, mean, rstd


def _by_sequence(ids: Tensor | None, tokens: torch.Size) -> Tensor | None:
    """(B, S), with stride 0 where ids are broadcast."""
    return None if ids is None else ids.expand(tokens).reshape(-1, tokens[-1])


def _strides(ids: Tensor | None) -> tuple[int, int]:
    return (0, 0) if ids is None else ids.stride()


def embed_layer_norm_bwd(
    dout: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dsum, and in fp32 dweight and dbias."""
    width = total.shape[-1]
    dsum = total.new_empty(total.shape)
    if total.numel() == 0:
        dweight, dbias = (total.new_zeros(width, dtype=torch.float32) for _ in range(2))
        return dsum, dweight, dbias
    dout, rows = as_rows(dout), as_rows(total)
    dropout = dropout_of(seed, dropout_p)
    tile = tiles.layer_norm_bwd(width)
    programs = tiles.layer_norm_bwd_programs(rows.shape[0], tile.block_m, device_of(rows).multiprocessors)
    partial = rows.new_empty((2, programs, width), dtype=torch.float32)
    _bwd(
        (programs,),
        dout,
        rows,
        mean.contiguous(),
        rstd.contiguous(),
        weight.contiguous(),
        dropout.seed,
        dsum,
        partial,
        rows.shape[0],
        dout.stride(0),
        rows.stride(0),
        dropout.last_dropped,
        dropout.scale,
        width,
        tile.block_m,
        tile.block_n,
        num_warps=tile.num_warps,
    )
    dweight, dbias = column_sum(partial)
    return dsum, dweight, dbias
