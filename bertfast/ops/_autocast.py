"""What autocast makes of an op's inputs, so that fused ops give the dtypes that stock PyTorch gives."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def to_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts floating point tensors as autocast does for GEMMs and attention; fp64 is left alone, as torch does."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # no autocast for meta: asking is an error
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.dtype.is_floating_point and t.dtype != torch.float64 else t for t in tensors
    )


def normalises_in_float32(x: Tensor) -> bool:
    """Whether stock LayerNorm returns fp32 here: CUDA's autocast lists it under fp32, the CPU's does not."""
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def without_autocast(backward: Callable) -> Callable:
    """`backward`, which computes in the dtypes that the forward pass had: where it runs another autocast may be in
    force, or one where there was none, and GEMMs would follow that."""

    @functools.wraps(backward)
    def run(*arguments):
        device = next(a for a in arguments if isinstance(a, Tensor)).device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return backward(*arguments)
        with torch.autocast(device, enabled=False):
            return backward(*arguments)

    return run
