"""The module of sentence-transformers that calls a model. Since version 6 it calls the model's `forward`, past the
model's hooks; so a hook on this module runs them, and adds what they add to the arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn

from bertfast.swap.core import HookSwapper, SwapHook, Swapper
from bertfast.swap.huggingface import swapper_for as swapper_of_model

TRANSFORMER = "sentence_transformers.base.modules.transformer"


class TransformerHook(SwapHook):
    """Runs our hooks on the model inside."""

    becomes = "tells its model of padding"

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        hooks = [hook for hook in module.model._forward_pre_hooks.values() if isinstance(hook, SwapHook)]
        features = args[0] if args else kwargs.get("features")
        if not hooks or not isinstance(features, Mapping):
            return None
        how = module.modality_config.get(features.get("modality", "text"), {})
        if how.get("method") != "forward":
            return None
        not_for_model = getattr(sys.modules[TRANSFORMER], "_NON_MODEL_FEATURE_KEYS", ())
        given = {name: value for name, value in {**features, **kwargs}.items() if name not in not_for_model}
        if "hidden_states" in (how.get("method_output_name") or ()):
            given["output_hidden_states"] = True
        found = given
        for hook in hooks:
            _, found = hook(module.model, (), found)
        changed = {name: value for name, value in found.items() if given.get(name) is not value}
        return args, {**kwargs, **changed}


def swapper_for(module: nn.Module) -> Swapper | None:
    """The swapper of the module around a supported model; None for others."""
    modules = sys.modules.get(TRANSFORMER)
    if modules is None or type(module) is not modules.Transformer or swapper_of_model(module.model) is None:
        return None
    return HookSwapper(TransformerHook, lambda module: None)


def reason_left(module: nn.Module) -> str | None:
    """Never any: models inside have their own."""
    return None
