"""How results read wherever they are shown: numbers with three digits, the machine and the command in a line."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from bertfast.benchmarks import measure, records
from bertfast.benchmarks.records import Results, Row, Run


def load(path: Path) -> Results:
    """`records.read` for commands.

    Raises:
        ValueError: the file cannot be read, or holds nothing that was measured or skipped. The message is one line.
    """
    try:
        results = records.read(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a file of benchmark results") from None
    if not (results.rows or results.skipped):
        raise ValueError(f"{path}: no results in it")
    return results


def ours(contestant: str) -> bool:
    """Whether a contestant is bertfast, with whatever backend, or a stock model that it accelerates."""
    return contestant.split(" ")[0] in ("bertfast", "swapped")


def digits(value: float | None) -> str:
    """Three significant digits without an exponent; all of them before the point."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def milliseconds(seconds: float) -> str:
    return digits(1e3 * seconds)


def speedup(row: Row) -> str:
    """Times as fast, with the 10th and 90th percentile of rounds; without what it is over."""
    if row.speedup is None:
        return "-"
    return f"{row.speedup['median']:.2f} ({row.speedup['p10']:.2f}-{row.speedup['p90']:.2f})"


def over(row: Row) -> str:
    return "-" if row.speedup is None else str(row.speedup["over"])


def percent(share: float | None) -> str:
    return "-" if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def facts(machine: Mapping) -> dict[str, str]:
    """Nested facts as texts by their path; what is unknown (None, empty) is left out."""
    flat = {}
    for name, value in machine.items():
        if isinstance(value, Mapping):
            flat |= {f"{name} {inner}": text for inner, text in facts(value).items()}
        elif isinstance(value, (list, tuple)):
            flat[name] = ", ".join(map(str, value))
        elif value is not None:
            flat[name] = str(value)
    return {name: text for name, text in flat.items() if text}


def machine_text(run: Run) -> str:
    """The machine in a line: what `measure.machine_line` says, then what it does not."""
    told = {"cpu", "cores", "torch_threads", "gpus", "torch", "python", "system"}
    line = [measure.machine_line(run.machine)] if told <= set(run.machine) else []
    shown = told if line else set()
    for name, text in facts({name: value for name, value in run.machine.items() if name not in shown}).items():
        name = name.removeprefix("versions ")
        if not line or (text not in line[0] and f"{name} {text}" not in line[0]):
            line.append(f"{name} {text}")
    return ", ".join(line)


def command_text(run: Run) -> str:
    """What was typed: the program without its folder."""
    if not run.command:
        return ""
    return shlex.join([Path(run.command[0]).name, *run.command[1:]])


def distinct(texts: list[str]) -> list[str]:
    """Without empty ones and repetitions, in order."""
    return [text for text in dict.fromkeys(texts) if text]
