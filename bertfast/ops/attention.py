"""attention: softmax(query key^T * scale + mask) value on padded tensors, as scaled_dot_product_attention.

FLOPs: 4 S_q S_k D per (batch, head). Memory floor: query, key, value and out once each, (2 S_q + 2 S_k) D elements.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast import reference
from bertfast.backends import FLOAT, HALF, Capability, choose, describe, needs_grad, register
from bertfast.dropout import check_probability, dropout_mask, seed_for
from bertfast.kernels.tiles import MAX_HEAD_DIM
from bertfast.ops._autocast import to_autocast
from bertfast.ops._checks import check_device, check_rank, check_required, check_same_dtype, check_tensors
from bertfast.ops._library import TRITON_DEVICES, cuda_unavailable, define, extension_unavailable, triton_unavailable
from bertfast.ops._once import distinct, once

_BACKENDS = ("triton", "cuda", "cpu")
# kMaxHeadDim of csrc/cuda/attention.h.
CUDA_MAX_HEAD_DIM = 128
ENABLE_GQA = "enable_gqa"
VALUE_HEAD_DIM = "value head dim unlike the query's"


def mask_kind(attn_mask: Tensor | None) -> str:
    """`"none"`, `"bool"` or `"float"`; any other dtype is a TypeError."""
    if attn_mask is None:
        return "none"
    if attn_mask.dtype == torch.bool:
        return "bool"
    if attn_mask.dtype.is_floating_point:
        return "float"
    raise TypeError(f"attn_mask must be bool (True takes part) or floating point (added), got {attn_mask.dtype}")


def causal_mask(s_q: int, s_k: int, device: torch.device, bottom_right: bool = False) -> Tensor:
    """(s_q, s_k) bool, True where the query may see the key."""
    return torch.ones(s_q, s_k, dtype=torch.bool, device=device).tril(s_k - s_q if bottom_right else 0)


def _bias_as(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A float mask in another dtype; finite values stay finite, so that they remain arithmetic (fp32's lowest number
    would become -inf in half precision and mask what it should only weigh)."""
    limits = torch.finfo(dtype)
    if torch.finfo(attn_mask.dtype).max <= limits.max:
        return attn_mask.to(dtype)
    finite = attn_mask.clamp(limits.min, limits.max)
    return torch.where(attn_mask.isinf(), attn_mask, finite).to(dtype)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    seed: Tensor | None,
    bottom_right: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Stock scaled_dot_product_attention with a mask and causality together, and with a replayed dropout mask."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = _bias_as(attn_mask, query.dtype)
    if is_causal and (attn_mask is not None or (bottom_right and query.shape[-2] != key.shape[-2])):
        visible = causal_mask(query.shape[-2], key.shape[-2], query.device, bottom_right)
        if attn_mask is None:
            attn_mask = visible
        elif attn_mask.dtype == torch.bool:
            attn_mask = attn_mask & visible
        else:
            attn_mask = attn_mask.masked_fill(~visible, -math.inf)
        is_causal = False
    if dropout_p > 0.0 and seed is not None:
        batch, heads, s_q, _ = query.shape
        if enable_gqa:
            key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
        keep = dropout_mask(seed, (batch, heads, s_q, key.shape[-2]), dropout_p, "attention")
        return reference.attention(
            query,
            key,
            value,
            attn_mask,
            keep=keep,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
        )[0]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _by_position(x: Tensor) -> Tensor:
    batch, heads, length, head_dim = x.shape
    return x.new_empty((batch, length, heads, head_dim)).transpose(1, 2)


def _fwd_fake(query, key, value, attn_mask, seed, dropout_p, is_causal, scale):
    return _by_position(query), query.new_empty((2, *query.shape[:3]), dtype=torch.float32)


def _bwd_fake(dout, query, key, value, attn_mask, seed, out, stats, dropout_p, is_causal, scale):
    return *map(_by_position, (query, key, value)), stats.new_empty(stats.shape[1:])


def _mask_bwd_fake(dout, query, key, value, attn_mask, seed, stats, delta, dropout_p, is_causal, scale):
    return attn_mask.new_empty(attn_mask.shape)


_FWD = define(
    "attention_fwd",
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? seed, float dropout_p, bool is_causal,"
    " float scale) -> (Tensor out, Tensor stats)",
    _fwd_fake,
    _BACKENDS,
    launcher="attention",
)
_BWD = define(
    "attention_bwd",
    "(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? seed, Tensor out, Tensor stats,"
    " float dropout_p, bool is_causal, float scale) -> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor delta)",
    _bwd_fake,
    _BACKENDS,
    launcher="attention_bwd",
)
_MASK_BWD = define(
    "attention_mask_bwd",
    "(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor attn_mask, Tensor? seed, Tensor stats, Tensor delta,"
    " float dropout_p, bool is_causal, float scale) -> Tensor",
    _mask_bwd_fake,
    _BACKENDS,
    launcher="attention_mask_bwd",
)


class _Attention(torch.autograd.Function):
    """Saves its inputs, the output and the rows' statistics; scores and the dropout mask are made again. Differentiable
    once. Gradients of query, key and value come together: attention with some of them frozen is rare."""

    @staticmethod
    def forward(ctx, query, key, value, attn_mask, seed, dropout_p, is_causal, scale, backend):
        out, stats = _FWD[backend](query, key, value, attn_mask, seed, dropout_p, is_causal, scale)
        ctx.save_for_backward(query, key, value, attn_mask, seed, out, stats)
        ctx.settings, ctx.backend = (dropout_p, is_causal, scale), backend
        return out

    @staticmethod
    def backward(ctx, dout):
        query, key, value, attn_mask, seed, out, stats = ctx.saved_tensors
        call = once("attention", _BWD[ctx.backend])
        dq, dk, dv, delta = call(dout, query, key, value, attn_mask, seed, out, stats, *ctx.settings)
        dmask = None
        if ctx.needs_input_grad[3]:
            call = once("attention", _MASK_BWD[ctx.backend])
            dmask = call(dout, query, key, value, attn_mask, seed, stats, delta, *ctx.settings)
        return dq, dk, dv, dmask, *(None,) * 5


def _fused(backend, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, seed):
    seed = seed_for(dropout_p, seed, query.device)
    scale = default_scale(query) if scale is None else scale
    if attn_mask is not None and attn_mask.dtype not in FLOAT | {torch.bool}:
        attn_mask = _bias_as(attn_mask, torch.float32)
    if needs_grad(query, key, value, attn_mask):
        tensors = distinct(query, key, value, attn_mask)
        return _Attention.apply(*tensors, seed, dropout_p, is_causal, scale, backend)
    return _FWD[backend](query, key, value, attn_mask, seed, dropout_p, is_causal, scale)[0]


def _torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, seed):
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unsqueeze(0)
    return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, seed, enable_gqa=enable_gqa)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
    _seed: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by name, argument for argument.

    Equivalent PyTorch::

        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    and beyond it: a row without any key gives 0 and passes 0 gradients on every backend, `attn_mask` and
    `is_causal` may be given together, and a float mask may have any floating point dtype.

    Args:
        query: (B, H, S_q, D) fp16, bf16, fp32 or fp64, any strides.
        key, value: (B, H, S_k, D); with `enable_gqa` their H may divide the query's.
        attn_mask: broadcasts to (B, H, S_q, S_k). bool: True takes part; floating point: added to the scaled scores.
        dropout_p: dropout of the probabilities, applied whenever it is above 0.
        is_causal: query i sees keys up to i (aligned at the top left).
        scale: factor of the scores, 1/sqrt(D) by default.
        backend: a backend's name, or None for the one in force.
        _seed: int64 tensor of one element that fixes the dropout mask (see `ops.dropout_mask`).

    Returns:
        (B, H, S_q, D) in the query's dtype (autocast's dtype under autocast); of kernels (B, S_q, H, D) in memory.
        Kernels' results can be differentiated once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, `dropout_p` outside [0, 1].
        TypeError: an input that is not floating point, a mask that is neither that nor bool.
        BackendError: `backend` cannot serve these inputs.
    """
    check_probability(dropout_p)
    check_required(("query", "key", "value"), query, key, value)
    check_tensors(("query", "key", "value"), query, key, value)
    check_device("attn_mask", attn_mask, query.device)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape (B, H, S, D), got {tuple(tensor.shape)}")
    check_attention_shapes(query, key, value, enable_gqa, heads_dim=1)
    query, key, value = to_autocast(query, key, value)
    check_same_dtype(("query", "key", "value"), query, key, value)
    kind = mask_kind(attn_mask)
    if attn_mask is not None:
        _check_mask_shape(attn_mask, (*query.shape[:3], key.shape[2]))
    grad = needs_grad(query, key, value, attn_mask)
    call = describe(
        "attention",
        (query,),
        grad=grad,
        dropout_p=dropout_p,
        head_dim=query.shape[-1],
        mask=kind,
        features=attention_features(query, value, enable_gqa),
    )
    chosen = choose(call, backend)
    return chosen.implementation(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, _seed)


def default_scale(query: Tensor) -> float:
    """1/sqrt(D); of heads without any dimension, which have no scores, 1."""
    return query.shape[-1] ** -0.5 if query.shape[-1] else 1.0


def attention_features(query: Tensor, value: Tensor, enable_gqa: bool = False) -> tuple[str, ...]:
    """What only stock attention serves."""
    features = (ENABLE_GQA,) if enable_gqa else ()
    return features if value.shape[-1] == query.shape[-1] else (*features, VALUE_HEAD_DIM)


def check_attention_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, heads_dim: int) -> None:
    """Raises ValueError unless key and value fit each other and the query (sequence lengths apart)."""
    if tuple(key.shape[:-1]) != tuple(value.shape[:-1]):
        raise ValueError(f"value must have the key's shape {tuple(key.shape)}, got {tuple(value.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have the query's head dim {query.shape[-1]}, got {key.shape[-1]}")
    if heads_dim == 1 and key.shape[0] != query.shape[0]:
        raise ValueError(f"key must have the query's batch size {query.shape[0]}, got {key.shape[0]}")
    heads_q, heads_k = query.shape[heads_dim], key.shape[heads_dim]
    if heads_q != heads_k and not (enable_gqa and heads_k and heads_q % heads_k == 0):
        option = f" (enable_gqa={enable_gqa})" if heads_dim == 1 else ""
        raise ValueError(f"key must have the query's {heads_q} heads, got {heads_k}{option}")


def _check_mask_shape(attn_mask: Tensor, full: tuple[int, ...]) -> None:
    check_rank("attn_mask", attn_mask, 2)
    pairs = zip(reversed(attn_mask.shape), reversed(full), strict=False)
    if attn_mask.dim() > 4 or any(have not in (1, want) for have, want in pairs):
        raise ValueError(f"attn_mask must broadcast to {full}, got {tuple(attn_mask.shape)}")


register(Capability("attention", "torch", _torch))
register(
    Capability(
        "attention",
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
        "attention",
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
        "attention",
        "cpu",
        functools.partial(_fused, "cpu"),
        devices=frozenset({"cpu"}),
        dtypes=FLOAT,
        features=frozenset(),
        unavailable=extension_unavailable,
    )
)
