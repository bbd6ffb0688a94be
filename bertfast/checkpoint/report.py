"""What loading a checkpoint did not find, did not use, or could not fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bertfast.checkpoint.keys import is_stray_buffer
from bertfast.tables import merge_layers, table


@dataclass
class LoadReport:
    """Differences between a checkpoint and the model it was loaded into, by full names.

    `str(report)` is a table. The sets are those of transformers' `output_loading_info`, whose keys work as well
    (`report["missing_keys"]`).

    Attributes:
        model: name of the model's class.
        source: where the checkpoint came from.
        missing: parameters that the checkpoint lacks; they are newly initialised.
        unexpected: tensors of the checkpoint that the model has no place for.
        mismatched: name -> (shape in the checkpoint, shape in the model); these are newly initialised.
        notes: what else a user should know.
    """

    model: str
    source: str
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is any difference."""
        return bool(self.missing or self.unexpected or self.mismatched)

    def __getitem__(self, key: str) -> Any:
        mismatched = {(name, *shapes) for name, shapes in self.mismatched.items()}
        return {
            "missing_keys": set(self.missing),
            "unexpected_keys": set(self.unexpected),
            "mismatched_keys": mismatched,
            "error_msgs": [],
        }[key]

    def rows(self) -> list[tuple[str, str, str]]:
        """Lines of the table: name, what happened, detail. The same tensor of several layers is one line."""
        entries = [(name, "missing", "newly initialised") for name in self.missing]
        entries += [
            (name, "mismatched", f"newly initialised: {list(found)} in the file, {list(wanted)} here")
            for name, (found, wanted) in self.mismatched.items()
        ]
        entries += [
            (name, "unexpected", "a buffer, not needed" if is_stray_buffer(name) else "not used")
            for name in self.unexpected
        ]
        return merge_layers(entries)

    def __str__(self) -> str:
        rows = self.rows()
        lines = [f"{self.model} from {self.source}: " + (self._summary() if rows else "every weight found and used")]
        if rows:
            lines += table(("name", "status", "what happened"), rows)
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def _summary(self) -> str:
        counts = {"missing": self.missing, "mismatched": self.mismatched, "unexpected": self.unexpected}
        return ", ".join(f"{len(names)} {status}" for status, names in counts.items() if names)
