"""Breaks the Triton kernels one place at a time and sees whether the tests notice.

    python tests/mutants.py                        mutants without a result yet, and those of functions that changed
    python tests/mutants.py layer_norm column_sum  of these kernel files only
    python tests/mutants.py --again                all of them anew
    python tests/mutants.py --check                runs nothing: holds the committed results to the rule

Mutated are the bodies of `@triton.jit` functions: comparisons, arithmetic, masks, constants, maximum for minimum,
stores, accumulations and branches left out. Left alone are casts, because what is widened mostly meets fp32 anyway and
no test has offsets above 2^31; what runs compiled only or interpreted only; and what only decides about speed (compiler
options, hints).

`mutants.json` has the results. The rule: at least 95 % are caught, and each survivor has its reason in
`mutants_survivors.json`. A mutant is caught when a test fails, when the process dies, or when a test takes ten times as
long as with the kernel as it is.

The tests are collected once, in a copy of the tree; each mutant is one fork of that process, which imports the kernels
(anew, if a test module has), the mutated file before the others. Test modules must not take functions out of them by
`from`. Tests that caught many mutants run first, then a case of each
test function and value of its parameters, then the quickest.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("mutants.json")
SURVIVORS = Path(__file__).with_name("mutants_survivors.json")
NEEDED = 0.95

# Kernel file: the test files that must notice; files after those that they import. Cases of other backends do not
# count.
TESTS = {
    "common": ("test_triton_interpreter.py", "test_layer_norm.py"),
    "activations": ("test_activations.py", "test_feed_forward.py"),
    "gemm": ("test_gemm.py", "test_linear_gelu.py", "test_feed_forward.py", "test_qkv_projection.py"),
    "column_sum": ("test_column_sum.py",),
    "bias_activation": ("test_bias_activation.py", "test_linear_gelu.py", "test_feed_forward.py"),
    "layer_norm": ("test_layer_norm.py",),
    "linear_gelu": ("test_linear_gelu.py", "test_feed_forward.py"),
    "embed_layer_norm": ("test_embed_layer_norm.py",),
    "qkv_projection": ("test_qkv_projection.py", "test_weight_cache.py"),
    "attention": ("test_attention_kernels.py", "test_attention.py", "test_varlen_attention.py"),
    "attention_bwd": ("test_attention_kernels.py", "test_attention.py", "test_varlen_attention.py"),
    "attention_mask_bwd": ("test_attention_kernels.py", "test_attention.py"),
}

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
# Both operands alone as well: a mask forgotten, a factor forgotten.
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.LShift: ">>", ast.RShift: "<<"}
ALONE = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor)
OTHER_CALLS = {
    "tl.maximum": "tl.minimum",
    "tl.minimum": "tl.maximum",
    "tl.max": "tl.min",
    "tl.min": "tl.max",
    "tl.sum": "tl.max",
    "tl.exp": "tl.exp2",
    "tl.exp2": "tl.exp",
    "tl.log": "tl.log2",
    "tl.log2": "tl.log",
}
# Calls that one of their arguments stands in for.
UNWRAPPED = {"tl.sqrt_rn", "tl.sqrt", "tl.rsqrt", "tl.abs", "tl.erf", "round_to"}
SPEED_ONLY = {"tl.multiple_of", "tl.max_contiguous", "tl.max_constancy", "tl.assume", "tl.static_assert"}
# Arguments that are shapes, lengths of ranges or axes: another value does not run at all.
SHAPES = {"tl.arange", "tl.zeros", "tl.full", "tl.reshape", "tl.broadcast_to", "tl.permute", "tl.trans"}
KEYWORDS_LEFT_ALONE = {
    "axis",
    "dtype",
    "num_stages",
    "warp_specialize",
    "disable_licm",
    "eviction_policy",
    "cache_modifier",
    "bitcast",
}


@dataclass(frozen=True)
class Mutant:
    """One replaced piece of source. `name` is `<file>.<function>: <line> -> <new line>`, numbered where it repeats."""

    file: str
    function: str
    name: str
    source: str
    digest: str


def jit_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Functions whose decorator is `triton.jit`, called or not."""
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(d).partition("(")[0] == "triton.jit" for d in node.decorator_list)
    ]


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of one kernel file, in the order of the source."""
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found, names = [], Counter()
    for function in jit_functions(ast.parse(source)):
        digest = hashlib.sha256(ast.unparse(function).encode()).hexdigest()[:12]
        for node, replacement in _replacements(function.body):
            start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
            mutated = source[:start] + replacement + source[end:]
            first, last = starts[node.lineno - 1], starts[node.end_lineno]
            before = " ".join(source[first:last].split())
            after = " ".join((source[first:start] + replacement + source[end:last]).split())
            name = f"{path.stem}.{function.name}: {before} -> {after}"
            names[name] += 1
            if names[name] > 1:
                name += f" #{names[name]}"
            found.append(Mutant(path.stem, function.name, name, mutated, digest))
    return found


def _replacements(body: list[ast.stmt]) -> Iterator[tuple[ast.AST, str]]:
    """(node, source to put in its place) for every mutation of some statements."""
    for statement in body:
        if isinstance(statement, ast.If) and "INTERPRETED" in ast.unparse(statement.test):
            if ast.unparse(statement.test) == "INTERPRETED" and isinstance(statement.body[-1], ast.Return):
                yield from _replacements(statement.orelse)
                return
            yield from _replacements(statement.orelse)
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        yield from _of_statement(statement)
        for name, value in ast.iter_fields(statement):
            if name in ("body", "orelse") and isinstance(value, list):
                yield from _replacements(value)
            elif isinstance(value, ast.expr) and not (name == "test" and _is_static(value)):
                yield from _of_expression(value)


def _is_static(test: ast.expr) -> bool:
    """Whether a pointer is there, or a flag: negated, nothing runs."""
    is_none = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot))
    return isinstance(test, ast.Name) or is_none


def _of_statement(statement: ast.stmt) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(statement, ast.AugAssign):
        target, value = ast.unparse(statement.target), ast.unparse(statement.value)
        yield statement, f"{target} = {value}"
        if isinstance(statement.op, ast.Add):
            yield statement, f"{target} -= {value}"
    elif isinstance(statement, ast.If):
        # A branch that gives a name its only value or a function its result cannot be left out.
        if not any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            yield statement.test, "False"
    elif isinstance(statement, ast.Expr) and _called(statement.value) == "tl.store":
        yield statement, "pass"


def _called(node: ast.AST) -> str | None:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else None


def _call(node: ast.Call, **changes) -> str:
    return ast.unparse(ast.Call(**{"func": node.func, "args": node.args, "keywords": node.keywords, **changes}))


def _of_expression(node: ast.expr) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield node, f"({left} {COMPARISONS[type(node.ops[0])]} {right})"
    elif isinstance(node, ast.BinOp):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        if type(node.op) in OPERATORS:
            yield node, f"({left} {OPERATORS[type(node.op)]} {right})"
        elif type(node.op) in ALONE:
            yield node, f"({left})"
            if isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.Mult)):
                yield node, f"({right})"
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({word.join(map(ast.unparse, node.values))})"
    elif isinstance(node, ast.IfExp):
        yield node, f"({ast.unparse(node.orelse)} if {ast.unparse(node.test)} else {ast.unparse(node.body)})"
    elif isinstance(node, ast.Constant):
        if type(node.value) is int:
            yield node, str(node.value + 1)
        elif type(node.value) is float:
            yield node, "1.0" if node.value == 0.0 else repr(node.value * 1.01)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    yield from _of_children(node)


def _of_call(node: ast.Call) -> Iterator[tuple[ast.AST, str]]:
    name, arguments = _called(node), list(map(ast.unparse, node.args))
    if name in OTHER_CALLS:
        yield node, _call(node, func=ast.parse(OTHER_CALLS[name], mode="eval").body)
    elif name in UNWRAPPED:
        yield node, f"({arguments[0]})"
    elif name == "tl.where":
        yield node, f"({arguments[1]})"
        yield node, f"({arguments[2]})"
    elif name == "tl.cdiv":
        yield node, f"({arguments[0]} // {arguments[1]})"
    elif name in ("tl.load", "tl.store") and any(k.arg == "mask" for k in node.keywords):
        yield node, _call(node, keywords=[k for k in node.keywords if k.arg not in ("mask", "other")])
    elif name in ("tl.interleave", "tl.join"):
        yield node, _call(node, args=node.args[::-1])
    elif name in ("range", "tl.range", "tl.static_range") and len(arguments) > 1:
        step = arguments[2] if len(arguments) > 2 else "1"
        changed = ast.parse(f"({arguments[1]}) - {step}", mode="eval").body
        yield node, _call(node, args=[node.args[0], changed, *node.args[2:]])
    elif name == "dot" and not arguments[2].startswith(("tl.zeros(", "zeros")):
        nothing = ast.parse(f"{arguments[2]} * 0.0", mode="eval").body
        yield node, _call(node, args=[*node.args[:2], nothing, *node.args[3:]])
    elif name == "keep_mask":
        # By a word of four: the column is a multiple of that.
        yield (
            node,
            _call(node, args=[*node.args[:2], ast.parse(f"{arguments[2]} + 4", mode="eval").body, *node.args[3:]]),
        )


def _of_children(node: ast.expr) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Call):
        name = _called(node)
        if name in SPEED_ONLY:
            return
        yield from _of_expression(node.func)
        # What is broadcast is mutated, what it is broadcast to is not.
        arguments = node.args[:1] if name in SHAPES - {"tl.arange", "tl.zeros", "tl.full"} else node.args
        for argument in [] if name in ("tl.arange", "tl.zeros", "tl.full") else arguments:
            if not (name == "keep_mask" and isinstance(argument, ast.Constant)):
                yield from _of_expression(argument)
        for keyword in node.keywords:
            if keyword.arg == "other" and ast.unparse(keyword.value) == "0.0":
                # NaN passes where any number is multiplied by 0.
                yield keyword.value, 'float("nan")'
            elif keyword.arg not in KEYWORDS_LEFT_ALONE:
                yield from _of_expression(keyword.value)
    elif isinstance(node, ast.Subscript):
        yield from _of_expression(node.value)
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _of_expression(child)


def snapshot(folder: Path) -> None:
    """The package as installed, its tests and their configuration: the tree may change while mutants run."""
    from helpers.project import MADE, copy_installation

    copy_installation(folder / "site", native=True)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=MADE)
    shutil.copy(ROOT / "pyproject.toml", folder)


class Runner:
    """A pytest plugin that runs mutants where pytest would run tests."""

    def __init__(self, mutants: list[Mutant], folder: Path, jobs: int, budget: float, record) -> None:
        self.mutants, self.folder, self.jobs, self.budget, self.record = mutants, folder, jobs, budget, record

    def pytest_runtestloop(self, session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("the tests do not collect")
        files = {file for mutant in self.mutants for file in TESTS[mutant.file]}
        items = [item for item in session.items if item.path.name in files]
        seconds = self.measure(items)
        items = sorted((item for item in items if item.nodeid in seconds), key=lambda item: seconds[item.nodeid])
        kills = Counter()
        gc.collect()
        gc.freeze()
        waiting, running = list(self.mutants), {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop(0)
                chosen = self.choose(mutant, items, seconds, kills)
                process, pipe = self.fork(mutant, chosen, seconds)
                running[pipe] = mutant, process
            for pipe in select.select(list(running), [], [])[0]:
                text = os.read(pipe, 65536).decode()
                mutant, process = running.pop(pipe)
                os.close(pipe)
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                kills[text] += 1
                self.record(mutant, _verdict(text, status))
        return True

    def choose(self, mutant: Mutant, items, seconds: dict[str, float], kills: Counter) -> list:
        """The tests for one mutant within the budget, from `items` sorted by seconds: before any other the quickest
        case of each test function and of each value of its parameters."""
        items = [item for item in items if item.path.name in TESTS[mutant.file]]
        quickest = {value: item for item in reversed(items) for value in _values(item)}.values()
        chosen, spent = [], 0.0
        for item in dict.fromkeys((*sorted(quickest, key=lambda item: seconds[item.nodeid]), *items)):
            spent += seconds[item.nodeid]
            if spent > self.budget:
                break
            chosen.append(item)
        return sorted(chosen, key=lambda item: -kills[_short(item)])

    def measure(self, items) -> dict[str, float]:
        """Seconds of tests on the kernels as they are, which must pass; of each file as many, in any order, as take
        twice the budget."""
        source, target = os.pipe()
        process = os.fork()
        if not process:
            _silence()
            spent = Counter()
            with os.fdopen(target, "w") as out:
                for item in random.Random(0).sample(items, len(items)):
                    if spent[item.path] > 2 * self.budget:
                        continue
                    began = time.process_time()
                    _limit(60)
                    failed = _failure(item)
                    seconds = time.process_time() - began
                    spent[item.path] += seconds
                    print(json.dumps([item.nodeid, seconds, failed]), file=out, flush=True)
            os._exit(0)
        os.close(target)
        with os.fdopen(source) as lines:
            done = [json.loads(line) for line in lines]
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        broken = [name for name, _, failed in done if failed]
        assert not broken and status == 0, f"without a mutant: ends with {status}, fails {', '.join(broken)}"
        print(f"{len(done)} of {len(items)} tests, {sum(seconds for _, seconds, _ in done):.0f} s", flush=True)
        return {name: seconds for name, seconds, _ in done}

    def fork(self, mutant: Mutant, items, seconds: dict[str, float]) -> tuple[int, int]:
        source, target = os.pipe()
        process = os.fork()
        if process:
            os.close(target)
            return process, source
        import bertfast.kernels

        _silence()
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / f"{mutant.file}.py").write_text(mutant.source)
        bertfast.kernels.__path__.insert(0, str(folder))
        for name in TESTS:
            # What collecting the tests has imported.
            module = sys.modules.get(f"bertfast.kernels.{name}")
            if module is not None:
                importlib.reload(module)
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
    return f"caught: {text}" if text else f"caught: ends with {status}"


def load(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def save(results: dict) -> None:
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def all_mutants(files: list[str]) -> list[Mutant]:
    return [mutant for name in files for mutant in mutants_of(ROOT / "kernels" / f"{name}.py")]


def verdict_of(mutant: Mutant, results: dict) -> str | None:
    """The result of a mutant; None without one, or where its function changed since."""
    known = results.get(mutant.file, {}).get(mutant.function, {})
    return known["mutants"].get(mutant.name) if known.get("digest") == mutant.digest else None


def complaints(mutants: list[Mutant], results: dict, reasons: dict) -> list[str]:
    """What the results fall short of."""
    verdicts = {mutant.name: verdict_of(mutant, results) for mutant in mutants}
    missing = [name for name, verdict in verdicts.items() if verdict is None]
    survivors = {name for name, verdict in verdicts.items() if verdict == "survived"}
    caught = len(mutants) - len(missing) - len(survivors)
    found = [f"{len(missing)} mutants have no result, the first is {missing[0]}"] if missing else []
    if caught < NEEDED * len(mutants):
        found.append(f"{caught} of {len(mutants)} mutants are caught, needs {NEEDED:.0%}")
    found += [f"survives without a reason: {name}" for name in sorted(survivors - reasons.keys())]
    stale = {name for name in reasons if name.partition(".")[0] in {m.file for m in mutants}} - survivors
    found += [f"has a reason and does not survive: {name}" for name in sorted(stale)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="KERNEL", help="kernel files without .py; all by default")
    parser.add_argument("--again", action="store_true", help="also mutants that have a result")
    parser.add_argument("--survivors", action="store_true", help="those that survived without a reason, anew")
    parser.add_argument("--check", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side (2)")
    parser.add_argument("--budget", type=float, default=40, metavar="S", help="seconds of tests for a mutant (40)")
    arguments = parser.parse_args()
    present = [name for name in TESTS if (ROOT / "kernels" / f"{name}.py").exists()]
    files = arguments.files or present
    mutants, results, reasons = all_mutants(files), load(RESULTS), load(SURVIVORS)

    def wanted(mutant: Mutant) -> bool:
        verdict = verdict_of(mutant, results)
        unexplained = verdict == "survived" and mutant.name not in reasons
        return arguments.again or verdict is None or (arguments.survivors and unexplained)

    waiting = [] if arguments.check else [mutant for mutant in mutants if wanted(mutant)]
    if waiting:
        _forget(results, mutants)
        run(waiting, results, arguments.jobs, arguments.budget)
    found = complaints(mutants, results, reasons)
    caught = sum((verdict_of(mutant, results) or "").startswith("caught") for mutant in mutants)
    print(*found, f"{caught} of {len(mutants)} mutants are caught", sep="\n")
    return bool(found)


def _forget(results: dict, mutants: list[Mutant]) -> None:
    """Drops results of functions that changed or went, and of mutants that are no longer made."""
    for file in {mutant.file for mutant in mutants}:
        functions: dict = {}
        for mutant in mutants:
            verdict = verdict_of(mutant, results) if mutant.file == file else None
            if verdict is not None:
                function = functions.setdefault(mutant.function, {"digest": mutant.digest, "mutants": {}})
                function["mutants"][mutant.name] = verdict
        results[file] = functions


def run(waiting: list[Mutant], results: dict, jobs: int, budget: float) -> None:
    """Runs mutants and saves each result as it comes."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True
    done = 0

    def record(mutant: Mutant, verdict: str) -> None:
        nonlocal done
        done += 1
        file = results.setdefault(mutant.file, {})
        function = file.setdefault(mutant.function, {"digest": mutant.digest, "mutants": {}})
        function["mutants"][mutant.name] = verdict
        save(results)
        if verdict == "survived" or done % 25 == 0:
            print(f"{done}/{len(waiting)} {mutant.name}: {verdict}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        snapshot(folder)
        tests = folder / "tests"
        rest = [entry for entry in sys.path if Path(entry) != ROOT / "tests"]
        sys.path[:] = [str(folder / "site"), str(tests), *rest]
        os.chdir(folder)
        import pytest

        import bertfast.kernels.launch

        assert Path(bertfast.kernels.launch.__file__).is_relative_to(folder)
        chosen = sorted({tests / file for mutant in waiting for file in TESTS[mutant.file] if (tests / file).exists()})
        plugin = Runner(waiting, folder, jobs, budget, record)
        # Without those of other backends, and those that change the number of threads, which a forked process must not.
        selected = ["-k", "not torch and not cpu and not threads", "-m", "not slow"]
        options = ["-q", "-s", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", *selected]
        code = pytest.main([*options, *map(str, chosen)], plugins=[plugin])
        assert code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), f"pytest ends with {code}"


if __name__ == "__main__":
    sys.exit(main())
