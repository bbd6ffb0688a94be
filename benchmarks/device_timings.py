"""Timings of whole models on the device: bertfast by its automatic choice and on each of its backends, stock eager and
stock SDPA in turn, after a parity gate. Of training, whose gradients the parity stages compare, losses are looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from bertfast.benchmarks import device_models
from bertfast.benchmarks.device_check import Report
from bertfast.benchmarks.device_stages import card

# A cell that is begun with less left would be cut short by the stage's limit.
CELL_SECONDS = 6.0
FILLINGS = ("dense", "half filled")


@dataclass(frozen=True)
class Plan:
    """How much is timed.

    Attributes:
        config: changes to bert-base.
        cells: (B, S), those of inference and of training.
        dtypes: of inference, and of autocast in training, whose parameters are fp32; the most valuable first.
        rounds, min_seconds: of `measure.interleave`.
    """

    config: Mapping[str, int]
    cells: tuple[tuple[int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    rounds: int
    min_seconds: float

    def order(self) -> Iterator[tuple[torch.dtype, str, int, int]]:
        """dtype, filling, B and S, so that what is cut off at the end is what would be missed least."""
        for dtype, filling, (batch, seqlen) in itertools.product(self.dtypes, FILLINGS, self.cells):
            yield dtype, filling, batch, seqlen


# 20 cells of five contestants. If an H200 takes three times the floor of what a pass computes and moves, and 5 ms for
# the launches of a forward, the rounds of a cell take 0.8 s, in training 1 to 2 s; gates and first calls come on top.
FULL = Plan(
    config={},
    cells=((8, 128), (32, 128), (1, 128), (32, 512), (8, 512)),
    dtypes=(torch.bfloat16, torch.float16),
    rounds=11,
    min_seconds=0.012,
)
REHEARSAL = Plan(
    config=device_models.TINY, cells=((1, 16), (2, 24)), dtypes=(torch.bfloat16,), rounds=2, min_seconds=0.0
)


def inference(report: Report) -> None:
    """Forward, dense and half filled, bert-base with random weights."""
    plan = REHEARSAL if report.rehearse else FULL
    torch.manual_seed(0)
    stock = device_models.stock_model(**plan.config)
    models: dict[str, nn.Module] = {}
    for dtype, filling, batch, seqlen in plan.order():
        item = f"forward ({batch},{seqlen}) {filling} {_name(dtype)}"
        if report.seconds_left() < CELL_SECONDS:
            report.not_run(item, "out of time")
            continue
        with report.guard(item), torch.inference_mode():
            if not models or models["bertfast"].dtype != dtype:
                models.clear()
                device_models.release(report.device)
                models |= device_models.models_of(stock, dtype, report.device)
            _inference(report, plan, models, item, device_models.batch_of(batch, seqlen, filling, report.device))
    if report.device == "cuda":
        report.measured("card after the timings", **card())


def _inference(report, plan, models, item, inputs) -> None:
    calls = {name: device_models.forward(model, inputs) for name, model in models.items()}
    calls = device_models.with_backends(calls, report.device)
    calls = device_models.right(report, item, models[device_models.BASELINE], calls, inputs)
    _time(report, plan, item, calls, inputs)


def training(report: Report) -> None:
    """Forward under autocast and backward, dense and half filled, fp32 parameters."""
    plan = REHEARSAL if report.rehearse else FULL
    torch.manual_seed(0)
    stock = device_models.stock_model(**plan.config)
    models = device_models.models_of(stock, torch.float32, report.device)
    models = {name: model.train() for name, model in models.items()}
    for dtype, filling, batch, seqlen in plan.order():
        item = f"forward and backward ({batch},{seqlen}) {filling} autocast {_name(dtype)}"
        if report.seconds_left() < CELL_SECONDS:
            report.not_run(item, "out of time")
            continue
        with report.guard(item):
            inputs = device_models.batch_of(batch, seqlen, filling, report.device)
            calls = {name: device_models.step(model, inputs, dtype) for name, model in models.items()}
            calls = device_models.with_backends(calls, report.device)
            losses = {name: call().item() for name, call in calls.items()}
            for name in [name for name, loss in losses.items() if not math.isfinite(loss)]:
                report.failed(f"{item}, {name}", f"not timed: the loss is {losses[name]}")
                del calls[name]
            _time(report, plan, item, calls, inputs)


def _time(report, plan, item, calls, inputs) -> None:
    if calls:
        tokens = int(inputs["attention_mask"].sum())
        device_models.time_in_turn(report, item, calls, tokens, plan.rounds, plan.min_seconds)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
