"""Replays of CUDA graphs as what is timed, under a stand-in for CUDA."""

from __future__ import annotations

import pytest
import torch

from bertfast.benchmarks import graphs, harness, suite
from bertfast.benchmarks.graphs import CannotCapture
from bertfast.benchmarks.harness import Contest, Entrant
from bertfast.benchmarks.records import Cell, Row, Skipped
from bertfast.benchmarks.roofline import Ceilings, Cost
from bertfast.benchmarks.timer import CLOCK, EVENTS, REPLAYS, Timer, way_of
from helpers.fake_graphs import FakeCuda

X = torch.linspace(-1, 1, 64)
CANNOT = "cannot be recorded in a CUDA graph"


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(harness, "peak_bytes", lambda call, device: None)
    return FakeCuda().install(monkeypatch)


def calls_of(cuda: FakeCuda, *names: str):
    return [lambda name=name: cuda.log.append(name) or name for name in names]


def test_each_call_is_warmed_up_then_recorded_on_a_side_stream(cuda):
    with graphs.side_stream():
        replays = graphs.record(calls_of(cuda, "a", "b"), warm_ups=2)
    recorded = ["begin 0", "a", "end 0", "begin 1", "b", "end 1"]
    assert cuda.log == ["1 waits for 0", "a", "a", "b", "b", *recorded, "0 waits for 1"]
    assert cuda.stream is cuda.default
    assert replays[0].graph.pool is replays[1].graph.pool is not None
    cuda.log.clear()
    assert [replay() for replay in replays] == ["a", "b"] and cuda.log == ["replay 0", "replay 1"]


def test_one_call(cuda):
    replay = graphs.capture(calls_of(cuda, "a")[0])
    assert cuda.log.count("a") == graphs.WARM_UPS + 1 and cuda.stream is cuda.default
    assert replay() == "a" and cuda.log[-1] == "replay 0"


def test_what_cannot_be_recorded_says_why_and_leaves_the_stream(cuda):
    with graphs.side_stream():
        side = cuda.stream
        with pytest.raises(CannotCapture) as raised:
            graphs.record([cuda.wait])
        assert cuda.stream is side
    assert str(raised.value) == f"{CANNOT}: operation not permitted when stream is capturing"
    begun = [line for line in cuda.log if line.startswith(("begin", "end"))]
    assert begun[:2] == ["begin 0", "begin 1"], "a capture that succeeds mends torch's generator"


def test_what_fails_when_its_capture_ends_says_so(cuda, monkeypatch):
    monkeypatch.setattr(graphs, "_mend", lambda stream: None)

    class Ends:
        def __enter__(self):
            pass

        def __exit__(self, *error):
            raise RuntimeError("unjoined work")

    monkeypatch.setattr(torch.cuda, "graph", lambda *arguments, **options: Ends())
    with graphs.side_stream(), pytest.raises(CannotCapture, match="graph: unjoined work$"):
        graphs.record([lambda: None], warm_ups=0)


def test_what_raises_by_itself_is_no_matter_of_graphs(cuda):
    def call():
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        graphs.record([call])


def contest(contestants: dict[str, Entrant], inputs) -> Contest:
    return Contest(
        Cell("fake", "forward", 2, 32, "dense", "float32", "cpu"),
        Cost(flops=40, bytes=500),
        inputs,
        {name: lambda entrant=entrant: entrant for name, entrant in contestants.items()},
        exact=lambda: {"out": 2 * inputs[0].double()},
        yardsticks=[lambda: {"out": 2 * inputs[0]}],
    )


def run(given: Contest, cuda: FakeCuda) -> dict[str, Row | Skipped]:
    """Replays take half a second by the clock, calls nothing."""
    now = [0.0]

    def replayed():
        now[0] += 0.5

    cuda.on_replay = replayed
    timer = Timer(rounds=5, clock=lambda: now[0], replayed=True)
    return {entry.contestant: entry for entry in harness.run(given, Ceilings(1e3, {"float32": 1e2}), timer)}


def double(x):
    return {"out": 2 * x}


def test_replays_are_timed_and_rotate(cuda):
    found = run(contest({"bertfast": Entrant(double)}, [X, X + 1, X + 2]), cuda)
    assert found["bertfast"].seconds == [0.5] * 5 and found["bertfast"].first_call_seconds == 0.0
    replays = [line for line in cuda.log if line.startswith("replay")]
    # Held to the result first, then timed: one call and another to find out how long it takes, and the rounds.
    assert replays == ["replay 0", *(f"replay {i % 3}" for i in range(7))]
    assert cuda.stream is cuda.default and cuda.log[-1] == "0 waits for 1"


def test_what_cannot_be_recorded_is_one_line_and_the_others_go_on(cuda):
    def waiting(x):
        cuda.wait()
        return double(x)

    found = run(contest({"eager": Entrant(double), "peer": Entrant(waiting), "bertfast": Entrant(double)}, [X]), cuda)
    assert (
        found["peer"].reason == "cannot be recorded in a CUDA graph: operation not permitted when stream is capturing"
    )
    assert (found["bertfast"].median, found["bertfast"].speedup["median"]) == (0.5, 1.0)


@pytest.mark.parametrize("apart", [False, True])
def test_a_wrong_replay_gets_no_number(cuda, apart):
    """Right as a call, wrong as a recording."""

    def call(x):
        return {"out": 2 * x + (cuda.capturing is not None)}

    named = {"check": lambda: double(X), "results": lambda out: out} if apart else {}
    found = run(contest({"eager": Entrant(double), "bertfast": Entrant(call, **named)}, [X]), cuda)
    assert found["bertfast"].reason.startswith("wrong result: out is off by") and isinstance(found["eager"], Row)


def test_what_drops_elements_is_not_compared(cuda):
    call = Entrant(lambda x: x * torch.nan, check=lambda: double(X))
    assert isinstance(run(contest({"bertfast": call}, [X]), cuda)["bertfast"], Row)


def test_ways_to_time():
    assert [way_of("cpu", False), way_of("cuda", False), way_of("cuda", True)] == [CLOCK, EVENTS, REPLAYS]
    assert suite.Plan().timing == CLOCK and suite.Plan(device="cuda", graphs=True).timing == REPLAYS
    for refused in (lambda: suite.Plan(graphs=True), lambda: Timer.on(torch.device("cpu"), replayed=True)):
        with pytest.raises(ValueError, match="on a GPU only, the device is cpu"):
            refused()
    timer = Timer.on(torch.device("cuda"), replayed=True, rounds=3)
    assert timer.replayed and timer.stopwatch is not None and timer.rounds == 3


def test_without_graphs_calls_are_timed_where_they_are():
    calls = [lambda: None]
    with Timer().place():
        assert Timer().prepared(calls) is calls


def test_compiled_contestants_leave_recording_to_the_suite():
    from bertfast.benchmarks import cases

    modes = {replayed: [cases.compile_mode(name, replayed) for name in cases.COMPILE_MODES] for replayed in (0, 1)}
    assert modes == {0: [None, "max-autotune"], 1: [None, "max-autotune-no-cudagraphs"]}
