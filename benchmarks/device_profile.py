"""What the device's time goes to, kernel by kernel: bertfast's forward and training step under torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from bertfast.benchmarks import device_models, measure
from bertfast.benchmarks.device_check import Report

DTYPE = torch.bfloat16
FORWARD, TRAINING = ((8, 128), (32, 512)), (32, 128)
CALLS, WARM_UPS = 10, 3
MOST_KERNELS = 15
# Of names, which are C++ templates with all of their arguments; what tells them apart stands first.
LONGEST_NAME = 120
# A profile that is begun with less left would be cut short by the stage's limit.
PROFILE_SECONDS = 5.0


def profiles(report: Report) -> None:
    """The kernels that take the most time, and the share of a call in which the device is idle."""
    torch.manual_seed(0)
    for title, call in _calls(report):
        if report.seconds_left() < PROFILE_SECONDS:
            report.not_run(title, "out of time")
            continue
        with report.guard(title):
            _profile(report, title, call)


def _calls(report: Report) -> Iterator[tuple[str, Callable[[], object]]]:
    stock = device_models.stock_model(**(device_models.TINY if report.rehearse else {}))
    cells, last = (((1, 16),), (1, 16)) if report.rehearse else (FORWARD, TRAINING)
    model = device_models.models_of(stock, DTYPE, report.device)["bertfast"]
    for batch, seqlen in cells:
        inputs = device_models.batch_of(batch, seqlen, "dense", report.device)
        yield f"forward ({batch},{seqlen})", torch.no_grad()(device_models.forward(model, inputs))
    model = device_models.models_of(stock, torch.float32, report.device)["bertfast"].train()
    inputs = device_models.batch_of(*last, "dense", report.device)
    yield "training step ({},{})".format(*last), device_models.step(model, inputs, DTYPE)


def _profile(report: Report, title: str, call: Callable[[], object]) -> None:
    on_gpu = report.device == "cuda"
    stopwatch = measure.cuda_stopwatch if on_gpu else None
    for _ in range(WARM_UPS):
        call()
    # Not under the profiler, which makes launches slower.
    (timing,) = measure.interleave({title: call}, rounds=5, min_seconds=0.0, stopwatch=stopwatch).values()
    microseconds = 1e6 * timing.quantiles.median
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(CALLS):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    kernels = kernels_of(profiler.key_averages(), on_gpu)
    if not kernels:
        report.not_run(title, "the profiler saw no kernel: it may not be allowed to here")
        return
    total = sum(spent for _, _, spent in kernels)
    busy = total / CALLS
    report.measured(
        f"{title}: all kernels",
        microseconds=microseconds,
        kernel_microseconds=busy,
        kernels=sum(count for _, count, _ in kernels) / CALLS,
        # Kernels that run side by side may add up to more than the time that they take.
        idle=max(0.0, 1 - busy / microseconds),
    )
    for name, count, spent in kernels[:MOST_KERNELS]:
        report.measured(
            f"{title}: {name[:LONGEST_NAME]}",
            profile=title,
            kernel=name,
            calls=count / CALLS,
            kernel_microseconds=spent / CALLS,
            share=spent / total,
        )


def kernels_of(averages, on_gpu: bool) -> list[tuple[str, int, float]]:
    """Name, calls and microseconds of a profile's `key_averages()`, those that took longest first: kernels and copies
    of the GPU, or operators of the CPU without those that they call."""
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    found = [
        (event.key, event.count, event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        for event in averages
        if event.device_type == device and not getattr(event, "is_user_annotation", False)
    ]
    return sorted((kernel for kernel in found if kernel[2] > 0), key=lambda kernel: -kernel[2])
