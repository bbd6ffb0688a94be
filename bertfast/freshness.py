"""What the host knows of a Parameter: the first thing that copies of weights are held to."""

from __future__ import annotations

from torch import nn

Facts = tuple


def facts_of(p: nn.Parameter | None) -> Facts | None:
    """data_ptr, version counter (of a tensor that has one), dtype, device, shape and strides; of None, None."""
    if p is None:
        return None
    version = None if p.is_inference() else p._version
    return p.data_ptr(), version, p.dtype, p.device, p.shape, p.stride()
