"""The table of compiled kernels: one row per variant and target, what every row must satisfy, and what has regressed
against the committed table."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, get_type_hints

from bertfast.kernels.tiles import SHARED_KIB
from helpers.project import ROOT

FOLDER = ROOT / "tests" / "compiled"
# Of what each table was written from.
SOURCES = FOLDER / "sources.json"

# Registers are given to warps in units of 8 a thread; another unit may cost a resident block.
REGISTER_MARGIN = 8

# 64 rows are the least that a wgmma or a tcgen05 instruction multiplies: smaller tiles use mma.sync.
ASYNCHRONOUS_ROWS = 64
MATRIX_INSTRUCTIONS = {90: "wgmma", 100: "tcgen05", 103: "tcgen05"}


class Row(NamedTuple):
    """One compiled variant.

    Attributes:
        kernel: its name.
        call: the first call of the gate that launches it; "name #2" for the second variant that one call launches.
        target: capability, 10 x major + minor.
        warps: per program.
        stages: of pipelined loops.
        registers: a thread.
        stack: bytes a thread, which are spilled registers: kernels have no arrays of their own.
        shared: bytes a program.
        loads: instructions that load from global memory, asynchronous copies included.
        wide_loads: those of 16 bytes a thread or more, and bulk copies.
        bulk_loads: bulk copies from global memory, as tensor descriptors make them.
        stores: instructions that store to global memory.
        wide_stores: those of 16 bytes a thread or more, and bulk copies.
        matrix: matrix instructions, as "name" or "name.tf32"; several joined by "+"; empty for none.
    """

    kernel: str
    call: str
    target: int
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    loads: int
    wide_loads: int
    bulk_loads: int
    stores: int
    wide_stores: int
    matrix: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kernel, self.call, self.target

    def __str__(self) -> str:
        return f"{self.kernel}, sm_{self.target}, {self.call}"


class Facts(NamedTuple):
    """What a row is held to.

    Attributes:
        half: a tensor argument is fp16 or bf16.
        dots: matrix products in the kernel's source.
        rows: of their tiles.
        aligned: see `kernel_calls.Call`.
        tf32: see `kernel_calls.Call`.
        descriptors: an argument is a tensor descriptor.
    """

    half: bool
    dots: int
    rows: int
    aligned: bool
    tf32: bool
    descriptors: bool = False


# Below the most that a thread can have, ptxas sets a register or two aside so that one more program fits beside.
SPARED = 8
# Each program leaves one row of a narrow tile.
NARROW_STORES = {"column_sum_kernel"}


def complaints(row: Row, facts: Facts) -> list[str]:
    """What is wrong with a variant, whatever it was before."""
    found = []
    if row.shared > SHARED_KIB[row.target] * 1024:
        found.append(f"{row.shared} bytes of shared memory, the limit is {SHARED_KIB[row.target]} KiB")
    most = min(255, 65536 // (32 * row.warps))
    spared = SPARED if facts.dots and row.registers < most else 0
    if facts.half and row.stack > spared:
        found.append(f"{row.stack} bytes of spilled registers in half precision")
    instructions = set(row.matrix.split("+")) - {""}
    if facts.dots and facts.half:
        asynchronous = facts.rows >= ASYNCHRONOUS_ROWS and row.target in MATRIX_INSTRUCTIONS
        meant = MATRIX_INSTRUCTIONS[row.target] if asynchronous else "mma"
        if instructions != {meant}:
            found.append(f"{row.matrix or 'no'} matrix instructions, {meant} was meant")
    tf32 = any(name.endswith("tf32") for name in instructions)
    if facts.dots and not facts.half and tf32 != facts.tf32:
        found.append("tf32 was not allowed" if tf32 else "tf32 was allowed, none is used")
    if facts.descriptors and not row.bulk_loads:
        found.append("loads by tensor descriptor are no bulk copies")
    if facts.aligned and not facts.dots:
        if row.loads and not row.wide_loads:
            found.append(f"none of {row.loads} loads has 128 bits")
        if row.stores and not row.wide_stores and row.kernel not in NARROW_STORES:
            found.append(f"none of {row.stores} stores has 128 bits")
    return found


def _worse(row: Row, before: Row) -> list[str]:
    found = []
    if row.registers > before.registers + REGISTER_MARGIN:
        found.append(f"{row.registers} registers, were {before.registers}")
    if row.stack > before.stack:
        found.append(f"{row.stack} bytes of stack, were {before.stack}")
    if row.shared > before.shared:
        found.append(f"{row.shared} bytes of shared memory, were {before.shared}")
    for what in ("wide_loads", "bulk_loads", "wide_stores"):
        if getattr(row, what) < getattr(before, what):
            found.append(f"{getattr(row, what)} {what.replace('_', ' ')}, were {getattr(before, what)}")
    lost = set(before.matrix.split("+")) - set(row.matrix.split("+")) - {""}
    if lost:
        found.append(f"no {' and '.join(sorted(lost))} any more")
    return found


def regressions(rows: Iterable, table: Iterable, worse: Callable[..., list[str]] = _worse) -> list[str]:
    """What got worse against the table: numbers, and variants that it does not list. Whatever it lists and was not
    compiled is out of date, and said too."""
    before = {row.key: row for row in table}
    found = []
    for row in rows:
        known = before.pop(row.key, None)
        if known is None:
            found.append(f"{row}: one more variant than the table has")
        else:
            found.extend(f"{row}: {what}" for what in worse(row, known))
    return found + [f"{row}: in the table, but no longer compiled" for row in before.values()]


def compare(rows: Sequence, path: Path, whole: bool, worse: Callable[..., list[str]] = _worse) -> list[str]:
    """Regressions against a committed table, which has to be there; of a part of what is compiled (not `whole`), those
    of what both sides have."""
    if not rows:
        return []
    if not path.exists():
        return [f"there is no {path.name} to compare with in {path.parent.name}: --write makes it"]
    table = read_table(path, type(rows[0]))
    if not whole:
        made, listed = {row.key for row in rows}, {row.key for row in table}
        rows, table = [row for row in rows if row.key in listed], [row for row in table if row.key in made]
    return regressions(rows, table, worse)


def table_path(triton_version: str) -> Path:
    """Tables are per minor version of Triton, whose ptxas is part of it."""
    return FOLDER / f"triton-{'.'.join(triton_version.split('.')[:2])}.csv"


def sources_digest() -> str:
    """Of what decides, beside Triton's version, what is compiled."""
    calls = ("bertfast/dropout.py", "tests/helpers/fake_gpu.py", "tests/helpers/kernel_calls.py")
    files = [*sorted((ROOT / "kernels").glob("*.py")), *(ROOT / name for name in calls)]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def is_written_from(triton_version: str) -> bool:
    """Whether the committed table of a version was written from the sources as they are."""
    return json.loads(SOURCES.read_text()).get(table_path(triton_version).stem) == sources_digest()


def note_sources(triton_version: str) -> None:
    """Notes that the table of a version was written from the sources as they are."""
    known = json.loads(SOURCES.read_text()) if SOURCES.exists() else {}
    known[table_path(triton_version).stem] = sources_digest()
    SOURCES.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def read_table(path: Path, row_type: type[NamedTuple] = Row) -> list:
    numbers = {name for name, kind in get_type_hints(row_type).items() if kind is int}
    with path.open(newline="") as file:
        return [
            row_type(**{name: int(text) if name in numbers else text for name, text in line.items()})
            for line in csv.DictReader(file)
        ]


def write_table(path: Path, rows: Sequence[NamedTuple]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(rows[0]._fields)
        lines.writerows(rows)
