"""How calls are timed: by the clock, or between CUDA events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bertfast.benchmarks import measure


@dataclass(frozen=True)
class Timer:
    """How to time: `measure.interleave`'s arguments, and the clock of first calls."""

    rounds: int = 7
    min_seconds: float = 0.02
    clock: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], None] | None = None
    stopwatch: Callable[[Callable[[], object], int], float] | None = None

    @classmethod
    def on(cls, device: torch.device, **options: Any) -> Timer:
        """CUDA events on a GPU, else the clock."""
        stopwatch = measure.cuda_stopwatch if device.type == "cuda" else None
        return cls(synchronize=measure.synchronizer(device), stopwatch=stopwatch, **options)

    def first(self, call: Callable[[], object]) -> tuple[float, object]:
        """Seconds of one call by the clock, and what it returned."""
        start = self.clock()
        result = call()
        if self.synchronize:
            self.synchronize()
        return self.clock() - start, result

    def rounds_of(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, measure.Timing]:
        return measure.interleave(
            calls,
            rounds=self.rounds,
            min_seconds=self.min_seconds,
            synchronize=self.synchronize,
            clock=self.clock,
            stopwatch=self.stopwatch,
        )
