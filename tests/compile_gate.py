"""Compiles what the Triton launchers really launch, for GPUs that are not there, and holds it to the committed table.

    python tests/compile_gate.py                 check, for the targets of every call
    python tests/compile_gate.py --write         check; with no errors, write tests/compiled/triton-<version>.csv
    python tests/compile_gate.py --targets 86,89 for these capabilities, which the table need not list
    python tests/compile_gate.py --calls 768     the calls whose names match; nothing is missed then
    python tests/compile_gate.py --sample 8      one in 8 compilations, if the table was written from these very sources

Every call of `helpers/kernel_calls.py` runs under `helpers/fake_gpu.py`, so specialisation comes from actual arguments.
Registers and stack are those of the machine code; accesses and matrix instructions are counted in PTX, from which
ptxas neither merges nor splits them. Fails on what `helpers/compiled.py` says, and on a kernel that nothing launches.
Triton keeps what it compiled on disk: a second run takes seconds.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"

import argparse
import importlib
import multiprocessing
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

import bertfast.kernels
from bertfast.kernels.launch import Launcher
from bertfast.kernels.tiles import MULTIPROCESSORS
from helpers.compiled import (
    Facts,
    Row,
    compare,
    complaints,
    is_written_from,
    note_sources,
    table_path,
    write_table,
)
from helpers.fake_gpu import fake_gpu
from helpers.kernel_calls import CALLS

ROW_COUNTS = range(1, 200)

_LOAD = re.compile(r"\b(?:ld\.\S*global|cp\.async\.c[ag]\.shared\.global|cp\.async\.bulk\S*\.shared::\w+\.global)\b.*")
_STORE = re.compile(r"\b(?:st\.\S*global|cp\.async\.bulk\S*\.global\.shared::\w+)\b.*")
_WIDE = re.compile(r"\.v4\.[bfus]32|\.v[24]\.[bfus]64|\.v8\.[bfus]32|\.bulk|, 0x10\b")
_MATRIX = re.compile(r"\b(wgmma|tcgen05|mma)\.(?:mma_async|mma|sync)\.\S*")


class Variant(NamedTuple):
    row: Row
    facts: Facts
    digest: str


def kernels_modules() -> Iterator[Any]:
    for found in pkgutil.iter_modules(bertfast.kernels.__path__):
        yield importlib.import_module(f"bertfast.kernels.{found.name}")


def launchers() -> list[Launcher]:
    return [value for module in kernels_modules() for value in vars(module).values() if isinstance(value, Launcher)]


def defined_kernels() -> set[str]:
    """Names of all kernels, as opposed to device functions: what launchers start is named `..._kernel...`."""
    defined = {launcher.kernel.__name__ for launcher in launchers()}
    for module in kernels_modules():
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and "_kernel" in name:
                defined.add(value.__name__)
    return defined


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread."""
    tool = Path(triton.__path__[0], "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing about registers:\n{done.stdout}{done.stderr}")
    return int(found[1]), int(found[2])


def _tile_rows(ttir: str) -> int:
    """Rows of the smallest left operand; 0 without a matrix product."""
    return min(map(int, re.findall(r"\btt\.dot\b.* : tensor<(\d+)x", ttir)), default=0)


def describe(kernel, name: str, call_name: str, target: int, aligned: bool, tf32: bool) -> Variant:
    ptx, metadata = kernel.asm["ptx"], kernel.metadata
    loads, stores = _LOAD.findall(ptx), _STORE.findall(ptx)
    matrix = {found[1] + (".tf32" if "tf32" in found[0] else "") for found in _MATRIX.finditer(ptx)}
    registers, stack = resources(kernel.asm["cubin"])
    row = Row(
        kernel=name,
        call=call_name,
        target=target,
        warps=metadata.num_warps,
        stages=metadata.num_stages,
        registers=registers,
        stack=stack,
        shared=metadata.shared,
        loads=len(loads),
        wide_loads=sum(_WIDE.search(line) is not None for line in loads),
        bulk_loads=sum(".bulk" in line for line in loads),
        stores=len(stores),
        wide_stores=sum(_WIDE.search(line) is not None for line in stores),
        matrix="+".join(sorted(matrix)),
    )
    kinds = " ".join(map(str, kernel.src.signature.values()))
    half, descriptors = "fp16" in kinds or "bf16" in kinds, "tensordesc" in kinds
    ttir = kernel.asm["ttir"]
    facts = Facts(half, len(re.findall(r"\btt\.dot\b", ttir)), _tile_rows(ttir), aligned, tf32, descriptors)
    return Variant(row, facts, kernel.hash)


def compile_call(index: int, target: int) -> tuple[list[Variant], list[str]]:
    """The variants that a call launches, and what is wrong with how many there are."""
    call, all_launchers = CALLS[index], launchers()
    variants, errors = [], []
    for launcher in all_launchers:
        launcher._variants.clear()
    with fake_gpu(target):
        try:
            call.run(call.rows)
            for rows in ROW_COUNTS if call.most_variants is not None else ():
                call.run(rows)
        except Exception as error:
            return [], [f"sm_{target}, {call.name}: {type(error).__name__}: {error}"]
    for launcher in all_launchers:
        name = launcher.kernel.__name__
        if call.most_variants is not None and launcher.variants > call.most_variants:
            errors.append(
                f"{name}, sm_{target}, {call.name}: {launcher.variants} variants for {len(ROW_COUNTS)} row counts"
            )
        for i, kernel in enumerate(launcher._variants.values(), 1):
            call_name = call.name if i == 1 else f"{call.name} #{i}"
            variants.append(describe(kernel, name, call_name, target, call.aligned, call.tf32))
    return variants, errors


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table of this Triton version")
    parser.add_argument("--targets", help=f"comma-separated capabilities, or 'all': {sorted(MULTIPROCESSORS)}")
    parser.add_argument("--calls", help="a regular expression: the names of the calls to make")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="one compilation in N, if no source changed since the table was written"
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one a core)"
    )
    options = parser.parse_args()
    if options.targets:
        options.targets = (
            sorted(MULTIPROCESSORS) if options.targets == "all" else list(map(int, options.targets.split(",")))
        )
    if options.write and (options.targets or options.calls or options.sample):
        parser.error("--write takes no --targets, --calls or --sample: the table is written as a whole")
    return options


def compile_calls(
    targets: list[int] | None, names: str | None, every: int, jobs: int
) -> tuple[list[Variant], list[str]]:
    """Every variant once, of each `every`-th pair of call and target, and what is wrong with its making."""
    tasks = [
        (index, target)
        for index, call in enumerate(CALLS)
        if names is None or re.search(names, call.name)
        for target in (targets or call.targets)
        if target >= min(call.targets)
    ][::every]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        results = list(pool.map(compile_call, *zip(*tasks, strict=True)))
    # Calls share variants: the first that launches one names it.
    unique: dict[tuple, Variant] = {}
    for variant in (variant for variants, _ in results for variant in variants):
        unique.setdefault((variant.row.kernel, variant.row.target, variant.digest), variant)
    return list(unique.values()), [error for _, errors in results for error in errors]


def main() -> int:
    options, started = _options(), time.perf_counter()
    every = options.sample if options.sample and is_written_from(triton.__version__) else 1
    whole = every == 1 and not (options.targets or options.calls)
    variants, errors = compile_calls(options.targets, options.calls, every, options.jobs)
    rows = sorted((variant.row for variant in variants), key=lambda row: row.kernel)
    launched = {row.kernel for row in rows}
    errors += [f"{variant.row}: {what}" for variant in variants for what in complaints(variant.row, variant.facts)]
    if whole:
        errors += [f"{name}: no call launches it" for name in sorted(defined_kernels() - launched)]
    if options.write and not errors:
        write_table(table_path(triton.__version__), rows)
        note_sources(triton.__version__)
    elif not options.write:
        errors += compare(rows, table_path(triton.__version__), whole)
    spilled = [f"{row}: {row.stack} bytes of spilled registers" for row in rows if row.stack]
    seconds = time.perf_counter() - started
    for line in (*spilled, *(f"error: {error}" for error in errors)):
        print(line)
    sample = f" (a sample of one in {every}: the table is of these sources)" if every > 1 else ""
    print(f"Triton {triton.__version__}: {len(rows)} variants of {len(launched)} kernels in {seconds:.0f} s{sample}")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
