"""Heads of transformers: what they need of padded rows, and the transforms in front of the vocabulary."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from bertfast import ops
from bertfast.activations import Activation
from bertfast.nn.feed_forward import dense_activation
from bertfast.nn.plain import has_global_hooks
from bertfast.plan import RowUse
from bertfast.swap.core import SwapHook, SwappedForward, our_hooks
from bertfast.swap.eligibility import ends_in_class, is_readable_norm
from bertfast.swap.hf_encoder import USE, USE_OF_HEAD
from bertfast.swap.hf_layers import activation_of


class HeadHook(SwapHook):
    """Tells the base model, by an argument that transformers passes on, which padded rows the head will use: all, for a
    label of each token that is predicted by the one before it."""

    becomes = "tells which padded rows it uses"
    # The position of the first argument behind those of the base model.
    labels_at: ClassVar[int] = 5
    # What the head may use in any call.
    use: ClassVar[RowUse] = RowUse(padded_rows=True)

    @classmethod
    def prepare(cls, module: nn.Module) -> None:
        module.base_model.__dict__[USE_OF_HEAD] = cls.use

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        # Neither a forward nor a base model of the user's own may be given an argument that it does not know.
        base = module._modules.get(module.base_model_prefix)
        if base is None or not our_hooks(base) or not ends_in_class(module):
            return args, kwargs
        use = self.use_of(args, kwargs) if self.is_last(module) else RowUse(padded_rows=True)
        return args, {**kwargs, USE: use}

    def use_of(self, args: tuple, kwargs: dict) -> RowUse:
        """What the head uses in this call."""
        return self.use

    def given(self, name: str, offset: int, args: tuple, kwargs: dict) -> object:
        """An argument of the head by its name and its place behind those of the base model."""
        at = self.labels_at + offset
        return args[at] if len(args) > at else kwargs.get(name)


class TokenHook(HeadHook):
    """A label for each token."""

    def use_of(self, args: tuple, kwargs: dict) -> RowUse:
        labels = self.given("labels", 0, args, kwargs)
        return RowUse(labels=labels if isinstance(labels, Tensor) else None)


class AnswerHook(HeadHook):
    """Cross entropy over the positions of a sequence, padded ones too."""

    def use_of(self, args: tuple, kwargs: dict) -> RowUse:
        starts = self.given("start_positions", 0, args, kwargs)
        ends = self.given("end_positions", 1, args, kwargs)
        return RowUse(padded_rows=starts is not None and ends is not None)


class FirstTokenHook(HeadHook):
    """A classifier on the first token of the encoder's output."""

    use = RowUse(first_token=True)


class DistilBertTokenHook(TokenHook):
    """DistilBERT's order of arguments."""

    labels_at = 3


class DistilBertAnswerHook(AnswerHook):
    """DistilBERT's order of arguments."""

    labels_at = 3


class FusedTransform(SwappedForward):
    """Linear layer and GELU as one op, then LayerNorm."""

    becomes = "fused transform"

    def fused_forward(self, hidden_states: Tensor) -> Tensor:
        norm = self._modules["LayerNorm"]
        if has_global_hooks() or not is_readable_norm(norm):
            return self.stock_forward(hidden_states)
        return _transform(hidden_states, self._modules["dense"], activation_of(self.transform_act_fn), norm)


class FusedLMHead(SwappedForward):
    """RoBERTa's transform, which is always by the exact GELU, and its decoder."""

    becomes = "fused transform"

    def fused_forward(self, features: Tensor, **kwargs: object) -> Tensor:
        norm = self._modules["layer_norm"]
        if has_global_hooks() or not is_readable_norm(norm):
            return self.stock_forward(features, **kwargs)
        return self.decoder(_transform(features, self._modules["dense"], "gelu", norm))


def _transform(x: Tensor, dense: nn.Module, activation: str | Activation, norm: nn.LayerNorm) -> Tensor:
    return ops.add_layer_norm(dense_activation(x, dense, activation), None, norm.weight, norm.bias, norm.eps)
