"""Runs mutants as forks of a process that has collected the tests, and says what became of each."""

from __future__ import annotations

import gc
import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from helpers.mutant import NO_MUTANT, DoesNotCompile, Mutant

# Of a mutant in part, and of none.
PART_TESTS = 40
NOTHING = "nothing"


@dataclass(frozen=True)
class Kind:
    """What the kernel files of one language have in common."""

    tests: dict[str, tuple[str, ...]]  # of each kernel file
    paths: Callable[[str], list[Path]]  # the sources of a kernel file
    mutants_of: Callable[[Path, str], list[Mutant]]
    counts: Callable[[str], bool]  # whether the test of that id is one of these kernels
    budget: float  # seconds of tests for a mutant
    install: Callable[[Mutant, Path], None]  # has the process use a mutant, written into a folder
    # The same of a part of what the mutant changes, which is there sooner. False where there is no such part.
    install_part: Callable[[Mutant, Path], bool] = lambda mutant, folder: False


class Runner:
    """A pytest plugin that runs mutants where pytest would run tests."""

    def __init__(self, mutants: list[Mutant], kind_of: Callable[[str], Kind], folder: Path, jobs: int, record) -> None:
        self.mutants, self.kind_of, self.folder, self.jobs, self.record = mutants, kind_of, folder, jobs, record

    def pytest_runtestloop(self, session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("the tests do not collect")
        files = {mutant.file for mutant in self.mutants}
        seconds = self.measure({file: self.tests_of(file, session.items) for file in sorted(files)})
        items = sorted((i for i in session.items if i.nodeid in seconds), key=lambda item: seconds[item.nodeid])
        kills = Counter()
        gc.collect()
        gc.freeze()
        # Where the installation itself is broken, every mutant is caught.
        waiting, running = [self.nothing_changed(file) for file in sorted(files)] + self.mutants, {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop(0)
                chosen = self.choose(mutant, items, seconds, kills)
                folder = Path(tempfile.mkdtemp(dir=self.folder))
                process, pipe = self.fork(mutant, folder, chosen, seconds)
                running[pipe] = mutant, process, folder
            for pipe in select.select(list(running), [], [])[0]:
                text = os.read(pipe, 65536).decode()
                mutant, process, folder = running.pop(pipe)
                os.close(pipe)
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                shutil.rmtree(folder)
                kills[text] += 1
                verdict = _verdict(text, status)
                if mutant.name != NOTHING:
                    self.record(mutant, verdict)
                elif verdict != "survived":
                    raise session.Failed(f"{mutant.file} as it is, installed as a mutant: {verdict}")
        return True

    def nothing_changed(self, file: str) -> Mutant:
        path = self.kind_of(file).paths(file)[0]
        return Mutant(file, "", NOTHING, path.read_text(), "", path)

    def tests_of(self, file: str, items) -> list:
        kind = self.kind_of(file)
        return [item for item in items if item.path.name in kind.tests[file] and kind.counts(item.nodeid)]

    def choose(self, mutant: Mutant, items, seconds: dict[str, float], kills: Counter) -> list:
        """The tests for one mutant within the budget, from `items` sorted by seconds: before any other the quickest
        case of each test function and of each value of its parameters."""
        items = self.tests_of(mutant.file, items)
        quickest = {value: item for item in reversed(items) for value in _values(item)}.values()
        chosen, spent = [], 0.0
        for item in dict.fromkeys((*sorted(quickest, key=lambda item: seconds[item.nodeid]), *items)):
            spent += seconds[item.nodeid]
            if spent > self.kind_of(mutant.file).budget:
                break
            chosen.append(item)
            if mutant.name == NOTHING and len(chosen) == PART_TESTS:
                break
        return sorted(chosen, key=lambda item: -kills[_short(item)])

    def measure(self, tests: dict[str, list]) -> dict[str, float]:
        """Seconds of tests on the kernels as they are, which must pass; of each test file as many, in any order, as
        take twice the budget."""
        budgets = {item: self.kind_of(file).budget for file, items in tests.items() for item in items}
        source, target = os.pipe()
        process = os.fork()
        if not process:
            _silence()
            spent = Counter()
            with os.fdopen(target, "w") as out:
                for item in random.Random(0).sample(list(budgets), len(budgets)):
                    if spent[item.path, budgets[item]] > 2 * budgets[item]:
                        continue
                    began = time.process_time()
                    _limit(60)
                    failed = _failure(item)
                    seconds = time.process_time() - began
                    spent[item.path, budgets[item]] += seconds
                    print(json.dumps([item.nodeid, seconds, failed]), file=out, flush=True)
            os._exit(0)
        os.close(target)
        with os.fdopen(source) as lines:
            done = [json.loads(line) for line in lines]
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        broken = [name for name, _, failed in done if failed]
        assert not broken and status == 0, f"without a mutant: ends with {status}, fails {', '.join(broken)}"
        print(f"{len(done)} of {len(budgets)} tests, {sum(seconds for _, seconds, _ in done):.0f} s", flush=True)
        return {name: seconds for name, seconds, _ in done}

    def fork(self, mutant: Mutant, folder: Path, items, seconds: dict[str, float]) -> tuple[int, int]:
        source, target = os.pipe()
        process = os.fork()
        if process:
            os.close(target)
            return process, source
        _silence()
        kind = self.kind_of(mutant.file)
        # In a process of its own, because it loads kernels.
        part = os.fork()
        if not part:
            self.test(lambda: kind.install_part(mutant, folder), items[:PART_TESTS], seconds, target)
        status = os.waitstatus_to_exitcode(os.waitpid(part, 0)[1])
        if status < 0:
            os.kill(os.getpid(), -status)
        if status != 0:
            os._exit(status)
        self.test(lambda: kind.install(mutant, folder), items, seconds, target)

    def test(self, install: Callable[[], bool | None], items, seconds: dict[str, float], target: int) -> NoReturn:
        """Ends this process with what became of a mutant: 1 and a text where it is caught, else 0."""
        try:
            if install() is False:
                os._exit(0)
        except DoesNotCompile:
            os.write(target, NO_MUTANT.encode())
            os._exit(1)
        for item in items:
            _limit(5 + 10 * seconds[item.nodeid])
            if _failure(item):
                os.write(target, _short(item).encode())
                os._exit(1)
        os._exit(0)


def _short(item) -> str:
    return item.nodeid.rpartition("/")[2]


def _values(item) -> Iterator[tuple[str, ...]]:
    """The test function, and each value of its parameters."""
    function, _, values = item.nodeid.rstrip("]").partition("[")
    return ((function, value) for value in ("", *values.split("-")))


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _limit(seconds: float) -> None:
    """Ends the process after that much of its own time, or much later should it only wait."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 60 + 20 * seconds)


def _failure(item) -> bool:
    from _pytest.runner import runtestprotocol

    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def _verdict(text: str, status: int) -> str:
    if status == 0:
        return "survived"
    if status in (-signal.SIGPROF, -signal.SIGALRM):
        return "caught: takes too long"
    if text == NO_MUTANT:
        return text
    return f"caught: {text}" if text else f"caught: ends with {status}"
