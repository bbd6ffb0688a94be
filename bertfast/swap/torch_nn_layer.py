"""The layer of `torch.nn.TransformerEncoderLayer` from fused ops, padded or packed, before or after its LayerNorms.

It reads the children's parameters instead of calling them, as torch's own fast path does. `reason_not_fused` says
whether that gives what calling them would give.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bertfast import ops
from bertfast.activations import Activation
from bertfast.nn.plain import any_hooks, has_global_hooks, has_hooks, is_plain_tensor
from bertfast.swap import plain_ops
from bertfast.swap.eligibility import dropout_of
from bertfast.swap.torch_nn_native import call_native

_CHILDREN = {
    "self_attn": nn.MultiheadAttention,
    "linear1": nn.Linear,
    "dropout": nn.Dropout,
    "linear2": nn.Linear,
    "norm1": nn.LayerNorm,
    "norm2": nn.LayerNorm,
    "dropout1": nn.Dropout,
    "dropout2": nn.Dropout,
}
_WEIGHTED = ("linear1", "linear2", "norm1", "norm2")
_FUNCTIONS = {
    F.relu: "relu",
    torch.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    F.mish: "mish",
    torch.tanh: "tanh",
    torch.sigmoid: "sigmoid",
}
_MODULES = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Mish: "mish", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


class Layout(NamedTuple):
    """Which tokens of hidden states see which. Padded hidden states are (B, S, N), packed ones (1, T, N).

    Attributes:
        attn_mask: broadcasts to (B, H, S, S): bool (True takes part) or floating point (added).
        is_causal: no token sees a later one.
        key_padding_mask: (B, S) bool, True where a key takes no part: all that `attn_mask` says, if it is given.
        cu_seqlens, max_seqlen: of packed hidden states, see `bertfast.packing.Packing`.
    """

    attn_mask: Tensor | None = None
    is_causal: bool = False
    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None

    def keys_only(self) -> bool:
        """Whether hidden states are padded, and at most keys are masked."""
        if self.is_causal or self.cu_seqlens is not None:
            return False
        return self.attn_mask is None or self.key_padding_mask is not None


def reason_not_fused(layer: nn.TransformerEncoderLayer) -> str | None:
    """Why the parts of `layer` must be called as they are and not fused, or None."""
    if has_global_hooks():
        return "there are hooks on all modules"
    children = layer._modules
    for name, kind in _CHILDREN.items():
        reason = _child_reason(name, children.get(name), kind)
        if reason is not None:
            return reason
    for name in _WEIGHTED:
        if not is_plain_tensor(children[name].weight):
            return f"{name}.weight is no plain tensor"
    for name in ("norm1", "norm2"):
        if len(children[name].normalized_shape) != 1:
            return f"{name} normalises over several dimensions"
    activation = children.get("activation")
    if activation is not None:
        if any_hooks(activation):
            return "activation has hooks"
        if "forward" in activation.__dict__:
            return "activation has a forward of its own"
    return _attention_reason(children["self_attn"])


def _child_reason(name: str, child: nn.Module | None, kind: type[nn.Module]) -> str | None:
    if type(child) is not kind:
        return f"{name} is {type(child).__name__}, not torch.nn's {kind.__name__}"
    if has_hooks(child):
        return f"{name} has hooks"
    if "forward" in child.__dict__:
        return f"{name} has a forward of its own"
    return None


def _attention_reason(attention: nn.MultiheadAttention) -> str | None:
    if not attention._qkv_same_embed_dim:
        return "self_attn has a kdim or vdim of its own"
    if attention.bias_k is not None or attention.bias_v is not None:
        return "self_attn has bias_k and bias_v"
    if attention.add_zero_attn:
        return "self_attn has add_zero_attn"
    if not is_plain_tensor(attention.in_proj_weight):
        return "self_attn.in_proj_weight is no plain tensor"
    out = attention._modules.get("out_proj")
    reason = _child_reason("self_attn.out_proj", out, NonDynamicallyQuantizableLinear)
    if reason is None and not is_plain_tensor(out.weight):
        return "self_attn.out_proj.weight is no plain tensor"
    return reason


def current_activation(layer: nn.TransformerEncoderLayer) -> str | Activation:
    """The activation by its configuration name where it has one, else the callable.

    Looked up in every forward: it may be replaced after construction. (Stock's fast path then keeps the old one, and
    takes every `nn.GELU` for the exact one.)
    """
    activation = layer.activation
    kind = type(activation)
    if kind is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_pytorch_tanh"
    if kind in _MODULES:
        return _MODULES[kind]
    return activation if isinstance(activation, nn.Module) else _FUNCTIONS.get(activation, activation)


def _attention_p(attention: nn.MultiheadAttention) -> float:
    return attention.dropout if attention.training else 0.0


def _norm(norm: nn.LayerNorm, may_lack_bias: bool) -> tuple[Tensor, Tensor | None, float]:
    """weight, bias and eps, as `add_layer_norm` takes them."""
    weight, bias = norm.weight, norm.bias
    return weight, torch.zeros_like(weight) if bias is None and not may_lack_bias else bias, norm.eps


def self_attention(attention: nn.MultiheadAttention, x: Tensor, layout: Layout, functions: ModuleType = ops) -> Tensor:
    """Self-attention with both projections, padded or packed, to the shape of `x`; the packed projection of query, key
    and value is read through views."""
    heads = attention.num_heads
    projected = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    by_head = projected.view(*x.shape[:-1], 3, heads, x.shape[-1] // heads)
    dropout_p = _attention_p(attention)
    if layout.cu_seqlens is not None:
        query, key, value = by_head[0].unbind(1)
        ends, longest = layout.cu_seqlens, layout.max_seqlen
        context = functions.varlen_attention(
            query, key, value, ends, ends, longest, longest, dropout_p=dropout_p, is_causal=layout.is_causal
        ).unsqueeze(0)
    else:
        query, key, value = by_head.transpose(1, 3).unbind(2)
        context = functions.attention(
            query, key, value, layout.attn_mask, dropout_p=dropout_p, is_causal=layout.is_causal
        ).transpose(1, 2)
    return F.linear(context.flatten(-2), attention.out_proj.weight, attention.out_proj.bias)


def layer_forward(layer: nn.TransformerEncoderLayer, x: Tensor, layout: Layout) -> Tensor:
    """One layer on padded or packed hidden states, of which `reason_not_fused` had nothing to say.

    Args:
        layer: gives parameters, settings and training flags.
        x: (B, S, N), or (1, T, N) where `layout` is of packed hidden states.

    Returns:
        The shape of `x`.
    """
    children = layer._modules
    attention, linear1, linear2 = children["self_attn"], children["linear1"], children["linear2"]
    inner_p, p1, p2 = (dropout_of(children[name]) for name in ("dropout", "dropout1", "dropout2"))
    activation = current_activation(layer)
    plain = plain_ops.is_preferred(x)
    if plain and layout.keys_only() and not (inner_p or p1 or p2 or _attention_p(attention)):
        output = call_native(layer, x, activation, layout.key_padding_mask)
        if output is not None:
            return output
    functions = plain_ops if plain else ops
    norm1, norm2 = _norm(children["norm1"], plain), _norm(children["norm2"], plain)
    weights = (linear1.weight, linear1.bias, linear2.weight, linear2.bias)
    if layer.norm_first:
        normed = functions.add_layer_norm(x, None, *norm1)
        attended = self_attention(attention, normed, layout, functions)
        normed, x = functions.add_layer_norm(attended, x, *norm2, dropout_p=p1, return_sum=True)
        output = functions.feed_forward(normed, *weights, activation, dropout_p=inner_p)
        return x + (F.dropout(output, p2) if p2 else output)
    attended = self_attention(attention, x, layout, functions)
    x = functions.add_layer_norm(attended, x, *norm1, dropout_p=p1)
    output = functions.feed_forward(x, *weights, activation, dropout_p=inner_p)
    return functions.add_layer_norm(output, x, *norm2, dropout_p=p2)
