"""FusedSelfAttention: query, key and value projections around the attention core, padded or packed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast import ops, prepacked, reference
from bertfast.backends import order_on
from bertfast.dropout import apply_dropout
from bertfast.nn import frozen, quantized
from bertfast.nn.linear import linear, uses_prepacked
from bertfast.nn.plain import is_plain

# The backends that compute query, key and value as one.
KERNELS = frozenset({"triton", "cuda"})


def qkv_projection(hidden_states: Tensor, query: nn.Module, key: nn.Module, value: nn.Module) -> tuple[Tensor, ...]:
    """`ops.qkv_projection` over the weights of three linear modules; their calls where they are not plain, differ in
    form, or no backend has one product for all three, because an op of three calls costs more than they do."""
    for others in (quantized, frozen):
        joint = others.qkv_projection(hidden_states, query, key, value)
        if joint is not None:
            return joint
    reordered = uses_prepacked(hidden_states)
    may_fuse = reordered or not KERNELS.isdisjoint(order_on(hidden_states.device.type))
    if may_fuse and is_plain(query, nn.Linear) and is_plain(key, nn.Linear) and is_plain(value, nn.Linear):
        weights, biases = (query.weight, key.weight, value.weight), (query.bias, key.bias, value.bias)
        # The op would come to the same, behind checks that take as long as a small product.
        packed = prepacked.linear(hidden_states, weights, biases) if reordered else None
        if packed is not None:
            return packed.tensor_split((weights[0].shape[0], weights[0].shape[0] + weights[1].shape[0]), -1)
        one_shape = weights[0].shape == weights[1].shape == weights[2].shape
        missing = sum(bias is None for bias in biases)
        if one_shape and missing in (0, 3):
            return ops.qkv_projection(hidden_states, weights, None if missing else biases)
    return linear(hidden_states, query), linear(hidden_states, key), linear(hidden_states, value)


def self_attention(
    hidden_states: Tensor,
    query: nn.Module,
    key: nn.Module,
    value: nn.Module,
    head_dim: int,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    need_weights: bool = False,
    first_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Self-attention over the projections `query`, `key` and `value`, called as modules where they are not plain.

    Args:
        hidden_states: (B, S, N), or packed (1, T, N) with `cu_seqlens` (sequences + 1,) and `max_seqlen`.
        head_dim: width of a head; the projections have as many heads as fit in their width.
        scale: of the scores, 1/sqrt(head_dim) by default.
        attn_mask: as in `ops.attention`; padded input only.
        need_weights: also return the probabilities (B, H, S, S) behind dropout, computed unfused; padded input only.
        first_tokens: (B, 1, N) or (1, sequences, N), the first of each sequence, where they alone attend.

    Returns:
        The context, (B, S, width of the projections) or (1, T, the same), with `first_tokens` for these alone, and the
        probabilities or None.

    Raises:
        ValueError: packed input with a mask or with `need_weights`, or as `ops.attention`.
    """
    if first_tokens is None:
        projected = qkv_projection(hidden_states, query, key, value)
    else:
        projected = linear(first_tokens, query), linear(hidden_states, key), linear(hidden_states, value)
    q, k, v = (t.view(*t.shape[:-1], t.shape[-1] // head_dim, head_dim) for t in projected)
    if cu_seqlens is not None:
        if attn_mask is not None or need_weights:
            raise ValueError("packed hidden_states take neither attn_mask nor need_weights")
        cu_seqlens_q, max_seqlen_q = cu_seqlens, max_seqlen
        if first_tokens is not None:
            cu_seqlens_q, max_seqlen_q = torch.arange(len(cu_seqlens), dtype=torch.int32, device=cu_seqlens.device), 1
        context = ops.varlen_attention(
            q[0], k[0], v[0], cu_seqlens_q, cu_seqlens, max_seqlen_q, max_seqlen, dropout_p=dropout_p, scale=scale
        )
        return context.flatten(-2).unsqueeze(0), None
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if first_tokens is not None and attn_mask is not None and attn_mask.dim() > 1:
        attn_mask = attn_mask[..., :1, :]
    if need_weights:
        context, weights = attention_with_weights(q, k, v, attn_mask, dropout_p, scale=scale)
        return context.transpose(1, 2).flatten(-2), weights
    context = ops.attention(q, k, v, attn_mask, dropout_p=dropout_p, scale=scale)
    return context.transpose(1, 2).flatten(-2), None


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.attention` unfused: its result (B, H, S_q, D) and the probabilities (B, H, S_q, S_k) behind dropout."""
    scores = reference.attention_scores(query, key, attn_mask, is_causal, scale)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = apply_dropout(reference.softmax(wide).to(value.dtype), dropout_p, "attention", None)
    return weights @ value, weights


class FusedSelfAttention(nn.Module):
    """Multi-head self-attention without the output projection, as BERT's `attention.self`.

    Args:
        hidden_size: N.
        num_heads: H, which divides N.
        dropout: dropout of the probabilities, in training only.

    Raises:
        ValueError: `num_heads` does not divide `hidden_size`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size must be a multiple of num_heads, got {hidden_size} and {num_heads}")
        self.num_heads, self.dropout = num_heads, dropout
        self.query, self.key, self.value = (
            nn.Linear(hidden_size, hidden_size, device=device, dtype=dtype) for _ in range(3)
        )

    def forward(
        self,
        hidden_states: Tensor,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """(B, S, N), or packed (1, T, N) with `cu_seqlens` and `max_seqlen`, to a context of the same shape."""
        context, _ = self_attention(
            hidden_states,
            self.query,
            self.key,
            self.value,
            hidden_states.shape[-1] // self.num_heads,
            dropout_p=self.dropout if self.training else 0.0,
            attn_mask=attn_mask,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        return context
