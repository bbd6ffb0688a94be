"""The CUDA kernels' own sources, run on CPU tensors behind tests/cuda_on_cpu/emulator.h.

`enable()` makes the backend `cuda` serve CPU tensors in this process; nothing is compiled before a kernel runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from helpers.cuda_build import build_package


class Counts(NamedTuple):
    """What ran. `requests` of warps to shared memory took `conflicts` wavefronts more than without bank conflicts;
    threads accessed global memory `wide_accesses` times by 16 bytes and `other_accesses` times by less; `products` of
    16 x 8 x 16 were made."""

    launches: int
    blocks: int
    threads: int
    requests: int
    conflicts: int
    wide_accesses: int
    other_accesses: int
    products: int

    def __sub__(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class Counters(NamedTuple):
    all: Counts
    last: Counts


class Emulator:
    """A built library: its kernels' settings, and what they did."""

    def __init__(self, path: Path):
        self.dll = ctypes.CDLL(str(path))
        self.usual_seed = 0
        self.dll.bertfast_seed.argtypes = [ctypes.c_uint64]
        self.dll.bertfast_only_blocks.argtypes = [ctypes.c_int64, ctypes.c_int64]
        self.dll.bertfast_shared_limit.argtypes = [ctypes.c_int]
        self.dll.bertfast_multiprocessors.argtypes = [ctypes.c_int]
        self.dll.bertfast_check_races.argtypes = [ctypes.c_bool]
        self.dll.bertfast_know_tensor.argtypes = [ctypes.c_void_p, ctypes.c_int64]

    def set_usual_seed(self, value: int) -> None:
        """That of launches outside of `seed`."""
        self.usual_seed = value
        self.dll.bertfast_seed(value)

    @contextmanager
    def seed(self, value: int) -> Iterator[None]:
        """Threads and blocks run in another order."""
        self.dll.bertfast_seed(value)
        try:
            yield
        finally:
            self.dll.bertfast_seed(self.usual_seed)

    @contextmanager
    def only_blocks(self, first: int, count: int) -> Iterator[None]:
        """Of each grid only these blocks run, counted along x first."""
        self.dll.bertfast_only_blocks(first, count)
        try:
            yield
        finally:
            self.dll.bertfast_only_blocks(0, 2**63 - 1)

    @contextmanager
    def shared_limit(self, size: int) -> Iterator[None]:
        """Blocks can have that many bytes of shared memory: 227 KiB is the limit of compute capability 9.0 and 10.0."""
        before = self.dll.bertfast_shared_limit(size)
        try:
            yield
        finally:
            self.dll.bertfast_shared_limit(before)

    @contextmanager
    def multiprocessors(self, count: int) -> Iterator[None]:
        """Ops find a device with as many."""
        before = self.dll.bertfast_multiprocessors(count)
        try:
            yield
        finally:
            self.dll.bertfast_multiprocessors(before)

    @contextmanager
    def races_allowed(self) -> Iterator[None]:
        """Races on shared memory are no error; what comes of them shows in results."""
        self.dll.bertfast_check_races(False)
        try:
            yield
        finally:
            self.dll.bertfast_check_races(True)

    def counters(self) -> Counters:
        every, last = ((ctypes.c_int64 * len(Counts._fields))() for _ in range(2))
        self.dll.bertfast_counters(every, last)
        return Counters(Counts(*every), Counts(*last))

    def name_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Those, and no others, that pointers given to kernels may point into."""
        self.dll.bertfast_forget_tensors()
        for tensor in tensors:
            self.dll.bertfast_know_tensor(tensor.data_ptr(), tensor.numel() * tensor.element_size())


_loaded: Emulator | None = None
_waiting: torch.library.Library | None = None
_loading = threading.RLock()
_usual_seed = 0


def library(replaced: Mapping[str, Path] | None = None, unchanged: Callable[[Path], bool] | None = None) -> Emulator:
    """The kernels of the package, built as `build_package` does and loaded once a process; from then on
    `bertfast::*_cuda` run on the CPU."""
    global _loaded, _waiting
    with _loading:
        if _loaded is not None and replaced:
            raise RuntimeError("the kernels are loaded already, they cannot be replaced")
        if _loaded is None:
            path = build_package(replaced, unchanged)
            if _waiting is not None:
                _waiting._destroy()
                _waiting = None
            torch.ops.load_library(str(path))
            _loaded = Emulator(path)
            _loaded.set_usual_seed(_usual_seed)
        return _loaded


def _private_ops() -> list[str]:
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return sorted(name for name in names if name.startswith("bertfast::") and name.endswith("_cuda"))


def enable() -> None:
    """Makes the backend `cuda` serve CPU tensors."""
    global _waiting
    import bertfast.ops  # noqa: F401
    from bertfast import backends

    for key, capability in backends._capabilities.items():
        if capability.backend == "cuda":
            backends._capabilities[key] = dataclasses.replace(
                capability, devices=frozenset({"cuda", "cpu"}), unavailable=lambda: None
            )
    backends._choices.clear()
    if _loaded is None and _waiting is None:
        _waiting = torch.library.Library("bertfast", "IMPL")
        for name in _private_ops():
            _waiting.impl(name.removeprefix("bertfast::"), _lazily(name), "CPU")


def _lazily(name: str) -> Callable:
    def run(*args):
        library()
        return getattr(torch.ops.bertfast, name.removeprefix("bertfast::")).default(*args)

    return run


@contextmanager
def separate_gemm() -> Iterator[None]:
    """`cuda` computes linear layers in half precision by torch's GEMM and a pass behind it, as on a GPU where sizes
    decide so."""
    from bertfast import gemm_forms

    original = gemm_forms.is_separate
    gemm_forms.is_separate = lambda x, width_out: True
    try:
        yield
    finally:
        gemm_forms.is_separate = original


def set_usual_seed(value: int) -> None:
    """That of launches outside of `seed`, whether kernels are loaded yet or not."""
    global _usual_seed
    _usual_seed = value
    if _loaded is not None:
        _loaded.set_usual_seed(value)


def seed(value: int):
    """Threads and blocks of the package's kernels run in another order."""
    return library().seed(value)


def only_blocks(first: int, count: int):
    """Of each grid only these blocks run, counted along x first."""
    return library().only_blocks(first, count)


def counters() -> Counters:
    """What the package's kernels did, in all launches and in the last."""
    return library().counters()
