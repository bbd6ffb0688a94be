"""CUDA kernels as nvcc compiles them: what ptxas says of each and what its machine code does, as rows of a table, what
every row must satisfy, and what has become worse."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
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
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_LOADS, _STORES, _WIDE = {"LDG", "LDGSTS", "LD"}, {"STG", "ST"}, {"128", "256"}


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

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.kernel, self.arch

    def __str__(self) -> str:
        return f"{self.kernel}, sm_{self.arch}"


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


def accesses(sass: str) -> dict[str, list[int]]:
    """Loads, wide loads, stores and wide stores of each function in a disassembly, by mangled name."""
    found = {}
    for part in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        counts = found[name.strip()] = [0, 0, 0, 0]
        for instruction in _INSTRUCTION.findall(body):
            operation, *modifiers = instruction.split(".")
            if operation in _LOADS | _STORES:
                first = 0 if operation in _LOADS else 2
                counts[first] += 1
                counts[first + 1] += not _WIDE.isdisjoint(modifiers)
    return found


def rows_of(
    file: str, arch: str, log: str, counts: dict[str, list[int]], parameters: dict[str, list[str]]
) -> tuple[list[Row], list[str]]:
    """A row for each kernel, from what ptxas said and the `accesses` of its machine code, and what is wrong."""
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
    return found


def cuobjdump() -> Path | None:
    """Triton's wheel brings it; toolkits made of wheels do not."""
    triton = find_spec("triton")
    folders = (
        [Path(place, "backends", "nvidia", "bin") for place in triton.submodule_search_locations] if triton else []
    )
    found = shutil.which("cuobjdump", path=os.pathsep.join(map(str, folders))) or shutil.which("cuobjdump")
    return Path(found) if found else None
