"""Timing that survives a noisy machine: contestants take turns, and ratios are taken inside a round.

A machine that slows down for a second slows every contestant of that round alike, so the median over rounds of the
ratio within a round is far steadier than the ratio of two medians measured one after the other.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Quantiles:
    """Median with the 10th and 90th percentile of one value per round."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        p10, median, p90 = np.percentile(np.asarray(values, dtype=np.float64), [10, 50, 90]).tolist()
        return cls(median, p10, p90)


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one value per round."""

    seconds: tuple[float, ...]

    @property
    def quantiles(self) -> Quantiles:
        return Quantiles.of(self.seconds)

    def speedup_over(self, other: Timing) -> Quantiles:
        """How many times as fast as `other`, round by round (both from one `interleave`)."""
        return Quantiles.of([theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True)])


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    min_seconds: float = 0.02,
    synchronize: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    stopwatch: Callable[[Callable[[], object], int], float] | None = None,
) -> dict[str, Timing]:
    """Times every contestant once per round, in an order that rotates from round to round.

    Args:
        contestants: the calls to time, by name.
        rounds: how often each is timed.
        min_seconds: what is quicker is called several times per round, and the mean is the round's value.
        synchronize: waits for the device, e.g. `torch.cuda.synchronize`; called before each reading of the clock.
        clock: seconds, rising.
        stopwatch: takes a call and how often to make it, and returns the seconds of one; replaces both.

    Returns:
        The timings by name, one value per round each.

    Raises:
        ValueError: `rounds` below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")

    def by_clock(call: Callable[[], object], repeats: int) -> float:
        if synchronize:
            synchronize()
        start = clock()
        for _ in range(repeats):
            call()
        if synchronize:
            synchronize()
        return (clock() - start) / repeats

    seconds = stopwatch or by_clock
    repeats = {}
    for name, call in contestants.items():
        seconds(call, 1)  # the first call allocates, packs weights and, on a GPU, compiles
        repeats[name] = max(1, round(min_seconds / max(seconds(call, 1), 1e-9)))
    names = list(contestants)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            taken[name].append(seconds(contestants[name], repeats[name]))
    return {name: Timing(tuple(values)) for name, values in taken.items()}


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """What `interleave` needs on this device; None on the CPU, where a call returns when its work is done."""
    return None if device.type == "cpu" else lambda: torch.accelerator.synchronize(device)


def cuda_stopwatch(call: Callable[[], object], repeats: int) -> float:
    """For `interleave` on a GPU: seconds of one call between two CUDA events on the current stream.

    The device is idle at the start, so what launches cost counts where the host is the slower of the two.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def machine() -> dict:
    """What a measurement must be read with: processor, cores, threads, GPUs, versions."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_line(facts: Mapping) -> str:
    """`machine()` in one line."""
    parts = [facts["cpu"], f"{facts['cores']} cores", f"{facts['torch_threads']} torch threads", *facts["gpus"]]
    return ", ".join([*parts, f"torch {facts['torch']}", f"Python {facts['python']}", facts["system"]])


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
