"""What a mutant is, whatever language it breaks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NO_MUTANT = "does not compile"


class DoesNotCompile(Exception):
    """A mutant that is no program."""


@dataclass(frozen=True)
class Mutant:
    """One replaced piece of source. `file` is `layer_norm` of kernels/, `cuda/layer_norm` of csrc/cuda; `name` is
    `<file>.<function>: <line> -> <new line>`, numbered where it repeats; `path` is what `source` stands for."""

    file: str
    function: str
    name: str
    source: str
    digest: str
    path: Path


@dataclass(frozen=True)
class Edit:
    """`replacement` for the characters from `start` to `end`, in a function of that digest."""

    function: str
    digest: str
    start: int
    end: int
    replacement: str


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def mutants_from(file: str, path: Path, source: str, edits: Iterable[Edit]) -> Iterator[Mutant]:
    names = Counter()
    for edit in edits:
        mutated = source[: edit.start] + edit.replacement + source[edit.end :]
        first = source.rfind("\n", 0, edit.start) + 1
        last = source.find("\n", edit.end)
        last = last if last >= 0 else len(source)
        before = " ".join(source[first:last].split())
        after = " ".join((source[first : edit.start] + edit.replacement + source[edit.end : last]).split())
        name = f"{file}.{edit.function}: {before} -> {after}"
        names[name] += 1
        if names[name] > 1:
            name += f" #{names[name]}"
        yield Mutant(file, edit.function, name, mutated, edit.digest, path)
