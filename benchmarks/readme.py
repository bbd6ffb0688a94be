"""The README's numbers, from a committed file of results.

python -m bertfast.benchmarks.readme RESULTS.jsonl              prints them
python -m bertfast.benchmarks.readme RESULTS.jsonl README.md    puts them between the file's markers
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bertfast.benchmarks import markers
from bertfast.benchmarks.records import Row
from bertfast.benchmarks.wording import (
    command_text,
    distinct,
    load,
    machine_text,
    milliseconds,
    ours,
    over,
    percent,
    speedup,
)

BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
# Left out where every row says the same.
OPTIONAL = ("device", "contestant")


def section(path: Path) -> str:
    """What belongs between the markers: the machine, the command, and a Markdown table of what bertfast took.

    Raises:
        ValueError: the file is not one of results, or none of them is bertfast's.
    """
    results = load(path)
    rows = {row.key: row for row in results.rows}
    table = [_row(row, rows) for row in results.rows if ours(row.contestant)]
    if not table:
        raise ValueError(f"{path}: no row of bertfast's in it")
    columns = [name for name in table[0] if name not in OPTIONAL or len({row[name] for row in table}) > 1]
    machines = distinct([machine_text(run) for run in results.runs])
    commands = distinct([command_text(run) for run in results.runs])
    lines = [f"Measured on {_cell(machine)}" for machine in machines]
    lines += [f"with `{_cell(command)}`:" for command in commands]
    lines += ["", _line(columns), _line(["---"] * len(columns))]
    lines += [_line([row[name] for name in columns]) for row in table]
    return "\n".join(lines)


def _row(row: Row, rows: dict[str, Row]) -> dict[str, str]:
    cell = row.key.removesuffix(row.contestant)
    baseline = rows.get(cell + over(row))
    others = [other for key, other in rows.items() if key == cell + other.contestant and not ours(other.contestant)]
    fastest = min(others, key=lambda other: other.median, default=None)
    return {
        "subject": f"`{row.subject}`",
        "pass": row.pass_,
        "B x S": f"{row.batch} x {row.length}",
        "fill": row.fill,
        "dtype": row.dtype,
        "device": row.device,
        "contestant": row.contestant,
        "ms": milliseconds(row.median),
        "baseline": over(row),
        "its ms": "-" if baseline is None else milliseconds(baseline.median),
        "times as fast (10-90 %)": speedup(row),
        # The baseline may be an easy one.
        "fastest other, ms": "-" if fastest is None else f"{fastest.contestant}, {milliseconds(fastest.median)}",
        "of the floor": percent(row.of_floor),
    }


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """One line that is no table's border and no HTML."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def replaced(text: str, between: str) -> str:
    """`text` with `between` between the markers.

    Raises:
        ValueError: there is not one pair of them.
    """
    return markers.replaced(text, BEGIN, END, between)


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        raise SystemExit("usage: python -m bertfast.benchmarks.readme RESULTS.jsonl [README.md ...]")
    results, *names = arguments
    try:
        between = section(Path(results))
        for name in names:
            path = Path(name)
            path.write_text(replaced(path.read_text(encoding="utf-8"), between), encoding="utf-8")
    except (ValueError, OSError) as error:
        raise SystemExit(f"readme: error: {error}") from None
    if not names:
        print(between)


if __name__ == "__main__":
    main(sys.argv[1:])
