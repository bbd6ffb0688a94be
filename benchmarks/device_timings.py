"""Timings of whole models on the device: bertfast, stock eager and stock SDPA in turn, after a parity gate."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import bertfast
from bertfast.benchmarks import measure
from bertfast.benchmarks.device_check import Report
from bertfast.benchmarks.device_stages import card

VOCAB = 30522
# A cell that is begun with less left would be cut short by the stage's limit.
CELL_SECONDS = 12.0


@dataclass(frozen=True)
class Plan:
    """How much is timed.

    Attributes:
        config: changes to bert-base.
        inference, training: (B, S) cells.
        dtypes: of inference; training runs in fp32 under autocast to bf16.
        rounds, min_seconds: of `measure.interleave`.
    """

    config: Mapping[str, int]
    inference: tuple[tuple[int, int], ...]
    training: tuple[tuple[int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    rounds: int
    min_seconds: float


FULL = Plan(
    config={},
    inference=((1, 128), (8, 128), (32, 128), (8, 512), (32, 512)),
    training=((32, 128), (8, 512)),
    dtypes=(torch.float16, torch.bfloat16),
    rounds=15,
    min_seconds=0.02,
)
REHEARSAL = Plan(
    config={"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96},
    inference=((1, 16), (4, 32)),
    training=((2, 16),),
    dtypes=(torch.bfloat16,),
    rounds=3,
    min_seconds=0.001,
)


def timings(report: Report) -> None:
    """Inference, then forward and backward, dense and half filled, bert-base with random weights."""
    plan = REHEARSAL if report.rehearse else FULL
    torch.manual_seed(0)
    stock = _stock(plan)
    with report.guard("inference"):
        for dtype in plan.dtypes:
            models = _models(stock, dtype, report.device)
            for batch, seqlen in plan.inference:
                for filling in ("dense", "half filled"):
                    _inference(report, plan, models, dtype, batch, seqlen, filling)
            del models
            _release(report.device)
    with report.guard("training"):
        models = {name: model.train() for name, model in _models(stock, torch.float32, report.device).items()}
        for batch, seqlen in plan.training:
            for filling in ("dense", "half filled"):
                _training(report, plan, models, batch, seqlen, filling)
    if report.device == "cuda":
        report.measured("card after the timings", **card())


def _stock(plan: Plan) -> nn.Module:
    import transformers

    config = transformers.BertConfig(vocab_size=VOCAB, **plan.config)
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def _models(stock: nn.Module, dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    ours = bertfast.BertModel(bertfast.BertConfig(**stock.config.to_dict()), add_pooling_layer=False).eval()
    ours.load_state_dict(stock.state_dict())
    models = {"bertfast": ours}
    for attention in ("eager", "sdpa"):
        models[f"stock {attention}"] = copy.deepcopy(stock)
        models[f"stock {attention}"].set_attn_implementation(attention)
    return {name: model.to(device, dtype) for name, model in models.items()}


def _release(device: str) -> None:
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


def _inference(report, plan, models, dtype, batch, seqlen, filling) -> None:
    item = f"forward ({batch},{seqlen}) {filling} {_name(dtype)}"
    if report.seconds_left() < CELL_SECONDS:
        report.not_run(item, "out of time")
        return
    with report.guard(item), torch.inference_mode():
        inputs = batch_of(batch, seqlen, filling, report.device)
        calls = {name: _forward(model, inputs) for name, model in models.items()}
        if _gate(report, item, models["stock eager"], calls, inputs):
            _time(report, plan, item, calls, inputs)


def _forward(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    return lambda: model(**inputs).last_hidden_state


def _gate(report: Report, item: str, stock: nn.Module, calls: Mapping[str, Callable], inputs) -> bool:
    """No number for a wrong result: our error against float64 is at most twice stock's, plus rounding."""
    real = inputs["attention_mask"].bool()
    exact_model = copy.deepcopy(stock).double()
    exact = exact_model(**inputs).last_hidden_state[real]
    del exact_model
    errors = {
        name: (call()[real].double() - exact).abs().nan_to_num(nan=math.inf).max().item()
        for name, call in calls.items()
    }
    ours = errors.pop("bertfast")
    limit = 2 * max(errors.values()) + torch.finfo(stock.dtype).eps * exact.abs().max().item()
    holds = ours <= limit < math.inf
    if not holds:
        report.failed(item, f"not timed: the error is {ours:.3g}, more than {limit:.3g}")
    return holds


def _training(report, plan, models, batch, seqlen, filling) -> None:
    item = f"forward and backward ({batch},{seqlen}) {filling} autocast bfloat16"
    if report.seconds_left() < CELL_SECONDS:
        report.not_run(item, "out of time")
        return
    with report.guard(item):
        inputs = batch_of(batch, seqlen, filling, report.device)
        weight = torch.randn(batch, seqlen, models["bertfast"].config.hidden_size, device=report.device)
        weight *= inputs["attention_mask"].unsqueeze(-1)
        calls = {name: _step(model, inputs, weight) for name, model in models.items()}
        losses = {name: call().item() for name, call in calls.items()}
        if all(math.isfinite(loss) for loss in losses.values()):
            _time(report, plan, item, calls, inputs)
        else:
            report.failed(item, f"not timed: losses are {losses}")


def _step(model: nn.Module, inputs: dict[str, Tensor], weight: Tensor) -> Callable[[], Tensor]:
    """Dropout is on: the models are in training mode."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast(weight.device.type, torch.bfloat16):
            loss = (model(**inputs).last_hidden_state * weight).mean()
        loss.backward()
        return loss.detach()

    return step


def _time(report: Report, plan: Plan, item: str, calls: Mapping[str, Callable], inputs: dict[str, Tensor]) -> None:
    on_gpu = report.device == "cuda"
    taken = measure.interleave(
        calls,
        rounds=plan.rounds,
        min_seconds=plan.min_seconds,
        stopwatch=measure.cuda_stopwatch if on_gpu else None,
    )
    tokens = int(inputs["attention_mask"].sum())
    for name, timing in taken.items():
        quantiles = timing.quantiles
        report.measured(
            f"{item}, {name}",
            ms={key: 1e3 * value for key, value in asdict(quantiles).items()},
            tokens=tokens,
            tokens_per_second=tokens / quantiles.median,
            gain=None if name == "bertfast" else asdict(taken["bertfast"].speedup_over(timing)),
            rounds=plan.rounds,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
