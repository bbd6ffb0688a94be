"""Stock models of transformers and their swapped copies."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import bertfast
from bertfast.packing import Packing
from helpers.checkpoints import HEADS, family_of, tiny_stock
from helpers.models import NO_DROPOUT, inputs_of
from helpers.project import ROOT

# Of this process for others: its bertfast, and its transformers, which may be another than the installed one.
PATH = (ROOT, Path(transformers.__file__).parents[1])
# In transformers 5.0 these two read the output of a pooler that their base model does not have.
BROKEN = ("XLMRobertaForMultipleChoice", "CamembertForMultipleChoice") if transformers.__version__ == "5.0.0" else ()
OTHER_ROBERTAS = [
    name
    for prefix in ("XLMRoberta", "Camembert")
    for name in (prefix + head.removeprefix("Roberta") for head in HEADS["roberta"])
    if name not in BROKEN
]
STOCK_HEADS = [*HEADS["bert"], *HEADS["roberta"], *OTHER_ROBERTAS, *HEADS["distilbert"]]


def stock_and_swapped(
    name: str,
    *,
    dtype: torch.dtype = torch.float64,
    attention: str = "sdpa",
    unpad: bool = True,
    seed: int = 0,
    **fields: object,
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
    """A tiny random stock model without dropout, in eval mode, and a swapped copy."""
    fields = {**NO_DROPOUT[family_of(name)], **fields}
    stock = tiny_stock(name, seed, attn_implementation=attention, **fields).to(dtype)
    swapped = copy.deepcopy(stock)
    assert bertfast.accelerate(swapped, unpad=unpad, strict=True)
    return stock, swapped


class PackedRuns:
    """How many encoders ran packed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        repad = Packing.repad

        def counted(packing, packed):
            self.count += 1
            return repad(packing, packed)

        monkeypatch.setattr(Packing, "repad", counted)

    def since(self) -> int:
        """The number since the last call."""
        count, self.count = self.count, 0
        return count


def types_of(model: nn.Module) -> dict[str, type]:
    """The class of every module."""
    return {name: type(module) for name, module in model.named_modules()}


def traces_of_swap(model: nn.Module) -> list[str]:
    """Where something of the swap is left."""
    found = []
    for name, module in model.named_modules():
        found += [f"{name}.{key}" for key in vars(module) if key.startswith("_bertfast")]
        found += [name for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("bertfast")]
        found += [name] if type(module).__module__.startswith("bertfast") else []
    return found


def run(model: nn.Module, kind: str = "right") -> list[torch.Tensor]:
    """The tensors that a model gives under one of `PADDING`, without gradients."""
    with torch.no_grad():
        output = model(**inputs_of(type(model).__name__, kind))
    return [tensor for tensor in output.values() if isinstance(tensor, torch.Tensor)]


def assert_bit_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    """The same numbers."""
    assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
