"""How calls are timed: by the clock, between CUDA events, or as replays of CUDA graphs between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bertfast.benchmarks import graphs, measure

CLOCK, EVENTS, REPLAYS = "clock", "CUDA events", "replays of CUDA graphs"


def way_of(device: str, replayed: bool) -> str:
    """How calls are timed on a type of device.

    Raises:
        ValueError: graphs are asked for where there are none.
    """
    if replayed and device != "cuda":
        raise ValueError(f"CUDA graphs can be timed on a GPU only, the device is {device}")
    if device != "cuda":
        return CLOCK
    return REPLAYS if replayed else EVENTS


@dataclass(frozen=True)
class Timer:
    """How to time: `measure.interleave`'s arguments, the clock of first calls, and whether graphs are replayed."""

    rounds: int = 7
    min_seconds: float = 0.02
    clock: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], None] | None = None
    stopwatch: Callable[[Callable[[], object], int], float] | None = None
    replayed: bool = False

    @classmethod
    def on(cls, device: torch.device, *, replayed: bool = False, **options: Any) -> Timer:
        """CUDA events on a GPU, around calls or replays, else the clock.

        Raises:
            ValueError: replays without a GPU.
        """
        stopwatch = None if way_of(device.type, replayed) == CLOCK else measure.cuda_stopwatch
        return cls(synchronize=measure.synchronizer(device), stopwatch=stopwatch, replayed=replayed, **options)

    def place(self) -> AbstractContextManager[None]:
        """Where everything that is timed runs, first calls too."""
        return graphs.side_stream() if self.replayed else nullcontext()

    def prepared(self, calls: Sequence[Callable[[], object]]) -> Sequence[Callable[[], object]]:
        """What is timed in place of calls that were made before: they themselves, or their replays, in this order.

        Raises:
            graphs.CannotCapture: one of them cannot be recorded.
        """
        return graphs.record(calls) if self.replayed else calls

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
