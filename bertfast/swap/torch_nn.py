"""The modules of torch.nn that can be swapped."""

from __future__ import annotations

from torch import nn

from bertfast.swap.core import Swapper


def swapper_for(module: nn.Module) -> Swapper | None:
    """The swapper of a stock module; None for what is none."""
    return None


def reason_left(module: nn.Module) -> str | None:
    """Why a module that one might expect swapped is not."""
    return None
