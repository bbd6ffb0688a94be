"""The masks of torch.nn's transformers: what they mean together, and whether padding can be removed.

torch.nn marks what takes *no* part with True, and adds floating point masks to the scores; a mask is taken by its
values in both forms, so a floating point one of 0 and -inf is a mask and any other a bias.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bertfast.backends import is_traced
from bertfast.packing import Packing, mask_sizes
from bertfast.plan import Plan
from bertfast.swap.torch_nn_layer import Layout
from bertfast.swap.torch_nn_native import is_small


def masks_fit(
    src_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, heads: int, seqlen: int, batched: bool
) -> bool:
    """Whether the masks have forms that torch.nn takes without a warning."""
    for mask in (src_mask, key_padding_mask):
        if mask is not None and mask.dtype != torch.bool and not mask.dtype.is_floating_point:
            return False
    if key_padding_mask is not None:
        if src_mask is not None and src_mask.dtype != key_padding_mask.dtype:
            return False
        if tuple(key_padding_mask.shape) != ((batch, seqlen) if batched else (seqlen,)):
            return False
    if src_mask is None:
        return True
    return tuple(src_mask.shape) == ((seqlen, seqlen) if src_mask.dim() == 2 else (batch * heads, seqlen, seqlen))


def joint_mask(src_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int) -> Tensor | None:
    """Both masks as one for `ops.attention`, which broadcasts to (B, H, S, S): bool (True takes part) or added.

    Args:
        src_mask: (S, S) or (B * H, S, S).
        key_padding_mask: (B, S).
    """
    pairs = src_mask
    if src_mask is not None and src_mask.dim() == 3:
        pairs = src_mask.unflatten(0, (batch, src_mask.shape[0] // batch))
    keys = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    if pairs is None or keys is None:
        both = keys if pairs is None else pairs
    else:
        both = pairs | keys if pairs.dtype == torch.bool else pairs + keys
    return ~both if both is not None and both.dtype == torch.bool else both


def is_causal_mask(src_mask: Tensor) -> Tensor:
    """Whether an (S, S) mask hides exactly the later tokens, as a tensor."""
    if src_mask.dtype == torch.bool:
        return (src_mask == torch.ones_like(src_mask).triu(1)).all()
    return (src_mask == torch.full_like(src_mask, -math.inf).triu(1)).all()


def plan(
    hidden_states: Tensor,
    src_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool | None,
    unpad: bool,
) -> tuple[Layout, Plan]:
    """How the encoder runs: what its layers are given, and how it treats padding. Values are read, once, where that may
    save work: whether a mask is the causal one and where padding is. Not in traces, which run padded and give the same.

    Args:
        hidden_states: (B, S, N).
        src_mask, key_padding_mask: as of `joint_mask`; they fit.
        is_causal: stock's hint: True says that `src_mask` is the causal mask, None that it may be.
        unpad: padded rows need not be computed.
    """
    if key_padding_mask is None and src_mask is None:
        return Layout(), Plan()
    batch = hidden_states.shape[0]
    may_be_causal = src_mask is not None and is_causal is not False and src_mask.dim() == 2
    may_be_causal = may_be_causal and not src_mask.requires_grad
    if key_padding_mask is None:
        causal = is_causal is True
        if not causal and may_be_causal and not is_traced(src_mask):
            causal = bool(is_causal_mask(src_mask))
        return Layout(None if causal else joint_mask(src_mask, None, batch), causal), Plan()
    is_bool = key_padding_mask.dtype == torch.bool
    real = ~key_padding_mask if is_bool else key_padding_mask != -math.inf
    may_pack = unpad and (src_mask is None or may_be_causal) and not key_padding_mask.requires_grad
    small = is_small(hidden_states)
    if may_pack and not is_traced(real) and not (small and src_mask is not None):
        against = [] if src_mask is None else [~is_causal_mask(src_mask)]
        if not is_bool:
            against.append((real & (key_padding_mask != 0)).any())
        total, longest, *found = mask_sizes(real, *against)
        causal = src_mask is not None
        if not any(found):
            if total == real.numel():
                return Layout(is_causal=causal), Plan()
            if small:
                return Layout(real[:, None, None, :], key_padding_mask=~real), Plan(rows=real)
            packing = Packing.from_sizes(real, total, longest)
            layout = Layout(is_causal=causal, cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen)
            return layout, Plan(packing)
    return Layout(joint_mask(src_mask, key_padding_mask, batch)), Plan(rows=real if unpad else None)
