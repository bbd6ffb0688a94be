"""The suite: its subjects, the cells of a plan, and a run over them that writes each as it is measured."""

from __future__ import annotations

import datetime
import functools
import gc
import importlib
import itertools
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bertfast.benchmarks import harness, measure, peers, roofline, wording
from bertfast.benchmarks.records import Cell, Results, Row, Run, Skipped, key
from bertfast.benchmarks.timer import Timer, way_of

MODULES = {
    "attention": "bench_attention",
    "varlen_attention": "bench_varlen_attention",
    "add_layer_norm": "bench_layer_norm",
    "linear_gelu": "bench_linear_gelu",
    "feed_forward": "bench_feed_forward",
    "embed_layer_norm": "bench_embed_layer_norm",
    "qkv_projection": "bench_qkv_projection",
}
MODELS = peers.MODELS
SUBJECTS = (*MODULES, *MODELS)
PACKAGES = ("bertfast", "torch", "triton", "transformers", "numpy")
PEER_PACKAGES = (
    *("onnxruntime", "onnxruntime-gpu", "openvino", "ctranslate2"),
    *("flash-attn", "liger-kernel", "transformer-engine"),
)
# The contestant of what keeps a whole cell from being measured.
ALL = "all"


@dataclass(frozen=True)
class Plan:
    """What to measure; None is every one that a subject has.

    Attributes:
        subjects: of `SUBJECTS`.
        passes, fills: of `records`.
        batches, lengths, dtypes: of the cells.
        device: "cpu" or "cuda".
        rounds, min_seconds: of `measure.interleave`.
        compiled: also what torch.compile makes of stock, which takes minutes on a CPU.
        graphs: time replays of CUDA graphs instead of calls.

    Raises:
        ValueError: graphs without a GPU.
    """

    subjects: Sequence[str] = SUBJECTS
    passes: Sequence[str] | None = None
    batches: Sequence[int] = (1, 8)
    lengths: Sequence[int] = (16, 128, 512)
    dtypes: Sequence[str] = ("float32",)
    fills: Sequence[str] | None = None
    device: str = "cpu"
    rounds: int = 7
    min_seconds: float = 0.02
    compiled: bool = False
    graphs: bool = False

    def __post_init__(self) -> None:
        way_of(self.device, self.graphs)

    @property
    def timing(self) -> str:
        """How calls are timed, of `timer.way_of`."""
        return way_of(self.device, self.graphs)

    @classmethod
    def of(cls, device: str, quick: bool, **given: Any) -> Plan:
        """The defaults of a device, or fewer and smaller cells; what is given (not None, not empty) replaces them."""
        usual: dict[str, Any] = {}
        if device == "cuda":
            usual = {"batches": (1, 8, 32), "lengths": (128, 512), "dtypes": ("bfloat16", "float16"), "rounds": 15}
        if quick:
            usual |= {"batches": (2,), "lengths": (32,), "rounds": 3, "min_seconds": 0.005}
            usual["dtypes"] = usual.get("dtypes", ("float32",))[:1]
        return cls(device=device, **{**usual, **{name: value for name, value in given.items() if value}})

    def cells(self) -> list[Cell]:
        """Every cell, those of a subject in one piece, without those that are the same as another: a single row of
        mixed length is dense."""
        found = []
        for name in self.subjects:
            subject = subject_of(name)
            passes = [pass_ for pass_ in subject.passes if self.passes is None or pass_ in self.passes]
            fills = [fill for fill in subject.fills if self.fills is None or fill in self.fills]
            for dtype, pass_, batch, length, fill in itertools.product(
                self.dtypes, passes, self.batches, self.lengths, fills
            ):
                if not (fill == "mixed" and batch == 1):
                    found.append(Cell(name, pass_, batch, length, fill, dtype, self.device))
        return found


def check_name(name: str) -> None:
    """
    Raises:
        ValueError: it is none of `SUBJECTS`.
    """
    if name not in SUBJECTS:
        raise ValueError(f"unknown subject {name!r}; expected one of {', '.join(SUBJECTS)}")


def subject_of(name: str):
    """The `cases.Op` or `bench_model.Model` of a name.

    Raises:
        ValueError: it is none of `SUBJECTS`.
    """
    check_name(name)
    if name in MODELS:
        return importlib.import_module("bertfast.benchmarks.bench_model").MODELS[name]
    return importlib.import_module(f"bertfast.benchmarks.{MODULES[name]}").SUBJECT


def use(device: torch.device) -> str:
    """The type of a device, which is the current one of that type from now on.

    Raises:
        ValueError: it is neither the CPU nor an NVIDIA GPU.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected a device of type cpu or cuda, got {device}")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device.type


def run(
    plan: Plan,
    *,
    command: Sequence[str] = (),
    done: frozenset[str] | set[str] = frozenset(),
    show: Callable[[str], None] = lambda what: None,
) -> Iterator[list[Run | Row | Skipped]]:
    """Measures a plan: first the run itself with the peers that take no part, then what each cell gives.

    Args:
        plan: what to measure.
        command: kept with the run.
        done: keys of results that exist; a cell of which all contestants have one is left out, and yields nothing.
        show: told what is being done.
    """
    device, cells = torch.device(plan.device), plan.cells()
    show("measuring what this machine does at best")
    ceilings = roofline.measure_ceilings(device, plan.dtypes)
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    facts = Run(started, list(command), machine(plan), asdict(ceilings), timing=plan.timing)
    yield [facts, *(line for line in peers.skipped(cells) if line.key not in done)]
    timer = Timer.on(device, replayed=plan.graphs, rounds=plan.rounds, min_seconds=plan.min_seconds)
    for cell in cells:
        show(str(cell))
        yield measured(cell, plan, ceilings, timer, done)
        gc.collect()


def measured(
    cell: Cell, plan: Plan, ceilings: roofline.Ceilings, timer: Timer, done: frozenset[str] | set[str]
) -> list[Row | Skipped]:
    """What a cell gives; one line where it cannot be measured at all."""
    try:
        subject = subject_of(cell.subject)
        options = {"compiled": plan.compiled, "replayed": plan.graphs}
        contestants = subject.contestants(cell, **options)
        if all(key(cell, name) in done for name in contestants):
            return []
        return list(harness.run(subject.contest(cell, **options), ceilings, timer))
    except Exception as error:
        return [harness.skip(cell, ALL, error, excused=isinstance(error, harness.Refused))]


def machine(plan: Plan) -> dict[str, Any]:
    """`measure.machine()` with card, clocks, versions and commit."""
    card = _card() if plan.device == "cuda" else None
    clocks = {name: value for name, value in (card or {}).items() if name.startswith("clocks")}
    versions = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
    versions |= {name: version for name in PEER_PACKAGES if (version := _version(name))}
    return {
        **measure.machine(),
        "card": (card or {}).get("name"),
        "clocks": clocks or None,
        "versions": versions,
        "commit": _commit(),
    }


def _card() -> dict[str, str]:
    from bertfast.benchmarks.device_stages import card

    return card()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _commit() -> str | None:
    """Of the checkout that this runs from; "-dirty" with changes; None where it is installed."""
    folder = Path(__file__).resolve().parent
    if not (folder.parent / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def failures(entries: Sequence[Row | Skipped]) -> list[Skipped]:
    """What of ours should have had a number, or of a whole cell: it was wrong, or raised."""
    skipped = (entry for entry in entries if isinstance(entry, Skipped) and not entry.excused)
    return [entry for entry in skipped if entry.contestant == ALL or wording.ours(entry.contestant)]


def done_in(results: Results) -> set[str]:
    """Keys of what need not be measured again. A library that was not there when its line was written, and is now, has
    the cells that it takes part in begin anew."""
    arrived = (e for e in results.skipped if e.contestant in peers.NAMES and e.contestant in peers.taking_part(e.cell))
    return results.keys - {entry.key for entry in arrived}


def script(*subjects: str) -> None:
    """`bertfast bench SUBJECT...` with the options of the command line; ends the process."""
    from bertfast.cli import main

    given = [argument for argument in sys.argv[1:] if argument in subjects]
    options = [argument for argument in sys.argv[1:] if argument not in subjects]
    main(["bench", *(given or subjects), *options])
