"""Launches: compiled kernels are kept per specialisation and started directly, on the tensors' device and stream.

`JITFunction.run` binds, specialises and looks up anew on every launch (12 us on a 2025 server core, where the compiled
kernel's own launch takes 3). What it would find depends on dtypes, on alignment and on the values of specialised
arguments only, so that is the key here.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bertfast.dropout import keep_scale
from bertfast.kernels.tiles import MULTIPROCESSORS


class Device(NamedTuple):
    """What tiles depend on.

    Attributes:
        capability: 10 x major + minor.
        multiprocessors: their number.
    """

    capability: int
    multiprocessors: int


# What interpreted kernels are tiled for.
INTERPRETED_AS = Device(80, MULTIPROCESSORS[80])


def device_of(x: Tensor) -> Device:
    """The device that kernels on `x` run on. CPU tensors only meet the interpreter, or a driver that stands for a
    GPU."""
    if x.is_cuda:
        return _cuda_device(x.device.index)
    if triton.knobs.runtime.interpret:
        return INTERPRETED_AS
    capability = triton.runtime.driver.active.get_current_target().arch
    return Device(capability, MULTIPROCESSORS[capability])


@functools.cache
def _cuda_device(index: int) -> Device:
    facts = torch.cuda.get_device_properties(index)
    return Device(10 * facts.major + facts.minor, facts.multi_processor_count)


class Launcher:
    """A `@triton.jit` kernel with its compiled variants.

    Call it with the grid and all arguments by position, constexprs included; options of the compiler by name. The
    device is that of the first argument.

    Raises:
        ValueError: a grid beyond CUDA's limits (2**31 - 1, 65,535, 65,535).
    """

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self._interpreted = not isinstance(kernel, JITFunction)
        self._variants: dict[tuple, Any] = {}
        self._kinds = () if self._interpreted else tuple(map(_kind, kernel.params))

    @property
    def variants(self) -> int:
        """Compiled variants so far."""
        return len(self._variants)

    def __call__(self, grid: tuple[int, ...], first: Tensor | TensorDescriptor, *rest: Any, **options: Any) -> None:
        grid = (*grid, 1, 1)[:3]
        if grid[0] >= 2**31 or grid[1] > 65535 or grid[2] > 65535:
            raise ValueError(f"{self.kernel.__name__} needs a grid of {grid}, CUDA takes (2147483647, 65535, 65535)")
        args = (first, *rest)
        if self._interpreted:
            self.kernel[grid](*args, **options)
            return
        on = first.base if isinstance(first, TensorDescriptor) else first
        index = on.device.index
        if not on.is_cuda:
            self._launch(triton.runtime.driver.active.get_current_device(), grid, args, options)
        elif index == torch.cuda.current_device():
            self._launch(index, grid, args, options)
        else:
            with torch.cuda.device(index):
                self._launch(index, grid, args, options)

    def _launch(self, index: int, grid, args, options) -> None:
        key = _key(index, args, self._kinds, options)
        kernel = self._variants.get(key)
        if kernel is None:
            # Named, because Triton warns where the default decides: FMA is more exact than a product and a sum.
            self._variants[key] = self.kernel[grid](*args, enable_fp_fusion=True, **options)
            return
        stream = triton.runtime.driver.active.get_current_stream(index)
        kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *args)


def _kind(parameter) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    return "type" if parameter.do_not_specialize else "value"


def _key(index: int, args: tuple, kinds: tuple[str, ...], options: dict[str, Any]) -> tuple:
    """What a variant is kept by. One loop, because every launch pays for it: 5 us for 19 arguments where a function
    for each takes 10."""
    key: list[Any] = [index]
    for arg, kind in zip(args, kinds, strict=True):
        if kind == "constexpr":
            key.append(arg)
        elif type(arg) is int:
            fits = -(2**31) <= arg < 2**31
            key.append((arg == 1, arg % 16 == 0, fits) if kind == "value" else fits)
        elif isinstance(arg, Tensor):
            key.append(arg.dtype if arg.data_ptr() % 16 == 0 else (arg.dtype,))
        elif type(arg) is float:
            key.append(float)
        elif isinstance(arg, TensorDescriptor):
            key.append((arg.base.dtype, *arg.block_shape))
        else:
            key.append(arg)
    key.extend(options.values())
    return tuple(key)


def as_rows(x: Tensor) -> Tensor:
    """(..., N) as (M, N) with unit stride in the last dimension, copied only where no such view exists."""
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


class Dropout(NamedTuple):
    """How kernels take dropout.

    Attributes:
        seed: int64 tensor of one element; None where nothing is dropped, which leaves dropout out of the kernel.
        last_dropped: `common.keep_mask`'s threshold.
        scale: of what is kept.
    """

    seed: Tensor | None
    last_dropped: int
    scale: float


def dropout_of(seed: Tensor | None, dropout_p: float) -> Dropout:
    """The kernels' form of a dropout probability."""
    count = math.floor(dropout_p * 2**32)
    if seed is None or count == 0:
        return Dropout(None, 0, 1.0)
    last = count - 1
    return Dropout(seed, last - 2**32 if last >= 2**31 else last, keep_scale(dropout_p))
