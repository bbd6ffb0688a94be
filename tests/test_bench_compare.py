"""Two result files compared: what is called a change, and how often noise is."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from bertfast.benchmarks import compare
from bertfast.benchmarks.compare import FASTER, SLOWER, UNCHANGED, UNKNOWN, Interval, interval, left_out, verdict
from bertfast.benchmarks.timer import CLOCK, EVENTS, REPLAYS
from bertfast.benchmarks.wording import load
from helpers.project import ROOT, run_python

MACHINE = {"cpu": "Some CPU", "torch": "2.13.0", "versions": {"transformers": "5.24.0"}, "commit": "a", "clocks": "1"}
KEY = "attention/forward/8x128/dense/float32/cpu/"
ROUNDS = 10


def run(timing: str | None = None, **machine) -> dict:
    facts = {"schema": 1, "started": "", "command": [], "machine": MACHINE | machine, "ceilings": {}}
    return {"kind": "run", **facts, **({} if timing is None else {"timing": timing})}


def entry(contestant: str, batch: int, **more) -> dict:
    names = {"subject": "attention", "pass": "forward", "batch": batch, "length": 128, "fill": "dense"}
    names |= {"dtype": "float32", "device": "cpu", "contestant": contestant}
    names |= {name: value for name, value in more.items() if name in names}
    key = "{subject}/{pass}/{batch}x{length}/{fill}/{dtype}/{device}/{contestant}".format(**names)
    return {"key": key, **names, **more}


def row(contestant: str, seconds, *, batch: int = 8, over: str | None = None, **more) -> dict:
    seconds = [float(value) for value in seconds]
    p10, median, p90 = np.percentile(seconds, [10, 50, 90]).tolist()
    zeros = "first_call_seconds error flops bytes flops_per_second bytes_per_second floor_seconds of_floor"
    measured = dict.fromkeys(zeros.split(), 0) | {"peak_bytes": None, "seconds": seconds}
    measured |= {"median": median, "p10": p10, "p90": p90}
    measured["speedup"] = over and {"over": over, "median": 2.0, "p10": 1.9, "p90": 2.1}
    return {"kind": "row", **entry(contestant, batch, **more), **measured}


def file_of(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def compared(tmp_path):
    def compare_lines(before: list[dict], after: list[dict]) -> compare.Comparison:
        files = [file_of(tmp_path / f"{name}.jsonl", *lines) for name, lines in (("a", before), ("b", after))]
        return compare.compared(*map(load, files))

    return compare_lines


def noise(seed: int, rounds: int = ROUNDS, sigma: float = 0.02) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.0, sigma, rounds)


def test_the_distribution_of_u_is_that_of_all_orders():
    for n, m in ((1, 1), (3, 5), (5, 3), (6, 6)):
        orders = list(itertools.combinations(range(n + m), n))
        counts = np.bincount([sum(place - i for i, place in enumerate(places)) for places in orders])
        np.testing.assert_allclose(compare._lower_tail(n, m), counts.cumsum() / len(orders), rtol=1e-12)


def test_few_rounds_reach_what_complete_separation_does():
    for n in (3, 5, 7, 10):
        assert left_out(n, n, 1e-9) == (0, pytest.approx(2 / math.comb(2 * n, n)))
    k, reached = left_out(10, 10, 0.01)
    assert reached <= 0.01 < 2 * compare._lower_tail(10, 10)[k + 1]


def test_the_normal_approximation_takes_over_smoothly():
    n = compare.MOST_EXACT
    exact, normal = (left_out(size, size, 1e-3)[0] / size**2 for size in (n, n + 1))
    assert exact == pytest.approx(normal, abs=0.005)


@pytest.mark.parametrize("name", ["lognormal", "heavy tails", "two modes", "spikes"])
def test_false_alarms_are_as_rare_as_said(name):
    """20,000 pairs of equals: the interval misses 1 as often as `left_out` says, whatever the noise looks like."""
    draw = {
        "lognormal": lambda rng, size: rng.lognormal(0, 0.1, size),
        "heavy tails": lambda rng, size: 1 + rng.pareto(1.5, size),
        "two modes": lambda rng, size: rng.choice([1.0, 1.4], size) * rng.lognormal(0, 0.01, size),
        "spikes": lambda rng, size: rng.lognormal(0, 0.02, size) * np.where(rng.random(size) < 0.1, 10, 1),
    }[name]
    rng, trials, rounds = np.random.default_rng(0), 20_000, 8
    k, level = left_out(rounds, rounds, 0.02)
    before, after = draw(rng, (trials, rounds)), draw(rng, (trials, rounds))
    ratios = np.sort((after[:, :, None] / before[:, None, :]).reshape(trials, -1), axis=1)
    misses = ((ratios[:, k] > 1) | (ratios[:, -1 - k] < 1)).mean()
    assert abs(misses - level) < 4 * math.sqrt(level / trials)
    for i in range(5):
        assert interval(before[i], after[i], 0.02) == Interval(ratios[i, k], ratios[i, -1 - k], level)


def test_equal_files_are_unchanged_and_rarely_anything_else():
    """200 comparisons of 12 unchanged rows, with noise above the margin: alarms in at most 5 of 100, as promised."""
    rng, alarms = np.random.default_rng(1), 0
    level = compare.LEVEL / 12
    for _ in range(200):
        verdicts = [verdict(interval(*rng.lognormal(0, 0.5, (2, ROUNDS)), level)) for _ in range(12)]
        assert UNKNOWN not in verdicts
        alarms += set(verdicts) != {UNCHANGED}
    assert alarms <= 0.05 * 200 + 3 * math.sqrt(0.05 * 0.95 * 200)


def test_the_margin_is_not_a_change():
    rounds, level = np.linspace(1, 1.001, ROUNDS), 0.01
    factors = {1.04: UNCHANGED, 0.96: UNCHANGED, 1.07: SLOWER, 0.93: FASTER}
    assert {factor: verdict(interval(rounds, factor * rounds, level)) for factor in factors} == factors


def test_a_change_within_the_noise_is_none():
    wide = noise(0, sigma=0.5)
    assert verdict(interval(wide, 1.1 * noise(1, sigma=0.5), 0.01)) == UNCHANGED
    assert verdict(interval(wide, 5 * noise(1, sigma=0.5), 0.01)) == SLOWER


@pytest.mark.parametrize(("factor", "said", "code"), [(1.5, SLOWER, 1), (1 / 1.5, FASTER, 0), (1.01, UNCHANGED, 0)])
def test_a_row_that_changed(tmp_path, capsys, factor, said, code):
    a = file_of(tmp_path / "a.jsonl", run(), row("bertfast", 1e-3 * noise(0)))
    b = file_of(tmp_path / "b.jsonl", run(commit="b", clocks="2"), row("bertfast", factor * 1e-3 * noise(1)))
    assert compare.main(a, b) == code
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.endswith(KEY + "bertfast"))
    assert line.startswith(said) and float(line.partition(" x ")[2].split()[0]) == pytest.approx(factor, rel=0.03)
    assert f"1 {said}" in printed and "warning" not in printed


def test_too_few_rounds_say_so(compared):
    few = compared([row("bertfast", [1.0] * 4)], [row("bertfast", [9.0] * 4)])
    assert [change.verdict for change in few.changes] == [UNKNOWN] and few.chance == 0
    enough = compared([row("bertfast", noise(0, 5))], [row("bertfast", 9 * noise(1, 5))])
    assert [change.verdict for change in enough.changes] == [SLOWER]
    assert enough.chance == pytest.approx(2 / math.comb(10, 5))


def test_more_rows_need_more_evidence(compared):
    rows = [[row("bertfast", noise(seed), batch=batch) for batch in range(1, 41)] for seed in (0, 1)]
    one, many = compared(*(lines[:1] for lines in rows)), compared(*rows)
    assert 0.005 < one.chance <= compare.WORST and 0.02 < many.chance <= compare.LEVEL
    assert many.changes[0].interval.low < one.changes[0].interval.low
    assert many.changes[0].interval.high > one.changes[0].interval.high


def test_a_slow_machine_is_not_a_slow_row(compared):
    """All contestants take twice as long: by the clock slower, by the yardstick not."""
    load_of_round = 2 * noise(5, sigma=0.1)
    before = [row("eager", noise(0)), row("bertfast", noise(1) / 2, over="eager")]
    after = [row("eager", noise(2) * load_of_round), row("bertfast", noise(3) / 2 * load_of_round, over="eager")]
    found = compared(before, after)
    eager, ours = found.changes
    assert (ours.verdict, ours.ours, eager.ours) == (UNCHANGED, True, False)
    assert ours.interval.low > 1.5 and ours.relative.low < 1 < ours.relative.high
    assert found.drift == pytest.approx(2, rel=0.2)


def test_a_row_must_also_be_slower_by_the_clock(compared):
    """A baseline that became faster makes no row of ours slower."""
    before = [row("eager", noise(0)), row("bertfast", noise(1), over="eager")]
    after = [row("eager", noise(2) / 2), row("bertfast", noise(3), over="eager")]
    _, ours = compared(before, after).changes
    assert ours.verdict == UNCHANGED and ours.relative.low > 1.5


def test_a_slow_row_beside_an_unchanged_yardstick(compared):
    before = [row("eager", noise(0)), row("bertfast", noise(1), over="eager")]
    after = [row("eager", noise(2)), row("bertfast", 1.3 * noise(3), over="eager")]
    assert [change.verdict for change in compared(before, after).changes] == [UNCHANGED, SLOWER]


@pytest.mark.parametrize("yardstick", [[], [row("eager", noise(2, ROUNDS + 1))]])
def test_without_a_yardstick_in_the_same_rounds_the_clock_decides(compared, yardstick):
    before = [row("eager", noise(0)), row("bertfast", noise(1), over="eager")]
    after = [*yardstick, row("bertfast", 2 * noise(3), over="eager")]
    ours = compared(before, after).changes[-1]
    assert ours.relative is None and ours.verdict == SLOWER


def test_a_slow_baseline_is_no_failure(tmp_path, capsys):
    a = file_of(tmp_path / "a.jsonl", row("eager", noise(0)))
    b = file_of(tmp_path / "b.jsonl", row("eager", 2 * noise(1)))
    assert compare.main(a, b) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(SLOWER) and "the machine drifted" in printed


def test_what_is_in_one_file_only(tmp_path, capsys):
    skipped = {"kind": "skipped", **entry("bertfast", 1), "reason": "it crashed"}
    a = file_of(tmp_path / "a.jsonl", row("bertfast", noise(0)), row("bertfast", noise(0), batch=1))
    b = file_of(tmp_path / "b.jsonl", row("bertfast", noise(0)), row("eager", noise(0)), skipped)
    assert compare.main(a, b) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"only before     {KEY.replace('8x', '1x')}bertfast: it crashed in the other" in lines
    assert f"only after      {KEY}eager" in lines and any("2 in one file only" in line for line in lines)


@pytest.mark.parametrize(
    ("machine", "more", "warning"),
    [
        ({"cpu": "Another"}, {}, "cpu differs: Some CPU before, Another after"),
        ({"versions": {"transformers": "5.0"}}, {}, "versions transformers differs: 5.24.0 before, 5.0 after"),
        ({"card": "Some GPU"}, {}, "card differs: unknown before, Some GPU after"),
        ({}, {"dtype": "bfloat16"}, "dtypes differ: float32 before, bfloat16 after"),
    ],
)
def test_what_was_not_measured_alike(compared, machine, more, warning):
    before, after = [run(), row("bertfast", noise(0))], [run(**machine), row("bertfast", noise(0), **more)]
    assert compared(before, after).warnings == [warning]
    assert compared(before, before).warnings == []


@pytest.mark.parametrize("other", [[], [run()], [run(EVENTS)], [run(REPLAYS), run(EVENTS)]])
def test_replays_and_calls_are_not_compared(compared, other):
    rows = [row("bertfast", noise(0))]
    replays = [run(REPLAYS), *rows]
    assert compared(replays, replays).warnings == []
    calls = " and ".join(line.get("timing", "calls") for line in other) or "calls"
    with pytest.raises(ValueError, match=f"not timed alike: {REPLAYS} before, {calls} after"):
        compared(replays, [*other, *rows])
    with pytest.raises(ValueError, match=f"not timed alike: {calls} before, {REPLAYS} after"):
        compared([*other, *rows], replays)


def test_calls_are_compared_however_they_were_timed(compared):
    rows = [row("bertfast", noise(0))]
    found = compared([run(CLOCK), *rows], [run(EVENTS), *rows])
    assert found.warnings == ["timing differs: clock before, CUDA events after"]
    found = compared([run(), *rows], [run(CLOCK), *rows])
    assert found.warnings == ["timing differs: unknown before, clock after"]


def test_a_file_with_two_machines_in_it(compared):
    mixed = [run(), run(cpu="Another"), row("bertfast", noise(0))]
    assert compared(mixed, mixed).warnings == ["cpu differs between the runs of each file: Some CPU and Another"]


@pytest.mark.parametrize("content", [None, "", "{}\n", "not JSON\n"])
def test_what_is_no_result_file_is_one_line_and_exit_code_2(tmp_path, content, capsys):
    good, bad = file_of(tmp_path / "good.jsonl", row("bertfast", noise(0))), tmp_path / "bad.jsonl"
    if content is not None:
        bad.write_text(content)
    for pair in ((good, bad), (bad, good)):
        with pytest.raises(ValueError, match=r"bad\.jsonl") as raised:
            compare.main(*pair)
        assert "\n" not in str(raised.value)
    assert compare._command([str(good), str(bad)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_as_a_command(tmp_path):
    a = file_of(tmp_path / "a.jsonl", row("bertfast", noise(0)))
    b = file_of(tmp_path / "b.jsonl", row("bertfast", 2 * noise(1)))
    arguments = ("-m", "bertfast.benchmarks.compare", str(a), str(b))
    assert run_python(*arguments, cwd=ROOT, check=False).returncode == 1
    assert compare._command([str(a)]) == 2
