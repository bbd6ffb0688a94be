"""CUDA graphs without a GPU: the parts of `torch.cuda` that `bertfast.benchmarks.graphs` and the timer use.

A capture runs what is recorded, as no GPU would; a replay runs nothing. What happens is kept in order.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class FakeStream:
    cuda: FakeCuda
    number: int

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.number} waits for {other.number}")


@dataclass
class FakeGraph:
    cuda: FakeCuda
    number: int
    pool: object = None

    def replay(self) -> None:
        self.cuda.log.append(f"replay {self.number}")
        self.cuda.on_replay()


@dataclass
class FakeCuda:
    """`log` is what happened; `stream` the current one; `capturing` the number of the graph that is recorded."""

    log: list[str] = field(default_factory=list)
    graphs: int = 0
    streams: int = 0
    capturing: int | None = None
    on_replay: object = lambda: None

    def __post_init__(self) -> None:
        self.default = self.stream = FakeStream(self, 0)

    def new_stream(self) -> FakeStream:
        self.streams += 1
        return FakeStream(self, self.streams)

    def new_graph(self) -> FakeGraph:
        self.graphs += 1
        return FakeGraph(self, self.graphs - 1)

    def set_stream(self, stream: FakeStream) -> None:
        self.stream = stream

    @contextmanager
    def on(self, stream: FakeStream):
        outer, self.stream = self.stream, stream
        yield
        self.stream = outer

    @contextmanager
    def graph(self, graph: FakeGraph, pool: object = None, stream: FakeStream | None = None):
        """As torch's: a capture that fails raises once more when it ends, and leaves the stream as it was in it."""
        assert stream is self.stream is not self.default, "captured on the default stream"
        graph.pool, self.capturing = pool, graph.number
        self.log.append(f"begin {graph.number}")
        try:
            yield
        except Exception:
            self.stream = FakeStream(self, -1)
            raise RuntimeError("operation failed due to a previous error during capture") from None
        finally:
            self.capturing = None
        self.log.append(f"end {graph.number}")

    def wait(self) -> None:
        """Does what a graph cannot hold."""
        if self.capturing is not None:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    def install(self, monkeypatch) -> FakeCuda:
        """Puts it in place of torch's. Import before what has torch's classes in its annotations."""
        replaced = {
            "Stream": self.new_stream,
            "CUDAGraph": self.new_graph,
            "current_stream": lambda device=None: self.stream,
            "set_stream": self.set_stream,
            "stream": self.on,
            "graph": self.graph,
            "graph_pool_handle": lambda: object(),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        return self
