"""Whole models with random weights: bertfast's, a stock model after `bertfast.accelerate` (`swapped`), and stock
transformers with eager, SDPA and flash attention; and what other libraries make of it (`peers`), converted once before
its first call is timed.

python -m bertfast.benchmarks.bench_model [options of `bertfast bench`]

Inference is in the cell's dtype. A training step is a forward and a backward of fp32 parameters, under autocast where
the dtype is another; dropout is on while it is timed and off while results are compared. All have the same weights,
and no pooler. Of a large batch some rows are compared with float64 (`GATE_TOKENS`).

What is recorded in a CUDA graph cannot wait to learn how many tokens there are: there bertfast computes padding too.
"""

from __future__ import annotations

import copy
import functools
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import bertfast
from bertfast import backends
from bertfast.benchmarks import peers, roofline, suite
from bertfast.benchmarks.cases import COMPILE_MODES, compile_mode, key_mask, lengths_of
from bertfast.benchmarks.harness import Contest, Entrant, Refused, Results
from bertfast.benchmarks.records import FILLS, MODEL_PASSES, Cell
from bertfast.configuration import PRESETS, PretrainedConfig

NAMES = ("bert-base", "bert-large", "distilbert-base", "roberta-base")
CLASSES = {"bert": "BertModel", "roberta": "RobertaModel", "distilbert": "DistilBertModel"}
LAYER = re.compile(r"layer\.(\d+)")
GATE_TOKENS = 1024
SETS = 2


@dataclass(frozen=True)
class Batch:
    """Inputs of a model.

    Attributes:
        tensors: keyword arguments.
        real: (B, S) bool, True at tokens.
        cotangent: (B, S, N) gradient of the last hidden state, 0 at padding.
    """

    tensors: dict[str, Tensor]
    real: Tensor
    cotangent: Tensor

    def rows(self, rows: Tensor) -> Batch:
        return Batch({name: t[rows] for name, t in self.tensors.items()}, self.real[rows], self.cotangent[rows])

    def with_gradient_at(self, rows: Tensor) -> Batch:
        """Rows that are not compared with anything leave no trace in gradients of parameters."""
        kept = torch.zeros_like(self.cotangent).index_copy(0, rows, self.cotangent[rows])
        return Batch(self.tensors, self.real, kept)


@dataclass(frozen=True)
class Model:
    """A model by its configuration, with an `Op`'s interface."""

    name: str
    config: Callable[[], PretrainedConfig]
    passes: tuple[str, ...] = MODEL_PASSES
    fills: tuple[str, ...] = FILLS

    def contestants(
        self, cell: Cell, *, compiled: bool = False, replayed: bool = False
    ) -> dict[str, Callable[[], Entrant]]:
        """Who takes part in a cell; with `compiled` also what torch.compile makes of stock's SDPA model, without CUDA
        graphs of its own where it is to be recorded in one and `replayed`."""
        names = ["bertfast", *_other_backends(cell.device), "swapped", "eager", "sdpa"]
        names += ["flash_attention_2"] if peers.serves("flash-attn", cell) else []
        names += COMPILE_MODES if compiled else []
        contestants = {name: partial(self._entrant, cell, name, replayed) for name in names}
        return contestants | {name: partial(self._peer, cell, name, replayed) for name in peers.taking_part(cell)}

    def contest(self, cell: Cell, *, compiled: bool = False, replayed: bool = False) -> Contest:
        """Everything that the harness needs for a cell.

        Raises:
            Refused: rows are longer than the model takes, or transformers is not installed.
        """
        config = self.config()
        limit = 512 if cell.subject.startswith("roberta") else config.max_position_embeddings
        if cell.length > limit:
            raise Refused(f"rows of {cell.length} tokens are longer than the model's {limit}")
        batches = [_batch(cell, config, seed) for seed in range(SETS)]
        stock, rows = self._models(cell, replayed).stock, _compared_rows(cell)
        sample, train = batches[0].rows(rows), cell.pass_ == "training"
        sizes = roofline.Sizes(config.hidden_size, config.intermediate_size, config.num_hidden_layers)
        cost = roofline.model(cell.pass_, lengths_of(cell), sizes, _parameter_dtype(cell).itemsize)
        return Contest(
            cell,
            cost,
            batches,
            self.contestants(cell, compiled=compiled, replayed=replayed),
            exact=lambda: _results(copy.deepcopy(stock).double(), _doubled(sample), train, None),
            yardsticks=[lambda: _results(stock, sample, train, _autocast_dtype(cell))],
            parameter_dtype=_parameter_dtype(cell),
        )

    def stock(self, cell: Cell) -> nn.Module:
        """transformers' model of the weights that all contestants of a cell have."""
        return self._models(cell, False).stock

    def _models(self, cell: Cell, replayed: bool) -> _Models:
        return _models(self, cell.device, _parameter_dtype(cell), replayed)

    def _entrant(self, cell: Cell, name: str, replayed: bool) -> Entrant:
        model, train = self._models(cell, replayed)[name], cell.pass_ == "training"
        model.train(train)
        autocast, rows = _autocast_dtype(cell), _compared_rows(cell)

        def check() -> Results:
            batch = _batch(cell, self.config(), 0).with_gradient_at(rows)
            try:
                return _results(model.eval(), batch, train, autocast, rows)
            finally:
                model.train(train)

        def results(out: Tensor) -> Results:
            real = _batch(cell, self.config(), 0).real
            return {"last_hidden_state": out[rows][real[rows]]}

        step = partial(_train if train else _infer, model, autocast)
        if name.startswith("bertfast "):
            order = name.removeprefix("bertfast "), "torch"
            step, check = _pinned(step, order), _pinned(check, order)
        return Entrant(step, check, None if train else results, [model], model.zero_grad)

    def _peer(self, cell: Cell, name: str, replayed: bool) -> Entrant:
        if replayed:
            raise Refused("computes in streams of its own, which a CUDA graph does not record")
        converted, rows = self._models(cell, replayed).converted(name), _compared_rows(cell)

        def step(batch: Batch) -> Any:
            return converted.call(batch.tensors["input_ids"], batch.tensors["attention_mask"])

        def check() -> Results:
            batch = _batch(cell, self.config(), 0)
            return {"last_hidden_state": converted.tensor(step(batch))[rows][batch.real[rows]]}

        return Entrant(step, check, own_memory=True)


class _Models:
    """The models of a configuration, built when they are asked for. Those of transformers share their parameters."""

    def __init__(self, model: Model, device: str, dtype: torch.dtype, replayed: bool):
        self._replayed = replayed
        try:
            import transformers
        except ImportError:
            raise Refused("transformers is not installed: pip install 'bertfast[transformers]'") from None
        config = model.config()
        self._class = CLASSES[config.model_type]
        self._options = {} if config.model_type == "distilbert" else {"add_pooling_layer": False}
        cls = getattr(transformers, self._class)
        torch.manual_seed(0)
        fields = {**config.to_dict(), "attn_implementation": "eager"}
        self.stock = cls(cls.config_class(**fields), **self._options).to(device, dtype).eval()
        self._config = config
        self._built: dict[str, nn.Module] = {}
        self._converted: dict[str, peers.Converted | Exception] = {}

    def __getitem__(self, name: str) -> nn.Module:
        # Backends share one model of ours.
        name = "bertfast" if name.startswith("bertfast ") else name
        if name not in self._built:
            self._built[name] = self._build(name)
        return self._built[name]

    def converted(self, name: str) -> peers.Converted:
        """What a peer makes of the stock model."""
        if name not in self._converted:
            try:
                self._converted[name] = peers.adapter(name).convert(self.stock)
            except Exception as error:  # once per model, which takes long enough
                self._converted[name] = error
        found = self._converted[name]
        if isinstance(found, Exception):
            raise found
        return found

    def _build(self, name: str) -> nn.Module:
        if name == "bertfast":
            ours = getattr(bertfast, self._class)(self._config, **self._options)
            ours.load_state_dict(self.stock.state_dict(), assign=True)
            return ours
        model = copy.deepcopy(self.stock, {id(parameter): parameter for parameter in self.stock.parameters()})
        if name == "swapped":
            model.set_attn_implementation("sdpa")
            bertfast.accelerate(model, strict=True)
        elif name in COMPILE_MODES:
            model.set_attn_implementation("sdpa")
            torch._dynamo.reset()
            model.compile(mode=compile_mode(name, self._replayed))
        else:
            model.set_attn_implementation(name)
        return model


# Cells of one model follow each other.
_models = functools.lru_cache(maxsize=1)(_Models)


def _other_backends(device: str) -> list[str]:
    """Names of ours on what `auto` would not take first."""
    return [f"bertfast {name}" for name in backends.AUTO_ORDER.get(device, ())[1:]]


def _parameter_dtype(cell: Cell) -> torch.dtype:
    return torch.float32 if cell.pass_ == "training" else getattr(torch, cell.dtype)


def _autocast_dtype(cell: Cell) -> torch.dtype | None:
    dtype = getattr(torch, cell.dtype)
    return dtype if cell.pass_ == "training" and dtype != torch.float32 else None


def _compared_rows(cell: Cell) -> Tensor:
    """The first, the last, and some between."""
    count = min(cell.batch, max(1, GATE_TOKENS // cell.length))
    return torch.linspace(0, cell.batch - 1, count).round().long().to(cell.device)


def _batch(cell: Cell, config: PretrainedConfig, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    first = min(1000, config.vocab_size // 2)
    ids = torch.randint(first, config.vocab_size, (cell.batch, cell.length), generator=generator)
    real = key_mask(lengths_of(cell), cell.length, "cpu")
    ids = ids.masked_fill(~real, config.pad_token_id or 0)
    cotangent = torch.randn(cell.batch, cell.length, config.hidden_size, generator=generator) * real.unsqueeze(-1)
    tensors = {"input_ids": ids.to(cell.device), "attention_mask": real.long().to(cell.device)}
    return Batch(tensors, real.to(cell.device), cotangent.to(cell.device))


def _doubled(batch: Batch) -> Batch:
    return Batch(batch.tensors, batch.real, batch.cotangent.double())


def _infer(model: nn.Module, autocast: torch.dtype | None, batch: Batch) -> Tensor:
    with torch.inference_mode():
        return model(**batch.tensors).last_hidden_state


def _train(model: nn.Module, autocast: torch.dtype | None, batch: Batch) -> Tensor:
    model.zero_grad(set_to_none=True)
    with torch.autocast(batch.real.device.type, autocast, enabled=autocast is not None):
        out = model(**batch.tensors).last_hidden_state
    out.backward(batch.cotangent.to(out.dtype))
    return out.detach()


def _pinned(function: Callable[..., Any], order: tuple[str, ...]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with backends.use_backend(*dict.fromkeys(order)):
            return function(*arguments)

    return call


def _results(
    model: nn.Module, batch: Batch, train: bool, autocast: torch.dtype | None, rows: Tensor | None = None
) -> Results:
    """Hidden states of tokens, and in training gradients too."""
    out = (_train if train else _infer)(model, autocast, batch)
    real = batch.real
    if rows is not None:
        out, real = out[rows], real[rows]
    results = {"last_hidden_state": out[real]}
    if train:
        results |= _gradients(model)
        model.zero_grad(set_to_none=True)
    return results


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of vectors, layer by layer, which everything behind them has a part in, and of the first layer's matrices.

    That of a key bias is 0 but for rounding.
    """
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        layer = LAYER.search(name)
        if parameter.grad is None or name.endswith(("key.bias", "k_lin.bias")):
            continue
        if parameter.dim() == 1:
            parts[f"gradients of {layer[0] if layer else 'embeddings'}"].append(parameter.grad)
        elif layer and layer[1] == "0":
            parts[f"gradients of matrices of {layer[0]}"].append(parameter.grad.flatten())
    return {name: torch.cat(gradients) for name, gradients in parts.items()}


MODELS = {name: Model(name, PRESETS[name]) for name in NAMES}

if __name__ == "__main__":
    suite.script(*MODELS)
