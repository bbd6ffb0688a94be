"""What converters that trace a PyTorch model are given."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class HiddenStates(nn.Module):
    """A stock model as a function of input_ids and attention_mask, (B, S) int64: the last hidden state, (B, S, N)."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def traceable(stock: nn.Module, attention: str) -> HiddenStates:
    """A copy in eval mode, float32 and on the CPU, where every converter works; a narrower dtype loses nothing by it.

    Args:
        stock: a transformers model.
        attention: transformers' name of its implementation.
    """
    model = copy.deepcopy(stock).to("cpu", torch.float32)
    model.set_attn_implementation(attention)
    return HiddenStates(model).eval().requires_grad_(False)


def example(stock: nn.Module) -> dict[str, Tensor]:
    """Two rows of which one has padding: with all tokens real, a trace would hold no mask."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    ids = torch.arange(14).view(2, 7) % (stock.config.vocab_size - 5) + 5
    return {"input_ids": ids.masked_fill(mask == 0, stock.config.pad_token_id or 0), "attention_mask": mask}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings about what a trace does not follow: results for other sizes are compared before timing."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield
