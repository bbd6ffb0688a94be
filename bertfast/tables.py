"""Plain-text tables of modules and parameters by their full names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence


def layers_as_star(name: str) -> str:
    """The name with `*` for the number of a layer: `encoder.layer.3.output` gives `encoder.layer.*.output`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def merge_layers(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows that begin with a name. Those of several layers are one, whose last cell ends with their number."""
    counts = Counter((layers_as_star(name), *cells) for name, *cells in rows)
    return [row if count == 1 else (*row[:-1], f"{row[-1]} ({count} layers)") for row, count in counts.items()]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the header, a rule, the rows."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines]
