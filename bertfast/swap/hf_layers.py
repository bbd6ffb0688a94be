"""Encoder layers of transformers with a fused forward: one for all families, which differ in where their parts are.

A layer reads the weights of its linear layers and LayerNorms. It stays stock while something is attached to a module
that it would skip, and while it is asked for what only stock gives: causal or cross-attention, caches, probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bertfast import ops
from bertfast.activations import Activation
from bertfast.backends import is_traced
from bertfast.nn.attention import self_attention
from bertfast.nn.feed_forward import feed_forward
from bertfast.nn.linear import linear
from bertfast.nn.plain import has_global_hooks
from bertfast.swap import plain_ops
from bertfast.swap.core import SwappedForward
from bertfast.swap.eligibility import (
    dropout_of,
    has_own_forward,
    has_user_hooks,
    is_readable_norm,
    may_skip_call,
)

ATTENTIONS = frozenset({"sdpa", "eager", "bertfast"})
# What transformers passes down to attention functions, of which those above make nothing. Outputs that are asked for
# are captured by hooks or forwards that transformers puts on what gives them; a layer with one at work runs stock.
WITHOUT_EFFECT = frozenset(
    {
        "token_type_ids",  # of DistilBERT, which has none, where a tokenizer makes them
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "num_items_in_batch",
    }
)
DROPOUT = frozenset({nn.Dropout})
# Up to that many numbers, 256 tokens of width 384, the host's part of an op counts: with `plain_ops` instead of `ops` a
# model of that width is 2 to 4 % faster on (8, 16) and on (1, 16), on two cores.
SMALL = 2**17
_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_new",
    "GELUTanh": "gelu_pytorch_tanh",
    "PytorchGELUTanh": "gelu_pytorch_tanh",
    "FastGELUActivation": "gelu_fast",
    "AccurateGELUActivation": "gelu_accurate",
    "QuickGELUActivation": "quick_gelu",
    "SiLUActivation": "silu",
    "ReLU": "relu",
    "SiLU": "silu",
}
_ACTIVATION_MODULES = frozenset({"transformers.activations", "torch.nn.modules.activation"})
_activation_names: dict[type, str | None] = {}


class Packed(NamedTuple):
    """Where the sequences in packed hidden states (1, T, N) begin, and how long the longest is; None in (B, S, N)
    without padding."""

    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None


class Parts(NamedTuple):
    """The modules that a layer computes with; `core`, which is not called, has the settings of its attention."""

    core: nn.Module
    query: nn.Module
    key: nn.Module
    value: nn.Module
    attention_dropout: nn.Dropout
    attention_out: nn.Module
    attention_out_dropout: nn.Dropout | None
    attention_norm: nn.LayerNorm
    ffn_in: nn.Module
    activation: Activation
    ffn_out: nn.Module
    ffn_dropout: nn.Dropout
    ffn_norm: nn.LayerNorm


class Settings(NamedTuple):
    """What decides whether a layer can be fused beside its modules."""

    attention: str
    chunk_size: int
    causal: bool


def activation_of(module: Activation) -> str | Activation:
    """The configuration name of an activation module, or the module itself, to be called."""
    kind = type(module)
    if kind not in _activation_names:
        known = kind.__module__ in _ACTIVATION_MODULES
        _activation_names[kind] = _ACTIVATIONS.get(kind.__name__) if known else None
    name = _activation_names[kind]
    if name is None or "forward" in module.__dict__ or has_user_hooks(module):
        return module
    return name


def unknown_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether something is given that may ask for what a fused forward does not do."""
    if any(value is not None for value in args):
        return True
    return any(not (value is None or value is False or name in WITHOUT_EFFECT) for name, value in kwargs.items())


class FusedLayer(SwappedForward):
    """A layer's fused forward. What a family gives are static methods, because they are asked of stock layers too."""

    becomes = "fused layer"
    _kinds: frozenset[type[nn.Module]]

    @staticmethod
    def containers(layer: nn.Module) -> Iterator[nn.Module]:
        """The modules on the way to the parts, which are never called, each before one looks into it."""
        raise NotImplementedError

    @staticmethod
    def parts(layer: nn.Module) -> Parts:
        """The parts of a layer whose containers are stock's."""
        raise NotImplementedError

    @staticmethod
    def settings(layer: nn.Module) -> Settings:
        """The settings of a layer whose containers are stock's."""
        raise NotImplementedError

    @classmethod
    def obstacle(cls, layer: nn.Module, kinds: frozenset[type[nn.Module]]) -> str | None:
        """Why a layer has to run stock now.

        Args:
            kinds: the stock types of containers.
        """
        if has_global_hooks():
            return "there are hooks on all modules"
        for module in cls.containers(layer):
            if not may_skip_call(module, kinds):
                return _why_called(module, kinds)
        settings = cls.settings(layer)
        if settings.causal:
            return "it is a decoder: causal and cross-attention and caches stay stock"
        if settings.attention not in ATTENTIONS:
            return f"attn_implementation is {settings.attention!r}, not one of {', '.join(sorted(ATTENTIONS))}"
        if settings.chunk_size:
            return "chunk_size_feed_forward is set"
        parts = cls.parts(layer)
        for dropout in (parts.attention_dropout, parts.attention_out_dropout, parts.ffn_dropout):
            if dropout is not None and not may_skip_call(dropout, DROPOUT):
                return _why_called(dropout, DROPOUT)
        for norm in (parts.attention_norm, parts.ffn_norm):
            if not is_readable_norm(norm):
                return _why_called(norm, frozenset({nn.LayerNorm}))
        return None

    def fused_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: object,
        bertfast_packed: Packed | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Stock's arguments and result, and what a swapped encoder adds.

        Args:
            hidden_states: (B, S, N), or packed (1, T, N) with `bertfast_packed`.
            attention_mask: over pairs, broadcasting to (B, H, S, S): bool (True takes part) or added to the scores;
                with others the layer runs stock. Not read with `bertfast_packed`.
            bertfast_packed: from an encoder that has looked at `obstacle` for all its layers.
        """
        if bertfast_packed is not None:
            return self._run(hidden_states, None, *bertfast_packed)
        mask = attention_mask
        if (
            (mask is None or _is_over_pairs(mask))
            and not unknown_arguments(args, kwargs)
            and self.obstacle(self, self._kinds) is None
        ):
            return self._run(hidden_states, mask, None, None)
        return self.stock_forward(hidden_states, self._stock_mask(mask, hidden_states), *args, **kwargs)

    def _stock_mask(self, mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
        """Stock's eager attention adds its mask, and a bool one comes from our hook on the model."""
        config = getattr(getattr(self.attention, "self", self.attention), "config", None)
        if (
            not isinstance(mask, Tensor)
            or mask.dtype != torch.bool
            or getattr(config, "_attn_implementation", None) != "eager"
        ):
            return mask
        lowest = torch.finfo(hidden_states.dtype).min
        return torch.zeros_like(mask, dtype=hidden_states.dtype).masked_fill(~mask, lowest)

    def _run(
        self, hidden_states: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> Tensor:
        """The layer on (B, S, N) with a mask as of `ops.attention` or None, or on packed (1, T, N) with `cu_seqlens`
        and `max_seqlen`; to the same shape."""
        parts, small = self.parts(self), _is_small(hidden_states)
        core = parts.core
        context, _ = self_attention(
            hidden_states,
            parts.query,
            parts.key,
            parts.value,
            core.attention_head_size,
            # Stock never calls the dropout inside: it applies its probability while the attention around it trains.
            dropout_p=parts.attention_dropout.p if core.training else 0.0,
            scale=core.scaling,
            attn_mask=mask,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        attended = _add_norm(
            linear(context, parts.attention_out),
            hidden_states,
            parts.attention_norm,
            parts.attention_out_dropout,
            small,
        )
        op = plain_ops.feed_forward if small else ops.feed_forward
        output = feed_forward(attended, parts.ffn_in, parts.ffn_out, activation_of(parts.activation), op)
        return _add_norm(output, attended, parts.ffn_norm, parts.ffn_dropout, small)


class BertLayerForward(FusedLayer):
    """BERT, RoBERTa, XLM-RoBERTa and CamemBERT."""

    @staticmethod
    def containers(layer: nn.Module) -> Iterator[nn.Module]:
        children = layer._modules
        attention = children["attention"]
        yield attention
        yield attention._modules["self"]
        yield attention._modules["output"]
        yield children["intermediate"]
        yield children["output"]

    @staticmethod
    def parts(layer: nn.Module) -> Parts:
        children = layer._modules
        attention, intermediate = children["attention"]._modules, children["intermediate"]
        core, attended = attention["self"]._modules, attention["output"]._modules
        output = children["output"]._modules
        return Parts(
            attention["self"],
            core["query"],
            core["key"],
            core["value"],
            core["dropout"],
            attended["dense"],
            attended["dropout"],
            attended["LayerNorm"],
            intermediate._modules["dense"],
            intermediate.intermediate_act_fn,
            output["dense"],
            output["dropout"],
            output["LayerNorm"],
        )

    @staticmethod
    def settings(layer: nn.Module) -> Settings:
        core = layer._modules["attention"]._modules["self"]
        causal = layer.is_decoder or layer.add_cross_attention or core.is_causal
        return Settings(core.config._attn_implementation, layer.chunk_size_feed_forward, causal)


class DistilBertLayerForward(FusedLayer):
    """DistilBERT."""

    @staticmethod
    def containers(layer: nn.Module) -> Iterator[nn.Module]:
        yield layer._modules["attention"]
        yield layer._modules["ffn"]

    @staticmethod
    def parts(layer: nn.Module) -> Parts:
        children = layer._modules
        core, ffn = children["attention"]._modules, children["ffn"]
        return Parts(
            children["attention"],
            core["q_lin"],
            core["k_lin"],
            core["v_lin"],
            core["dropout"],
            core["out_lin"],
            None,
            children["sa_layer_norm"],
            ffn._modules["lin1"],
            ffn.activation,
            ffn._modules["lin2"],
            ffn._modules["dropout"],
            children["output_layer_norm"],
        )

    @staticmethod
    def settings(layer: nn.Module) -> Settings:
        core, ffn = layer._modules["attention"], layer._modules["ffn"]
        return Settings(core.config._attn_implementation, ffn.chunk_size_feed_forward, core.is_causal)


def _is_over_pairs(mask: object) -> bool:
    # That of flex attention is no tensor.
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return False
    return mask.dtype == torch.bool or mask.is_floating_point()


def _is_small(hidden_states: Tensor) -> bool:
    return plain_ops.is_preferred(hidden_states) and not is_traced(hidden_states) and hidden_states.numel() <= SMALL


def _add_norm(x: Tensor, residual: Tensor, norm: nn.LayerNorm, dropout: nn.Dropout | None, small: bool) -> Tensor:
    dropout_p = 0.0 if dropout is None else dropout_of(dropout)
    add_layer_norm = plain_ops.add_layer_norm if small and dropout_p == 0.0 else ops.add_layer_norm
    return add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps, dropout_p=dropout_p)


def _why_called(module: nn.Module, kinds: frozenset[type[nn.Module]]) -> str:
    name = type(module).__name__
    if has_user_hooks(module):
        return f"there is a hook on its {name}"
    if has_own_forward(module):
        return f"the forward of its {name} was replaced"
    if type(module) not in kinds:
        expected = " or ".join(sorted(kind.__name__ for kind in kinds))
        return f"it has a {name} where {expected} was expected"
    return f"its {name} has no ordinary weight and bias"
