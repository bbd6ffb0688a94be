"""Breaks the Triton and CUDA kernels one place at a time and sees whether the tests notice.

    python tests/mutants.py                        mutants without a result yet, and those of functions that changed
    python tests/mutants.py layer_norm cuda/rows   of these kernel files only
    python tests/mutants.py --again                all of them anew
    python tests/mutants.py --check                runs nothing: holds the committed results to the rule

Mutated are the bodies of `@triton.jit`, `__global__` and `__device__` functions: comparisons, arithmetic, masks,
constants, maximum for minimum, stores, barriers, accumulations and branches left out. `helpers/triton_mutants.py` and
`helpers/cpp_mutants.py` say what is left alone.

`mutants.json` has the results. The rule, for Triton and for CUDA: at least 95 % are caught, and each survivor has its
reason in `mutants_survivors.json`. A mutant is caught when a test fails, when the process dies, or when a test takes
ten times as long as with the kernel as it is. What does not compile is no mutant.

The tests are collected once, in a copy of the tree; each mutant is one fork of that process, which imports the Triton
kernels (anew, if a test module has), the mutated file before the others, or builds and loads the CUDA kernels. Test
modules must not take functions out of kernels by `from`. Tests that caught many mutants run first, then a case of each
test function and value of its parameters, then the quickest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from helpers import cpp_mutants, triton_mutants
from helpers.mutant import NO_MUTANT, Mutant
from helpers.mutant_runner import Kind, Runner

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("mutants.json")
SURVIVORS = Path(__file__).with_name("mutants_survivors.json")
NEEDED = 0.95

# Kernel file: the test files that must notice; files after those that they import. Cases of other backends do not
# count.
TRITON_TESTS = {
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
_CUDA_ATTENTION = ("test_cuda_attention.py", "test_attention.py", "test_varlen_attention.py")
_CUDA_GEMM = ("test_cuda_gemm.py", "test_linear_gelu.py", "test_qkv_projection.py", "test_feed_forward.py")
CUDA_TESTS = {
    "cuda/packed": ("test_cuda_kernels.py", "test_layer_norm.py", "test_linear_gelu.py"),
    "cuda/philox": ("test_cuda_kernels.py", "test_layer_norm.py", "test_feed_forward.py"),
    "cuda/reduce": ("test_cuda_kernels.py", "test_layer_norm.py"),
    "cuda/rows": ("test_cuda_kernels.py", "test_layer_norm.py"),
    "cuda/normalise": ("test_cuda_kernels.py", "test_layer_norm.py"),
    "cuda/activations": ("test_activations.py", "test_feed_forward.py"),
    "cuda/column_sum": ("test_cuda_kernels.py", "test_layer_norm.py", "test_linear_gelu.py"),
    "cuda/layer_norm": ("test_cuda_kernels.py", "test_layer_norm.py"),
    "cuda/embed_layer_norm": ("test_cuda_kernels.py", "test_embed_layer_norm.py"),
    "cuda/bias_activation": (
        "test_cuda_kernels.py",
        "test_cuda_gemm.py",
        "test_linear_gelu.py",
        "test_feed_forward.py",
    ),
    "cuda/gemm": _CUDA_GEMM,
    "cuda/shared_tile": (*_CUDA_ATTENTION, "test_cuda_gemm.py"),
    "cuda/products": (*_CUDA_ATTENTION, "test_cuda_gemm.py"),
    "cuda/attention_inputs": _CUDA_ATTENTION,
    "cuda/attention_scores": _CUDA_ATTENTION,
    "cuda/attention": _CUDA_ATTENTION,
    "cuda/attention_bwd": _CUDA_ATTENTION,
    "cuda/attention_mask_bwd": _CUDA_ATTENTION,
}
TESTS = TRITON_TESTS | CUDA_TESTS


TRITON = Kind(
    tests=TRITON_TESTS,
    paths=lambda file: list((ROOT / "kernels").glob(f"{file}.py")),
    mutants_of=triton_mutants.mutants_of,
    counts=lambda test: not any(word in test for word in ("torch", "cpu", "cuda")),
    install=lambda mutant, folder: triton_mutants.install(mutant, folder, TRITON_TESTS),
    budget=40,
)
CUDA = Kind(
    tests=CUDA_TESTS,
    paths=lambda file: sorted((ROOT / "csrc").glob(f"{file}.cu*")),
    mutants_of=cpp_mutants.mutants_of,
    counts=lambda test: "cuda" in test,
    install=cpp_mutants.install,
    install_part=cpp_mutants.install_part,
    budget=15,
)


def kind_of(file: str) -> Kind:
    return CUDA if file.startswith("cuda/") else TRITON


def load(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def save(results: dict) -> None:
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def all_mutants(files: list[str]) -> list[Mutant]:
    return [m for file in files for path in kind_of(file).paths(file) for m in kind_of(file).mutants_of(path, file)]


def verdict_of(mutant: Mutant, results: dict) -> str | None:
    """The result of a mutant; None without one, or where its function changed since."""
    known = results.get(mutant.file, {}).get(mutant.function, {})
    return known["mutants"].get(mutant.name) if known.get("digest") == mutant.digest else None


def complaints(mutants: list[Mutant], results: dict, reasons: dict) -> list[str]:
    """What the results of mutants of one kind fall short of."""
    verdicts = {mutant.name: verdict_of(mutant, results) for mutant in mutants}
    missing = [name for name, verdict in verdicts.items() if verdict is None]
    survivors = {name for name, verdict in verdicts.items() if verdict == "survived"}
    total = len(mutants) - len(missing) - sum(verdict == NO_MUTANT for verdict in verdicts.values())
    caught = total - len(survivors)
    found = [f"{len(missing)} mutants have no result, the first is {missing[0]}"] if missing else []
    if caught < NEEDED * total:
        found.append(f"{caught} of {total} mutants are caught, needs {NEEDED:.0%}")
    found += [f"survives without a reason: {name}" for name in sorted(survivors - reasons.keys())]
    stale = {name for name in reasons if name.partition(".")[0] in {m.file for m in mutants}} - survivors
    found += [f"has a reason and does not survive: {name}" for name in sorted(stale)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="KERNEL", help="kernel files without suffix; all by default")
    parser.add_argument("--again", action="store_true", help="also mutants that have a result")
    parser.add_argument("--survivors", action="store_true", help="only those that survived without a reason, anew")
    parser.add_argument("--check", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side (2)")
    budgets = f"{TRITON.budget}, of CUDA {CUDA.budget}"
    parser.add_argument("--budget", type=float, metavar="S", help=f"seconds of tests for a mutant ({budgets})")
    arguments = parser.parse_args()
    if unknown := set(arguments.files) - TESTS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such kernel file; there are {', '.join(TESTS)}")
    files = arguments.files or list(TESTS)
    mutants, results, reasons = all_mutants(files), load(RESULTS), load(SURVIVORS)

    def wanted(mutant: Mutant) -> bool:
        verdict = verdict_of(mutant, results)
        if arguments.survivors:
            return verdict == "survived" and mutant.name not in reasons
        return arguments.again or verdict is None

    waiting = [] if arguments.check else [mutant for mutant in mutants if wanted(mutant)]
    # What a run has done when it is stopped is a sample of all.
    random.Random(0).shuffle(waiting)
    if waiting:
        _forget(results, mutants)
        run(waiting, results, arguments.jobs, arguments.budget)
    found = []
    for name, kind in (("Triton", TRITON), ("CUDA", CUDA)):
        of_kind = [mutant for mutant in mutants if kind_of(mutant.file) is kind]
        verdicts = [verdict_of(mutant, results) or "" for mutant in of_kind]
        found += complaints(of_kind, results, reasons)
        caught, total = sum(v.startswith("caught") for v in verdicts), sum(v != NO_MUTANT for v in verdicts)
        print(f"{name}: {caught} of {total} mutants are caught")
    print(*found, sep="\n", end="\n" if found else "")
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


def snapshot(folder: Path) -> None:
    """The package as installed, its sources, tests and their configuration: the tree may change while mutants run."""
    from helpers.project import MADE, copy_installation

    copy_installation(folder / "site", native=True)
    for name in ("csrc", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=MADE)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)


def run(waiting: list[Mutant], results: dict, jobs: int, budget: float | None) -> None:
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
        if not verdict.startswith("caught") or done % 25 == 0:
            print(f"{done}/{len(waiting)} {mutant.name}: {verdict}", flush=True)

    def kinds(file: str) -> Kind:
        return replace(kind_of(file), budget=budget or kind_of(file).budget)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        snapshot(folder)
        tests = folder / "tests"
        rest = [entry for entry in sys.path if Path(entry) != ROOT / "tests"]
        sys.path[:] = [str(folder / "site"), str(tests), *rest]
        for module in [module for module in sys.modules if module.partition(".")[0] == "helpers"]:
            # Tests import those of the copy.
            del sys.modules[module]
        os.chdir(folder)
        import pytest

        import bertfast.kernels.launch

        assert Path(bertfast.kernels.launch.__file__).is_relative_to(folder)
        if any(kind_of(mutant.file) is CUDA for mutant in waiting):
            cpp_mutants.prepare()
        chosen = sorted({tests / file for mutant in waiting for file in TESTS[mutant.file] if (tests / file).exists()})
        plugin = Runner(waiting, kinds, folder, jobs, record)
        # Without those that change the number of threads, which a forked process must not.
        selected = ["-k", "not threads", "-m", "not slow"]
        options = [
            "-q",
            "-s",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-p",
            "no:faulthandler",
            *selected,
        ]
        code = pytest.main([*options, *map(str, chosen)], plugins=[plugin])
        assert code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), f"pytest ends with {code}"


if __name__ == "__main__":
    sys.exit(main())
