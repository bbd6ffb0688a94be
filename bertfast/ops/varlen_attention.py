"""varlen_attention: attention of sequences laid end to end, with no padding anywhere.

FLOPs: 4 D sum(len_q len_k) per head. Memory floor: query, key, value and out once each.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bertfast.backends import FLOAT, HALF, Capability, choose, describe, needs_grad, register
from bertfast.dropout import check_probability, seed_for
from bertfast.kernels.tiles import MAX_HEAD_DIM
from bertfast.ops._autocast import to_autocast
from bertfast.ops._checks import check_device, check_required, check_same_dtype, check_tensors, values_are_checked
from bertfast.ops._library import TRITON_DEVICES, cuda_unavailable, define, extension_unavailable, triton_unavailable
from bertfast.ops._once import distinct, once
from bertfast.ops.attention import (
    CUDA_MAX_HEAD_DIM,
    attention_features,
    check_attention_shapes,
    default_scale,
    sdpa,
)

_BACKENDS = ("triton", "cuda", "cpu")


def _per_sequence(query, key, value, ends_q, ends_k, dropout_p, is_causal, scale):
    """One scaled_dot_product_attention per run of sequences of equal length: nothing is copied or padded."""
    outputs = []
    start, last = 0, len(ends_q) - 1
    while start < last:
        len_q, len_k = ends_q[start + 1] - ends_q[start], ends_k[start + 1] - ends_k[start]
        stop = start + 1
        while stop < last and (ends_q[stop + 1] - ends_q[stop], ends_k[stop + 1] - ends_k[stop]) == (len_q, len_k):
            stop += 1
        if len_q:
            run = tuple(
                t[ends[start] : ends[stop]].unflatten(0, (stop - start, length)).transpose(1, 2)
                for t, ends, length in ((query, ends_q, len_q), (key, ends_k, len_k), (value, ends_k, len_k))
            )
            out = sdpa(*run, None, dropout_p, is_causal, scale, None, bottom_right=True)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = stop
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs) if outputs else torch.zeros_like(query)


def _padded(query, key, value, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, scale, seed):
    """Gathers into (sequences, max_seqlen) and masks: sizes depend on no value, so it traces and never syncs."""
    rows_q, real_q = _rows(cu_q, max_q, query.shape[0])
    rows_k, real_k = _rows(cu_k, max_k, key.shape[0])
    mask = (real_q[:, :, None] & real_k[:, None, :]).unsqueeze(1)
    if is_causal:
        offset = (cu_k.diff() - cu_q.diff()).view(-1, 1, 1)
        query_at = torch.arange(max_q, device=query.device).view(1, -1, 1)
        key_at = torch.arange(max_k, device=query.device).view(1, 1, -1)
        mask = mask & (key_at <= query_at + offset).unsqueeze(1)
    q, k, v = query[rows_q].transpose(1, 2), key[rows_k].transpose(1, 2), value[rows_k].transpose(1, 2)
    out = sdpa(q, k, v, mask, dropout_p, False, scale, seed).transpose(1, 2)
    token = torch.arange(query.shape[0], device=query.device)
    sequence = torch.searchsorted(cu_q[1:].contiguous(), token.to(cu_q.dtype), right=True).clamp_max(cu_q.numel() - 2)
    position = (token - cu_q[sequence]).clamp(0, max(max_q - 1, 0))
    return out[sequence, position]


def _rows(cu_seqlens, longest, total):
    at = torch.arange(longest, device=cu_seqlens.device)
    real = at < cu_seqlens.diff()[:, None]
    return (cu_seqlens[:-1, None] + at).clamp(0, max(total - 1, 0)), real


def _torch(query, key, value, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, scale, seed):
    eager = not torch.compiler.is_compiling()
    if eager and (query.shape[0] == 0 or key.shape[0] == 0):
        # The empty sums keep key and value in the graph, so that their projections get gradients of 0 and not None.
        zeros = query[..., :1].masked_fill(torch.ones((), dtype=torch.bool, device=query.device), 0.0)
        return zeros.expand(*query.shape[:2], value.shape[-1]) + key[:0].sum() + value[:0].sum()
    on_host = query.device.type == "cpu" and eager
    if on_host and not (dropout_p > 0.0 and seed is not None):
        ends_q = cu_q.tolist()
        ends_k = ends_q if cu_k is cu_q else cu_k.tolist()
        return _per_sequence(query, key, value, ends_q, ends_k, dropout_p, is_causal, scale)
    if _stock_varlen_serves(query, key, value, dropout_p):
        from torch.nn.attention.varlen import varlen_attn

        # Keywords that torch gained over time are passed only where they are needed.
        options = {} if scale is None else {"scale": scale}
        if is_causal:
            options["window_size"] = (-1, 0)
        return varlen_attn(query, key, value, cu_q.int(), cu_k.int(), max_q, max_k, **options)
    return _padded(query, key, value, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, scale, seed)


def _stock_varlen_serves(query, key, value, dropout_p):
    heads, head_dim = query.shape[1:]
    return (
        query.is_cuda
        and query.dtype in HALF
        and dropout_p == 0.0
        and heads > 0
        and 0 < head_dim <= 256
        and head_dim % 8 == 0
        and value.shape[-1] == head_dim
        and all(x.stride(-1) == 1 for x in (query, key, value))
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _fwd_fake(query, key, value, cu_seqlens_q, cu_seqlens_k, seed, dropout_p, is_causal, scale):
    total, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((2, heads, total), dtype=torch.float32)


def _bwd_fake(dout, query, key, value, cu_q, cu_k, seed, out, stats, dropout_p, is_causal, scale):
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


_FWD = define(
    "varlen_attention_fwd",
    "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seed, float dropout_p,"
    " bool is_causal, float scale) -> (Tensor out, Tensor stats)",
    _fwd_fake,
    _BACKENDS,
    launcher="varlen_attention",
)
_BWD = define(
    "varlen_attention_bwd",
    "(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seed,"
    " Tensor out, Tensor stats, float dropout_p, bool is_causal, float scale)"
    " -> (Tensor dquery, Tensor dkey, Tensor dvalue)",
    _bwd_fake,
    _BACKENDS,
    launcher="varlen_attention",
)


class _VarlenAttention(torch.autograd.Function):
    """Saves its inputs, the output and the rows' statistics; scores and the dropout mask are made again. Differentiable
    once."""

    @staticmethod
    def forward(ctx, query, key, value, cu_seqlens_q, cu_seqlens_k, seed, dropout_p, is_causal, scale, backend):
        out, stats = _FWD[backend](query, key, value, cu_seqlens_q, cu_seqlens_k, seed, dropout_p, is_causal, scale)
        ctx.save_for_backward(query, key, value, cu_seqlens_q, cu_seqlens_k, seed, out, stats)
        ctx.settings, ctx.backend = (dropout_p, is_causal, scale), backend
        return out

    @staticmethod
    def backward(ctx, dout):
        grads = once("varlen_attention", _BWD[ctx.backend])(dout, *ctx.saved_tensors, *ctx.settings)
        return *grads, *(None,) * 7


def _fused(backend, query, key, value, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, scale, seed):
    seed = seed_for(dropout_p, seed, query.device)
    scale = default_scale(query) if scale is None else scale
    if needs_grad(query, key, value):
        tensors = distinct(query, key, value, cu_q, cu_k)
        return _VarlenAttention.apply(*tensors, seed, dropout_p, is_causal, scale, backend)
    return _FWD[backend](query, key, value, cu_q, cu_k, seed, dropout_p, is_causal, scale)[0]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    backend: str | None = None,
    _seed: Tensor | None = None,
) -> Tensor:
    """Attention of sequence i's queries to sequence i's keys, for sequences packed end to end.

    Equivalent PyTorch::

        for i in range(B):
            q = query[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]                  # likewise key and value
            out[...] = F.scaled_dot_product_attention(q, k, v, scale=scale)   # heads in front

    Args:
        query: (T_q, H, D) fp16, bf16, fp32 or fp64, any strides: views of one packed QKV need no copy.
        key, value: (T_k, H, D).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 or int64, 0 first, the total last, never descending. Empty
            sequences are legal.
        max_seqlen_q, max_seqlen_k: the longest lengths (larger numbers are allowed).
        dropout_p: dropout of the probabilities, applied whenever it is above 0.
        is_causal: within each sequence, aligned at the bottom right: the last query sees the last key.
        scale: factor of the scores, 1/sqrt(D) by default.
        backend: a backend's name, or None for the one in force.
        _seed: int64 tensor of one element that fixes the dropout mask (see `ops.dropout_mask`).

    Returns:
        (T_q, H, D) in the query's dtype (autocast's dtype under autocast). A query without any key gives 0. Kernels'
        results can be differentiated once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; `cu_seqlens` that is not of the form above or holds a
            longer sequence than its maximum (on a GPU its values are looked at when `BERTFAST_VALIDATE=1`; else
            nothing is read or written outside the tensors, and rows of tokens in no sequence are undefined);
            `dropout_p` outside [0, 1].
        TypeError: a query, key or value that is not floating point, a maximum that is no int.
        BackendError: `backend` cannot serve these inputs.
    """
    check_probability(dropout_p)
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    check_required(names, query, key, value, cu_seqlens_q, cu_seqlens_k)
    check_tensors(names[:3], query, key, value)
    check_device("cu_seqlens_q", cu_seqlens_q, query.device)
    check_device("cu_seqlens_k", cu_seqlens_k, query.device)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have shape (tokens, H, D), got {tuple(tensor.shape)}")
    check_attention_shapes(query, key, value, enable_gqa=False, heads_dim=-2)
    _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q)
    if cu_seqlens_k is not cu_seqlens_q or max_seqlen_k != max_seqlen_q or key.shape[0] != query.shape[0]:
        _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, key.shape[0], max_seqlen_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k must have the shape of cu_seqlens_q, {tuple(cu_seqlens_q.shape)}, "
            f"got {tuple(cu_seqlens_k.shape)}"
        )
    query, key, value = to_autocast(query, key, value)
    check_same_dtype(("query", "key", "value"), query, key, value)
    grad = needs_grad(query, key, value)
    call = describe(
        "varlen_attention",
        (query,),
        grad=grad,
        dropout_p=dropout_p,
        head_dim=query.shape[-1],
        features=attention_features(query, value),
    )
    chosen = choose(call, backend)
    return chosen.implementation(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        is_causal,
        scale,
        _seed,
    )


def _check_cu_seqlens(name: str, cu_seqlens: Tensor, total: int, longest: int) -> None:
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise ValueError(
            f"{name} must be a one-dimensional int32 or int64 tensor, got {cu_seqlens.dtype} "
            f"of shape {tuple(cu_seqlens.shape)}"
        )
    if not isinstance(longest, (int, torch.SymInt, Tensor)):
        raise TypeError(f"{name.replace('cu_seqlens', 'max_seqlen')} must be an int, got {type(longest).__name__}")
    if not values_are_checked(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in zip(ends, ends[1:], strict=False)]
    if not ends or ends[0] != 0 or ends[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(f"{name} must rise from 0 to the number of tokens, {total}; got {_shortened(ends)}")
    if max(lengths, default=0) > longest:
        raise ValueError(f"{name} holds a sequence of {max(lengths)} tokens, more than its maximum of {longest}")


def _shortened(ends: list[int]) -> str:
    return str(ends) if len(ends) <= 8 else f"[{', '.join(map(str, ends[:4]))}, ..., {ends[-1]}]"


register(Capability("varlen_attention", "torch", _torch))
register(
    Capability(
        "varlen_attention",
        "triton",
        functools.partial(_fused, "triton"),
        devices=TRITON_DEVICES,
        dtypes=FLOAT,
        auto_dtypes=HALF,
        min_compute=(8, 0),
        max_head_dim=MAX_HEAD_DIM,
        features=frozenset(),
        unavailable=triton_unavailable,
    )
)
register(
    Capability(
        "varlen_attention",
        "cuda",
        functools.partial(_fused, "cuda"),
        devices=frozenset({"cuda"}),
        dtypes=HALF,
        min_compute=(8, 0),
        max_head_dim=CUDA_MAX_HEAD_DIM,
        features=frozenset(),
        unavailable=cuda_unavailable,
    )
)
register(
    Capability(
        "varlen_attention",
        "cpu",
        functools.partial(_fused, "cpu"),
        devices=frozenset({"cpu"}),
        dtypes=FLOAT,
        features=frozenset(),
        unavailable=extension_unavailable,
    )
)
