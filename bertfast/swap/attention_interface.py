"""`attn_implementation="bertfast"`: `ops.attention` behind transformers' attention interface, for every model that uses
the interface, encoders and decoders alike. Nothing is unpadded here; `accelerate` does that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bertfast import ops
from bertfast.nn.attention import attention_with_weights

NAME = "bertfast"
# What changes the result and is not computed here. Other arguments of the interface are hints to other implementations.
UNSUPPORTED = ("softcap", "s_aux")
# transformers' names for packed sequences, as DataCollatorWithFlattening makes them.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register_attention() -> None:
    """Makes `attn_implementation="bertfast"` known to transformers: attention and mask function together.

    Then `from_pretrained(path, attn_implementation="bertfast")` and `model.set_attn_implementation("bertfast")` run
    `ops.attention`. It computes what "sdpa" does, and beyond it: a query without any key gives 0 on every device,
    `output_attentions=True` gives the probabilities as "eager" does, and packed sequences (`cu_seq_lens_q` ...) stay
    apart without a mask. Calling it again changes nothing.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function over `ops.attention`.

    Args:
        module: the attention layer: `is_causal`, `num_key_value_groups`.
        query: (B, H, S_q, D).
        key, value: (B, H or a divisor of it, S_k, D).
        attention_mask: broadcasts to (B, H, S_q, S_k), bool or added; causality is part of it, where given.
        dropout: probability; 0 outside training.
        scaling: of the scores, 1/sqrt(D) by default.
        is_causal: the module's by default; looked at without a mask only.
        position_bias: added to the scores.

    Returns:
        (B, S_q, H, D) contiguous, and the probabilities where they are asked for, else None.

    Raises:
        ValueError: the model asks for soft-capped scores or attention sinks.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f'"{NAME}" attention does not support {name}; set attn_implementation="eager"')
    if query.shape[0] == 1 and key.shape[0] > 1:
        query = query.expand(key.shape[0], -1, -1, -1)
    groups = getattr(module, "num_key_value_groups", 1)
    packed = _packed(attention_mask, position_bias, kwargs)
    need_weights = _need_weights(module, kwargs)
    plain = attention_mask is None and position_bias is None and packed is None and not need_weights
    # Beyond this stock attention, which serves it, materialises the scores.
    enable_gqa = groups > 1 and plain and key.shape[-1] == value.shape[-1] <= 256
    if groups > 1 and not enable_gqa:
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    causal = _is_causal(getattr(module, "is_causal", True) if is_causal is None else is_causal, query, attention_mask)
    mask = attention_mask if position_bias is None else _biased(position_bias, attention_mask)
    if packed is not None:
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        context = ops.varlen_attention(q, k, v, *packed, dropout, causal, scaling)
        return context.unflatten(0, (query.shape[0], query.shape[2])).contiguous(), None
    weights = None
    if need_weights:
        context, weights = attention_with_weights(query, key, value, mask, dropout, causal, scaling)
    else:
        context = ops.attention(query, key, value, mask, dropout, causal, scaling, enable_gqa)
    return context.transpose(1, 2).contiguous(), weights


def attention_mask(**kwargs: object) -> Tensor | None:
    """transformers' mask function: that of "sdpa", bool (B, 1, S_q, S_k), True takes part, or None where all do.

    A mask of keys alone, as encoders have it, is (B, 1, 1, S_k).
    """
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    # A caller that takes no None for an answer goes on to compute with the mask's shape.
    if kwargs.get("mask_function") is bidirectional_mask_function and kwargs.get("allow_is_bidirectional_skip"):
        if "cache_position" in kwargs:  # transformers 5.0; later versions give lengths
            kwargs["cache_position"] = kwargs["cache_position"][:1]
        else:
            kwargs["q_length"] = 1
    return sdpa_mask(**kwargs)


def _is_causal(is_causal: bool, query: Tensor, attention_mask: Tensor | None) -> bool:
    """Without a mask. One query is the last of its sequence and sees every key."""
    if not is_causal or attention_mask is not None:
        return False
    return bool(query.shape[2] > 1)


def _biased(position_bias: Tensor, attention_mask: Tensor | None) -> Tensor:
    if attention_mask is None:
        return position_bias
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, position_bias, -math.inf)
    return position_bias + attention_mask


def _packed(attention_mask: Tensor | None, position_bias: Tensor | None, kwargs: dict) -> tuple | None:
    """Where packed sequences begin and how long they are; None unless all of it is given and nothing else masks."""
    found = tuple(kwargs.get(name) for name in PACKED)
    if attention_mask is not None or position_bias is not None or any(given is None for given in found):
        return None
    return *found[:2], *map(int, found[2:])


def _need_weights(module: nn.Module, kwargs: dict) -> bool:
    wanted = kwargs.get("output_attentions")
    return bool(getattr(getattr(module, "config", None), "output_attentions", False) if wanted is None else wanted)
