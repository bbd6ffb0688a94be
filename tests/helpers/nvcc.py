"""CUDA kernels as nvcc compiles them: what ptxas says of each and what its machine code does, as rows of a table, what
every row must satisfy, and what has become worse."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from helpers.compiled import FOLDER, REGISTER_MARGIN

# A template parameter of this name says that a kernel accesses memory 16 bytes at a time.
VECTOR = "kVector"

_TYPES = {"__nv_bfloat16": "bf16", "__half": "fp16", "float": "fp32", "double": "fp64"}
_KERNEL = re.compile(
    r"(?:template\s*<(?P<parameters>[^;{}()]*)>\s*)?__global__\s+"
    r"(?:(?:void|static|__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\))\s*)+(?<!\w)(?P<name>\w+)\s*\("
)
_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_PROPERTIES = re.compile(
    r"Function properties for (\S+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_WARNING = re.compile(r"^.*(?:\bwarning\b|serialized|Potential Performance Loss).*$", re.IGNORECASE | re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*)([\w.]*)([^;]*)", re.MULTILINE)
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
_LOADS, _STORES, _WIDE = {"LDG", "LDGSTS", "LD"}, {"STG", "ST"}, {"128", "256"}
_TABLE_JUMPS = {"BRX", "BRXU"}
_ENDS = {"EXIT", "RET", *_TABLE_JUMPS}

# Of the instructions issued in a main loop. A few more are no regression.
ISSUED_PERCENT, ISSUED_MARGIN = 3, 4


class Row(NamedTuple):
    """One kernel for one architecture.

    Attributes:
        file: stem of the source file.
        kernel: its name and template arguments.
        arch: as in sm_<arch>.
        registers: a thread.
        stack: bytes a thread.
        spill_stores, spill_loads: bytes a thread.
        shared: bytes a block, those known to the compiler.
        loads: instructions that load from global memory, asynchronous copies included.
        wide_loads: those of 16 bytes a thread or more.
        stores, wide_stores: to global memory.
        hmma, ldsm, mufu: these instructions on the shortest way round the main loop, see `_main_loop` and `_way_round`;
            0 where there is none.
        ldgsts: those anywhere in the main loop, since copies lie behind conditions.
        issued: all instructions on that way.
    """

    file: str
    kernel: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    loads: int
    wide_loads: int
    stores: int
    wide_stores: int
    hmma: int
    ldsm: int
    ldgsts: int
    mufu: int
    issued: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.kernel, self.arch

    def __str__(self) -> str:
        return f"{self.kernel}, sm_{self.arch}"


class Counts(NamedTuple):
    """What a row has of the machine code."""

    loads: int = 0
    wide_loads: int = 0
    stores: int = 0
    wide_stores: int = 0
    hmma: int = 0
    ldsm: int = 0
    ldgsts: int = 0
    mufu: int = 0
    issued: int = 0


class Instruction(NamedTuple):
    """One of a disassembly; `guard` is its predicate, "" for none."""

    address: int
    guard: str
    operation: str
    modifiers: frozenset[str]
    operands: str


def find_nvcc() -> str | None:
    """The one of CUDA_HOME, on PATH, or where NVIDIA's installer puts it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=Path(home, "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def nvcc_version(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return re.search(r"release [\d.]+, V([\d.]+)", done.stdout)[1]


def table_path(version: str) -> Path:
    return FOLDER / f"nvcc-{'.'.join(version.split('.')[:2])}.csv"


def parameters_of_kernels(source: str) -> dict[str, list[str]]:
    """The names of template parameters, by kernel."""
    code = re.sub(r"//.*|/\*[\s\S]*?\*/", "", source)
    return {
        found["name"]: [
            re.search(r"(\w+)\s*$", parameter.partition("=")[0])[1] for parameter in _split(found["parameters"])
        ]
        for found in _KERNEL.finditer(code)
        if found["parameters"]
    }


def _split(arguments: str) -> list[str]:
    """At the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "<(") - (character in ">)")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def demangled(names: list[str]) -> list[str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def readable(signature: str, parameters: dict[str, list[str]]) -> str:
    """A demangled kernel as `name<T=bf16, kVector=true>`, without its namespaces and arguments."""
    text = re.sub(r"\(anonymous namespace\)::|\b\w+::", "", signature)
    text = re.sub(r"\((?:unsigned )?(?:int|long|bool)\)(?=-?\w)", "", text)
    text = re.sub("|".join(rf"\b{name}\b" for name in _TYPES), lambda found: _TYPES[found[0]], text)
    name = re.search(r"(\w+)\s*(?=[<(]|$)", text)
    arguments, depth = "", 0
    for character in text[name.end() :]:
        if depth == 0 and character != "<":
            break
        depth += (character == "<") - (character == ">")
        arguments += character
    values = _split(arguments[1:-1]) if arguments else []
    names = parameters.get(name[1], [])
    if len(names) == len(values):
        values = [f"{key}={value}" for key, value in zip(names, values, strict=True)]
    return name[1] + (f"<{', '.join(values)}>" if values else "")


def counts_of(sass: str) -> dict[str, Counts]:
    """Of each function in a disassembly, by mangled name."""
    found = {}
    for part in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        found[name.strip()] = _counts(
            [
                Instruction(int(address, 16), guard, operation, frozenset(modifiers.split(".")), operands)
                for address, guard, operation, modifiers, operands in _INSTRUCTION.findall(body)
            ]
        )
    return found


def _counts(code: list[Instruction]) -> Counts:
    loads, stores = ([one for one in code if one.operation in kind] for kind in (_LOADS, _STORES))
    wide_loads, wide_stores = (sum(not _WIDE.isdisjoint(one.modifiers) for one in some) for some in (loads, stores))
    loop, way = ([code[i].operation for i in some] for some in _main_loop(code))
    return Counts(
        len(loads),
        wide_loads,
        len(stores),
        wide_stores,
        hmma=way.count("HMMA"),
        ldsm=way.count("LDSM"),
        ldgsts=loop.count("LDGSTS"),
        mufu=way.count("MUFU"),
        issued=len(way),
    )


def _main_loop(code: list[Instruction]) -> tuple[set[int], list[int]]:
    """The loop with the most HMMA, as indices, and the way round it; of several the innermost, which is the shortest.
    Empty where no loop has any."""
    products = {i for i, instruction in enumerate(code) if instruction.operation == "HMMA"}
    if not products:
        return set(), []
    followers = _followers(code)
    loops = _loops(followers)
    head, loop = max(loops, key=lambda found: (len(products & found[1]), -len(found[1])), default=(0, set()))
    if products.isdisjoint(loop):
        return set(), []
    return loop, _way_round(head, loop, products & loop, followers)


def _way_round(head: int, loop: set[int], products: set[int], followers: list[list[int]]) -> list[int]:
    """The shortest way from the head of a loop back to it that has all of the products, in no particular order: of
    alternatives, such as with a mask and without, a warp issues one.

    Assumes that the products follow each other as their addresses do, from the head on. Where no way does that, as with
    products in two alternatives, it is the whole loop.
    """
    stops = [head, *sorted(products - {head}, key=lambda i: (i < head, i)), head]
    way = []
    for start, stop in pairwise(stops):
        part = _shortest(start, stop, loop - {head}, followers)
        if not part:
            return sorted(loop)
        way += part
    return way


def _shortest(start: int, stop: int, through: set[int], followers: list[list[int]]) -> list[int]:
    """The shortest way from `start` to `stop`, without the latter, backwards. Empty where there is none."""
    before, ahead = {start: start}, deque([start])
    while ahead:
        i = ahead.popleft()
        if stop in followers[i]:
            way = [i]
            while way[-1] != start:
                way.append(before[way[-1]])
            return way
        for to in followers[i]:
            if to in through and to not in before:
                before[to] = i
                ahead.append(to)
    return []


def _loops(followers: list[list[int]]) -> Iterator[tuple[int, set[int]]]:
    """The natural loops, each behind its head. A branch back alone makes none: code that lies apart, behind the rest,
    branches back too."""
    before: dict[int, list[int]] = {0: []}
    ahead = [0]
    while ahead:
        i = ahead.pop()
        for to in followers[i]:
            if to not in before:
                before[to] = []
                ahead.append(to)
            before[to].append(i)
    ways_back = [(head, last) for head, those in before.items() if head == 0 or len(those) > 1 for last in those]
    for head, last in ways_back:
        loop, behind = {head}, [last]
        while behind:
            i = behind.pop()
            if i not in loop:
                loop.add(i)
                behind += before[i]
        # The start is reached backwards past the head where the head is not the only way in: no loop.
        if head == 0 or 0 not in loop:
            yield head, loop


def _followers(code: list[Instruction]) -> list[list[int]]:
    """The indices of those that may be next after each instruction."""
    indices = {instruction.address: i for i, instruction in enumerate(code)}
    followers, targets = [], set()
    for i, (_, guard, operation, modifiers, operands) in enumerate(code):
        ends = not guard and (operation in _ENDS or (operation == "BRA" and "," not in operands))
        next_ones = [] if ends else [i + 1]
        if operation in ("BRA", "CALL"):
            target = _TARGET.search(operands)
            if operation == "BRA" and not target:
                raise ValueError(f"a branch without an address: {operation} {operands.strip()}")
            to = indices.get(int(target[1], 16)) if target else None
            targets.add(to)
            # There is a copy of the code for warps that have diverged: where they should not, it never runs.
            if to is not None and "DIV" not in modifiers:
                next_ones.append(to)
        followers.append([to for to in next_ones if to < len(code)])
    # Tables of targets are not in the disassembly: they have what is reached in no other way.
    targets.update(to for next_ones in followers for to in next_ones)
    from_tables = [i for i in range(1, len(code)) if i not in targets]
    return [
        next_ones + from_tables if instruction.operation in _TABLE_JUMPS else next_ones
        for instruction, next_ones in zip(code, followers, strict=True)
    ]


def rows_of(
    file: str, arch: str, log: str, counts: dict[str, Counts], parameters: dict[str, list[str]]
) -> tuple[list[Row], list[str]]:
    """A row for each kernel, from what ptxas said and the counts of its machine code, and what is wrong."""
    where = f"{file}.cu, sm_{arch}"
    errors = [f"{where}: {line.strip()}" for line in _WARNING.findall(log)]
    resources = {}
    for part in re.split(r"(?=^ptxas info\s*: Compiling entry)", log, flags=re.MULTILINE)[1:]:
        shared = _SHARED.search(part)
        properties = {name: tuple(map(int, numbers)) for name, *numbers in _PROPERTIES.findall(part)}
        entry = _ENTRY.search(part)[1]
        resources[entry] = int(_USED.search(part)[1]), *properties.pop(entry), int(shared[1]) if shared else 0
        errors += [f"{where}: {name} is called and not inlined" for name in demangled(sorted(properties))]
    if not resources or not resources.keys() <= counts.keys():
        errors.append(f"{where}: ptxas tells of {len(resources)} kernels, the machine code has {len(counts)} functions")
    names = sorted(counts.keys() & resources.keys())
    kernels = [readable(name, parameters) for name in demangled(names)]
    rows = [
        Row(file, kernel, arch, *resources[name], *counts[name]) for kernel, name in zip(kernels, names, strict=True)
    ]
    return sorted(rows), errors


def complaints(row: Row) -> list[str]:
    """What is wrong with a kernel, whatever it was before."""
    found = []
    spilled = row.spill_stores + row.spill_loads
    if spilled:
        found.append(f"{row.spill_stores} bytes of spills stored, {row.spill_loads} loaded")
    elif row.stack:
        found.append(f"{row.stack} bytes of stack")
    if f"{VECTOR}=true" in row.kernel:
        if not row.wide_loads:
            found.append(f"none of {row.loads} loads has 128 bits")
        if not row.wide_stores:
            found.append(f"none of {row.stores} stores has 128 bits")
    if row.hmma:
        for name in ("ldsm", "ldgsts"):
            if not getattr(row, name):
                found.append(f"no {name.upper()} in the main loop, which has {row.hmma} HMMA")
    return found


def worse(row: Row, before: Row) -> list[str]:
    found = []
    if row.registers > before.registers + REGISTER_MARGIN:
        found.append(f"{row.registers} registers, were {before.registers}")
    for name, what in (("stack", "bytes of stack"), ("shared", "bytes of shared memory")):
        if getattr(row, name) > getattr(before, name):
            found.append(f"{getattr(row, name)} {what}, were {getattr(before, name)}")
    for name in ("wide_loads", "wide_stores"):
        if getattr(row, name) < getattr(before, name):
            found.append(f"{getattr(row, name)} {name.replace('_', ' ')}, were {getattr(before, name)}")
    # With another number of products it is another loop.
    if row.hmma == before.hmma:
        for name, is_worse in (("ldsm", int.__gt__), ("ldgsts", int.__lt__), ("mufu", int.__gt__)):
            if is_worse(getattr(row, name), getattr(before, name)):
                found.append(f"{getattr(row, name)} {name.upper()} in the main loop, were {getattr(before, name)}")
        if row.issued > before.issued + before.issued * ISSUED_PERCENT // 100 + ISSUED_MARGIN:
            found.append(f"{row.issued} instructions issued in the main loop, were {before.issued}")
    return found


def cuobjdump() -> Path | None:
    """Triton's wheel brings it; toolkits made of wheels do not."""
    triton = find_spec("triton")
    folders = (
        [Path(place, "backends", "nvidia", "bin") for place in triton.submodule_search_locations] if triton else []
    )
    found = shutil.which("cuobjdump", path=os.pathsep.join(map(str, folders))) or shutil.which("cuobjdump")
    return Path(found) if found else None
