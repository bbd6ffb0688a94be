"""`bertfast bench`: what it writes and shows, resuming, and how it fails."""

from __future__ import annotations

import json
import runpy
import sys
from types import SimpleNamespace

import pytest

import bertfast.benchmarks
import bertfast.cli
from bertfast import ops
from bertfast.benchmarks import cases, harness, records, roofline, suite, timer
from helpers.command_line import error_of, run_here
from helpers.project import ROOT, run_python

CEILINGS = roofline.Ceilings(1e10, {"float32": 1e11, "bfloat16": 1e11})
SMALL = ("add_layer_norm", "--quick", "--length", "4", "--device", "cpu")


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(roofline, "measure_ceilings", lambda device, dtypes: CEILINGS)
    monkeypatch.setattr(cases, "ROTATED_BYTES", 1)
    monkeypatch.setattr(harness, "peak_bytes", lambda call, device: 12_300_000)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def test_results_are_shown_and_written(capsys, path):
    done = run_here(capsys, "bench", *SMALL, "--json", path)
    assert done.returncode == 0, done.stderr
    found = records.read(path)
    (run,) = found.runs
    assert run.ceilings == {"bytes_per_second": 1e10, "flops_per_second": CEILINGS.flops_per_second}
    assert run.machine["versions"]["torch"] and "commit" in run.machine and run.machine["card"] is None
    assert {row.pass_ for row in found.rows} == {"forward", "backward", "both"}
    assert {row.contestant for row in found.rows} >= {"bertfast", "eager"}
    assert all(
        (row.subject, row.batch, row.length, len(row.seconds)) == ("add_layer_norm", 2, 4, 3) for row in found.rows
    )
    assert {line.contestant for line in found.skipped} == {"liger", "transformer-engine"}
    for text in ("add_layer_norm", "2 x 4", "float32", "of floor", "12.3", "Not measured", "liger: runs on cuda only"):
        assert text in done.stdout
    assert f"results: {path}" in done.stderr and run.machine["cpu"] in done.stderr
    assert run.timing == "clock" and "timed by clock" in done.stderr


def test_options_choose_cells(capsys, path):
    options = ("--pass", "forward", "--batch", 1, "--batch", 3, "--dtype", "bfloat16", "--rounds", 2, "--json", path)
    assert run_here(capsys, "bench", *SMALL, *options).returncode == 0
    (run,), rows = records.read(path).runs, records.read(path).rows
    assert " ".join(run.command) == (
        "bertfast bench add_layer_norm --pass forward --batch 1 --batch 3 --length 4 --dtype bfloat16 --device cpu"
        " --rounds 2 --quick"
    )
    assert {(row.pass_, row.batch, row.dtype, len(row.seconds)) for row in rows} == {
        ("forward", batch, "bfloat16", 2) for batch in (1, 3)
    }


def test_an_interrupted_run_keeps_what_it_has_and_is_resumed(capsys, path, monkeypatch):
    run, cells = harness.run, []

    def interrupted(contest, *arguments):
        cells.append(str(contest.cell))
        if len(cells) == 2:
            raise KeyboardInterrupt
        return run(contest, *arguments)

    monkeypatch.setattr(harness, "run", interrupted)
    done = run_here(capsys, "bench", *SMALL, "--json", path)
    assert done.returncode == 130 and "bertfast: error: interrupted" in done.stderr
    kept = records.read(path)
    assert {row.pass_ for row in kept.rows} == {"forward"}
    assert "forward" in done.stdout and "backward" not in done.stdout

    # As a machine that went down leaves it: in the middle of a line.
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 3].rsplit(b"\n", 1)[-1])
    done = run_here(capsys, "bench", *SMALL, "--resume", path)
    assert done.returncode == 0, done.stderr
    assert [cell.split("/")[1] for cell in cells] == ["forward", "backward", "backward", "both"]
    found = records.read(path)
    assert len(found.runs) == 2 and {row.pass_ for row in found.rows} == {"forward", "backward", "both"}
    assert [row for row in found.rows if row.pass_ == "forward"] == kept.rows
    assert "forward" in done.stdout and "both" in done.stdout, "the table has what was measured before"


def test_what_was_timed_otherwise_is_not_continued(capsys, path):
    facts = records.Run("", [], {}, {}, timing=timer.REPLAYS)
    with records.Writer(path) as writer:
        writer.write(facts)
    message = f"{path} has been timed by {timer.REPLAYS}, this would be by clock"
    assert message in error_of(run_here(capsys, "bench", *SMALL, "--resume", path))
    assert records.read(path).runs == [facts]


def test_a_wrong_result_of_ours_is_an_exit_code(capsys, path, monkeypatch):
    right = ops.add_layer_norm
    monkeypatch.setattr(ops, "add_layer_norm", lambda *args, **options: right(*args, **options) + 1e-3)
    done = run_here(capsys, "bench", *SMALL, "--pass", "forward", "--json", path)
    assert done.returncode == 1 and "no number in" in done.stderr
    assert "bertfast: wrong result: out is off by" in done.stdout
    assert [row.contestant for row in records.read(path).rows] == ["eager"]


def test_what_crashes_is_one_line_and_the_rest_goes_on(capsys, path, monkeypatch):
    draw = cases.Op.contest

    def failing(op, cell, **options):
        if cell.pass_ == "backward":
            raise RuntimeError("out of\nmemory")
        return draw(op, cell, **options)

    monkeypatch.setattr(cases.Op, "contest", failing)
    done = run_here(capsys, "bench", *SMALL, "--json", path)
    assert "  all: RuntimeError: out of memory (add_layer_norm/backward/2x4/dense/float32/cpu)\n" in done.stdout
    assert {row.pass_ for row in records.read(path).rows} == {"forward", "both"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmax"], "unknown subject 'softmax'; expected one of attention, "),
        (["attention", "--device", "cuda:77"], "device 'cuda:77' cannot be used: "),
        (["attention", "--batch", "0"], "'--batch': 0 is not in the range"),
        (["attention", "--pass", "training"], "these options leave nothing to measure"),
        (["--json", "a", "--resume", "b"], "give one of them"),
        (["--resume", "no-such-file"], "no-such-file: no such file to continue"),
        (["--json", "no-such-folder/file", *SMALL], "no-such-folder/file: No such file or directory"),
        (["--results", "file"], "--results needs --report"),
        ([*SMALL, "--graphs"], "CUDA graphs can be timed on a GPU only, the device is cpu"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert message in error_of(run_here(capsys, "bench", *arguments))


def test_a_file_is_never_overwritten(capsys, path):
    path.write_text("mine\n")
    assert "exists: --resume continues it" in error_of(run_here(capsys, "bench", *SMALL, "--json", path))
    assert f"{path}, line 1: " in error_of(run_here(capsys, "bench", *SMALL, "--resume", path))
    assert path.read_text() == "mine\n"


def stub(monkeypatch, name: str, **functions) -> None:
    module = SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, f"bertfast.benchmarks.{name}", module)
    monkeypatch.setattr(bertfast.benchmarks, name, module, raising=False)


def test_reports_are_made_of_a_run_or_of_files(capsys, tmp_path, monkeypatch):
    asked = []

    def write(paths, folder):
        asked.append((list(paths), folder))
        return folder / "index.html"

    stub(monkeypatch, "report", write=write)
    folder = tmp_path / "report"
    done = run_here(capsys, "bench", *SMALL, "--pass", "forward", "--report", folder)
    assert done.returncode == 0 and f"report: {folder / 'index.html'}" in done.stderr
    assert records.read(folder / "results.jsonl").rows
    assert "exists" in error_of(run_here(capsys, "bench", *SMALL, "--report", folder))
    files = [tmp_path / "a", tmp_path / "b"]
    assert run_here(capsys, "bench", "--report", folder, "--results", files[0], "--results", files[1]).returncode == 0
    assert asked == [([folder / "results.jsonl"], folder), (files, folder)]


@pytest.mark.parametrize("code", [0, 1])
def test_comparing_runs_nothing(capsys, tmp_path, monkeypatch, code):
    asked = []
    stub(monkeypatch, "compare", main=lambda *files: asked.append(files) or code)
    assert run_here(capsys, "bench", "--compare", tmp_path / "a", tmp_path / "b").returncode == code
    assert asked == [(tmp_path / "a", tmp_path / "b")]


def test_help_names_every_subject(capsys):
    done = run_here(capsys, "bench", "--help")
    assert done.returncode == 0 and all(name in done.stdout.replace("\n", " ") for name in suite.SUBJECTS)


@pytest.mark.parametrize("stem", suite.MODULES.values())
def test_scripts_run_their_subject(monkeypatch, stem):
    given = []
    monkeypatch.setattr(bertfast.cli, "main", given.append)
    monkeypatch.setattr(sys, "argv", [stem, "--quick"])
    monkeypatch.delitem(sys.modules, f"bertfast.benchmarks.{stem}", raising=False)
    runpy.run_module(f"bertfast.benchmarks.{stem}", run_name="__main__")
    assert given == [["bench", next(name for name, s in suite.MODULES.items() if s == stem), "--quick"]]


def test_the_script_of_models_can_be_told_which(monkeypatch):
    given = []
    monkeypatch.setattr(bertfast.cli, "main", given.append)
    for argv, subjects in (([], suite.MODELS), (["bert-large"], ("bert-large",))):
        monkeypatch.setattr(sys, "argv", ["bench_model", *argv, "--quick"])
        suite.script(*suite.MODELS)
        assert given.pop() == ["bench", *subjects, "--quick"]


@pytest.mark.slow
def test_the_suite_runs_under_pytest_benchmark(tmp_path):
    """And the tests' own run leaves it out."""
    path = tmp_path / "benchmark.json"
    options = ("--benchmark-only", "--benchmark-max-time=0.01", "--benchmark-min-rounds=1", f"--benchmark-json={path}")
    chosen = ("-k", "add_layer_norm and forward", "-p", "no:cacheprovider", "-q")
    done = run_python("-m", "pytest", "benchmarks/", *options, *chosen, cwd=ROOT)
    groups = {(item["group"], item["name"]) for item in json.loads(path.read_text())["benchmarks"]}
    assert len(groups) >= 2, done.stdout
    assert all(group.startswith("add_layer_norm/forward/2x32/dense/") for group, _ in groups)
    assert "deselected" in done.stdout and "failed" not in done.stdout
