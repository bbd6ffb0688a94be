"""What a call takes at its peak, beyond what was allocated before it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def peak_bytes(call: Callable[[], object], device: str) -> int | None:
    """Of PyTorch's allocator; None on other devices than GPUs and the CPU. Scratch memory that libraries allocate by
    themselves is not seen."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if device != "cpu":
        return None
    with _without_stderr():
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


@contextmanager
def _without_stderr() -> Iterator[None]:
    """The profiler's library prints a line when it starts and one when it stops."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
