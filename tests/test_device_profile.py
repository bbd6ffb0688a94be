"""The device check's profiles and its race against compiled stock, as far as a CPU and stand-ins show them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from bertfast.benchmarks import device_check, device_compiled, device_models, device_profile, graphs
from helpers.fake_graphs import FakeCuda

pytest.importorskip("transformers")


@pytest.fixture
def report(tmp_path):
    report = device_check.Report(tmp_path / "out.jsonl", "stage", True, 100.0)
    report.found = lambda: {r["item"]: r for r in device_check.read(tmp_path / "out.jsonl")}
    return report


def event(name: str, device: DeviceType, microseconds: float, count: int = 2, annotation: bool = False):
    on_gpu = device == DeviceType.CUDA
    times = {"self_device_time_total": microseconds if on_gpu else 0.0, "self_cpu_time_total": 0.0}
    times["self_cpu_time_total"] = 0.0 if on_gpu else microseconds
    return SimpleNamespace(key=name, count=count, device_type=device, is_user_annotation=annotation, **times)


def test_kernels_are_those_of_the_device_longest_first():
    events = [
        event("aten::mm", DeviceType.CPU, 50.0),
        event("layer_norm_fwd_kernel", DeviceType.CUDA, 10.0),
        event("gemm", DeviceType.CUDA, 30.0, count=8),
        event("ProfilerStep", DeviceType.CUDA, 99.0, annotation=True),
        event("Memset", DeviceType.CUDA, 0.0),
    ]
    assert device_profile.kernels_of(events, True) == [("gemm", 8, 30.0), ("layer_norm_fwd_kernel", 2, 10.0)]
    assert device_profile.kernels_of(events, False) == [("aten::mm", 2, 50.0)]


def test_a_profile_counts_a_call(report, monkeypatch):
    calls = []

    def call():
        calls.append(0)
        time.sleep(1e-3)

    kernels = [(f"kernel {i}", device_profile.CALLS, 1000.0 * (20 - i)) for i in range(20)]
    monkeypatch.setattr(device_profile, "kernels_of", lambda averages, on_gpu: kernels)
    device_profile._profile(report, "forward", call)
    found = report.found()
    assert len(found) == 1 + device_profile.MOST_KERNELS and len(calls) > device_profile.CALLS
    first, total = found["forward: kernel 0"], found["forward: all kernels"]
    assert (first["calls"], first["kernel_microseconds"], first["share"]) == (1.0, 2000.0, 20 / 210)
    assert (total["kernels"], total["kernel_microseconds"], total["idle"]) == (20.0, 21000.0, 0.0)


def test_the_idle_share_is_what_no_kernel_takes(report, monkeypatch):
    monkeypatch.setattr(device_profile, "kernels_of", lambda averages, on_gpu: [("kernel", 1, 1000.0)])
    device_profile._profile(report, "forward", lambda: time.sleep(2e-3))
    assert 0.9 < report.found()["forward: all kernels"]["idle"] < 1


def test_a_profiler_that_sees_nothing_is_not_run(report, monkeypatch):
    monkeypatch.setattr(device_profile, "kernels_of", lambda averages, on_gpu: [])
    device_profile._profile(report, "forward", lambda: None)
    (record,) = report.found().values()
    assert record["status"] == "not run" and "saw no kernel" in record["reason"]


@pytest.fixture
def cuda(monkeypatch):
    """Calls stay on the CPU; captures and replays are a stand-in's, so a replay leaves what was recorded."""
    monkeypatch.setattr(device_compiled, "_add_graph", add_graph_on_cpu)
    device_models.stock_model(**device_models.TINY)
    return FakeCuda().install(monkeypatch)


add_graph = device_compiled._add_graph


def add_graph_on_cpu(report, item, name, calls):
    add_graph(SimpleNamespace(device="cuda", not_run=report.not_run), item, name, calls)


def test_calls_and_replays_are_timed_side_by_side(report, cuda):
    device_compiled.timings(report)
    found = report.found()
    cell = "forward (1,16) dense bfloat16"
    assert found[f"{cell}, compiling"]["seconds"] > 0
    contestants = ["bertfast", "stock sdpa", "stock compiled", "bertfast, graph", "stock sdpa, graph"]
    assert [r["contestant"] for r in found.values() if r.get("cell") == cell] == contestants
    assert found[f"{cell}, bertfast, graph over stock compiled"]["gain_of_graph"]["median"] > 0
    begun = [line for line in cuda.log if line.startswith("begin")]
    assert begun == ["begin 0", "begin 1", "begin 2", "begin 3"] and cuda.stream is cuda.default


def test_what_cannot_be_recorded_has_no_number(report, cuda, monkeypatch):
    def refused(call):
        raise graphs.CannotCapture("cannot be recorded in a CUDA graph: it waits")

    monkeypatch.setattr(graphs, "capture", refused)
    device_compiled.timings(report)
    record = report.found()["forward (1,16) dense bfloat16, bertfast, graph"]
    assert (record["status"], record["reason"]) == ("not run", "cannot be recorded in a CUDA graph: it waits")


def test_a_wrong_replay_is_not_timed(report, monkeypatch):
    def add(report, item, name, calls):
        calls[name + device_compiled.SUFFIX] = lambda: calls[name]() + 1

    monkeypatch.setattr(device_compiled, "_add_graph", add)
    device_compiled.timings(report)
    found = report.found()
    assert "not timed" in found["forward (1,16) dense bfloat16, bertfast, graph"]["reason"]
    assert found["forward (1,16) dense bfloat16, bertfast"]["status"] == "measured"


def test_a_second_cell_needs_the_time_of_the_first(report, monkeypatch):
    """Its compilation is as long."""
    monkeypatch.setattr(
        device_compiled, "_compiled", lambda report, model, inputs: (1000.0, device_models.forward(model, inputs))
    )
    device_compiled.timings(report)
    record = report.found()["forward (2,16) dense bfloat16"]
    assert record["status"] == "not run" and record["reason"].startswith("out of time: compiling and timing takes 1008")


def test_the_device_compiles_with_max_autotune(monkeypatch):
    options = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **given: options.append(given))
    stock = device_models.stock_model(**device_models.TINY)
    inputs = device_models.batch_of(1, 8, "dense", "cpu")
    for rehearse in (False, True):
        device_compiled._compiled(SimpleNamespace(rehearse=rehearse, device="cpu"), stock, inputs)
    assert options == [{"dynamic": False, "mode": "max-autotune"}, {"dynamic": False, "backend": "eager"}]
