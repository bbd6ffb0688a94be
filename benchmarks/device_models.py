"""What the device check times: bert-base with random weights, bertfast's and stock's, its batches, and the gate that
keeps a wrong result from being timed."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

import bertfast
from bertfast import backends
from bertfast.benchmarks import measure
from bertfast.benchmarks.device_check import Report

VOCAB = 30522
TINY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
BASELINE = "stock eager"
YARDSTICKS = (BASELINE, "stock sdpa")
Call = Callable[[], Any]
Calls = dict[str, Call]


def stock_model(**changes: int) -> nn.Module:
    """transformers' bert-base, with changes to its configuration, in eval mode."""
    import transformers

    config = transformers.BertConfig(vocab_size=VOCAB, **changes)
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def models_of(stock: nn.Module, dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    """bertfast, stock eager and stock SDPA, with the same weights."""
    ours = bertfast.BertModel(bertfast.BertConfig(**stock.config.to_dict()), add_pooling_layer=False).eval()
    ours.load_state_dict(stock.state_dict())
    models = {"bertfast": ours}
    for attention in ("eager", "sdpa"):
        models[f"stock {attention}"] = copy.deepcopy(stock)
        models[f"stock {attention}"].set_attn_implementation(attention)
    return {name: model.to(device, dtype) for name, model in models.items()}


def release(device: str) -> None:
    """Gives back the memory of what has been dropped."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def batch_of(batch: int, seqlen: int, filling: str, device: str) -> dict[str, Tensor]:
    """Random ids and their mask. Half filled: lengths spread evenly between 0 and S, so that half of B S are tokens."""
    generator = torch.Generator().manual_seed(batch * seqlen)
    ids = torch.randint(1000, VOCAB, (batch, seqlen), generator=generator)
    if filling == "dense":
        lengths = torch.full((batch,), seqlen)
    else:
        lengths = ((torch.arange(batch) + 0.5) * seqlen / batch).ceil().long()
    mask = (torch.arange(seqlen) < lengths[:, None]).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def forward(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    """The last hidden state."""
    return lambda: model(**inputs).last_hidden_state


def step(model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Forward under autocast and backward of a model in training mode: dropout is on. Returns the loss."""
    shape = (*inputs["input_ids"].shape, model.config.hidden_size)
    weight = torch.randn(shape, device=inputs["input_ids"].device) * inputs["attention_mask"].unsqueeze(-1)

    def call() -> Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast(weight.device.type, dtype):
            loss = (model(**inputs).last_hidden_state * weight).mean()
        loss.backward()
        return loss.detach()

    return call


def with_backends(calls: Calls, device: str) -> Calls:
    """`calls`, and bertfast's once more on each backend that has kernels for the device, where PyTorch serves what the
    backend does not: which of them is the faster one, and whether the automatic choice is as fast."""
    kernels = [name for name in backends.AUTO_ORDER[device] if name != "torch"]
    ours = {f"bertfast {name}": _pinned(calls["bertfast"], name) for name in kernels}
    return {"bertfast": calls["bertfast"], **ours, **calls}


def _pinned(call: Call, backend: str) -> Call:
    def run() -> Any:
        with backends.use_backend(backend, "torch"):
            return call()

    return run


def right(report: Report, item: str, stock: nn.Module, calls: Calls, inputs: dict[str, Tensor]) -> Calls:
    """No number for a wrong result: those of `calls` whose error against float64 is at most twice that of the larger
    of `YARDSTICKS`, plus rounding. The others fail, and without a right result of the automatic choice nothing is left
    to compare."""
    real = inputs["attention_mask"].bool()
    exact = copy.deepcopy(stock).double()(**inputs).last_hidden_state[real]
    errors = {
        name: (call()[real].double() - exact).abs().nan_to_num(nan=math.inf).max().item()
        for name, call in calls.items()
    }
    of_stock = max(errors[name] for name in YARDSTICKS if name in errors)
    limit = 2 * of_stock + torch.finfo(stock.dtype).eps * exact.abs().max().item()
    wrong = [name for name, error in errors.items() if not error <= limit < math.inf]
    for name in wrong:
        report.failed(f"{item}, {name}", f"not timed: the error is {errors[name]:.3g}, more than {limit:.3g}")
    return {} if "bertfast" in wrong else {name: call for name, call in calls.items() if name not in wrong}


def time_in_turn(
    report: Report, item: str, calls: Mapping[str, Call], tokens: int, rounds: int, min_seconds: float
) -> dict[str, measure.Timing]:
    """Times `calls`, one of which is bertfast, and writes what each took."""
    stopwatch = measure.cuda_stopwatch if report.device == "cuda" else None
    taken = measure.interleave(calls, rounds=rounds, min_seconds=min_seconds, stopwatch=stopwatch)
    for name, timing in taken.items():
        quantiles = timing.quantiles
        report.measured(
            f"{item}, {name}",
            cell=item,
            contestant=name,
            ms={key: 1e3 * value for key, value in asdict(quantiles).items()},
            tokens=tokens,
            tokens_per_second=tokens / quantiles.median,
            gain=None if name == "bertfast" else asdict(taken["bertfast"].speedup_over(timing)),
            rounds=rounds,
        )
    return taken
