"""Encoders of transformers around which padding is removed once, and the base models' hook that sees the padding.

An encoder is given a mask over (query, key) pairs only. So a pre-hook on the base model, where the (B, S) mask is, puts
its (B, 1, 1, S) view in its place, which transformers passes on as it is, and gives the mask itself to the encoder as
an argument more.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bertfast.nn.plain import any_hooks
from bertfast.plan import REAL_ROWS, RowUse, plan_rows
from bertfast.swap.core import SwapHook, SwappedForward
from bertfast.swap.eligibility import ends_in_class, has_own_forward, has_user_hooks
from bertfast.swap.hf_layers import ATTENTIONS, FusedLayer, Packed, unknown_arguments

PADDING = "bertfast_padding"
USE = "bertfast_use"
# Attribute of a base model inside a head: the `RowUse` while the head does not tell, as when its `forward` is called
# past its hooks.
USE_OF_HEAD = "_bertfast_use_of_head"
CAPTURED = ("output_attentions", "output_hidden_states")


class Padding(NamedTuple):
    """What an encoder is told of padding.

    Attributes:
        mask: (B, S), nonzero where a token is real, of any dtype.
        use: which padded rows are used.
    """

    mask: Tensor
    use: RowUse


class FusedEncoder(SwappedForward):
    """The stock loop over layers, on real tokens alone where that can be."""

    becomes = "can run without padding"

    def fused_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: object,
        bertfast_padding: Padding | None = None,
        **kwargs: object,
    ) -> object:
        """Stock's arguments and result, (B, S, N); with `bertfast_padding` from `BaseModelHook`, rows that nobody uses
        are 0, and `attention_mask` is not read."""
        if bertfast_padding is None:
            return self.stock_forward(hidden_states, attention_mask, *args, **kwargs)
        plan = plan_rows(*bertfast_padding, lambda: any_hooks(self, has_user_hooks), self._can_pack)
        packing = plan.packing
        if packing is None and plan.attn_mask is None:
            # The plan has asked the layers already.
            return self.stock_forward(hidden_states, None, *args, bertfast_packed=Packed(), **kwargs)
        if packing is None:
            output = self.stock_forward(hidden_states, plan.attn_mask, *args, **kwargs)
            if plan.rows is not None:
                output["last_hidden_state"] = plan.keep_rows(output["last_hidden_state"])
            return output
        packed = packing.unpad(hidden_states).unsqueeze(0)
        where = Packed(packing.cu_seqlens, packing.max_seqlen)
        output = self.stock_forward(packed, None, *args, bertfast_packed=where, **kwargs)
        output["last_hidden_state"] = packing.repad(output["last_hidden_state"][0])
        return output

    def _can_pack(self) -> bool:
        return all(layer.obstacle(layer, layer._kinds) is None for layer in self.layer)


class BaseModelHook(SwapHook):
    """Tells a base model's encoder of padding."""

    becomes = "tells the encoder of padding"
    encoder: ClassVar[str] = "encoder"
    arguments: ClassVar[tuple[str, ...]] = (
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "position_ids",
        "inputs_embeds",
    )

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        kwargs = dict(kwargs)
        use = kwargs.pop(USE, module.__dict__.get(USE_OF_HEAD, REAL_ROWS))
        given = dict(zip(self.arguments, args, strict=False), **kwargs)
        known = len(args) <= len(self.arguments) and self.is_last(module) and ends_in_class(module)
        if not known or not self._is_for_us(module, given):
            return args, kwargs
        mask = given["attention_mask"]
        asked = any(given.get(name) or getattr(module.config, name, False) for name in CAPTURED)
        pooler = module._modules.get("pooler")
        # A pooler of stock reads the first token; a user's own may read anything.
        own_pooler = pooler is not None and type(pooler).__module__ != type(module).__module__
        use = use._replace(
            padded_rows=use.padded_rows or asked or own_pooler or not self.options.unpad,
            first_token=use.first_token or pooler is not None,
        )
        kwargs[PADDING] = Padding(mask, use)
        # Dynamo compiles the hook of a whole model apart from its forward; without operations that is no graph. The
        # mask over pairs that transformers makes then is used by nobody, and goes. Hooks behind the forward see what it
        # was given.
        if not torch.compiler.is_dynamo_compiling() and not module._forward_hooks:
            view = (mask if mask.dtype == torch.bool else mask != 0)[:, None, None, :]
            if len(args) > 1:
                args = (args[0], view, *args[2:])
            else:
                kwargs["attention_mask"] = view
        return args, kwargs

    def _is_for_us(self, module: nn.Module, given: dict[str, object]) -> bool:
        """Whether there is a (B, S) mask, and an encoder that is told nothing which stock alone can do."""
        mask, encoder = given.get("attention_mask"), module._modules.get(self.encoder)
        shown = given.get("input_ids")
        shown = given.get("inputs_embeds") if shown is None else shown
        if not isinstance(mask, Tensor) or not isinstance(shown, Tensor) or mask.dim() != 2:
            return False
        # Not for Dynamo, for which sizes are a graph.
        if not torch.compiler.is_dynamo_compiling() and mask.shape != shown.shape[:2]:
            return False
        config = module.config
        others = {name: value for name, value in given.items() if name not in self.arguments}
        causal = getattr(config, "is_decoder", False) or getattr(config, "is_causal", False)
        return not (
            causal
            or unknown_arguments((), others)
            or config._attn_implementation not in ATTENTIONS
            or mask.device != shown.device
            or not isinstance(encoder, FusedEncoder)
            or has_own_forward(encoder)
            or not all(isinstance(layer, FusedLayer) for layer in encoder.layer)
        )


class DistilBertModelHook(BaseModelHook):
    """DistilBERT's arguments and names."""

    encoder = "transformer"
    arguments = ("input_ids", "attention_mask", "inputs_embeds", "position_ids")
