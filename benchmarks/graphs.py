"""CUDA graphs: calls are recorded once and replayed, so that what launches cost the host is left out of a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

# The first calls pack weights, compile and choose algorithms: none of that can be recorded.
WARM_UPS = 3


class CannotCapture(Exception):
    """Why a call cannot be recorded, in a sentence."""


@dataclass(frozen=True)
class Replay:
    """A recorded call. Calling it enqueues the graph on the current stream.

    Attributes:
        graph: the recording; holds its memory.
        output: what the recorded call returned. Each replay writes into it; in a pool of several recordings it is
            what was computed only until the next of them is recorded or replayed.
    """

    graph: torch.cuda.CUDAGraph
    output: Any

    def __call__(self) -> Any:
        self.graph.replay()
        return self.output


@contextmanager
def side_stream() -> Iterator[None]:
    """Another stream than the default one, which cannot be recorded, behind the work of the current one.

    Backward runs on its forward's stream. One that is to be recorded without it needs both in here.
    """
    outer, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


def record(calls: Sequence[Callable[[], Any]], warm_ups: int = WARM_UPS) -> list[Replay]:
    """Records each call on the current stream, in one pool of memory: replay them in this order only.

    Args:
        calls: alike in everything but their inputs, whose memory has to outlive the replays.
        warm_ups: how often each is called before.

    Raises:
        CannotCapture: one of them does what a graph cannot hold, such as waiting for the device.
        Exception: what a call raises in a warm-up.
    """
    for call in calls:
        for _ in range(warm_ups):
            call()
    pool = torch.cuda.graph_pool_handle()
    return [_recorded(call, pool) for call in calls]


def capture(call: Callable[[], Any]) -> Replay:
    """One call, warmed up and recorded on a side stream; see `record`."""
    with side_stream():
        return record([call])[0]


def _recorded(call: Callable[[], Any], pool: Any) -> Replay:
    stream = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    first: list[Exception] = []
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            try:
                output = call()
            except Exception as error:
                # What ends the capture raises as well then, and says less.
                first.append(error)
                raise
    except Exception as error:
        del graph
        _mend(stream)
        cause = first[0] if first else error
        text = " ".join(str(cause).split()) or type(cause).__name__
        raise CannotCapture(f"cannot be recorded in a CUDA graph: {text}") from cause
    return Replay(graph, output)


def _mend(stream: torch.cuda.Stream) -> None:
    """Makes good what a failed capture leaves behind: where ending it raised, no outer stream is current again; and up
    to torch 2.11 the generator of random numbers is in capture, where eager dropout raises, until a capture succeeds.
    """
    torch.cuda.set_stream(stream)
    try:
        with suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            torch.zeros((), device="cuda")
    finally:
        torch.cuda.set_stream(stream)
