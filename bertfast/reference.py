"""The specification: one plain-PyTorch function per op, differentiable, exact in float64.

Tests hold every backend to these functions run in float64, and benchmarks check their results against them before
they time anything. They favour the formula over speed; the package itself uses them only where a caller asks for
attention probabilities or replays a dropout mask. Dropout is given as a keep mask (bool, True = kept), so that a
backend's mask can be replayed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast.activations import Activation, get_activation
from bertfast.dropout import keep_scale


def _drop(x: Tensor, keep: Tensor | None, dropout_p: float) -> Tensor:
    return x if keep is None else torch.where(keep, x * keep_scale(dropout_p), 0.0)


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    bottom_right: bool = False,
) -> Tensor:
    """Scaled and masked scores, (..., S_q, S_k); keys that take no part are -inf."""
    s_q, s_k = query.shape[-2], key.shape[-2]
    scores = query @ key.transpose(-1, -2) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask.to(scores.dtype)
    if is_causal:
        diagonal = s_k - s_q if bottom_right else 0
        visible = torch.ones(s_q, s_k, dtype=torch.bool, device=query.device).tril(diagonal)
        scores = scores.masked_fill(~visible, -math.inf)
    return scores


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; a row of -inf gives zeros and passes zero gradients, never NaN."""
    if scores.shape[-1] == 0:
        return scores
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    bottom_right: bool = False,
) -> tuple[Tensor, Tensor]:
    """softmax(query key^T * scale + mask) value and the natural log-sum-exp of its rows.

    Shapes: query (..., S_q, D), key and value (..., S_k, D); returns (..., S_q, D) and (..., S_q). A row without any
    key gives 0 and -inf. `is_causal` aligns at the top left, or at the bottom right when asked.
    """
    scores = attention_scores(query, key, attn_mask, is_causal, scale, bottom_right)
    probabilities = _drop(softmax(scores), keep, dropout_p)
    return probabilities @ value, torch.logsumexp(scores, -1)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of each sequence alone: query (T_q, H, D), key and value (T_k, H, D), causal at the bottom right."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outputs = []
    for i in range(len(ends_q) - 1):
        q, k, v = (
            t[ends[i] : ends[i + 1]].transpose(0, 1) for t, ends in ((query, ends_q), (key, ends_k), (value, ends_k))
        )
        out, _ = attention(
            q,
            k,
            v,
            keep=None if keep is None else keep[i, :, : q.shape[1], : k.shape[1]],
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            bottom_right=True,
        )
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs) if outputs else torch.zeros_like(query)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Two-pass LayerNorm over the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps) * weight + bias


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-12,
    *,
    x_bias: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """LN(residual + dropout(x + x_bias)) and the sum in front of the LN."""
    total = _drop(x if x_bias is None else x + x_bias, keep, dropout_p)
    total = total if residual is None else residual + total
    return layer_norm(total, weight, bias, eps), total


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """gelu(x weight^T + bias)."""
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def qkv_projection(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], biases: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """x weight^T + bias for query, key and value."""
    query, key, value = (F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return query, key, value


def feed_forward(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    activation: str | Activation = "gelu",
    *,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """dropout(activation(x w_in^T + b_in)) w_out^T + b_out."""
    hidden = _drop(get_activation(activation)(F.linear(x, w_in, b_in)), keep, dropout_p)
    return F.linear(hidden, w_out, b_out)


def embed_layer_norm(
    words: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor,
    position: Tensor,
    token_type: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-12,
    *,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """dropout(LN(words + token_type[token_type_ids] + position[position_ids])); `words` are rows already gathered."""
    total = words
    if token_type is not None:
        total = total + (token_type[0] if token_type_ids is None else token_type[token_type_ids])
    total = total + position[position_ids]
    return _drop(layer_norm(total, weight, bias, eps), keep, dropout_p)
