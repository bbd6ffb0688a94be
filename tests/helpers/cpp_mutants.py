"""Mutants of CUDA C++ source: one changed place in the body of a `__device__` or `__global__` function.

Left alone are what runs on the host, template arguments, `if constexpr`, sizes of arrays and types, and what only
decides about speed. Not every mutant compiles.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers.cpp_source import ASSIGNMENTS, PRECEDENCE, Function, Source
from helpers.mutant import DoesNotCompile, Edit, Mutant, digest_of, mutants_from

SWAPPED = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "<<": ">>",
    ">>": "<<",
}
# Both operands alone: a mask forgotten, a factor forgotten.
ALONE = {"*", "/", "%", "&", "|", "^"}
OTHER_WORDS = {"&&": "||", "||": "&&"}
OTHER_CALLS = {
    "fmaxf": "fminf",
    "fminf": "fmaxf",
    "max": "min",
    "min": "max",
    "expf": "exp2f",
    "exp2f": "expf",
    "logf": "log2f",
    "log2f": "logf",
}
# Calls that one of their arguments stands in for.
UNWRAPPED = {"sqrtf", "rsqrtf", "fabsf", "erff", "expm1f", "tanhf"}
SIZES = {"sizeof", "alignof", "alignas", "decltype", "static_assert"}
NOT_CALLED = {"return", "if", "for", "while", "switch", "asm", "static_assert"}
# Of the units that include a file, the one that most of its tests use.
FIRST_UNIT = {
    f"cuda/{name}": "attention_fp16" for name in ("shared_tile", "products", "attention_inputs", "attention_scores")
}


def mutants_of(path: Path, file: str) -> list[Mutant]:
    """Every mutant of one source file, in the order of the source."""
    source = Source(path.read_text())
    return list(mutants_from(file, path, source.text, _edits(source)))


def prepare() -> None:
    """Has this process build kernels for mutants: what is not optimised is compiled in less than half of the time, most
    of a mutant's."""
    from helpers import cuda_build

    cuda_build.KERNEL_FLAGS += ("-O0",)


def install(mutant: Mutant, folder: Path) -> None:
    """Has this process use a mutant, built in `folder` from what is built already and what the mutant changes. Where
    units of fp16 and bf16 are two of one source, that of bf16 stays as it is: half of the time.

    Raises:
        DoesNotCompile: it does not.
    """
    _install(mutant, folder, lambda source: source.stem.endswith("_bf16"))


def install_part(mutant: Mutant, folder: Path) -> bool:
    """The same with one unit of the several that a mutant changes: a third of the time. False where there is but one.

    What a test notices then it would notice in the whole as well, but for a change that is consistent between the
    forward pass, which has it, and the backward pass, which has not. Such are taken for caught.

    Raises:
        DoesNotCompile: it does not.
    """
    first = FIRST_UNIT.get(mutant.file)
    if first is None:
        return False
    part = folder / "part"
    part.mkdir()
    _install(mutant, part, lambda source: source.stem != first)
    return True


def _install(mutant: Mutant, folder: Path, unchanged: Callable[[Path], bool]) -> None:
    from helpers import cuda_build, cuda_on_cpu

    changed, built = folder / mutant.path.name, folder / "built"
    changed.write_text(mutant.source)
    built.mkdir()
    for made in cuda_build.BUILT.glob("*.o"):
        os.link(made, built / made.name)
    cuda_build.BUILT = built
    try:
        cuda_on_cpu.library({mutant.path.name: changed}, unchanged)
    except cuda_build.CannotBuild as error:
        raise DoesNotCompile(mutant.name) from error


def _edits(source: Source) -> Iterator[Edit]:
    functions = source.device_functions()
    texts: dict[str, str] = {}
    for function in functions:
        # Overloads share a name, and with it a digest.
        tokens = source.tokens[function.declaration : function.end + 1]
        texts[function.name] = texts.get(function.name, "") + " ".join(tokens)
    for function in functions:
        for first, last, replacement in _replacements(source, function):
            start, end = source.starts[first], source.ends[last]
            yield Edit(function.name, digest_of(texts[function.name]), start, end, replacement)


def _replacements(source: Source, function: Function) -> Iterator[tuple[int, int, str]]:
    """(first token, last token, what takes their place) for every mutation of a function."""
    i = function.body
    while i < function.end:
        after = _left_alone(source, i)
        if after is None:
            yield from _of_statement(source, i)
            yield from _of_token(source, i)
        i = after or i + 1


def _left_alone(source: Source, i: int) -> int | None:
    """The token after what is left alone from this one on."""
    token, before = source.tokens[i], source.tokens[i - 1]
    is_declared = token == "[" and _is_declared(source, i)
    is_size = token == "(" and (before in SIZES or (before == "constexpr" and source.tokens[i - 2] == "if"))
    if (token == "<" and i in source.partner) or is_declared or is_size:
        return source.partner[i] + 1
    # A byte more or less of memory next to what is copied, which nothing here sees.
    if source.kinds[i] == "number" and source.tokens[i + 1] == ")" and _is_count_of_memcpy(source, i):
        return i + 1
    return None


def _is_count_of_memcpy(source: Source, i: int) -> bool:
    opening = source.partner.get(i + 1)
    return opening is not None and source.tokens[opening - 1] == "memcpy" and source.tokens[i - 1] == ","


def _is_declared(source: Source, i: int) -> bool:
    """Whether a bracket has the size of an array in its declaration, as in `float sums[4]`."""
    while source.tokens[i - 1] == "]":
        i = source.partner[i - 1]
    before = source.tokens[i - 2]
    if before == ",":
        last = i - 3
        if source.tokens[last] == "}" and source.tokens[source.partner[last] - 1] == "=":
            last = source.partner[last] - 2
        if source.tokens[last] == "]":
            return _is_declared(source, source.partner[last])
    is_name = source.kinds[i - 2] == "word" and before not in NOT_CALLED
    is_type = is_name or (before in (">", "*") and source.space_after(i - 2) and not source.space_before(i - 2))
    return source.kinds[i - 1] == "word" and is_type


def _of_statement(source: Source, i: int) -> Iterator[tuple[int, int, str]]:
    tokens = source.tokens
    if tokens[i] == "if" and tokens[i + 1] == "(":
        condition = i + 2, source.partner[i + 1] - 1
        yield (*condition, "false")
        yield (*condition, "true")
    elif source.around(i) == "{" and _starts_statement(source, i):
        end = source.chain(i + (tokens[i] == "*"))
        is_call = tokens[end] == ";" and tokens[end - 1] == ")" and tokens[i] not in NOT_CALLED
        if is_call or (tokens[end] == "=" and source.space_before(end)):
            yield i, _end_of_statement(source, end), ";"


def _starts_statement(source: Source, i: int) -> bool:
    before, j = source.tokens[i - 1], i - 1
    if before == ")" and j in source.partner:
        return source.tokens[source.partner[j] - 1] in ("if", "for", "while", "constexpr")
    if before == ":":
        while source.tokens[j - 1] not in (";", "{", "}"):
            j -= 1
        return source.tokens[j] in ("case", "default")
    return before in (";", "{", "}", "else")


def _end_of_statement(source: Source, i: int) -> int:
    while source.tokens[i] != ";":
        i = source.partner[i] + 1 if i in source.partner else i + 1
    return i


def _of_token(source: Source, i: int) -> Iterator[tuple[int, int, str]]:
    token = source.tokens[i]
    if source.kinds[i] == "number":
        yield i, i, _next_number(token)
    elif source.kinds[i] == "word":
        yield from _of_call(source, i)
    elif source.is_binary(i):
        yield from _of_operator(source, i)
    elif token in ("-", "!", "~") and not source.space_after(i):
        yield i, i, ""


def _of_operator(source: Source, i: int) -> Iterator[tuple[int, int, str]]:
    token = source.tokens[i]
    if token in SWAPPED:
        yield i, i, SWAPPED[token]
    elif token in ASSIGNMENTS - {"="}:
        yield i, i, "="
        if token in ("+=", "-="):
            yield i, i, "-=" if token == "+=" else "+="
    elif token == "?":
        condition = source.operand(i, -1, len(PRECEDENCE))
        colon, last = source.alternatives(i)
        first_one, other = source.piece(i + 1, colon - 1), source.piece(colon + 1, last)
        yield condition, last, f"{source.piece(condition, i)} ({other}) : {first_one}"
    elif token in ALONE or token in OTHER_WORDS:
        first, last = (source.operand(i, step, PRECEDENCE[token]) for step in (-1, 1))
        left, right = source.piece(first, i - 1), source.piece(i + 1, last)
        if token in ALONE:
            yield first, last, f"({left})"
            if token not in ("/", "%"):
                yield first, last, f"({right})"
        else:
            yield first, last, f"({left} {OTHER_WORDS[token]} {right})"


def _of_call(source: Source, i: int) -> Iterator[tuple[int, int, str]]:
    name = source.tokens[i]
    if source.tokens[i + 1] != "(":
        return
    last = source.partner[i + 1]
    arguments = _arguments(source, i + 1)
    if name in OTHER_CALLS:
        yield i, i, OTHER_CALLS[name]
    elif name in UNWRAPPED:
        yield i, last, f"({arguments[0]})"
    elif name == "fmaf":
        a, b, c = arguments
        yield i, last, f"fmaf({a}, {b}, -({c}))"
        yield i, last, f"(({a}) + ({c}))"
        yield i, last, f"(({b}) + ({c}))"


def _arguments(source: Source, opening: int) -> list[str]:
    found, first, i = [], opening + 1, opening + 1
    while i <= source.partner[opening]:
        if i == source.partner[opening] or source.tokens[i] == ",":
            found.append(source.piece(first, i - 1))
            first = i + 1
        elif i in source.partner:
            i = source.partner[i]
        i += 1
    return found


def _next_number(token: str) -> str:
    digits = token.replace("'", "")
    if re.fullmatch(r"(0[xX][\da-fA-F]+|\d+)[uUlLzZ]*", digits):
        number = re.match(r"0[xX][\da-fA-F]+|\d+", digits).group()
        value, suffix = int(number, 0) + 1, digits[len(number) :]
        return f"{value:#x}{suffix}" if number[:2] in ("0x", "0X") else f"{value}{suffix}"
    number = digits.rstrip("fFlL")
    value = float.fromhex(number) if number[:2] in ("0x", "0X") else float(number)
    changed = float(f"{value * 1.01:.9g}") if value else 1.0
    return f"{changed!r}{digits[len(number) :]}"
