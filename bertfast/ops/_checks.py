"""Argument checks shared by the public ops: each names the argument, what was expected and what came.

They look at metadata only and cost no transfer; while tracing, comparisons of sizes become guards or symbolic checks.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from bertfast.backends import has_values


def check_required(names: tuple[str, ...], *tensors: Tensor) -> None:
    """Raises TypeError unless all are tensors."""
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")


def check_tensors(names: tuple[str, ...], *tensors: Tensor | None) -> None:
    """Raises unless all tensors (None where an optional one is absent) are floating point (TypeError) and live on the
    device of the first (ValueError)."""
    device = tensors[0].device
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating point tensor, got {got}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, expected {device}, the device of {names[0]}")


def check_same_dtype(names: tuple[str, ...], *tensors: Tensor | None) -> None:
    """Raises ValueError unless all tensors (None where an optional one is absent) have the dtype of the first."""
    dtype = tensors[0].dtype
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and tensor.dtype != dtype:
            raise ValueError(f"{name} must have the dtype {dtype} of {names[0]}, got {tensor.dtype}")


def check_device(name: str, tensor: Tensor | None, device: torch.device) -> None:
    """Raises TypeError unless `tensor` (if any) is one, ValueError unless it lives on `device`."""
    if tensor is not None and not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")


def check_eps(eps: float) -> None:
    """Raises ValueError unless `eps` is 0 or more. Under dynamic=True it is symbolic, and Dynamo must meet it before it
    traces a Function."""
    if not eps >= 0.0:
        raise ValueError(f"eps must be 0 or more, got {eps}")


def check_shape(name: str, tensor: Tensor | None, expected: tuple[int, ...]) -> None:
    """Raises ValueError unless `tensor` (if any) has the shape `expected`."""
    if tensor is not None and tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")


def check_rank(name: str, tensor: Tensor, minimum: int) -> None:
    """Raises ValueError unless `tensor` has at least `minimum` dimensions."""
    if tensor.dim() < minimum:
        raise ValueError(f"{name} must have at least {minimum} dimension(s), got shape {tuple(tensor.shape)}")


def values_are_checked(tensor: Tensor) -> bool:
    """Whether checks of values (ids in range, cu_seqlens ascending) run on `tensor`.

    On the CPU they always do. On a GPU they would cost a transfer that stalls the stream, so they need
    `BERTFAST_VALIDATE=1`. A trace has no values to look at, nor have `torch.func` and fake tensors.
    """
    if not has_values(tensor):
        return False
    return tensor.device.type == "cpu" or os.environ.get("BERTFAST_VALIDATE") == "1"


def check_range(name: str, ids: Tensor | None, size: int, table: str) -> None:
    """Raises IndexError unless all `ids` are in [0, size); TypeError unless they are int32 or int64."""
    if ids is None:
        return
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {ids.dtype}")
    if not values_are_checked(ids) or ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise IndexError(f"{name} has the value {wrong}, expected 0 <= value < {size}, the rows of {table}")


def check_broadcast(name: str, ids: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `ids` broadcasts to `shape`."""
    pairs = zip(reversed(ids.shape), reversed(shape), strict=False)
    if ids.dim() > len(shape) or any(have not in (1, want) for have, want in pairs):
        raise ValueError(f"{name} must broadcast to {tuple(shape)}, got {tuple(ids.shape)}")
