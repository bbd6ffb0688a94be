"""Results as a page for people: one HTML file that needs nothing else, and its figures as PNG files beside it.

    python -m bertfast.benchmarks.report FOLDER RESULTS.jsonl [RESULTS.jsonl ...]

Every text that comes from a result file is escaped, and the page forbids itself to load anything.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from bertfast.benchmarks import plots
from bertfast.benchmarks.records import Results
from bertfast.benchmarks.wording import (
    command_text,
    digits,
    distinct,
    load,
    machine_text,
    milliseconds,
    over,
    percent,
    speedup,
)

PAGE = "report.html"
TITLE = "bertfast: benchmark results"
COLUMNS = {
    "pass": lambda row: row.pass_,
    "B": lambda row: str(row.batch),
    "S": lambda row: str(row.length),
    "fill": lambda row: row.fill,
    "dtype": lambda row: row.dtype,
    "device": lambda row: row.device,
    "contestant": lambda row: row.contestant,
    "median ms": lambda row: milliseconds(row.median),
    "p10-p90 ms": lambda row: f"{milliseconds(row.p10)}-{milliseconds(row.p90)}",
    "times as fast (p10-p90)": speedup,
    "as": over,
    "GFLOP/s": lambda row: digits(row.flops_per_second / 1e9),
    "GB/s": lambda row: digits(row.bytes_per_second / 1e9),
    "of the floor": lambda row: percent(row.of_floor),
    "error / tolerance": lambda row: digits(row.error),
    "first call ms": lambda row: milliseconds(row.first_call_seconds),
    "peak MiB": lambda row: "-" if row.peak_bytes is None else digits(row.peak_bytes / 2**20),
}
TEXTS = ("pass", "fill", "dtype", "device", "contestant", "as")
NOTES = (
    "Times are of one call: the median over rounds, with the 10th and 90th percentile. How many times as fast is taken "
    "round by round. The floor is the time that the floating-point operations or the bytes of the subject need at the "
    "ceilings measured on this machine, whichever is longer; 100 % is the floor. The error is that against float64 as "
    "a multiple of what is tolerated; a contestant above 1 is not timed. The first call, which compiles, packs and "
    "allocates, is in no median."
)
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #111; }
code { background: #f2f2f2; padding: .1em .3em; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th.text, td.text { text-align: left; }
th { background: #fff; border-bottom: 2px solid #888; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; height: auto; }
"""


def write(paths: Sequence[Path], folder: Path) -> Path:
    """The page of all these result files, each a part of its own, so that no two machines share a figure.

    Args:
        paths: files of results, see `records`.
        folder: gets the page and the PNG files; made where it is missing.

    Returns:
        The page.

    Raises:
        ValueError: matplotlib is missing, or a file is not one of results.
        OSError: the folder cannot be written.
    """
    plots.require()
    parts = [(Path(path), load(Path(path))) for path in paths]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for number, (path, results) in enumerate(parts, 1):
        figures = [*plots.rooflines(results.runs, results.rows), *plots.sweeps(results.rows)]
        for figure in figures:
            name = figure.name if len(parts) == 1 else f"{number}-{figure.name}"
            (folder / name).write_bytes(figure.png)
        sections.append(_part(path.name, results, figures))
    page = folder / PAGE
    page.write_text(_page(sections), encoding="utf-8")
    return page


def _page(sections: Iterable[str]) -> str:
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{TITLE}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{TITLE}</h1>\n<p>{NOTES}</p>\n"
        + "".join(sections)
        + "</body>\n</html>\n"
    )


def _part(name: str, results: Results, figures: Sequence[plots.Plot]) -> str:
    runs, rows, skipped = results.runs, results.rows, results.skipped
    lines = [f"<h2>{escape(name)}</h2>\n"]
    machines = distinct([machine_text(run) for run in runs])
    lines += [f"<p>Machine: {escape(machine)}</p>\n" for machine in machines]
    if len(machines) > 1:
        lines.append("<p><strong>The runs in this file differ in machine, versions or commit.</strong></p>\n")
    lines += [
        f"<p>Command: <code>{escape(text)}</code></p>\n" for text in distinct([command_text(run) for run in runs])
    ]
    lines += [f"<p>Timed by: {escape(text)}</p>\n" for text in distinct([run.timing or "" for run in runs])]
    lines += [f"<p>Started: {escape(str(run.started))}</p>\n" for run in runs[:1]]
    for figure in figures:
        data = base64.b64encode(figure.png).decode()
        caption = escape(figure.caption)
        lines.append(f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"></figure>\n')
    for subject in distinct([row.subject for row in rows]):
        lines.append(f"<h3>{escape(subject)}</h3>\n")
        cells = [[text(row) for text in COLUMNS.values()] for row in rows if row.subject == subject]
        lines.append(_table(list(COLUMNS), cells, TEXTS))
    if skipped:
        lines.append(f"<h3>Skipped ({len(skipped)})</h3>\n")
        head = ["what", "reason"]
        lines.append(_table(head, [[row.key, row.reason] for row in skipped], head))
    return "".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[str]) -> str:
    """Escapes every cell; columns in `texts` are aligned as text."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="text"' if name in texts else "" for name in head]
        inner = "".join(f"<{tag}{kind}>{escape(str(cell))}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{inner}</tr>\n"

    body = "".join(line("td", cells) for cells in rows)
    return f'<div class="wide"><table>\n<thead>{line("th", head)}</thead>\n<tbody>\n{body}</tbody>\n</table></div>\n'


def main(arguments: Sequence[str]) -> None:
    if len(arguments) < 2:
        raise SystemExit("usage: python -m bertfast.benchmarks.report FOLDER RESULTS.jsonl [RESULTS.jsonl ...]")
    folder, *paths = arguments
    try:
        print(write([Path(path) for path in paths], Path(folder)))
    except (ValueError, OSError) as error:
        raise SystemExit(f"report: error: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
