"""What `bertfast check` measures. Everything runs on the same token ids, masks, dtype and device."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice

import torch

from bertfast.benchmarks import measure
from bertfast.encode import Encoder, Pooling, pad
from bertfast.quantization import quantize

MOST_TEXTS = 2000
STOCK = ("eager", "sdpa")
INT8 = "bertfast int8"
BATCH_ROWS = 32
FULL_ROWS = 16
FULL_LENGTH = 128
ACCURACY_ROWS = 8
ACCURACY_BATCHES = 3
NEIGHBOURS = 3


def take_texts(lines: Iterable[str]) -> list[str]:
    """The first lines that are not blank.

    Raises:
        ValueError: there is none.
    """
    texts = list(islice((line for line in lines if line.strip()), MOST_TEXTS))
    if not texts:
        raise ValueError("the input holds no text")
    return texts


def compare(
    path: str,
    texts: Sequence[str],
    *,
    dtype: str,
    device: torch.device,
    rounds: int,
    show: Callable[[str], None],
    int8: bool = False,
) -> dict:
    """The report of `bertfast check` as plain data.

    Args:
        path: a checkpoint's folder or hub id.
        texts: what to run on.
        dtype: a torch dtype's name, of our model and of the stock models that are timed.
        device: of all models.
        rounds: how often each timing is repeated.
        show: told what is being done.
        int8: also our model after `bertfast.quantize`. Its error is reported, and is no part of what has to pass.

    Raises:
        ValueError: transformers is not installed or cannot load the checkpoint; `int8` on another device than the CPU.
        BackendError: `int8` on a machine that has no int8 products.
    """
    _transformers()
    torch_dtype = getattr(torch, dtype)
    encoder = Encoder.from_pretrained(path, dtype=torch_dtype, device=device)
    stock = {name: _stock(path, torch_dtype, name, device) for name in STOCK}
    models = {**{f"stock {name}": model for name, model in stock.items()}, "bertfast": encoder.model}
    if int8:
        models[INT8] = quantize(copy.deepcopy(encoder.model), keep_weights=False)
    ids = encoder.token_ids(texts)
    shuffled = random.Random(0).sample(range(len(ids)), len(ids))
    mixed = [ids[i] for i in shuffled]
    batches = [mixed[start : start + ACCURACY_ROWS] for start in range(0, len(mixed), ACCURACY_ROWS)]

    with torch.inference_mode():
        show("comparing with float64")
        accuracy = _accuracy(
            models,
            _stock(path, torch.float64, "eager", device),
            [_batch(rows, encoder, device) for rows in batches[:ACCURACY_BATCHES]],
            encoder.pooling,
        )
        speed = []
        for name, rows in _cases(ids, mixed[:BATCH_ROWS], encoder.max_length).items():
            show(f"timing {name.lower()}")
            speed.append(_speed(name, models, _batch(rows, encoder, device), rounds, device))
    show("looking for neighbours")
    facts = measure.machine()
    return {
        "checkpoint": path,
        "model": type(encoder.model).__name__,
        "dtype": dtype,
        "device": str(device),
        "rounds": rounds,
        "machine": facts,
        "machine_line": measure.machine_line(facts),
        "texts": len(texts),
        "accuracy": accuracy,
        "speed": speed,
        "neighbours": _neighbours(encoder, texts, ids),
    }


def _transformers():
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "bertfast check compares with transformers, which is not installed: pip install 'bertfast[transformers]'"
        ) from error
    return transformers


def _stock(path: str, dtype: torch.dtype, attention: str, device: torch.device):
    transformers = _transformers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModel.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    return model.to(device).eval()


def _batch(rows: Sequence[Sequence[int]], encoder: Encoder, device: torch.device) -> dict[str, torch.Tensor]:
    input_ids, attention_mask = pad(rows, encoder.tokenizer.pad_token_id)
    return {"input_ids": input_ids.to(device), "attention_mask": attention_mask.to(device)}


def _accuracy(models: dict, reference, batches: list[dict[str, torch.Tensor]], pooling: Pooling) -> dict:
    token_errors = {name: _Errors() for name in models}
    vector_errors = {name: _Errors() for name in models}
    scale, tokens = 0.0, 0
    for batch in batches:
        mask = batch["attention_mask"]
        real = mask.bool()
        exact = reference(**batch).last_hidden_state
        exact_vectors = pooling(exact, mask)
        scale, tokens = max(scale, exact[real].abs().max().item()), tokens + int(real.sum())
        for name, model in models.items():
            hidden = model(**batch).last_hidden_state.double()
            token_errors[name].add(hidden[real], exact[real])
            vector_errors[name].add(pooling(hidden, mask), exact_vectors)
    noise_floor = 4 * torch.finfo(models["bertfast"].dtype).eps * scale
    limit = 2 * max(errors.largest for name, errors in token_errors.items() if name.startswith("stock")) + noise_floor
    return {
        "tokens": tokens,
        "errors": {
            name: {
                "max": errors.largest,
                "rms": errors.rms,
                "vectors": {
                    "max": vector_errors[name].largest,
                    "mean_cosine": vector_errors[name].mean_cosine,
                    "worst_cosine": vector_errors[name].worst_cosine,
                },
            }
            for name, errors in token_errors.items()
        },
        "noise_floor": noise_floor,
        "limit": limit,
        "passed": token_errors["bertfast"].largest <= limit < float("inf"),
    }


class _Errors:
    """Of rows against exact ones: the largest and the root mean square of the values' errors, and the cosines."""

    def __init__(self) -> None:
        self.largest = self.squares = 0.0
        self.count = 0
        self.cosines: list[float] = []

    def add(self, rows: torch.Tensor, exact: torch.Tensor) -> None:
        """Takes rows (M, N) of any floating point dtype and the exact ones in fp64."""
        # Comparisons with NaN are false: without this, a model that gives NaN would have the error of the others.
        error = (rows.double() - exact).nan_to_num(nan=torch.inf).abs()
        self.largest = max(self.largest, error.max().item())
        self.squares += error.square().sum().item()
        self.count += error.numel()
        cosines = torch.nn.functional.cosine_similarity(rows.double(), exact, dim=-1)
        self.cosines += cosines.nan_to_num(nan=-1.0).tolist()

    @property
    def rms(self) -> float:
        return (self.squares / self.count) ** 0.5

    @property
    def mean_cosine(self) -> float:
        return sum(self.cosines) / len(self.cosines)

    @property
    def worst_cosine(self) -> float:
        return min(self.cosines)


def _cases(ids: list[list[int]], mixed: list[list[int]], max_length: int | None) -> dict[str, list[list[int]]]:
    """One sentence of median length; a batch without padding, made by joining texts; texts as they come."""
    median = sorted(ids, key=len)[len(ids) // 2]
    length = min(FULL_LENGTH, max_length or FULL_LENGTH)
    first, last = ids[0][:1], ids[0][-1:]
    stream = [token for row in ids for token in row[1:-1]] or list(ids[0])
    inner = length - 2
    stream *= -(-FULL_ROWS * inner // len(stream))
    full = [first + stream[i * inner : (i + 1) * inner] + last for i in range(FULL_ROWS)]
    return {"One sentence": [median], "Full batch": full, "Mixed lengths": mixed}


def _speed(name: str, models: dict, batch: dict[str, torch.Tensor], rounds: int, device: torch.device) -> dict:
    lengths = batch["attention_mask"].sum(dim=1)
    tokens = int(lengths.sum())
    calls = {label: partial(model, **batch) for label, model in models.items()}
    timings = measure.interleave(calls, rounds=rounds, synchronize=measure.synchronizer(device))
    ours = timings["bertfast"]

    def row(label: str, timing: measure.Timing) -> dict:
        quantiles = timing.quantiles
        return {
            "ms": {key: 1e3 * value for key, value in asdict(quantiles).items()},
            "tokens_per_second": tokens / quantiles.median,
            "bertfast_speedup": None if label == "bertfast" else asdict(ours.speedup_over(timing)),
        }

    return {
        "name": name,
        "rows": len(lengths),
        "tokens": tokens,
        "mean": tokens / len(lengths),
        "longest": int(lengths.max()),
        "timings": {label: row(label, timing) for label, timing in timings.items()},
    }


def _neighbours(encoder: Encoder, texts: Sequence[str], ids: list[list[int]]) -> list[dict]:
    """Three texts spread over the input, of a length that fits a line, with the texts nearest to each."""
    vectors = torch.nn.functional.normalize(torch.from_numpy(encoder.encode(texts)), dim=-1)
    readable = [i for i, row in enumerate(ids) if 8 <= len(row) <= 24] or list(range(len(ids)))
    queries = sorted({readable[len(readable) * k // 4] for k in (1, 2, 3)})
    found = []
    for query in queries:
        cosines = vectors @ vectors[query]
        cosines[query] = -2.0
        best = cosines.argsort(descending=True)[: min(NEIGHBOURS, len(texts) - 1)].tolist()
        nearest = [{"text": texts[i], "cosine": cosines[i].item()} for i in best]
        found.append({"text": texts[query], "nearest": nearest})
    return found
