"""What a swap did: which modules it changed, which it left, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from bertfast.tables import merge_layers, table

ROOT = "(the model itself)"


@dataclass
class SwapReport:
    """The modules of a model that `accelerate` swapped, or `restore` restored, by full names ("" is the model itself).

    True when there is any. `str(report)` is a table, in which the same module of several layers is one line.

    Attributes:
        model: name of the model's class.
        swapped: name -> (type, what became of it).
        left: name -> (type, reason), the modules that stay as they are although one might expect otherwise.
        notes: what else a user should know.
        verb: "swapped" or "restored".
    """

    model: str
    swapped: dict[str, tuple[str, str]] = field(default_factory=dict)
    left: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    verb: str = "swapped"

    def __bool__(self) -> bool:
        return bool(self.swapped)

    def rows(self) -> list[tuple[str, ...]]:
        """Lines of the table: module, type, what happened, detail."""
        entries = [(name or ROOT, kind, self.verb, became) for name, (kind, became) in self.swapped.items()]
        entries += [(name or ROOT, kind, "left", reason) for name, (kind, reason) in self.left.items()]
        return merge_layers(entries)

    def __str__(self) -> str:
        counts = f"{len(self.swapped) or 'no'} module{'' if len(self.swapped) == 1 else 's'} {self.verb}"
        lines = [f"{self.model}: {counts}" + (f", {len(self.left)} left" if self.left else "")]
        rows = self.rows()
        if rows:
            lines += table(("module", "type", "status", "detail"), rows)
        return "\n".join(lines + [f"note: {note}" for note in self.notes])
