"""The device check's large tensors and grids, small: each backend passes, and one that is wrong at the end does not."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial

import pytest
import torch

from bertfast import backends
from bertfast.benchmarks import device_check, device_limits


@pytest.fixture
def report(tmp_path):
    report = device_check.Report(tmp_path / "out.jsonl", "limits", True, 300.0)
    report.found = lambda: {r["item"]: r for r in device_check.read(tmp_path / "out.jsonl")}
    return report


def on_gpu_backends(monkeypatch, *names: str) -> None:
    """The emulated and interpreted kernels, on the CPU."""
    monkeypatch.setattr(device_limits, "_names", lambda report: names)


@pytest.mark.parametrize("backend", device_limits.GPU_BACKENDS)
def test_each_op_of_a_backend_is_right_at_the_end(report, monkeypatch, backend):
    on_gpu_backends(monkeypatch, backend)
    for make in (*device_limits._large_grids(1, "cpu"), *device_limits._far_offsets(2**9, 4, "cpu")):
        device_limits._compare(report, make)
    found = report.found()
    assert {r["status"] for r in found.values()} == {"passed"}, found
    expected = dict.fromkeys(backends.OPS, 2) | {"embed_layer_norm": 3}
    if backend == "cuda":
        expected |= {"linear_gelu": 4, "feed_forward": 4}
    assert {op: sum(item.startswith((f"{op},", f"{op}'s")) for item in found) for op in expected} == expected


@pytest.mark.parametrize("backend", device_limits.GPU_BACKENDS)
def test_each_op_of_a_backend_runs_in_a_new_thread(report, monkeypatch, backend):
    on_gpu_backends(monkeypatch, backend)
    device_limits._devices_and_threads(report)
    statuses = {item: r["status"] for item, r in report.found().items()}
    for op in backends.OPS:
        assert statuses.pop(f"{op} {backend} in a new thread") == "passed"
        assert statuses.pop(f"{op} {backend} on another device") == "not run"
    assert not statuses


def replaced(monkeypatch, op: str, backend: str, change) -> None:
    true = backends._capabilities[op, backend]
    wrong = dataclasses.replace(true, implementation=lambda *given: change(true.implementation(*given), *given))
    monkeypatch.setitem(backends._capabilities, (op, backend), wrong)
    monkeypatch.setattr(backends, "_choices", {})


def test_an_end_that_is_wrong_fails(report, monkeypatch):
    """As an offset of 32 bits would make it: the last rows of a large tensor only."""
    on_gpu_backends(monkeypatch, "cpu")

    def change(out, x, *_):
        return out * (torch.arange(x.shape[0])[:, None] < x.shape[0] - 1) if len(x) > 100 else out

    replaced(monkeypatch, "add_layer_norm", "cpu", change)
    device_limits._compare(report, partial(device_limits._add_layer_norm, 200, 16, "cpu", ""))
    assert report.found()["add_layer_norm, cpu"]["reason"] == (
        "out 0, dx at the end differ from those of the end alone"
    )
    device_limits._compare(report, partial(device_limits._add_layer_norm, 50, 16, "cpu", " of few rows"))
    assert report.found()["add_layer_norm of few rows, cpu"]["status"] == "passed"


def test_what_raises_in_a_thread_fails(report, monkeypatch):
    on_gpu_backends(monkeypatch, "cpu")

    def change(out, *_):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no context")
        return out

    replaced(monkeypatch, "add_layer_norm", "cpu", change)
    device_limits._devices_and_threads(report)
    found = report.found()
    assert found["add_layer_norm cpu"]["reason"] == "RuntimeError: no context"
    assert found["qkv_projection cpu in a new thread"]["status"] == "passed"


def test_full_sizes_are_beyond_the_limits():
    """Counted on the meta device."""
    widths = {"linear_gelu": 3072, "feed_forward": 3072, "qkv_projection": 3 * 768}
    far = [make() for make in device_limits._far_offsets(device_limits.FAR, 64, "meta")]
    assert {case.op for case in far} == set(backends.OPS)
    for case in far:
        first, second, *_ = case.inputs.values()
        width = widths.get(case.op, 768)
        by_rows = first.numel() * (width if case.op == "embed_layer_norm" else width // 768)
        assert max(by_rows, second.numel()) > device_limits.FAR, case.title
    grids = [make() for make in device_limits._large_grids(device_limits.GRID, "meta")]
    assert {case.op for case in grids} == set(backends.OPS)
    for case in grids:
        first, *_, last = case.inputs.values()
        blocks = {
            "attention": first.shape[0] * first.shape[1],
            "varlen_attention": len(last) - 1,
            "embed_layer_norm": first.numel() // 128,
        }
        assert blocks.get(case.op, first.shape[0] // 128) > device_limits.GRID, case.title
