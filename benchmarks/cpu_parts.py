"""What `bench_cpu_peers` measures, part by part."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import bertfast
from bertfast import prepacked
from bertfast.benchmarks import harness, measure, peers, roofline
from bertfast.benchmarks.bench_model import MODELS, Batch
from bertfast.benchmarks.cases import lengths_of
from bertfast.benchmarks.harness import Entrant
from bertfast.benchmarks.memory import peak_bytes
from bertfast.benchmarks.records import Cell, Row
from bertfast.benchmarks.timer import Timer

SUBJECT = "bert-base"
SHAPES = {
    "1x128": (1, 128, "dense"),
    "8x128": (8, 128, "dense"),
    "32 mixed": (32, 128, "mixed"),
    "8x512": (8, 512, "dense"),
}
OURS, PRODUCTS, KERNELS = "bertfast", "products", "kernels"
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
LONG = (512, 1024, 2048, 4096)
PARTS = ("float32", "bfloat16", "int8", "host", "tokens", "memory")


@dataclass(frozen=True)
class Line:
    """A contestant of a cell.

    Attributes:
        part, shape: of `PARTS`, and the cell's name in it.
        contestant: who.
        value: the median.
        unit: "ms", or "MiB" of memory.
        ratio: how many times as fast bertfast is, of `PRODUCTS` and kernels their share of bertfast's time, of growing
            inputs the growth from the line before; None of bertfast itself.
        note: what else there is to say.
    """

    part: str
    shape: str
    contestant: str
    value: float
    unit: str
    ratio: float | None = None
    note: str = ""


def cell_of(shape: str, dtype: str) -> Cell:
    batch, length, fill = SHAPES[shape]
    return Cell(SUBJECT, "inference", batch, length, fill, dtype, "cpu")


class Products:
    """The GEMMs of all layers of a model on T tokens by reordered weights, without what lies between them.

    Args:
        model: a base model of bertfast.
        tokens: T.
    """

    def __init__(self, model: nn.Module, tokens: int):
        self._layers = []
        for layer in layers_of(model):
            query, key, value, attention_out, _, ffn_in, ffn_out, _ = layer.leaves()
            groups = ((query, key, value), (attention_out,), (ffn_in,), (ffn_out,))
            self._layers.append([_reordered(group) for group in groups])
        self.x = torch.randn(tokens, query.in_features, dtype=query.weight.dtype)

    @torch.inference_mode()
    def __call__(self, gelu: bool = False) -> None:
        for qkv, attention_out, ffn_in, ffn_out in self._layers:
            prepacked.product(self.x, *qkv)
            prepacked.product(self.x, *attention_out)
            prepacked.product(prepacked.product(self.x, *ffn_in, "gelu" if gelu else None), *ffn_out)


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    return getattr(model, model.encoder_name).layer


@torch.no_grad()
def _reordered(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    weight = torch.cat([linear.weight for linear in linears])
    return prepacked.reordered(weight), torch.cat([linear.bias for linear in linears])


def floats(dtype: str, compiled: bool, timer: Timer, ceilings: roofline.Ceilings) -> Iterator[Line]:
    """Parts float32 and bfloat16."""
    for shape in SHAPES:
        cell = cell_of(shape, dtype)
        contest = MODELS[SUBJECT].contest(cell, compiled=compiled)
        wanted = (OURS, "sdpa", *peers.taking_part(cell), *(("compile",) if compiled else ()))
        contestants = {name: build for name, build in contest.contestants.items() if name in wanted}
        contestants[PRODUCTS] = partial(_products, contestants[OURS], sum(lengths_of(cell)))
        results = harness.run(replace(contest, contestants=contestants), ceilings, timer)
        timings = {row.contestant: measure.Timing(tuple(row.seconds)) for row in results if isinstance(row, Row)}
        skipped = {row.contestant: row.reason for row in results if not isinstance(row, Row)}
        yield from compared(dtype, shape, timings)
        for name, reason in skipped.items():
            print(f"{dtype} {shape} {name}: {reason}", file=sys.stderr)


def _products(ours: Callable[[], Entrant], tokens: int) -> Entrant:
    entrant = ours()
    products = Products(entrant.modules[0], tokens)
    # What they compute is nobody's result: the model that they are of is compared in their place.
    return Entrant(lambda batch: products(), entrant.check)


def compared(
    part: str, shape: str, timings: Mapping[str, measure.Timing], notes: Mapping[str, str] | None = None
) -> Iterator[Line]:
    """Lines of those that took turns."""
    ours = timings.get(OURS)
    for name, timing in timings.items():
        ratio = None
        if ours is not None and name != OURS:
            ratio = ours.speedup_over(timing).median
        yield Line(part, shape, name, 1e3 * timing.quantiles.median, "ms", ratio, (notes or {}).get(name, ""))


def int8(timer: Timer) -> Iterator[Line]:
    """Part int8."""
    first = cell_of(next(iter(SHAPES)), "float32")
    model = MODELS[SUBJECT].contest(first).contestants[OURS]().modules[0].eval()
    functions = {OURS: partial(_hidden_states, bertfast.quantize(copy.deepcopy(model)))}
    for name in peers.taking_part(first):
        adapter = peers.adapter(name)
        if hasattr(adapter, "convert_int8"):
            functions[name] = partial(_converted, adapter.convert_int8(MODELS[SUBJECT].stock(first)))
    for shape in SHAPES:
        batch = MODELS[SUBJECT].contest(cell_of(shape, "float32")).inputs[0]
        calls = {name: partial(function, batch) for name, function in functions.items()}
        exact, notes = _hidden_states(model, batch)[batch.real], {}
        for name, call in calls.items():
            cosines = torch.nn.functional.cosine_similarity(call()[batch.real].float(), exact, dim=-1)
            notes[name] = f"cosine of tokens with fp32 {cosines.mean():.4f}, least {cosines.min():.4f}"
        yield from compared("int8", shape, timer.rounds_of(calls), notes)


@torch.inference_mode()
def _hidden_states(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch.tensors).last_hidden_state


def _converted(converted: peers.Converted, batch: Batch) -> Tensor:
    return converted.tensor(converted.call(batch.tensors["input_ids"], batch.tensors["attention_mask"]))


def host(timer: Timer) -> Iterator[Line]:
    """Part host: the model, and its kernels called alone on tensors of the same sizes."""
    cell = Cell(SUBJECT, "inference", 1, 16, "dense", "float32", "cpu")
    contest = MODELS[SUBJECT].contest(cell)
    model, batch = contest.contestants[OURS]().modules[0].eval(), contest.inputs[0]
    products = Products(model, cell.length)
    layers = layers_of(model)
    norm, heads = layers[0].leaves()[4], layers[0].num_heads
    query, key, value = torch.randn(3, 1, cell.length, heads, products.x.shape[-1] // heads).transpose(2, 3).unbind(0)
    ops = torch.ops.bertfast

    @torch.inference_mode()
    def kernels() -> None:
        products(gelu=True)
        for _ in layers:
            ops.attention_fwd_cpu(query, key, value, None, None, 0.0, False, 0.125)
            for _ in range(2):
                ops.add_layer_norm_fwd_cpu(
                    products.x, products.x, norm.weight, norm.bias, None, None, norm.eps, 0.0, False
                )

    whole = partial(_hidden_states, model, batch)
    yield from compared("host", "1x16", timer.rounds_of({OURS: whole, KERNELS: kernels}))


def tokens(timer: Timer) -> Iterator[Line]:
    """Part tokens."""
    calls = {}
    for count in SEQUENCES:
        cell = Cell(SUBJECT, "inference", count, 128, "dense", "float32", "cpu")
        contest = MODELS[SUBJECT].contest(cell)
        calls[f"{count}x128"] = partial(contest.contestants[OURS]().call, contest.inputs[0])
    yield from growing("tokens", {shape: t.quantiles.median * 1e3 for shape, t in timer.rounds_of(calls).items()}, "ms")


def memory() -> Iterator[Line]:
    """Part memory: a model with more positions than BERT's, of random weights as all are here."""
    config = MODELS[SUBJECT].config().replaced(max_position_embeddings=LONG[-1])
    model = bertfast.BertModel(config, add_pooling_layer=False).eval()

    @torch.inference_mode()
    def call(ids: Tensor) -> None:
        model(ids)

    found = {}
    for length in LONG:
        ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
        call(ids)
        found[f"1x{length}"] = peak_bytes(partial(call, ids), "cpu") / 2**20
    yield from growing("memory", found, "MiB")


def growing(part: str, values: Mapping[str, float], unit: str) -> Iterator[Line]:
    """Lines of bertfast alone."""
    before = None
    for shape, value in values.items():
        yield Line(part, shape, OURS, value, unit, None if before is None else value / before)
        before = value


def measured(parts: Sequence[str], compiled: bool, timer: Timer) -> Iterator[Line]:
    """The lines of some parts, each as it is measured."""
    dtypes = [part for part in parts if part in ("float32", "bfloat16")]
    ceilings = roofline.measure_ceilings(torch.device("cpu"), dtypes) if dtypes else None
    for dtype in dtypes:
        yield from floats(dtype, compiled, timer, ceilings)
    for part in parts:
        if part == "memory":
            yield from memory()
        elif part not in dtypes:
            yield from {"int8": int8, "host": host, "tokens": tokens}[part](timer)
