"""Timings against the best that PyTorch makes of stock: SDPA under torch.compile(mode="max-autotune").

That mode replays CUDA graphs, so that launches cost it nothing: bertfast and stock are timed as calls and as replays.
Two cells, as each is compiled for itself, which takes a minute.
"""

from __future__ import annotations

import copy
import time
from dataclasses import asdict

import torch
from torch import Tensor, nn

from bertfast.benchmarks import device_models, graphs, measure
from bertfast.benchmarks.device_check import Report

DTYPE = torch.bfloat16
CELLS = ((8, 128), (32, 128))
COMPILED, SUFFIX = "stock compiled", ", graph"
ROUNDS, MIN_SECONDS = 11, 0.012
# What the timing of a cell takes behind its compilation.
TIMING_SECONDS = 8.0
# torch.compile's first calls compile, warm up and record.
FIRST_CALLS = 3


def timings(report: Report) -> None:
    """Forward, dense: bertfast, stock SDPA and stock compiled, as calls and as replays of CUDA graphs."""
    torch.manual_seed(0)
    stock = device_models.stock_model(**(device_models.TINY if report.rehearse else {}))
    models = device_models.models_of(stock, DTYPE, report.device)
    cells = ((1, 16), (2, 16)) if report.rehearse else CELLS
    needed = TIMING_SECONDS
    for batch, seqlen in cells:
        item = f"forward ({batch},{seqlen}) dense bfloat16"
        if report.seconds_left() < needed:
            report.not_run(item, f"out of time: compiling and timing takes {needed:.0f} s")
            continue
        with report.guard(item), torch.no_grad():
            inputs = device_models.batch_of(batch, seqlen, "dense", report.device)
            needed = TIMING_SECONDS + _cell(report, item, models, inputs)
        device_models.release(report.device)


def _cell(report: Report, item: str, models: dict[str, nn.Module], inputs: dict[str, Tensor]) -> float:
    """Seconds that compiling took."""
    calls = {name: device_models.forward(models[name], inputs) for name in ("bertfast", "stock sdpa")}
    seconds, calls[COMPILED] = _compiled(report, models["stock sdpa"], inputs)
    report.measured(f"{item}, compiling", seconds=seconds)
    # Last: what cannot be recorded may leave CUDA in no good state.
    for name in ("bertfast", "stock sdpa"):
        _add_graph(report, item, name, calls)
    calls = device_models.right(report, item, models[device_models.BASELINE], calls, inputs)
    if calls:
        tokens = int(inputs["attention_mask"].sum())
        taken = device_models.time_in_turn(report, item, calls, tokens, ROUNDS, MIN_SECONDS)
        _graph_with_graph(report, item, taken)
    return seconds


def _compiled(report: Report, model: nn.Module, inputs: dict[str, Tensor]):
    """Seconds of the first calls of a compiled copy, and its call."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    # Inductor takes minutes on two cores; a rehearsal compiles nothing.
    options = {"backend": "eager"} if report.rehearse else {"mode": "max-autotune"}
    model.compile(dynamic=False, **options)
    call = device_models.forward(model, inputs)
    synchronize = measure.synchronizer(torch.device(report.device))
    start = time.perf_counter()
    for _ in range(FIRST_CALLS):
        call()
    if synchronize:
        synchronize()
    return time.perf_counter() - start, call


def _add_graph(report: Report, item: str, name: str, calls: device_models.Calls) -> None:
    if report.device != "cuda":
        report.not_run(f"{item}, {name}{SUFFIX}", "CUDA graphs exist on a GPU only")
        return
    try:
        calls[name + SUFFIX] = graphs.capture(calls[name])
    except graphs.CannotCapture as error:
        report.not_run(f"{item}, {name}{SUFFIX}", str(error))


def _graph_with_graph(report: Report, item: str, taken: dict[str, measure.Timing]) -> None:
    """Like with like: a replay of ours against the compiled model, which is one as well."""
    ours = taken.get("bertfast" + SUFFIX)
    if ours is not None and COMPILED in taken:
        report.measured(
            f"{item}, bertfast{SUFFIX} over {COMPILED}", gain_of_graph=asdict(ours.speedup_over(taken[COMPILED]))
        )
