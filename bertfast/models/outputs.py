"""What models return: named fields with access by attribute, by key and by position."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


class ModelOutput(OrderedDict):
    """A dataclass that is also the dictionary, and on request the tuple, of its fields that are not None.

    `out.logits`, `out["logits"]`, `out[0]` and `out[:2]` all work, and `out.to_tuple()` is what a model
    returns for `return_dict=False`. Being a dictionary, it passes through DataParallel, accelerate and Trainer, which
    rebuild it as `type(out)(...)` of a mapping or of pairs.
    """

    def __init_subclass__(cls) -> None:
        torch.utils._pytree.register_pytree_node(
            cls,
            _flatten,
            lambda values, context: context[0](**dict(zip(context[1], values, strict=True))),
            serialized_type_name=f"{cls.__module__}.{cls.__name__}",
            flatten_with_keys_fn=_flatten_with_keys,
            to_dumpable_context=lambda context: [context[0].__name__, context[1]],
            from_dumpable_context=lambda dumped: (globals()[dumped[0]], dumped[1]),
        )

    def __post_init__(self) -> None:
        first, *others = (field.name for field in fields(self))
        items = getattr(self, first)
        if isinstance(items, (Mapping, Iterator)) and all(getattr(self, name) is None for name in others):
            for name, value in {first: None, **dict(items)}.items():
                setattr(self, name, value)
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self):
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are not None, in order."""
        return tuple(self.values())


def _flatten(output: ModelOutput) -> tuple[list[Any], Any]:
    return list(output.values()), (type(output), list(output.keys()))


def _flatten_with_keys(output: ModelOutput):
    values, context = _flatten(output)
    return [(torch.utils._pytree.MappingKey(k), v) for k, v in zip(context[1], values, strict=True)], context


@dataclass
class BaseModelOutputWithPooling(ModelOutput):
    """`last_hidden_state` (B, S, N) and, where the model has a pooler, `pooler_output` (B, N).

    Here and below, of a model of L layers: `hidden_states`, L + 1 of (B, S, N), and `attentions`, L of (B, H, S, S).
    """

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class LogitsOutput(ModelOutput):
    """`loss` (scalar, when labels were given) and `logits`, whose shape the model's forward states."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class PreTrainingOutput(ModelOutput):
    """`prediction_logits` (B, S, V) and `seq_relationship_logits` (B, 2); `loss` when both labels were given."""

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class QuestionAnsweringOutput(ModelOutput):
    """`start_logits` and `end_logits` (B, S); `loss` when both positions were given."""

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
