"""A Triton driver that compiles for a GPU that is not there, and launches nothing.

Real launchers, called on CPU tensors, then compile exactly what they would launch on that GPU, with the specialisation
that their arguments bring about. For a process without the interpreter.
"""

from __future__ import annotations

from contextlib import contextmanager

import triton
from triton.backends.compiler import GPUTarget

from bertfast.kernels.tiles import SHARED_KIB


class _Utils:
    def __init__(self, capability: int) -> None:
        self._shared = SHARED_KIB[capability] * 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": self._shared}

    def load_binary(self, name, kernel, shared, device):
        # No module: a kernel that has one asks the driver to unload it when it is collected, whichever driver is then.
        return None, 0, 0, 0, 1024

    def unload_module(self, module):
        pass


class _Launcher:
    """Stands for the compiled kernel's own; counts nothing, runs nothing."""

    def __init__(self, source, metadata) -> None:
        pass

    def __call__(self, *args) -> None:
        pass


class FakeGpu:
    """The part of a Triton driver that compiling and launching touch."""

    launcher_cls = _Launcher

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = _Utils(capability)

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        # Triton keeps what it compiled per device, and takes a device's capability for unchanging.
        return self.capability

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return None


@contextmanager
def fake_gpu(capability: int):
    """Makes Triton compile for `capability` (10 x major + minor) inside the block."""
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(FakeGpu(capability))
    try:
        yield
    finally:
        triton.runtime.driver._active = previous
