"""Compiles the CUDA kernels with nvcc for every architecture, and holds the result to the committed table.

    python tests/nvcc_gate.py                   check
    python tests/nvcc_gate.py --write           check; with no errors, write tests/compiled/nvcc-<version>.csv
    python tests/nvcc_gate.py --archs 80,90a    for these only; nothing is missed then
    python tests/nvcc_gate.py --files layer     of files whose names match; nothing is missed then

Flags and architectures are those of setup.py. Registers, stack and spills are what ptxas says; accesses and what a main
loop of matrix products consists of are counted in the machine code. Fails on what `helpers/nvcc.py` says and on any
warning. The emulator's own test kernels have to compile, no more. What was compiled is kept in build/nvcc_gate by
content: a second run takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

from helpers import nvcc
from helpers.compiled import compare, write_table
from helpers.cpp_source import included
from helpers.project import ROOT, load_setup

KERNELS = ROOT / "csrc" / "cuda"
TEST_KERNELS = ROOT / "tests" / "cuda_on_cpu" / "kernels"
TEST_ARCHS = ("80", "90a")
INCLUDES = (ROOT / "csrc", KERNELS)
CACHE = ROOT / "build" / "nvcc_gate"


class Tools(NamedTuple):
    nvcc: str
    version: str
    cuobjdump: Path
    flags: list[str]


class Compiled(NamedTuple):
    """What nvcc and ptxas said, and the counts of the machine code; None where it does not compile."""

    log: str
    counts: dict[str, nvcc.Counts] | None


def archs_of(listed: str) -> list[str]:
    """setup.py's "8.0;9.0a;12.0+PTX" as 80, 90a, 120."""
    return [arch.partition("+")[0].replace(".", "") for arch in listed.split(";")]


def compile_one(source: Path, arch: str, tools: Tools) -> Compiled:
    files = [Path(nvcc.__file__), *included(source, INCLUDES)]
    about = [arch, tools.version, *tools.flags, *(file.read_text() for file in files)]
    kept = CACHE / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()}.json"
    if kept.exists():
        log, counts = json.loads(kept.read_text())
        return Compiled(log, {name: nvcc.Counts(*numbers) for name, numbers in counts.items()})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, f"{source.stem}.cubin")
        command = [tools.nvcc, "-cubin", f"-arch=sm_{arch}", *tools.flags, "-Xptxas=-v", "-o", cubin, source]
        done = subprocess.run(command, capture_output=True, text=True)
        log = done.stdout + done.stderr
        if done.returncode:
            return Compiled(log, None)
        dumped = subprocess.run([tools.cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True)
    compiled = Compiled(log, nvcc.counts_of(dumped.stdout))
    CACHE.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}.{arch}")
    part.write_text(json.dumps(compiled))
    part.replace(kept)
    return compiled


def check_one(source: Path, arch: str, tools: Tools) -> tuple[list[nvcc.Row], list[str]]:
    compiled = compile_one(source, arch, tools)
    if compiled.counts is None:
        return [], [f"{source.name}, sm_{arch}: does not compile\n{compiled.log.strip()}"]
    if source.parent == TEST_KERNELS:
        return [], []
    text = "\n".join(file.read_text() for file in included(source, INCLUDES))
    parameters = nvcc.parameters_of_kernels(text)
    return nvcc.rows_of(source.stem, arch, compiled.log, compiled.counts, parameters)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table of this nvcc")
    parser.add_argument("--archs", help="comma-separated, as in 80,90a (default: those of setup.py)")
    parser.add_argument("--files", help="a regular expression: names of source files")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    options = parser.parse_args()
    if options.write and (options.archs or options.files):
        parser.error("--write takes no --archs and no --files: the table is written as a whole")
    return options


def find_tools(flags: list[str]) -> Tools:
    compiler, cuobjdump = nvcc.find_nvcc(), nvcc.cuobjdump()
    if compiler is None:
        raise SystemExit("error: there is no nvcc, neither in CUDA_HOME nor on PATH")
    if cuobjdump is None:
        raise SystemExit("error: there is no cuobjdump: install Triton, whose wheel has it")
    return Tools(compiler, nvcc.nvcc_version(compiler), cuobjdump, flags)


def main() -> int:
    options, started = _options(), time.perf_counter()
    setup = load_setup()
    tools = find_tools([*COMMON_NVCC_FLAGS, *setup.NVCC_FLAGS, *(f"-I{folder}" for folder in INCLUDES)])
    archs = options.archs.split(",") if options.archs else archs_of(setup.CUDA_ARCHS)
    tasks = [(source, arch) for source in sorted(KERNELS.glob("*.cu")) for arch in archs]
    tasks += [(source, arch) for source in sorted(TEST_KERNELS.glob("*.cu")) for arch in TEST_ARCHS if arch in archs]
    tasks = [task for task in tasks if re.search(options.files or "", task[0].name)]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda task: check_one(*task, tools), tasks))
    rows = sorted(row for found, _ in results for row in found)
    errors = [error for _, found in results for error in found]
    errors += [f"{row}: {what}" for row in rows for what in nvcc.complaints(row)]
    path = nvcc.table_path(tools.version)
    if options.write and not errors:
        write_table(path, rows)
    elif not options.write:
        errors += compare(rows, path, not (options.archs or options.files), nvcc.worse)
    for error in errors:
        print(f"error: {error}")
    kernels = len({(row.file, row.kernel) for row in rows})
    seconds = time.perf_counter() - started
    print(f"nvcc {tools.version}: {kernels} kernels of {len({task[0] for task in tasks})} files in {seconds:.0f} s")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
