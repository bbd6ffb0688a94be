"""Which private ops ran, and how much memory a call takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Calls of private ops inside a `with` block, forward and backward: `names`, without the namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "bertfast":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def allocated(function: Callable[[], object]) -> int:
    """Bytes that a call allocates in all."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0)
