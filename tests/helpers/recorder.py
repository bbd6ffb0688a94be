"""Which private ops ran."""

from __future__ import annotations

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
