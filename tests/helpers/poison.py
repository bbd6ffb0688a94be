"""Memory as a kernel may find it: fresh tensors full of NaN, and inputs that lie inside buffers full of NaN.

An element that a kernel forgets to write, or a lane that it reads beyond a tensor and gives a weight of zero, becomes a
NaN in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from helpers.bounds import checked


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills what torch allocates without initialising it with NaN, allocations in C++ included."""
    mode = torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    # As use_deterministic_algorithms(True, warn_only=True), which imports Inductor: seconds per process.
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.set_deterministic_debug_mode(mode)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """`poisoned` around a test, and Triton's accesses checked; op tests use it for all of theirs."""
    with poisoned(), checked():
        yield


def _filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max if dtype != torch.bool else True
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def _inside(x: Tensor, view: Tensor) -> Tensor:
    assert view.shape == x.shape
    view.copy_(x.detach())
    return view.requires_grad_(x.requires_grad)


def contiguous(x: Tensor) -> Tensor:
    return _inside(x, _filled([x.numel() + 128], x.dtype, x.device)[64 : 64 + x.numel()].view(x.shape))


def misaligned(x: Tensor) -> Tensor:
    """Contiguous, one element away from any alignment."""
    return _inside(x, _filled([x.numel() + 128], x.dtype, x.device)[65 : 65 + x.numel()].view(x.shape))


def padded_rows(x: Tensor) -> Tensor:
    """Rows further apart than they are long."""
    *leading, width = x.shape
    return _inside(x, _filled([*leading, width + 5], x.dtype, x.device)[..., 2 : 2 + width])


def every_other(x: Tensor) -> Tensor:
    """Innermost stride 2."""
    *leading, width = x.shape
    return _inside(x, _filled([*leading, 2 * width + 1], x.dtype, x.device)[..., 1 : 2 * width + 1 : 2])


def transposed(x: Tensor) -> Tensor:
    """The first two dimensions swapped in memory (of a matrix: stored by columns)."""
    if x.dim() < 2:
        return contiguous(x)
    swapped = [x.shape[1], x.shape[0], *x.shape[2:]]
    size = x.numel()
    return _inside(x, _filled([size + 32], x.dtype, x.device)[16 : 16 + size].view(swapped).transpose(0, 1))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    layout.__name__: layout for layout in (contiguous, misaligned, padded_rows, every_other, transposed)
}


def expanded(x: Tensor) -> Tensor:
    """Stride 0 everywhere, as the gradient that `.sum().backward()` makes; the value of the first element."""
    scalar = _filled([33], x.dtype, x.device)
    scalar[16] = x.reshape(-1)[0].detach() if x.numel() else 0.0
    return scalar[16:17].expand(x.numel()).as_strided(x.shape, [0] * x.dim(), 16).requires_grad_(x.requires_grad)
