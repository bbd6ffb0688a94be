"""Two result files: what became faster or slower beyond the noise.

    python -m bertfast.benchmarks.compare BEFORE.jsonl AFTER.jsonl

**When a change counts.** A row has one time a round, n in one file and m in the other. All n m ratios of a time after
to a time before, sorted, bound the factor between the two by their order statistics, as the Mann-Whitney test has it:
with the k smallest and the k largest left out, the interval misses the true factor with probability 2 P(U < k + 1),
exactly, whatever the noise looks like, as long as rounds are independent and the change is a factor. (A bootstrap of
seven rounds promises nothing exactly, least of all at the small levels below.) A row is slower where the whole interval
is above 1 + `MARGIN`, faster where it is below 1 / (1 + `MARGIN`).

**The yardstick.** A machine that is slower today slows every contestant. So where the row's speed-up is over a
contestant that both files have in the same rounds, its times divided by that contestant's must say the same: a row
changed only if it did both by the clock and by that yardstick. Contestants that are not bertfast's are judged by the
clock alone; they are shown, but do not make the exit code.

**Replays and calls** are not compared: a replay of a CUDA graph leaves out what launches cost, so that any factor
between the two says nothing of what changed.

**False alarms.** The level of one row is `LEVEL` divided by the number of rows (Bonferroni), at most `WORST`: a
comparison in which nothing changed names a row at most 5 times in 100. Few rounds cannot reach that: even that all of
one file are above all of the other happens by chance with 2 / C(n + m, n), which is 0.8 % for 5 rounds each, 0.06 % for
7, 0.001 % for 10. Then that is the level; what is to be expected by chance over all rows is printed. With less than 5
rounds each that is above `WORST`, and nothing is said of the row. The promise is for rounds that are independent.
Of 14 processes with nothing changed between them (9 cells, 11 or 21 rounds, two cores shared with other heavy work) the
clock alone called 202 of 774 rows slower than those of another process; with the yardstick it was 6, in 5 of 86
comparisons.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from bertfast.benchmarks.records import Results, Row, Run
from bertfast.benchmarks.timer import REPLAYS
from bertfast.benchmarks.wording import distinct, facts, load, milliseconds, ours

# Of all rows together: how often a comparison of equals may name one.
LEVEL = 0.05
# Of one row, where rounds are few.
WORST = 0.01
# Two processes with nothing changed differ by some per cent, in where their memory lies and what runs beside them.
MARGIN = 0.05
# From here on the distribution of U is as good as normal, and its table too large.
MOST_EXACT = 60
FASTER, SLOWER, UNCHANGED, UNKNOWN = "faster", "slower", "unchanged", "too few rounds"


@dataclass(frozen=True)
class Interval:
    """Of the factor from before to after; `level` is how often it misses, 1 if it tells nothing."""

    low: float
    high: float
    level: float


@dataclass(frozen=True)
class Change:
    """A row in both files.

    Attributes:
        before, after: median seconds.
        ratio: the second by the first.
        interval: of that ratio by the clock.
        relative: the same by the yardstick; None without one.
        verdict: `FASTER`, `SLOWER`, `UNCHANGED` or `UNKNOWN`.
        ours: whether it is bertfast's.
    """

    key: str
    before: float
    after: float
    interval: Interval
    relative: Interval | None
    verdict: str
    ours: bool

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True)
class Comparison:
    """All rows of two files. `chance` is how many would be named at most, on average, if nothing had changed; `drift`
    the median ratio of contestants that are not bertfast's, 1 if there are none."""

    changes: list[Change]
    only_before: list[str]
    only_after: list[str]
    warnings: list[str]
    chance: float
    drift: float


@lru_cache(maxsize=256)
def _lower_tail(n: int, m: int) -> np.ndarray:
    """P(U <= u) for u = 0 .. n m, of n and m values from one continuous distribution."""
    # Whether the largest of all is one of the n, which then is above all m, or one of the m.
    columns = [np.ones(1) for _ in range(m + 1)]  # [i m + 1] for i values against each j <= m
    for i in range(1, n + 1):
        columns[0] = np.ones(1)
        for j in range(1, m + 1):
            chances = np.zeros(i * j + 1)
            chances[j:] += columns[j] * (i / (i + j))
            chances[: i * (j - 1) + 1] += columns[j - 1] * (j / (i + j))
            columns[j] = chances
    return np.cumsum(columns[m])


def left_out(n: int, m: int, level: float) -> tuple[int, float]:
    """How many ratios may be left out at each end, and how often the interval then misses; at least none are."""
    if max(n, m) > MOST_EXACT:
        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        k = math.floor(n * m / 2 + NormalDist().inv_cdf(level / 2) * deviation - 0.5)
        return max(0, k), level
    tail = _lower_tail(n, m)
    k = max(0, int(np.searchsorted(tail, level / 2, side="right")) - 1)
    return k, min(1.0, 2 * float(tail[k]))


def interval(before: Sequence[float], after: Sequence[float], level: float) -> Interval:
    """Of the factor from `before` to `after`, which misses it with probability `level`, or, where so few values
    cannot reach that, as seldom as they can."""
    k, reached = left_out(len(before), len(after), level)
    ratios = np.sort(np.divide.outer(np.asarray(after, np.float64), np.asarray(before, np.float64)), axis=None)
    return Interval(float(ratios[k]), float(ratios[-1 - k]), reached)


def verdict(*intervals: Interval) -> str:
    """What all of them say."""
    if any(one.level > WORST for one in intervals):
        return UNKNOWN
    if all(one.low > 1 + MARGIN for one in intervals):
        return SLOWER
    if all(one.high < 1 / (1 + MARGIN) for one in intervals):
        return FASTER
    return UNCHANGED


def compared(before: Results, after: Results) -> Comparison:
    """Rows by key, with what must be known to believe it.

    Raises:
        ValueError: one has replays of CUDA graphs, the other calls.
    """
    ways = [{run.timing == REPLAYS for run in results.runs} or {False} for results in (before, after)]
    if ways[0] != ways[1] or len(ways[0]) > 1:
        said = [" and ".join(_timings(results.runs)) for results in (before, after)]
        raise ValueError(f"these were not timed alike: {said[0]} before, {said[1]} after")
    old, new = ({row.key: row for row in results.rows} for results in (before, after))
    both = [key for key in new if key in old]
    level = min(WORST, LEVEL / max(1, len(both)))
    changes = [_change(key, old, new, level) for key in both]
    others = [change.ratio for change in changes if not change.ours]
    return Comparison(
        changes,
        [key for key in old if key not in new],
        [key for key in new if key not in old],
        warnings(before, after),
        sum(change.interval.level for change in changes if change.verdict != UNKNOWN),
        float(np.median(others)) if others else 1.0,
    )


def _change(key: str, old: dict[str, Row], new: dict[str, Row], level: float) -> Change:
    before, after = old[key], new[key]
    by_clock = interval(before.seconds, after.seconds, level)
    yardsticks = [_by_yardstick(row, rows, after) for row, rows in ((before, old), (after, new))]
    relative = None if None in yardsticks else interval(*yardsticks, level)
    said = verdict(by_clock) if relative is None else verdict(by_clock, relative)
    return Change(key, before.median, after.median, by_clock, relative, said, ours(after.contestant))


def _by_yardstick(row: Row, rows: dict[str, Row], named_by: Row) -> list[float] | None:
    """The row's times by those of what `named_by` was compared with, round by round; None where that is not there."""
    if named_by.speedup is None:
        return None
    yardstick = rows.get(row.key.removesuffix(row.contestant) + str(named_by.speedup["over"]))
    if yardstick is None or len(yardstick.seconds) != len(row.seconds):
        return None
    return [mine / theirs for mine, theirs in zip(row.seconds, yardstick.seconds, strict=True)]


def warnings(before: Results, after: Results) -> list[str]:
    """Where the two were not measured alike: machine, versions, dtypes. Commits differ by intent and clocks always."""
    said = []
    old, new = _facts(before.runs), _facts(after.runs)
    for name in dict.fromkeys([*old, *new]):
        values = [" and ".join(texts.get(name, ["unknown"])) for texts in (old, new)]
        if values[0] != values[1]:
            said.append(f"{name} differs: {values[0]} before, {values[1]} after")
        elif len(old[name]) > 1:
            said.append(f"{name} differs between the runs of each file: {values[0]}")
    dtypes = [", ".join(sorted({row.dtype for row in results.rows})) or "none" for results in (before, after)]
    if dtypes[0] != dtypes[1]:
        said.append(f"dtypes differ: {dtypes[0]} before, {dtypes[1]} after")
    return said


def _facts(runs: Sequence[Run]) -> dict[str, list[str]]:
    """What the runs say of the machine, each fact with its distinct values."""
    told = [
        facts({name: run.machine[name] for name in run.machine if name not in ("commit", "clocks")})
        | facts({"timing": run.timing})
        for run in runs
    ]
    names = dict.fromkeys(name for one in told for name in one)
    return {name: distinct([one.get(name, "") for one in told]) for name in names}


def _timings(runs: Sequence[Run]) -> list[str]:
    return distinct([run.timing or "calls" for run in runs]) or ["calls"]


def lines(comparison: Comparison, before: Results, after: Results) -> list[str]:
    """The comparison for people: warnings, each row, a summary."""
    said = [f"warning: {text}" for text in comparison.warnings]
    order = [SLOWER, FASTER, UNKNOWN, UNCHANGED]
    for change in sorted(comparison.changes, key=lambda change: (order.index(change.verdict), not change.ours)):
        times = f"{milliseconds(change.before):>8} -> {milliseconds(change.after):>8} ms"
        factor = f"x {change.ratio:.3f} ({change.interval.low:.3f}-{change.interval.high:.3f}){_relative(change)}"
        said.append(f"{change.verdict:<14}  {times}  {factor}  {change.key}")
    for name, keys, other in (("before", comparison.only_before, after), ("after", comparison.only_after, before)):
        reasons = {row.key: f": {row.reason} in the other" for row in other.skipped}
        said += [f"only {name:<9}  {key}{reasons.get(key, '')}" for key in keys]
    counts = {name: sum(change.verdict == name for change in comparison.changes) for name in order}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name != UNKNOWN)
    said.append(f"{summary}, {len(comparison.only_before) + len(comparison.only_after)} in one file only")
    said.append(f"by chance alone at most {comparison.chance:.2g} rows on average would be called faster or slower")
    if abs(math.log(comparison.drift)) > math.log(1 + MARGIN):
        said.append(f"warning: what is not bertfast's takes {comparison.drift:.2f} times as long: the machine drifted")
    return said


def _relative(change: Change) -> str:
    if change.relative is None:
        return ""
    return f", by the yardstick {change.relative.low:.3f}-{change.relative.high:.3f}"


def main(a: Path, b: Path) -> int:
    """Prints what changed from `a` to `b`.

    Returns:
        1 if something of bertfast's is slower beyond the noise, else 0.

    Raises:
        ValueError: a file cannot be read, or is not one of results, or the two were not timed alike.
    """
    before, after = load(Path(a)), load(Path(b))
    comparison = compared(before, after)
    print("\n".join(lines(comparison, before, after)))
    return int(any(change.ours and change.verdict == SLOWER for change in comparison.changes))


def _command(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m bertfast.benchmarks.compare BEFORE.jsonl AFTER.jsonl", file=sys.stderr)
        return 2
    try:
        return main(*map(Path, arguments))
    except ValueError as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(_command(sys.argv[1:]))
