"""Memory accesses of interpreted Triton kernels, held to the tensors that the launch was given.

Poisoned memory shows a stray value that reaches a result; this shows the access itself, also a store beyond a tensor's
end that the next program overwrites and a load whose value is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from torch import Tensor


class OutOfBounds(AssertionError):
    """A kernel read or wrote an address that belongs to none of its arguments."""


def _extent(t: Tensor) -> tuple[int, int]:
    """First byte, and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else -1
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _check(extents: list[tuple[int, int]], what: str, pointers, mask) -> None:
    addresses = np.broadcast_to(pointers.data, np.shape(mask.data))[mask.data]
    if addresses.size == 0:
        return
    low, high = int(addresses.min()), int(addresses.max())
    size = pointers.get_element_ty().primitive_bitwidth // 8
    if any(start <= low and high + size <= end for start, end in extents):
        return
    # Pointers that a kernel gathers from several tensors.
    inside = np.zeros(addresses.shape, bool)
    for start, end in extents:
        inside |= (addresses >= start) & (addresses + np.uint64(size) <= end)
    if not inside.all():
        raise OutOfBounds(f"a kernel {what} {int((~inside).sum())} elements that belong to none of its arguments")


@contextmanager
def checked() -> Iterator[None]:
    """Interpreted kernels raise where they leave their arguments; nothing where Triton is missing or compiles."""
    try:
        import triton
    except ImportError:
        yield
        return
    if not triton.knobs.runtime.interpret:
        yield
        return
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    init, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    extents: list[tuple[int, int]] = []

    def checked_init(self, args, kwargs):
        host, named = init(self, args, kwargs)
        tensors = [getattr(arg, "base", arg) for arg in (*host, *named.values())]
        extents[:] = [_extent(t) for t in tensors if isinstance(t, Tensor)]
        return host, named

    def checked_load(self, pointers, mask, *rest, **named):
        _check(extents, "reads", pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def checked_store(self, pointers, value, mask, *rest, **named):
        _check(extents, "writes", pointers, mask)
        return store(self, pointers, value, mask, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_init_args_hst", checked_init)
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        yield
