"""CUDA C++ source: which files it includes, and as tokens what brackets enclose, where device functions are, how far
operands reach.

It counts on clang-format: binary operators have a space on both sides, brackets of templates never do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

TOKEN = re.compile(
    r"""
      (?P<skipped>\s+ | //[^\n]* | /\*.*?\*/ | \#(?:\\\n|[^\n])*)
    | (?P<string>R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)" | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*')
    | (?P<number>(?:0[xX][\da-fA-F'.]+(?:[pP][+-]?\d+)? | (?:\d[\d']*\.?\d* | \.\d+)(?:[eE][+-]?\d+)?)[a-zA-Z]*)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<sign><<= | (?<=\s)>>=? | <=> | -> | :: | \+\+ | -- | && | \|\| | [-+*/%&|^<>=!]= | << | \.\.\. | .)
    """,
    re.DOTALL | re.VERBOSE,
)
PRECEDENCE = {
    operator: i
    for i, level in enumerate(("* / %", "+ -", "<< >>", "< <= > >=", "== !=", "&", "^", "|", "&&", "||"))
    for operator in level.split()
}
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}
# What no operand reaches across.
ENDS = {"(", "[", "{", "<", ")", "]", "}", ",", ";", "?", ":", "return", "case", "else", *ASSIGNMENTS}
CLOSING = {")": "(", "]": "[", "}": "{", ">": "<"}


def included(source: Path, folders: Iterable[Path]) -> list[Path]:
    """`source` and what it includes by quotes, directly and not, from beside it and from `folders`."""
    folders, found, left = list(folders), [], [source]
    while left:
        file = left.pop()
        if file in found:
            continue
        found.append(file)
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(), re.MULTILINE):
            places = [folder / name for folder in (file.parent, *folders)]
            left += [place.resolve() for place in places if place.exists()][:1]
    return found


@dataclass(frozen=True)
class Function:
    """Tokens from `declaration` to `end`, its closing brace; `body` is the first one after the parameters."""

    name: str
    declaration: int
    body: int
    end: int


class Source:
    def __init__(self, text: str) -> None:
        self.text = text
        found = [match for match in TOKEN.finditer(text) if match.lastgroup != "skipped"]
        self.kinds = [match.lastgroup for match in found]
        self.tokens = [match.group() for match in found]
        self.starts = [match.start() for match in found]
        self.ends = [match.end() for match in found]

    def space_before(self, i: int) -> bool:
        return self.text[self.starts[i] - 1].isspace()

    def space_after(self, i: int) -> bool:
        return self.text[self.ends[i]].isspace()

    def is_binary(self, i: int) -> bool:
        return self.kinds[i] == "sign" and self.space_before(i) and self.space_after(i) and i not in self.partner

    @cached_property
    def brackets(self) -> tuple[dict[int, int], list[int | None]]:
        """The other bracket of each, those of templates among them; the bracket that encloses each token."""
        partner, around, opened = {}, [], []
        for i, token in enumerate(self.tokens):
            is_template = token in "<>" and not (self.space_before(i) and self.space_after(i))
            closes = CLOSING.get(token) if token != ">" or is_template else None
            if closes and opened and self.tokens[opened[-1]] == closes:
                start = opened.pop()
                partner[start], partner[i] = i, start
            around.append(opened[-1] if opened else None)
            if token in ("(", "[", "{") or (token == "<" and is_template):
                opened.append(i)
        return partner, around

    @property
    def partner(self) -> dict[int, int]:
        return self.brackets[0]

    def around(self, i: int) -> str | None:
        """The opening bracket that encloses a token."""
        enclosing = self.brackets[1][i]
        return None if enclosing is None else self.tokens[enclosing]

    def is_initialiser(self, i: int) -> bool:
        """Of a brace: whether it follows a name, as in `word_{0}`."""
        return not self.space_before(min(i, self.partner[i]))

    def piece(self, first: int, last: int) -> str:
        """The text of tokens from `first` to `last`, both included."""
        return self.text[self.starts[first] : self.ends[last]]

    def operand(self, i: int, step: int, precedence: int) -> int:
        """The outermost token of what a binary operator at `i` takes on its left (step -1) or right (1)."""
        last, j = i, i + step
        while True:
            token = self.tokens[j]
            enclosed = j in self.partner and (token in CLOSING) == (step < 0)
            if enclosed and (token not in "{}" or self.is_initialiser(j)):
                j = self.partner[j]
            elif token in ENDS and (token not in "<>" or j in self.partner):
                return last
            elif self.is_binary(j) and token in PRECEDENCE:
                other = PRECEDENCE[token]
                if other > precedence or (step > 0 and other == precedence):
                    return last
            last, j = j, j + step

    def alternatives(self, i: int) -> tuple[int, int]:
        """Of the `?` at `i`: its `:`, and the last token of what follows that."""
        j, open_ones, colon = i + 1, 1, None
        while True:
            token = self.tokens[j]
            if j in self.partner and token not in CLOSING:
                j = self.partner[j]
            elif token == "?":
                open_ones += 1
            elif token == ":" and open_ones:
                open_ones -= 1
                colon = j if open_ones == 0 and colon is None else colon
            elif token in CLOSING and j in self.partner or token in (",", ";", ":"):
                return colon, j - 1
            j += 1

    def chain(self, i: int) -> int:
        """The token after a name with its members, template arguments, indices and calls."""
        while True:
            if self.kinds[i] != "word":
                return i
            i += 1
            while i in self.partner and self.tokens[i] in ("<", "[", "("):
                i = self.partner[i] + 1
            if self.tokens[i] not in ("::", ".", "->"):
                return i
            i += 1 + (self.tokens[i + 1] == "template")

    def device_functions(self) -> list[Function]:
        return list(self._functions(0, len(self.tokens), ""))

    def _functions(self, first: int, last: int, scope: str) -> Iterator[Function]:
        declaration = i = first
        while i < last:
            token = self.tokens[i]
            if token == "{" and not self.is_initialiser(i):
                end = self.partner[i]
                outer = self._outer_tokens(declaration, i)
                words = [self.tokens[j] for j in outer]
                if "__device__" in words or "__global__" in words:
                    name, parameters = self._name(outer)
                    yield Function(scope + name, declaration, self.partner[parameters] + 1, end)
                elif "namespace" in words or '"C"' in words:
                    yield from self._functions(i + 1, end, scope)
                elif "struct" in words or "class" in words:
                    named = next(j for j in outer if self.tokens[j - 1] in ("struct", "class"))
                    last_named = self.partner.get(named + 1, named) if self.tokens[named + 1] == "<" else named
                    yield from self._functions(i + 1, end, f"{scope}{self.piece(named, last_named)}::")
                i, declaration = end, end + 1
            elif token == ";" or (token == ":" and self.tokens[i - 1] in ("public", "protected", "private")):
                declaration = i + 1
            elif i in self.partner and token not in CLOSING:
                i = self.partner[i]
            i += 1

    def _outer_tokens(self, first: int, last: int) -> list[int]:
        """Those outside of brackets, and what opens a pair."""
        outer = []
        while first < last:
            outer.append(first)
            first = self.partner.get(first, first) + 1
        return outer

    def _name(self, outer: list[int]) -> tuple[str, int]:
        """The name of a function, and the parenthesis that opens its parameters."""
        attributes = ("__launch_bounds__", "__align__", "alignas", "noexcept", "decltype", "requires")
        for j in outer:
            if self.tokens[j] == "operator":
                parameters = next(k for k in range(j + 2, outer[-1] + 1) if self.tokens[k] == "(")
                words = self.tokens[j:parameters]
                return " ".join(words) if self.kinds[j + 1] == "word" else "".join(words), parameters
            if self.tokens[j] == "(" and self.tokens[j - 1] not in attributes:
                return self.tokens[j - 1], j
        raise ValueError(f"a function without a name: {self.piece(outer[0], outer[-1])}")
