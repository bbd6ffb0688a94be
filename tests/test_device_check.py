"""The device check: its stages stand alone, its verdict is honest, and it rehearses on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bertfast import backends
from bertfast.benchmarks import device_check, device_models, device_parity, device_stages, device_timings
from helpers import tolerance
from helpers.project import ROOT, copy_installation, copy_tree, run_python

PROBES = """
import ctypes, os, pathlib, subprocess, time

HERE = pathlib.Path(__file__).parent

def good(report):
    report.passed("one", value=1)
    report.measured("seconds left", value=report.seconds_left())

def hangs(report):
    report.passed("before")
    (HERE / "pids").write_text(f"{os.getpid()} {subprocess.Popen(['sleep', '600']).pid}")
    time.sleep(600)

def waits(report):
    report.passed("early")
    while not (HERE / "go").exists():
        time.sleep(0.02)

def leaves(report):
    report.passed("before")
    os._exit(0)

def leaves_with_code(report):
    os._exit(7)

def segfaults(report):
    report.passed("before")
    ctypes.string_at(0)

def raises(report):
    raise RuntimeError("boom")

def wrong(report):
    report.check("sum", 1 + 1 == 3, "1 + 1 is 2")
    with report.guard("guarded"):
        raise ValueError("inside")
    report.passed("after")

def nothing_here(report):
    report.not_run("thing", "there is no such thing yet")

def wrong_kernel(report):
    import dataclasses
    from bertfast import backends
    from bertfast.benchmarks import device_parity
    key = ("linear_gelu", "torch")
    true = backends._capabilities[key]
    backends._capabilities[key] = dataclasses.replace(
        true, implementation=lambda *arguments: true.implementation(*arguments) * 1.02
    )
    device_parity.gemm_ops(report)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a check of stages of `PROBES`, by name or as (name, changes to the stage), options behind `--rehearse`."""
    started = []
    (tmp_path / "probes.py").write_text(PROBES)

    def start(*stages: str | tuple[str, dict], options: tuple[str, ...] = (), least: float = 0.0):
        listed = []
        for stage in stages:
            name, changes = (stage, {}) if isinstance(stage, str) else stage
            listed.append({"name": name, "function": f"probes:{name}", "limit": 30.0, **changes})
        script = tmp_path / "check.py"
        script.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nimport device_check as check\n"
            f"check.LEAST_SECONDS = {least}\nsys.exit(check.main([check.Stage(**s) for s in {listed!r}]))\n"
        )
        command = [sys.executable, str(script), "--rehearse", "--output", str(tmp_path / "out.jsonl"), *options]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def report(tmp_path):
    report = device_check.Report(tmp_path / "out.jsonl", "stage", True, 100.0)
    report.path = tmp_path / "out.jsonl"
    return report


def finish(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def stages_of(path: Path) -> dict[str, dict]:
    return {r["stage"]: r for r in device_check.read(path) if r["kind"] == "stage"}


def statuses(path: Path) -> dict[str, str]:
    return {name: record["status"] for name, record in stages_of(path).items()}


def wait_for(condition, seconds: float = 30.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_of(folder: Path) -> list[int]:
    """Of the process of the stage `hangs` and of what it started."""
    path = folder / "pids"
    return [int(pid) for pid in wait_for(lambda: path.exists() and path.read_text()).split()]


def test_a_bad_stage_loses_itself_only(start, tmp_path):
    names = ("hangs", "segfaults", "leaves", "leaves_with_code", "raises", "wrong", "nothing_here", "good")
    limits = {"hangs": {"limit": 2.0}}
    code, out = finish(start(*((name, limits.get(name, {})) for name in names)))
    assert code == 1
    found = stages_of(tmp_path / "out.jsonl")
    assert list(found) == list(names)
    assert {name: record["status"] for name, record in found.items()} == {
        "hangs": "timed out",
        "segfaults": "crashed",
        "leaves": "crashed",
        "leaves_with_code": "crashed",
        "raises": "crashed",
        "wrong": "failed",
        "nothing_here": "not run",
        "good": "passed",
    }
    assert "limit of 2 s" in found["hangs"]["reason"] and "SIGSEGV" in found["segfaults"]["reason"]
    assert "string_at" in found["segfaults"]["output"]
    assert "exit code 0" in found["leaves"]["reason"] and "exit code 7" in found["leaves_with_code"]["reason"]
    assert "RuntimeError: boom" in found["raises"]["reason"]
    assert found["wrong"]["items"] == {"failed": 2, "passed": 1} and "1 + 1 is 2" in found["wrong"]["reason"]
    assert found["hangs"]["items"] == found["segfaults"]["items"] == {"passed": 1}
    pids = (tmp_path / "pids").read_text().split()
    assert not any(is_running(int(pid)) for pid in pids)
    for word in (*names, "timed out", "FAILED", "ValueError: inside", "there is no such thing yet"):
        assert word in out


def test_all_good_is_exit_code_0(start, tmp_path):
    code, out = finish(start("good", "nothing_here", ("wrong", {"gpu_only": "needs a GPU"})))
    assert code == 0 and "PASSED" in out and "needs a GPU" in out
    assert statuses(tmp_path / "out.jsonl") == {"good": "passed", "nothing_here": "not run", "wrong": "not run"}


def test_results_are_on_disk_as_soon_as_they_are_known(start, tmp_path):
    process = start("good", "waits")
    path = tmp_path / "out.jsonl"
    wait_for(lambda: path.exists() and any(r.get("item") == "early" for r in device_check.read(path)))
    assert process.poll() is None and statuses(path) == {"good": "passed"}
    (tmp_path / "go").touch()
    assert finish(process)[0] == 0
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert device_check.read(path)[-1]["passed"] is True


def test_an_interrupted_run_keeps_its_results_and_ends_its_stage(start, tmp_path):
    process = start("good", "hangs", "good")
    pids = pids_of(tmp_path)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == 128 + signal.SIGTERM and "FAILED" in out
    assert device_check.read(tmp_path / "out.jsonl")[-1]["complete"] is False
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_a_killed_run_leaves_no_stage_behind(start, tmp_path):
    process = start("hangs")
    stage, sleep = pids_of(tmp_path)
    process.kill()
    wait_for(lambda: not is_running(stage))
    os.kill(sleep, signal.SIGKILL)


def test_what_was_kept_from_running_is_a_failure(start, tmp_path):
    code, out = finish(start(("raises", {"essential": True}), "good"))
    assert code == 1 and "raises did not pass" in out
    assert statuses(tmp_path / "out.jsonl") == {"raises": "crashed", "good": "not run"}
    code, out = finish(start("good", options=("--budget", "5"), least=10.0))
    assert code == 1 and "out of time" in out


def test_a_wrong_kernel_fails(start, tmp_path):
    code, _ = finish(start("wrong_kernel"))
    items = [r for r in device_check.read(tmp_path / "out.jsonl") if r["kind"] == "item"]
    failed = {r["item"]: r["reason"] for r in items if r["status"] == "failed"}
    assert code == 1
    assert {item.split()[0] for item in failed} == {"linear_gelu"}
    assert any("float32" in item and "too far off" in reason for item, reason in failed.items())


def test_only_chooses_and_an_unknown_name_is_an_error(start, tmp_path):
    assert finish(start("good", "wrong", options=("--only", "goo")))[0] == 0
    assert list(statuses(tmp_path / "out.jsonl")) == ["good"]
    assert finish(start("good", options=("--only", "nowhere")))[0] == 2


@pytest.mark.slow
def test_rehearsal(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "device_check.py"), "--rehearse"],
        env={**os.environ, "OUT": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    path = tmp_path / "device_check.jsonl"
    assert done.returncode == 0, done.stdout + done.stderr
    records = device_check.read(path)
    found = statuses(path)
    assert list(found) == [stage.name for stage in device_check.STAGES]
    gpu_only = {stage.name for stage in device_check.STAGES if stage.gpu_only}
    assert gpu_only and {name for name, status in found.items() if status != "passed"} == gpu_only
    items = [r for r in records if r["kind"] == "item"]
    parity = [r for r in items if r["stage"].endswith(" ops")]
    for candidate in backends.candidates():
        mine = [r["status"] for r in parity if r["item"].startswith(f"{candidate.op} {candidate.backend}")]
        assert mine, f"{candidate.op} on {candidate.backend} is not in the results"
        # Emulated, `cuda` serves the CPU in this process only.
        gpu_only = candidate.backend == "cuda" or candidate.devices == {"cuda"}
        assert set(mine) <= {"passed"} or candidate.unavailable_reason() or gpu_only
    assert {r["status"] for r in items if r["item"] in ("kernels", "MiniLM checkpoint")} == {"not run"}
    timed = [r for r in items if "ms" in r]
    by_stage = {
        stage.name: {r["contestant"] for r in timed if r["stage"] == stage.name} for stage in device_check.STAGES
    }
    models = {"bertfast", "bertfast cpu", "stock eager", "stock sdpa"}
    assert by_stage["inference timings"] == by_stage["training timings"] == models
    assert by_stage["compiled stock"] == {"bertfast", "stock sdpa", "stock compiled"}
    assert {"torch", "GEMM"} <= by_stage["op timings"] <= {*backends.BACKENDS, "GEMM"}
    assert all(0 < r["ms"]["p10"] <= r["ms"]["median"] <= r["ms"]["p90"] for r in timed)
    assert all(r["cell"] in done.stdout and f"{r['ms']['median']:.3f}" in done.stdout for r in timed)
    kernels = [r for r in items if "profile" in r]
    assert len({r["profile"] for r in kernels}) == 2 and all(r["profile"] in done.stdout for r in kernels)


def test_a_bare_checkout_is_enough(tmp_path):
    tree = copy_tree(tmp_path / "tree")
    arguments = ("benchmarks/device_check.py", "--rehearse", "--only", "environment")
    run_python(*arguments, cwd=tree)
    (source,) = (r for r in device_check.read(tree / "build" / "device_check.jsonl") if r.get("item") == "source")
    assert source["package"] == str(tree / "bertfast" / "__init__.py") and len(source["sha256"]) == 64


def test_an_installed_one_checks_what_is_installed(tmp_path):
    package = copy_installation(tmp_path / "site")
    arguments = ("-m", "bertfast.benchmarks.device_check", "--rehearse", "--only", "environment", "--only", "row ops")
    run_python(*arguments, "--output", "out.jsonl", cwd=tmp_path, path=(tmp_path / "site",))
    records = device_check.read(tmp_path / "out.jsonl")
    assert next(r for r in records if r.get("item") == "source")["package"] == str(package / "__init__.py")
    assert "checkout" in next(r for r in records if r.get("item") == "parity")["reason"]


def test_torn_lines_are_passed_over(tmp_path):
    path = tmp_path / "out.jsonl"
    device_check.append(path, {"kind": "item"})
    with path.open("a") as file:
        file.write('{"kind": "ite')
    assert [r["kind"] for r in device_check.read(path)] == ["item"]


@pytest.mark.parametrize("op", backends.OPS)
def test_full_size_cases_can_be_made_and_called(op):
    made = device_parity.cases(op, small=False)
    assert len(made) >= 3
    for make in made.values():
        case = make(torch.bfloat16)
        with torch.no_grad():
            assert all(out.isfinite().all() for out in case.ours(case.inputs, "torch").values())


@pytest.mark.parametrize("op", [op for op in backends.OPS if op != "varlen_attention"])
def test_cases_keep_to_one_device(op):
    """On the meta device, as no GPU is here; varlen_attention reads lengths, which nothing there has."""
    for make in device_parity.cases(op, small=True).values():
        case = device_parity.on_device(make(torch.float32), "meta")
        cotangents = {name: torch.empty_like(out) for name, out in case.ours(case.inputs, "torch").items()}
        ours = tolerance.run(lambda inputs, case=case: case.ours(inputs, "torch"), case.inputs, cotangents)
        inputs, upstream = tolerance.to_double(case.inputs), tolerance.to_double(cotangents)
        exact = tolerance.run(case.exact, inputs, upstream)
        noise = case.noise(inputs, upstream, exact, ours)
        stocks = [tolerance.run(stock, case.inputs, cotangents) for stock in case.stocks()]
        for results in (ours, exact, *stocks):
            assert {out.device.type for out in results.values()} == {"meta"}
        assert {noise[name].device.type for name in exact} == {"meta"}


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_half_filled_batches_are(batch):
    mask = device_models.batch_of(batch, 128, "half filled", "cpu")["attention_mask"]
    assert mask.sum() == batch * 64 and (mask[:, 0] == 1).all()
    assert device_models.batch_of(batch, 128, "dense", "cpu")["attention_mask"].all()


@pytest.fixture
def stock():
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 40}
    return device_models.stock_model(**sizes)


def test_a_wrong_result_is_not_timed(report, stock):
    models = device_models.models_of(stock, torch.float32, "cpu")
    with torch.no_grad():
        models["bertfast"].encoder.layer[0].output.LayerNorm.weight *= 1.01
        inputs = device_models.batch_of(2, 8, "half filled", "cpu")
        device_timings._inference(report, device_timings.REHEARSAL, models, "cell", inputs)
    records = device_check.read(report.path)
    assert [r["item"] for r in records] == ["cell, bertfast", "cell, bertfast cpu"]
    assert all(r["status"] == "failed" and "not timed" in r["reason"] for r in records)


def test_a_backend_that_is_wrong_loses_its_own_number_only(report, stock, monkeypatch):
    models = device_models.models_of(stock, torch.float32, "cpu")
    inputs = device_models.batch_of(2, 8, "dense", "cpu")
    pinned = device_models._pinned
    monkeypatch.setattr(device_models, "_pinned", lambda call, name: lambda: pinned(call, name)() + 1e-2)
    with torch.no_grad():
        device_timings._inference(report, device_timings.REHEARSAL, models, "cell", inputs)
    found = {r["item"]: r["status"] for r in device_check.read(report.path)}
    measured = dict.fromkeys(("cell, bertfast", "cell, stock eager", "cell, stock sdpa"), "measured")
    assert found == {"cell, bertfast cpu": "failed", **measured}


def test_backends_are_pinned_one_by_one(monkeypatch):
    seen = []
    calls = {"bertfast": lambda: seen.append(backends.order_on("cuda")), "stock eager": lambda: None}
    made = device_models.with_backends(calls, "cuda")
    assert list(made) == ["bertfast", "bertfast triton", "bertfast cuda", "stock eager"]
    for call in made.values():
        call()
    assert seen == [backends.AUTO_ORDER["cuda"], ("triton", "torch"), ("cuda", "torch")]


def test_what_is_cut_off_is_worth_the_least():
    order = list(device_timings.FULL.order())
    assert len(order) == 20 and [dtype for dtype, *_ in order[:10]] == [torch.bfloat16] * 10
    assert [filling for _, filling, *_ in order[:10]] == ["dense"] * 5 + ["half filled"] * 5
    assert {cell[2:] for cell in order} == {(1, 128), (8, 128), (32, 128), (8, 512), (32, 512)}


def test_a_cell_that_no_time_is_left_for_says_so(tmp_path, stock, monkeypatch):
    monkeypatch.setattr(device_models, "stock_model", lambda **changes: stock)
    path = tmp_path / "out.jsonl"
    for timings in (device_timings.inference, device_timings.training):
        timings(device_check.Report(path, "timings", True, 1.0))
    assert {(r["status"], r["reason"]) for r in device_check.read(path)} == {("not run", "out of time")}


def test_the_first_timings_are_within_any_budget():
    names = [stage.name for stage in device_check.STAGES]
    before = device_check.STAGES[: names.index("inference timings")]
    assert sum(stage.limit for stage in before) <= device_check.BUDGET_SECONDS - 60


def test_the_table_has_a_line_for_each_cell():
    def timing(cell, contestant, median, gain=None, stage="timings", spread=0.0):
        ms = {"median": median, "p10": median * (1 - spread), "p90": median * (1 + spread)}
        gains = {"median": gain} if gain else None
        item = {"kind": "item", "stage": stage, "status": "measured", "item": f"{cell}, {contestant}"}
        return {**item, "cell": cell, "contestant": contestant, "ms": ms, "gain": gains}

    kernel = {"kind": "item", "stage": "profiles", "status": "measured", "item": "forward: gemm", "profile": "forward"}
    kernel |= {"kernel": "gemm", "calls": 12.0, "kernel_microseconds": 345.678, "share": 0.5}
    total = {"kind": "item", "stage": "profiles", "status": "measured", "item": "forward: all kernels"}
    total |= {"kernel_microseconds": 700.0, "kernels": 84.0, "idle": 0.125}
    records = [
        timing("(1,128)", "bertfast", 1.0),
        timing("(1,128)", "stock", 3.0, 3.0),
        timing("(8,128)", "bertfast", 2.0, spread=0.2),
        timing("GEMM", "torch", 0.5, stage="ops"),
        total,
        kernel,
    ]
    lines = [line.split() for line in device_check.table(records).splitlines()]
    for line in (
        "timings, ms bertfast stock",
        "(1,128) 1.000 3.000 3.00x",
        "(8,128) ~2.000",
        "ops, ms torch",
        "GEMM 0.500",
        "gemm 12 345.7 50.0%",
        "all 84 700.0 idle 12% of a call",
    ):
        assert line.split() in lines, line


@pytest.mark.parametrize(
    ("kernels", "installed", "status", "reason"),
    [
        (False, True, "not run", "no Triton or CUDA kernels"),
        (True, False, "not run", "not installed"),
        (True, True, "failed", "exit code 86: a race in memcheck"),
    ],
)
def test_compute_sanitizer(monkeypatch, tmp_path, kernels, installed, status, reason):
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "a race in $2"\nexit 86\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"] if installed else os.environ["PATH"])
    kernel = backends.Capability("attention", "triton", lambda: None)
    monkeypatch.setattr(backends, "candidates", lambda: [kernel] if kernels else [])
    path = tmp_path / "out.jsonl"
    device_stages.compute_sanitizer(device_check.Report(path, "compute-sanitizer", False, 60.0))
    records = device_check.read(path)
    assert [r["item"] for r in records] == list(device_stages.SANITIZER_TOOLS)
    assert {r["status"] for r in records} == {status} and reason in records[0]["reason"]


@pytest.mark.parametrize(
    ("said", "status", "reason"),
    [
        ("========= COMPUTE-SANITIZER", "not run", "without a finding in 1 cases"),
        ("========= Invalid __global__ read", "failed", "killed after 1 s: ========= Invalid __global__ read"),
    ],
)
def test_compute_sanitizer_out_of_time(monkeypatch, tmp_path, said, status, reason):
    """It is 50 times slower than the kernels alone; what it has seen until then counts."""
    item = json.dumps({"kind": "item", "item": "one", "status": "passed"})
    script = tmp_path / "sanitizer"
    script.write_text(
        f"#!{sys.executable}\nimport sys, time\n"
        f"open(sys.argv[sys.argv.index('--output') + 1], 'w').write({item!r} + '\\n')\n"
        f"print({said!r}, flush=True)\ntime.sleep(60)\n"
    )
    script.chmod(0o755)
    path = tmp_path / "out.jsonl"
    report = device_check.Report(path, "compute-sanitizer", False, 60.0)
    device_stages._sanitize(report, str(script), "memcheck", 1.0)
    (record,) = device_check.read(path)
    assert record["status"] == status and reason in record["reason"]


def test_kernels_for_a_tool_run_forward_and_backward(report, monkeypatch):
    """On small inputs, and on ours only."""
    monkeypatch.setattr(device_parity, "DTYPES", (torch.float32,))
    monkeypatch.setattr(device_parity, "GPU_BACKENDS", ("cpu",))
    device_parity.gpu_kernels(report)
    found = {r["item"]: r for r in device_check.read(report.path)}
    assert {r["status"] for r in found.values()} == {"passed"} and "add_layer_norm dropout float32 cpu" in found
    assert len(found) == sum(c.backend == "cpu" for c in backends.candidates())
