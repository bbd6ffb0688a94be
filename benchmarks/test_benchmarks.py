"""Small cells of every op and of a model for pytest-benchmark, one benchmark for each contestant, on a GPU if any.

    pytest benchmarks/ --benchmark-only

A contestant that is wrong fails; `bertfast bench` measures more, contestants in turn, and other libraries: whether one
of those runs here shows only when it is built.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bertfast.benchmarks import harness, peers, suite
from bertfast.benchmarks.records import Cell
from bertfast.benchmarks.timer import Timer

BATCH, LENGTH = 2, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"


def contestants() -> Iterator:
    for name in (*suite.MODULES, "bert-base"):
        subject = suite.subject_of(name)
        for pass_ in subject.passes:
            cell = Cell(name, pass_, BATCH, LENGTH, "dense", DTYPE, DEVICE)
            for contestant in (name for name in subject.contestants(cell) if name not in peers.NAMES):
                yield pytest.param(cell, contestant, id=f"{name}-{pass_}-{contestant}".replace(" ", "_"))


@pytest.mark.parametrize(("cell", "contestant"), list(contestants()))
def test_contestant(benchmark, cell: Cell, contestant: str) -> None:
    contest = suite.subject_of(cell.subject).contest(cell)
    timer = Timer.on(torch.device(cell.device))
    call = harness.ready(contest, contestant, timer)

    def finished() -> None:
        call()
        if timer.synchronize:
            timer.synchronize()

    benchmark.group = str(cell)
    benchmark.extra_info |= {"flops": contest.cost.flops, "bytes": contest.cost.bytes}
    benchmark(finished)
