"""Everything that only a machine with an NVIDIA GPU can tell, in one run of at most eight minutes.

    python benchmarks/device_check.py               a checkout is enough; builds the extension for this card, in place
    python benchmarks/device_check.py --rehearse    the same, small, on the CPU, without touching the checkout
    python -m bertfast.benchmarks.device_check      where bertfast is installed

The stages of `STAGES` run in that order, the most valuable first, each in a process of its own with a limit of its own:
a crash, a hang or an illegal access loses the rest of one stage and nothing else. Every result is on disk, as a line of
JSON, as soon as it is known. A table comes last. Exit code 0 only if every stage that should run here passed; what
cannot run here is listed as not run, with the reason, and never as passed.

A stage is a function that takes a `Report`. A backend that is registered for an op is held to the op's cases without
more ado; any other check is one more entry of `STAGES`. This file imports neither torch nor bertfast, so that it
survives whatever is wrong with them.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IN_CHECKOUT = (ROOT / "setup.py").is_file() and (ROOT / "csrc").is_dir()
BUDGET_SECONDS = 480.0
# A stage that is given less would only start up.
LEAST_SECONDS = 10.0
# Spread of rounds by the median from which on the table marks a number.
NOISY = 0.2
_OUTPUT_TAIL = 3000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Stage:
    """One process of the check.

    Attributes:
        name: as the table shows it.
        function: "module:function", imported in the stage's own process; called with a `Report`.
        limit: seconds after which the process is killed.
        gpu_only: why it has no rehearsal on a CPU, or None.
        essential: nothing after it makes sense if it does not pass.
    """

    name: str
    function: str
    limit: float
    gpu_only: str | None = None
    essential: bool = False


_STAGES = "bertfast.benchmarks.device_stages"
_PARITY = "bertfast.benchmarks.device_parity"
# Limits up to the first timings leave these a minute of the budget even if each is reached: so much is always learnt.
STAGES = [
    Stage("environment", f"{_STAGES}:environment", 40, essential=True),
    Stage("build", f"{_STAGES}:build", 150),
    Stage("compile", f"{_PARITY}:compile_kernels", 70, gpu_only="interpreted kernels are not compiled"),
    Stage("attention ops", f"{_PARITY}:attention_ops", 35),
    Stage("row ops", f"{_PARITY}:row_ops", 30),
    Stage("GEMM ops", f"{_PARITY}:gemm_ops", 35),
    Stage("models", f"{_PARITY}:models", 60),
    Stage("inference timings", "bertfast.benchmarks.device_timings:inference", 75),
    Stage(
        "streams and graphs",
        f"{_STAGES}:streams_and_graphs",
        40,
        gpu_only="streams, synchronisation and CUDA graphs exist on a GPU only",
    ),
    Stage("training timings", "bertfast.benchmarks.device_timings:training", 75),
    Stage("profiles", "bertfast.benchmarks.device_profile:profiles", 40),
    Stage("compiled stock", "bertfast.benchmarks.device_compiled:timings", 150),
    Stage("limits", "bertfast.benchmarks.device_limits:limits", 60),
    Stage(
        "compute-sanitizer",
        f"{_STAGES}:compute_sanitizer",
        60,
        gpu_only="compute-sanitizer watches GPU kernels only",
    ),
    Stage("op timings", "bertfast.benchmarks.device_ops:timings", 60),
]


class Report:
    """What a stage is told, and where it puts its results: one line of JSON each, written at once.

    Attributes:
        rehearse: run small.
        device: "cuda" or "cpu".
    """

    def __init__(self, path: Path, stage: str, rehearse: bool, seconds: float) -> None:
        self.rehearse = rehearse
        self.device = "cpu" if rehearse else "cuda"
        self._path, self._stage, self._end = path, stage, time.monotonic() + seconds

    def seconds_left(self) -> float:
        """Until this process is killed."""
        return self._end - time.monotonic()

    def passed(self, item: str, **data: Any) -> None:
        """A check that held."""
        self._item(item, "passed", data)

    def failed(self, item: str, reason: str, **data: Any) -> None:
        """A check that did not hold; the stage goes on and fails in the end."""
        self._item(item, "failed", {"reason": reason, **data})

    def not_run(self, item: str, reason: str) -> None:
        """Something that cannot be looked at here."""
        self._item(item, "not run", {"reason": reason})

    def measured(self, item: str, **data: Any) -> None:
        """A fact or a number that can be neither right nor wrong."""
        self._item(item, "measured", data)

    def check(self, item: str, holds: bool, reason: str, **data: Any) -> None:
        """`passed`, or `failed` with `reason`."""
        if holds:
            self.passed(item, **data)
        else:
            self.failed(item, reason, **data)

    @contextmanager
    def guard(self, item: str) -> Iterator[None]:
        """Turns an exception inside into the failure of `item`, so that the stage goes on."""
        try:
            yield
        except Exception as error:
            self.failed(item, f"{type(error).__name__}: {error}", traceback=traceback.format_exc()[-_OUTPUT_TAIL:])

    def _item(self, item: str, status: str, data: dict[str, Any]) -> None:
        append(self._path, {"kind": "item", "stage": self._stage, "item": item, "status": status, **data})


def append(path: Path, record: dict[str, Any]) -> None:
    """One line, in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**record, "time": round(time.time(), 3)}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file; a line that a killed process left torn is passed over."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


class _Checkout:
    """Finds `bertfast.kernels` and `bertfast.benchmarks` in a checkout, where only installing maps them."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None):
        package, _, folder = name.partition(".")
        if package != "bertfast" or folder not in ("kernels", "benchmarks"):
            return None
        return importlib.util.spec_from_file_location(
            name, ROOT / folder / "__init__.py", submodule_search_locations=[str(ROOT / folder)]
        )


def use_checkout() -> None:
    """Makes this checkout, installed or not, the bertfast that is imported; what is installed is used without one.

    The helpers of the tests, which hold the tolerance rule and the ops' cases, are found as well.
    """
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    if IN_CHECKOUT:
        sys.path.insert(0, str(ROOT))
        sys.path.append(str(ROOT / "tests"))
        sys.meta_path.append(_Checkout)


def run_here(name: str, function: str, path: Path, rehearse: bool, seconds: float) -> None:
    """Runs one stage in this process, which ends with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    use_checkout()
    module, _, attribute = function.partition(":")
    getattr(importlib.import_module(module), attribute)(Report(path, name, rehearse, seconds))
    # A process can end early with exit code 0; this line says that the stage came to its end.
    append(path, {"kind": "finished", "stage": name})


def command_of(stage: Stage, path: Path, rehearse: bool, seconds: float) -> list[str]:
    """Runs `stage` in a process of its own, its results going to `path`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--stage", stage.name, "--function", stage.function]
    command += ["--output", str(path), "--seconds", str(seconds)]
    return [*command, "--rehearse"] if rehearse else command


def run_stage(stage: Stage, path: Path, rehearse: bool, seconds: float) -> dict[str, Any]:
    """Runs `stage` in a process of its own; what became of it."""
    environment = {name: value for name, value in os.environ.items() if name != "BERTFAST_VALIDATE"}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    before, start, timed_out = len(read(path)), time.monotonic(), False
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command_of(stage, path, rehearse, seconds),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=os.setpgrp,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _kill_group(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")
    records = [record for record in read(path)[before:] if record.get("stage") == stage.name]
    items = [record for record in records if record["kind"] == "item"]
    status, reason = _verdict(
        items, any(r["kind"] == "finished" for r in records), timed_out, process.returncode, text, seconds
    )
    result = {"status": status, "reason": reason, "seconds": round(time.monotonic() - start, 1)}
    result["items"] = dict(Counter(record["status"] for record in items))
    if status not in ("passed", "not run"):
        result["output"] = text[-_OUTPUT_TAIL:]
    return result


def _kill_group(process: subprocess.Popen) -> None:
    """Ends a stage with all that it started. One that hangs inside the driver may not die; it is left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def _verdict(items, finished: bool, timed_out: bool, code: int, text: str, seconds: float) -> tuple[str, str]:
    if timed_out:
        return "timed out", f"killed at its limit of {seconds:.0f} s"
    if code < 0:
        return "crashed", f"killed by {signal.Signals(-code).name}"
    if code or not finished:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
        return "crashed", f"ended early with exit code {code}: {last[:300]}"
    failed = [item for item in items if item["status"] == "failed"]
    if failed:
        return "failed", f"{len(failed)} of {len(items)} items, first: {failed[0]['item']}: {failed[0]['reason'][:300]}"
    if all(item["status"] == "not run" for item in items):
        return "not run", "; ".join(dict.fromkeys(item["reason"] for item in items)) or "the stage looked at nothing"
    return "passed", ""


def run(stages: Sequence[Stage], path: Path, rehearse: bool, budget: float) -> bool:
    """Runs `stages`, writes their results to `path` and the table to standard output; whether all of them passed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    start = time.monotonic()
    append(path, {"kind": "run", "rehearse": rehearse, "budget": budget, "python": sys.version, "argv": sys.argv})
    results: dict[str, dict[str, Any]] = {}
    try:
        blocked = ""
        for stage in stages:
            left = budget - (time.monotonic() - start)
            kept_from = blocked or (f"out of time: {left:.0f} s left" if left < LEAST_SECONDS else "")
            if rehearse and stage.gpu_only:
                result = {"status": "not run", "reason": stage.gpu_only, "seconds": 0.0, "items": {}, "good": True}
            elif kept_from:
                result = {"status": "not run", "reason": kept_from, "seconds": 0.0, "items": {}, "good": False}
            else:
                print(f"{stage.name} ...", end=" ", file=sys.stderr, flush=True)
                result = run_stage(stage, path, rehearse, min(stage.limit, left))
                print(f"{result['status']}, {result['seconds']:.1f} s", file=sys.stderr, flush=True)
                # A stage may find that there is nothing for it to look at here.
                result["good"] = result["status"] in ("passed", "not run")
                if stage.essential and result["status"] != "passed":
                    blocked = f"{stage.name} did not pass"
            results[stage.name] = result
            append(path, {"kind": "stage", "stage": stage.name, **result})
    finally:
        complete = len(results) == len(stages)
        good = complete and all(result["good"] for result in results.values())
        summary = {"passed": good, "complete": complete, "seconds": round(time.monotonic() - start, 1)}
        append(path, {"kind": "summary", **summary})
        print(table(read(path)))
        print(f"\n{'PASSED' if good else 'FAILED'} in {summary['seconds']:.0f} s; every result: {path}", flush=True)
    return good


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text as aligned lines."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] + [0]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def table(records: Sequence[dict[str, Any]]) -> str:
    """What a person reads at the end, from the records of a run."""
    stages = [r for r in records if r["kind"] == "stage"]
    items = [r for r in records if r["kind"] == "item"]
    rows = [("stage", "result", "seconds", "passed", "failed", "not run", "")]
    for r in stages:
        counts = [str(r["items"].get(status, 0)) for status in ("passed", "failed", "not run")]
        rows.append((r["stage"], r["status"], f"{r['seconds']:.1f}", *counts, r["reason"]))
    lines = ["", *columns(rows)]
    failed = [r for r in items if r["status"] == "failed"]
    if failed:
        lines += ["", "failed", *columns([(f"  {r['stage']}: {r['item']}", r["reason"]) for r in failed])]
    not_run: dict[tuple[str, str], list[str]] = {}
    for r in items:
        if r["status"] == "not run":
            not_run.setdefault((r["stage"], r["reason"]), []).append(r["item"])
    if not_run:
        lines += ["", "not run"]
        lines += [f"  {stage}: {_shortened(names)}: {reason}" for (stage, reason), names in not_run.items()]
    for stage in dict.fromkeys(r["stage"] for r in items if "ms" in r):
        lines += ["", *_timing_lines(stage, [r for r in items if r["stage"] == stage and "ms" in r])]
    for title in dict.fromkeys(r["profile"] for r in items if "profile" in r):
        lines += ["", *_profile_lines(title, items)]
    return "\n".join(lines)


def _timing_lines(stage: str, timings: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each cell, a column for each contestant."""
    contestants = list(dict.fromkeys(r["contestant"] for r in timings))
    cells: dict[str, dict[str, str]] = {}
    for r in timings:
        cells.setdefault(r["cell"], {})[r["contestant"]] = _timing(r)
    rows = [(f"{stage}, ms", *contestants)]
    rows += [(f"  {cell}", *(found.get(name, "") for name in contestants)) for cell, found in cells.items()]
    gains = "x: bertfast's gain; ~: the middle 80 % of rounds spread by more than a fifth of the median"
    return [*columns(rows), f"  ({gains})"]


def _timing(r: dict[str, Any]) -> str:
    ms, gain = r["ms"], r.get("gain")
    noisy = "~" if ms["p90"] - ms["p10"] > NOISY * ms["median"] else ""
    return f"{noisy}{ms['median']:.3f}" + (f" {gain['median']:.2f}x" if gain else "")


def _profile_lines(title: str, items: Sequence[dict[str, Any]]) -> list[str]:
    total = next((r for r in items if r["item"] == f"{title}: all kernels"), None)
    rows = [(f"{title}, kernels", "calls", "us", "share", "")]
    rows += [
        (f"  {r['kernel'][:60]}", f"{r['calls']:g}", f"{r['kernel_microseconds']:.1f}", f"{r['share']:.1%}", "")
        for r in items
        if r.get("profile") == title
    ]
    if total is not None:
        spent = f"{total['kernel_microseconds']:.1f}"
        rows.append(("  all", f"{total['kernels']:g}", spent, "", f"idle {total['idle']:.0%} of a call"))
    return columns(rows)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def main(stages: Sequence[Stage] = STAGES) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run small on the CPU")
    parser.add_argument("--output", type=Path, help="JSON lines; device_check.jsonl in $OUT, or in build/ here")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for everything (%(default)s)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="run the stages whose name holds TEXT")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--function", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    output = options.output or Path(os.environ.get("OUT", "build"), "device_check.jsonl")
    if options.stage:
        run_here(options.stage, options.function, output, options.rehearse, options.seconds)
        return 0
    chosen = [s for s in stages if not options.only or any(text in s.name for text in options.only)]
    if not chosen:
        names = ", ".join(stage.name for stage in stages)
        parser.error(f"no stage's name holds {' or '.join(options.only)}; there are {names}")
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        return 0 if run(chosen, output.resolve(), options.rehearse, options.budget) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
