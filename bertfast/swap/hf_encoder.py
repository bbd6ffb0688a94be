"""Encoders of transformers around which padding is removed once, and the base models' hook that decides it.

An encoder is given a mask over (query, key) pairs only. So a pre-hook on the base model, where the (B, S) mask is, puts
its (B, 1, 1, S) view in its place, which transformers passes on as it is, and gives the encoder a plan as an argument.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from bertfast.models.plan import REAL_ROWS, Plan, RowUse, plan_rows
from bertfast.swap.core import SwapHook, SwappedForward
from bertfast.swap.eligibility import any_user_hooks, has_own_forward
from bertfast.swap.hf_layers import ATTENTIONS, FusedLayer, Packed, unknown_arguments

PLAN = "bertfast_plan"
USE = "bertfast_use"
CAPTURED = ("output_attentions", "output_hidden_states")


class FusedEncoder(SwappedForward):
    """The stock loop over layers, on real tokens alone where the plan says so."""

    def fused_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: object,
        bertfast_plan: Plan | None = None,
        **kwargs: object,
    ) -> object:
        plan = bertfast_plan
        if plan is None:
            return self.stock_forward(hidden_states, attention_mask, *args, **kwargs)
        if plan.packing is None:
            output = self.stock_forward(hidden_states, plan.attn_mask, *args, **kwargs)
            if plan.rows is not None:
                output["last_hidden_state"] = plan.keep_rows(output["last_hidden_state"])
            return output
        packing = plan.packing
        packed = packing.unpad(hidden_states).unsqueeze(0)
        where = Packed(packing.cu_seqlens, packing.max_seqlen)
        output = self.stock_forward(packed, None, *args, bertfast_packed=where, **kwargs)
        output["last_hidden_state"] = packing.repad(output["last_hidden_state"][0])
        return output


class BaseModelHook(SwapHook):
    """Decides for a base model whether its encoder runs packed."""

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
        use = kwargs.pop(USE, REAL_ROWS)
        given = dict(zip(self.arguments, args, strict=False), **kwargs)
        plan = None if len(args) > len(self.arguments) else self._plan(module, given, use)
        if plan is not None:
            # Of any plan, since it stops transformers from making a mask over pairs.
            view = given["attention_mask"][:, None, None, :] != 0
            kwargs[PLAN] = plan
            if len(args) > 1:
                args = (args[0], view, *args[2:])
            else:
                kwargs["attention_mask"] = view
        return args, kwargs

    def _plan(self, module: nn.Module, given: dict[str, object], use: RowUse) -> Plan | None:
        """None where the mask is not for us: stock does then whatever it does."""
        mask, encoder = given.get("attention_mask"), module._modules.get(self.encoder)
        shown = given.get("input_ids")
        shown = given.get("inputs_embeds") if shown is None else shown
        if not isinstance(mask, Tensor) or not isinstance(shown, Tensor) or mask.shape != shown.shape[:2]:
            return None
        config = module.config
        others = {name: value for name, value in given.items() if name not in self.arguments}
        causal = getattr(config, "is_decoder", False) or getattr(config, "is_causal", False)
        if causal or unknown_arguments((), others) or not isinstance(encoder, FusedEncoder) or has_own_forward(encoder):
            return None
        if config._attn_implementation not in ATTENTIONS or mask.device != shown.device:
            return None
        if not all(isinstance(layer, FusedLayer) for layer in encoder.layer):
            return None
        asked = (given.get(name) or getattr(config, name, None) for name in CAPTURED)
        use = use._replace(
            padded_rows=use.padded_rows or not self.options.unpad or any(asked),
            first_token=use.first_token or module._modules.get("pooler") is not None,
        )
        return plan_rows(mask, use, lambda: any_user_hooks(encoder) or not _all_fused(encoder))


class DistilBertModelHook(BaseModelHook):
    """DistilBERT's arguments and names."""

    encoder = "transformer"
    arguments = ("input_ids", "attention_mask", "inputs_embeds", "position_ids")


def _all_fused(encoder: nn.Module) -> bool:
    return all(layer.obstacle(layer, layer._kinds) is None for layer in encoder.layer)
