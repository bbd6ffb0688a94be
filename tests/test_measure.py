"""The timing core, with contestants whose duration is known."""

from __future__ import annotations

import pytest

from bertfast.benchmarks.measure import Quantiles, Timing, interleave, machine, machine_line


class Clock:
    """A clock that only moves when a contestant runs."""

    def __init__(self):
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contestant(self, name: str, seconds):
        def call():
            self.calls.append(name)
            self.now += seconds() if callable(seconds) else seconds

        return call


def test_known_durations_are_measured():
    clock = Clock()
    timings = interleave({"a": clock.contestant("a", 0.5), "b": clock.contestant("b", 2.0)}, rounds=4, clock=clock)
    assert timings == {"a": Timing((0.5,) * 4), "b": Timing((2.0,) * 4)}
    assert timings["a"].speedup_over(timings["b"]) == Quantiles(4.0, 4.0, 4.0)


def test_contestants_take_turns_and_the_first_rotates():
    clock = Clock()
    interleave({name: clock.contestant(name, 1.0) for name in "abc"}, rounds=4, clock=clock)
    assert "".join(clock.calls) == "aabbcc" + "abc" + "bca" + "cab" + "abc"


def test_quick_contestants_are_repeated_within_a_round():
    clock = Clock()
    timings = interleave({"quick": clock.contestant("quick", 0.001)}, rounds=2, min_seconds=0.02, clock=clock)
    assert len(clock.calls) == 2 + 2 * 20
    assert timings["quick"].quantiles.median == pytest.approx(0.001)


def test_a_machine_that_slows_down_does_not_change_the_ratio():
    clock = Clock()
    pace = iter([1, 1, 1, 1, 1, 1, 9, 9, 5, 5, 1, 1, 3, 3])
    load = {"value": 1}

    def lasting(seconds):
        def duration():
            load["value"] = next(pace)
            return seconds * load["value"]

        return duration

    timings = interleave(
        {"a": clock.contestant("a", lasting(1.0)), "b": clock.contestant("b", lasting(3.0))}, rounds=5, clock=clock
    )
    assert timings["a"].speedup_over(timings["b"]) == Quantiles(3.0, 3.0, 3.0)
    assert timings["a"].quantiles.p90 > 2 * timings["a"].quantiles.p10


def test_the_device_is_waited_for_on_both_sides_of_a_measurement():
    clock = Clock()
    order = []

    def read():
        order.append("clock")
        return clock()

    interleave({"a": clock.contestant("a", 1.0)}, rounds=1, synchronize=lambda: order.append("wait"), clock=read)
    assert order == ["wait", "clock", "wait", "clock"] * 3


def test_quantiles():
    assert Quantiles.of(range(11)) == Quantiles(5.0, 1.0, 9.0)
    assert Quantiles.of([7.0]) == Quantiles(7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="rounds"):
        interleave({}, rounds=0)


def test_machine_names_what_matters():
    facts = machine()
    line = machine_line(facts)
    assert facts["cpu"] in line and f"{facts['torch_threads']} torch threads" in line and facts["torch"] in line
