"""Stages of `device_check` around the parity and the timings: the machine, the build, streams and graphs, memory."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

from bertfast.benchmarks.device_check import IN_CHECKOUT, ROOT, Report, Stage, command_of, read

LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pybind11", "ninja", "setuptools")
CLOCKS = "name,driver_version,compute_cap,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
SANITIZER_TOOLS = ("memcheck", "racecheck")
SANITIZER_EXIT = 86  # any number that a Python process does not end with by itself


def environment(report: Report) -> None:
    """Card, clocks, driver, versions, commit; and that torch can compute on the device at all."""
    import torch

    import bertfast
    from bertfast.benchmarks import measure

    report.measured("machine", **measure.machine())
    report.measured("versions", python=platform.python_version(), **{name: _version(name) for name in LIBRARIES})
    facts = {"commit": _commit(), "sha256": _digest()} if IN_CHECKOUT else {}
    report.measured("source", package=bertfast.__file__, version=bertfast.__version__, **facts)
    if report.device == "cuda":
        if not torch.cuda.is_available():
            report.failed("GPU", "torch sees no NVIDIA GPU here; --rehearse runs on the CPU")
            return
        report.measured("card", **card())
        properties = torch.cuda.get_device_properties(0)
        report.measured(
            "GPU",
            name=properties.name,
            capability=list(torch.cuda.get_device_capability(0)),
            multiprocessors=properties.multi_processor_count,
            memory=properties.total_memory,
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
        )
    x = torch.arange(64.0, device=report.device).view(8, 8)
    report.check("arithmetic", (x @ x.T).sum().item() == 510720.0, "a product of small integers is wrong")


def card() -> dict[str, str]:
    """What nvidia-smi says of the first card: name, driver, clocks, power limit, temperature."""
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": str(error)}
    return dict(zip(CLOCKS.split(","), done.stdout.strip().split(", "), strict=False))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _digest() -> str:
    """Of what is measured: names a tree that came without its history."""
    total = hashlib.sha256()
    for folder in ("bertfast", "benchmarks", "csrc", "kernels"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh"):
                total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def build(report: Report) -> None:
    """Builds the extension for this card only, in place, and loads it.

    A rehearsal builds elsewhere and without a compiler: compiling takes minutes on two cores.
    """
    if not IN_CHECKOUT:
        report.not_run("build", "this is an installed bertfast, not a checkout; what is installed is checked")
        return
    environment = dict(os.environ)
    environment.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    if report.rehearse:
        report.not_run("kernels", "a rehearsal builds the pure-Python package")
        mode, expected = "none", "not_built"
    else:
        import torch

        environment["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability(0))
        mode, expected = "cuda" if list((ROOT / "csrc" / "cuda").glob("*.cu")) else "cpu", "loaded"
        if mode == "cpu":
            report.not_run("CUDA kernels", "csrc has CPU kernels only: there are no CUDA kernels yet")
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "setup.py", "--quiet", "build", f"--build-base={scratch}"]
        command += [f"--build-lib={scratch}/lib"] if report.rehearse else ["build_ext", "--inplace"]
        with report.guard("build"):
            environment["BERTFAST_BUILD"] = mode
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            said = (done.stdout + done.stderr).strip()
            report.check("build", done.returncode == 0, said[-1000:], mode=mode)
        with report.guard("load"):
            folder = Path(scratch, "lib") if report.rehearse else ROOT
            report.check("load", *_loads(folder, expected))


def _loads(folder: Path, expected: str) -> tuple[bool, str]:
    """Whether the extension in `folder` is as `expected`, seen by a process of its own, and what it is instead."""
    code = "from bertfast import _extension as e; print(e.STATUS.state, e.verify_hash(), e.__file__, e.STATUS.reason)"
    if folder == ROOT:
        benchmarks = str(ROOT / "benchmarks")
        code = f"import sys; sys.path.insert(0, {benchmarks!r}); import device_check as d; d.use_checkout(); {code}"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    good = done.stdout.startswith(f"{expected} {expected == 'loaded'} {folder}")
    return good, (done.stdout + done.stderr).strip()[-1000:]


def streams_and_graphs(report: Report) -> None:
    """One synchronisation per packed forward, other streams, capture and replay."""
    import torch

    import bertfast
    from bertfast.benchmarks import graphs

    torch.manual_seed(0)
    config = bertfast.PRESETS["bert-base"]()
    config.num_hidden_layers = 2
    model = bertfast.BertModel(config).to("cuda", torch.float16).eval()
    ids = torch.randint(1000, 20000, (4, 64), device="cuda")
    mask = (torch.arange(64, device="cuda") < torch.tensor([[64], [40], [1], [33]], device="cuda")).long()
    with torch.no_grad():
        with report.guard("one synchronisation"):
            model(ids, mask)
            found = _synchronisations(lambda: model(ids, mask))
            report.check("one synchronisation", len(found) == 1, f"{len(found)} in a packed forward", found=found)
        with report.guard("no synchronisation without a mask"):
            found = _synchronisations(lambda: model(ids))
            report.check("no synchronisation without a mask", not found, f"{len(found)} in a forward", found=found)
        with report.guard("another stream"):
            _another_stream(report, model, ids, mask)
        with report.guard("graph"):
            _graph(report, model, ids, mask)
        with report.guard("graph with dropout"):
            model.train()
            replay = graphs.capture(lambda: model(ids).last_hidden_state)
            first, second = replay().clone(), replay().clone()
            changes = bool(first.isfinite().all() and second.isfinite().all() and not torch.equal(first, second))
            report.check("graph with dropout", changes, "two replays dropped the same elements")


def _synchronisations(call) -> list[str]:
    import torch

    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(w.message)[:200] for w in caught if "called a synchronizing" in str(w.message)]


def _another_stream(report: Report, model, ids, mask) -> None:
    """Inputs made on a side stream behind work that keeps it busy: a kernel on another stream reads them too early."""
    import torch

    expected = model(ids, mask).last_hidden_state
    delay = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late_ids, late_mask = torch.zeros_like(ids), torch.zeros_like(mask)
        for _ in range(20):
            delay = delay @ delay * 1e-3
        late_ids.copy_(ids)
        late_mask.copy_(mask)
        got = model(late_ids, late_mask).last_hidden_state
    stream.synchronize()
    report.check("another stream", torch.equal(got, expected), "the result differs from that of the default stream")


def _graph(report: Report, model, ids, mask) -> None:
    """Captured on one batch and replayed on another. Libraries may pick other kernels under capture, so the result has
    to be as near to float64 as the eager one is, not bit-equal."""
    import copy

    import torch

    from bertfast.benchmarks import graphs

    static_ids, static_mask = ids.clone(), mask.clone()
    replay = graphs.capture(lambda: model(static_ids, static_mask).last_hidden_state)
    static_ids.copy_(ids.flip(0))
    static_mask.copy_(mask.flip(0))
    got = replay()
    exact = copy.deepcopy(model).double()(static_ids, static_mask).last_hidden_state
    eager_error, error = (
        (out - exact).abs().nan_to_num(nan=torch.inf).max().item()
        for out in (model(static_ids, static_mask).last_hidden_state, got)
    )
    limit = 2 * eager_error + torch.finfo(got.dtype).eps * exact.abs().max().item()
    report.check("graph", error <= limit, f"error {error:.3g} > {limit:.3g}", error=str(error), limit=str(limit))
    report.check("graph, padded rows", not got[static_mask == 0].any().item(), "padded rows are not 0")


def compute_sanitizer(report: Report) -> None:
    """Our own GPU kernels on small inputs under memcheck and racecheck."""
    from bertfast import backends

    kernels = [c for c in backends.candidates() if c.backend in ("triton", "cuda") and not c.unavailable_reason()]
    program = shutil.which("compute-sanitizer")
    for i, tool in enumerate(SANITIZER_TOOLS):
        if not kernels:
            report.not_run(tool, "there are no Triton or CUDA kernels yet")
        elif program is None:
            report.not_run(tool, "compute-sanitizer is not installed")
        else:
            with report.guard(tool):
                # The last seconds are for ending.
                _sanitize(report, program, tool, (report.seconds_left() - 4) / (len(SANITIZER_TOOLS) - i))


def _sanitize(report: Report, program: str, tool: str, limit: float) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "results.jsonl")
        stage = Stage(tool, "bertfast.benchmarks.device_parity:gpu_kernels", limit)
        watched = command_of(stage, output, False, limit)
        command = [program, "--tool", tool, f"--error-exitcode={SANITIZER_EXIT}", "--print-limit=5", *watched]
        # Into a file: what a killed tool leaves behind would keep a pipe open.
        with open(Path(scratch, "said"), "w+b") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
            try:
                ended = f"exit code {process.wait(limit)}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                ended = ""
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
        records = read(output) if output.exists() else []
        cases = [record["item"] for record in records if record["kind"] == "item" and record["status"] == "passed"]
        if not ended and not _has_findings(text):
            report.not_run(tool, f"not at its end after {limit:.0f} s, without a finding in {len(cases)} cases")
            return
        finished = any(record["kind"] == "finished" for record in records)
        good = bool(ended) and process.returncode == 0 and finished
        report.check(tool, good, f"{ended or f'killed after {limit:.0f} s'}: {text[-1500:]}", cases=len(cases))


def _has_findings(text: str) -> bool:
    """Whether compute-sanitizer said more than its name."""
    lines = (line for line in text.splitlines() if line.startswith("========="))
    return any("COMPUTE-SANITIZER" not in line for line in lines)
