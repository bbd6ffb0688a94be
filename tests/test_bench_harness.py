"""The harness, with contestants whose durations, results and faults are known."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn

from bertfast.benchmarks import harness, memory
from bertfast.benchmarks.harness import Contest, Entrant, Timer
from bertfast.benchmarks.records import Cell, Row, Skipped
from bertfast.benchmarks.roofline import Ceilings, Cost

CEILINGS = Ceilings(1000.0, {"float32": 100.0})
X = torch.linspace(-1, 1, 64)


class Clock:
    """A clock that only moves when a contestant runs."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def entrant(self, seconds, results=None, **options) -> Entrant:
        """Takes the next of `seconds`, the last for ever."""
        left = list(seconds) if isinstance(seconds, list) else [seconds]

        def call(x):
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return {"out": 2 * x} if results is None else results(x)

        return Entrant(call, **options)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(harness, "peak_bytes", lambda call, device: None)
    return Clock()


def contest(contestants, pass_="forward", inputs=(X,), **options) -> Contest:
    contestants = {name: value if callable(value) else lambda v=value: v for name, value in contestants.items()}
    return Contest(
        Cell("fake", pass_, 2, 32, "dense", "float32", "cpu"),
        Cost(flops=40, bytes=500),
        inputs,
        contestants,
        exact=lambda: {"out": 2 * inputs[0].double()},
        yardsticks=[lambda: {"out": 2 * inputs[0]}],
        **options,
    )


def run(given: Contest, clock=None, **options) -> dict[str, Row | Skipped]:
    timer = Timer(**{"rounds": 5, **options}, **({"clock": clock} if clock else {}))
    return {entry.contestant: entry for entry in harness.run(given, CEILINGS, timer)}


def test_known_durations_rates_and_shares(clock):
    found = run(contest({"eager": clock.entrant(2.0), "bertfast": clock.entrant(0.5)}), clock)
    eager, ours = found["eager"], found["bertfast"]
    assert (eager.median, ours.median, ours.seconds) == (2.0, 0.5, [0.5] * 5)
    assert eager.speedup is None
    assert ours.speedup == {"over": "eager", "median": 4.0, "p10": 4.0, "p90": 4.0}
    assert (ours.flops, ours.bytes, ours.flops_per_second, ours.bytes_per_second) == (40, 500, 80.0, 1000.0)
    assert (ours.floor_seconds, ours.of_floor, eager.of_floor) == (0.5, 1.0, 0.25)
    assert ours.key == "fake/forward/2x32/dense/float32/cpu/bertfast"


def test_a_real_duration_is_measured_to_5_percent(monkeypatch):
    """In the thread's own time: what else runs on the machine would stretch that on the wall."""
    monkeypatch.setattr(harness, "peak_bytes", lambda call, device: None)

    def lasting(seconds):
        def call(x):
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
            return {"out": 2 * x}

        return Entrant(call)

    durations = {"eager": 0.010, "bertfast": 0.004, "quick": 0.001}
    found = run(contest({name: lasting(seconds) for name, seconds in durations.items()}), time.thread_time)
    for name, seconds in durations.items():
        assert found[name].median == pytest.approx(seconds, rel=0.05)
        assert found[name].first_call_seconds == pytest.approx(seconds, rel=0.25)
    assert found["bertfast"].speedup["median"] == pytest.approx(2.5, rel=0.05)


def test_a_slow_first_call_is_reported_apart(clock):
    given = contest({"eager": clock.entrant(1.0), "bertfast": clock.entrant([100.0, 1.0])})
    ours = run(given, clock)["bertfast"]
    assert (ours.first_call_seconds, ours.median, max(ours.seconds)) == (100.0, 1.0, 1.0)
    assert ours.speedup["median"] == 1.0


def test_first_calls_on_every_set_of_inputs_are_outside_the_rounds(clock):
    inputs = [X, X + 1, X + 2]
    seen = []

    def packing(x):
        clock.now += 1.0 if any(x is other for other in seen) else 100.0
        seen.append(x)
        return {"out": 2 * x}

    ours = run(contest({"bertfast": Entrant(packing)}, inputs=inputs), clock)["bertfast"]
    assert (ours.first_call_seconds, set(ours.seconds)) == (100.0, {1.0})
    assert [sum(x is given for x in seen) for given in inputs] > [1, 1, 1], "inputs do not rotate"
    assert all(a is not b for a, b in zip(seen[4:], seen[5:], strict=False))


def test_a_wrong_result_gets_no_number(clock):
    def slightly_wrong(x):
        out = 2 * x
        out[7] += 1e-5
        return {"out": out}

    wrong = {
        "off": (slightly_wrong, "wrong result: out is off by"),
        "nan": (lambda x: {"out": x * math.nan}, "wrong result: out is off by inf"),
        "masked": (lambda x: {"out": 2 * x[:32]}, "wrong result: the shape of out is (32,), not (64,)"),
        "less": (lambda x: {}, "wrong result: has "),
        "half": (lambda x: {"out": (2 * x).double()}, "out is torch.float64, this cell is measured in torch.float32"),
    }
    entrants = {name: clock.entrant(1.0, results) for name, (results, _) in wrong.items()}
    found = run(contest({"eager": clock.entrant(1.0), **entrants}), clock)
    assert isinstance(found.pop("eager"), Row)
    for name, entry in found.items():
        assert isinstance(entry, Skipped) and entry.reason.startswith(wrong[name][1]), entry


def test_the_error_is_a_multiple_of_the_tolerance(clock):
    # Two roundings of the largest value, which is 2: the yardstick is exact.
    eps = torch.finfo(torch.float32).eps
    found = run(contest({"bertfast": clock.entrant(1.0, lambda x: {"out": 2 * x + eps * (x == X[40])})}), clock)
    assert found["bertfast"].error == pytest.approx(0.25, rel=0.01)


def test_the_worst_yardstick_widens_the_tolerance(clock):
    given = contest({"bertfast": clock.entrant(1.0, lambda x: {"out": 2 * x + 1e-5})})
    assert "wrong result" in run(given, clock)["bertfast"].reason
    object.__setattr__(given, "yardsticks", [*given.yardsticks, lambda: {"out": 2 * X + 2e-5}])
    assert run(given, clock)["bertfast"].error == pytest.approx(1 / 4, rel=0.05)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))


@pytest.mark.parametrize("pass_", ["inference", "training"])
def test_a_module_in_the_wrong_mode_is_caught(clock, pass_):
    right, wrong = Model().train(pass_ == "training"), Model().train(pass_ == "training")
    wrong.inner[1].train(pass_ != "training")
    given = {"bertfast": clock.entrant(1.0, modules=[right]), "eager": clock.entrant(1.0, modules=[wrong])}
    found = run(contest(given, pass_), clock)
    got, wanted = ("eval", "train") if pass_ == "training" else ("train", "eval")
    assert found["eager"].reason == f"Dropout is in {got} mode, this cell is measured in {wanted} mode"
    assert found["bertfast"].median == 1.0 and found["bertfast"].speedup is None


def test_a_module_of_another_dtype_is_caught(clock):
    given = contest({"eager": clock.entrant(1.0, modules=[Model().half().eval()])}, "inference")
    assert run(given, clock)["eager"].reason == (
        "inner.0.weight is torch.float16, this cell has parameters of torch.float32"
    )


@pytest.mark.parametrize("dies_at", [0, 1, 3, 5, 8])
def test_what_raises_is_one_line_and_the_others_go_on(clock, dies_at):
    left = {"calls": dies_at}

    def dying(x):
        left["calls"] -= 1
        if left["calls"] < 0:
            raise RuntimeError("no kernel image\nis available " + "x" * 500)
        return {"out": 2 * x}

    given = {"eager": clock.entrant(1.0), "peer": clock.entrant(1.0, dying), "bertfast": clock.entrant(0.5)}
    found = run(contest(given), clock)
    assert found["peer"].reason.startswith("RuntimeError: no kernel image is available xx")
    assert len(found["peer"].reason) <= 200 and "\n" not in found["peer"].reason
    assert (found["bertfast"].median, found["bertfast"].speedup["median"]) == (0.5, 2.0)
    assert list(found) == list(given)


def test_what_cannot_be_built_is_one_line(clock):
    def build():
        raise ImportError("No module named 'peer'")

    found = run(contest({"peer": build, "bertfast": clock.entrant(1.0)}), clock)
    assert found["peer"].reason == "ImportError: No module named 'peer'"
    assert found["bertfast"].speedup is None, "the first that is timed is the baseline, where there is no other"


def test_an_interrupt_is_not_swallowed(clock):
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(contest({"eager": clock.entrant(1.0, interrupted)}), clock)


@pytest.mark.parametrize("wrong", [X * math.nan, 2 * X.abs()])
def test_a_yardstick_that_is_wrong_is_none(clock, wrong):
    given = contest({"eager": clock.entrant(1.0)})
    object.__setattr__(given, "yardsticks", [*given.yardsticks, lambda: {"out": wrong}])
    with pytest.raises(ValueError, match="out of plain PyTorch is .* off"):
        run(given, clock)


def test_the_peak_is_that_of_the_call():
    x = torch.zeros(1000, 250)

    def call():
        first = x + 1
        second = first + 1
        del first
        return second + 1

    assert memory.peak_bytes(call, "cpu") == pytest.approx(2e6, rel=0.001)
    assert memory.peak_bytes(lambda: None, "cpu") == 0
    assert memory.peak_bytes(call, "meta") is None


def test_what_a_call_leaves_behind_does_not_change_its_peak():
    """A training step frees the gradients of the one before it."""
    kept = {}

    def call(x):
        kept.clear()
        kept["gradient"] = torch.zeros(250_000)
        return {"out": 2 * x}

    peaks = [run(contest({"eager": Entrant(call, reset=kept.clear)}))["eager"].peak_bytes for _ in range(2)]
    assert peaks == [pytest.approx(1e6, rel=0.001)] * 2


def test_the_profiler_is_silent(capfd):
    memory.peak_bytes(lambda: X + 1, "cpu")
    assert capfd.readouterr() == ("", "")
