"""The format of results: JSON lines, one `Run`, `Row` or `Skipped` each.

A run writes itself first, then its rows as they are measured; a resumed run adds another `Run` behind them. What is in
a `Row` and what in a `Skipped` starts with the same fields, a `Cell` and a contestant, which `key` joins.
"""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA = 1
OP_PASSES = ("forward", "backward", "both")
MODEL_PASSES = ("inference", "training")
FILLS = ("dense", "half", "mixed")
# Python keeps the word `pass` for itself.
_RENAMED = {"pass_": "pass"}


@dataclass(frozen=True)
class Cell:
    """What contestants are compared on.

    Attributes:
        subject: an op or a model.
        pass_: `OP_PASSES` or `MODEL_PASSES`.
        batch, length: rows, and tokens in a row, padding included.
        fill: how much of that is tokens, of `FILLS`; see `cases.lengths_of`.
        dtype: a torch dtype's name.
        device: its type, "cpu" or "cuda".
    """

    subject: str
    pass_: str
    batch: int
    length: int
    fill: str
    dtype: str
    device: str

    def __str__(self) -> str:
        return "/".join((self.subject, self.pass_, f"{self.batch}x{self.length}", self.fill, self.dtype, self.device))


def key(cell: Cell, contestant: str) -> str:
    """subject/pass/BxS/fill/dtype/device/contestant."""
    return f"{cell}/{contestant}"


@dataclass(frozen=True)
class Run:
    """Where and how the rows behind it were measured.

    Attributes:
        started: ISO time with its zone.
        command: the arguments.
        machine: `suite.machine()`.
        ceilings: `bytes_per_second`, and `flops_per_second` by dtype; see `roofline.measure_ceilings`.
        timing: how calls were timed, of `timer.way_of`; None in files of before that was written: by the clock or
            between CUDA events.
    """

    started: str
    command: list[str]
    machine: dict[str, Any]
    ceilings: dict[str, Any]
    schema: int = SCHEMA
    timing: str | None = None


@dataclass(frozen=True)
class _Entry(Cell):
    contestant: str

    @property
    def cell(self) -> Cell:
        return Cell(*(getattr(self, item.name) for item in fields(Cell)))

    @property
    def key(self) -> str:
        return key(self.cell, self.contestant)


@dataclass(frozen=True)
class Row(_Entry):
    """What one contestant took in one cell.

    Attributes:
        seconds: of a call, one value a round; `median`, `p10` and `p90` are theirs.
        speedup: how many times as fast as the contestant `over`, round by round (`median`, `p10`, `p90`); None for
            that one itself.
        first_call_seconds: apart from them: it allocates, packs weights, compiles.
        peak_bytes: what a call takes beyond what was allocated before it; None where that is not known.
        error: of the results, as a multiple of the tolerance: at most 1.
        flops, bytes: of the floor, `roofline`.
        flops_per_second, bytes_per_second: those over the median.
        floor_seconds: what the floor takes at the run's ceilings.
        of_floor: that over the median.
    """

    seconds: list[float]
    median: float
    p10: float
    p90: float
    speedup: dict[str, Any] | None
    first_call_seconds: float
    peak_bytes: int | None
    error: float
    flops: int
    bytes: int
    flops_per_second: float
    bytes_per_second: float
    floor_seconds: float
    of_floor: float


@dataclass(frozen=True)
class Skipped(_Entry):
    """What has no number, and why, in one line.

    Attributes:
        reason: in a sentence.
        excused: nothing is wrong with it: it cannot be measured like this.
    """

    reason: str
    excused: bool = False


_KINDS: dict[str, type] = {"run": Run, "row": Row, "skipped": Skipped}
Record = Run | Row | Skipped


@dataclass
class Results:
    """A file's content. Where a contestant of a cell was measured again, the later result counts."""

    runs: list[Run] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def keys(self) -> set[str]:
        return {entry.key for entry in (*self.rows, *self.skipped)}


def to_line(record: Record) -> str:
    """The record as JSON, with the end of its line."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(record, cls))
    entry = {} if kind == "run" else {"key": record.key}
    content = {_RENAMED.get(name, name): value for name, value in asdict(record).items()}
    return json.dumps({"kind": kind, **entry, **content}, allow_nan=False) + "\n"


def from_line(line: str) -> Record:
    """The record of a line.

    Raises:
        ValueError: it is none of this schema.
    """
    content = json.loads(line)
    cls = _KINDS.get(content.get("kind")) if isinstance(content, dict) else None
    if cls is None:
        raise ValueError("neither a run, a row nor something skipped")
    if cls is Run and content.get("schema") != SCHEMA:
        raise ValueError(f"schema is {content.get('schema')}, this version reads {SCHEMA}")
    given = {item.name: content[_name(item)] for item in fields(cls) if _name(item) in content}
    missing = [_name(item) for item in fields(cls) if item.name not in given and item.default is MISSING]
    if missing:
        raise ValueError(f"{content['kind']} without {', '.join(missing)}")
    return cls(**given)


def _name(item: Field) -> str:
    return _RENAMED.get(item.name, item.name)


def read(path: str | Path) -> Results:
    """What a file of results holds. A last line that an interrupted run left without its end is ignored.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is no record; it says which.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    runs: list[Run] = []
    entries: dict[str, Row | Skipped] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = from_line(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if isinstance(record, Run):
            runs.append(record)
        else:
            entries.pop(record.key, None)
            entries[record.key] = record
    rows = [entry for entry in entries.values() if isinstance(entry, Row)]
    return Results(runs, rows, [entry for entry in entries.values() if isinstance(entry, Skipped)])


class Writer:
    """Appends records to a file, each on the disk before the next is measured. A context manager.

    Args:
        path: made if there is none; an unfinished last line in it is cut off.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str | Path):
        self._file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)

    def write(self, *records: Record) -> None:
        """Appends them, and waits until they are written."""
        for line in map(to_line, records):
            self._file.write(line.encode("utf-8"))
            self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()
