"""The mutant runner: what it breaks, what it leaves alone, and the committed results."""

import ast
import re
from pathlib import Path

import mutants
import pytest

FILES = sorted((mutants.ROOT / "kernels").glob("*.py"))
KERNELS = [path for path in FILES if mutants.jit_functions(ast.parse(path.read_text()))]


def broken(tmp_path, body, before="@triton.jit\ndef f(x, m, N):\n    "):
    path = tmp_path / "toy.py"
    path.write_text(before + body + "\n")
    return [mutant.name.removeprefix(f"toy.f: {body} -> ") for mutant in mutants.mutants_of(path)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("m = x < N", ["m = (x <= N)"]),
        ("m = x * N", ["m = (x)", "m = (N)"]),
        ("m = x + 2", ["m = (x - 2)", "m = x + 3"]),
        ("m = x & N", ["m = (x)", "m = (N)"]),
        ("m = -x", ["m = (x)"]),
        ("m += x", ["m = x", "m -= x"]),
        ("m = 0.5", ["m = 0.505"]),
        ("m = tl.maximum(x, N)", ["m = tl.minimum(x, N)"]),
        ("m = tl.where(m, x, 0.0)", ["m = (x)", "m = (0.0)", "m = tl.where(m, x, 1.0)"]),
        ("m = tl.load(x, mask=m, other=0.0)", ["m = tl.load(x)", 'm = tl.load(x, mask=m, other=float("nan"))']),
        ("tl.store(x, m, mask=m)", ["pass", "tl.store(x, m)"]),
        ("m = tl.sum(x, axis=1) / N", ["m = (tl.sum(x, axis=1))", "m = tl.max(x, axis=1) / N"]),
        ("m = dot(x, x, m, P)", ["m = dot(x, x, m * 0.0, P)"]),
        ("m = tl.arange(0, 16)", []),
        ("m = x.to(tl.int64)", []),
        ("m = tl.zeros((16, 8), tl.float32)", []),
        ("tl.static_assert(N > 4)", []),
    ],
)
def test_what_is_broken(tmp_path, body, expected):
    assert broken(tmp_path, body) == expected


def test_functions_that_are_not_kernels_are_left_alone(tmp_path):
    assert broken(tmp_path, "m = x < N", before="def f(x, m, N):\n    ") == []


def test_what_runs_interpreted_or_compiled_only_is_left_alone(tmp_path):
    assert broken(tmp_path, "if INTERPRETED:\n        return x + 1\n    return x - 1") == []


def test_every_kernel_file_has_its_tests():
    assert {path.stem for path in KERNELS} == mutants.TESTS.keys()
    for files in mutants.TESTS.values():
        assert all((mutants.ROOT / "tests" / file).exists() for file in files)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_mutants_are_other_python_and_have_names_of_their_own(path):
    found, source = mutants.mutants_of(path), path.read_text()
    assert found and len({mutant.name for mutant in found}) == len(found)
    for mutant in found:
        assert mutant.source != source
        function = mutant.source[mutant.source.index(f"def {mutant.function}(") :]
        ast.parse(re.split(r"\n(?=[^\s)])", function, maxsplit=1)[0])


def test_committed_results():
    """Of functions that have not changed since; the whole is `python tests/mutants.py --check`."""
    results = mutants.load(mutants.RESULTS)
    known = [m for m in mutants.all_mutants(sorted(mutants.TESTS)) if mutants.verdict_of(m, results)]
    names = {mutant.name for mutant in known}
    reasons = {name: why for name, why in mutants.load(mutants.SURVIVORS).items() if name in names}
    assert mutants.complaints(known, results, reasons) == []


def test_results_name_tests_that_exist():
    verdicts = [
        verdict
        for functions in mutants.load(mutants.RESULTS).values()
        for function in functions.values()
        for verdict in function["mutants"].values()
    ]
    named = {
        tuple(verdict.removeprefix("caught: ").partition("[")[0].split("::")) for verdict in verdicts if "::" in verdict
    }
    assert named
    for file, function in sorted(named):
        assert f"def {function}(" in Path(__file__).with_name(file).read_text(), f"{file} has no {function}"
