"""What autograd keeps for a backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from helpers.tolerance import Inputs


def saved_bytes(inputs: Inputs, function: Callable[[], Tensor]) -> int:
    """Bytes that a call keeps beyond its inputs, each storage once."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    assert out.requires_grad
    ours = {t.untyped_storage().data_ptr() for t in inputs.values() if t is not None}
    return sum(size for pointer, size in storages.items() if pointer not in ours)
