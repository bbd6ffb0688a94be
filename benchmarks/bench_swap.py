"""Stock transformers (SDPA) next to the same model after `bertfast.accelerate`, over batches, lengths and masks.

    python -m bertfast.benchmarks.bench_swap PATH                        every cell, inference, fp32
    python -m bertfast.benchmarks.bench_swap PATH --batches 1 --lengths 16 128 --train
    python -m bertfast.benchmarks.bench_swap PATH --json results.jsonl   a line for each cell, with the machine

Both models have the checkpoint's weights and are compared on what they give for real tokens before they are timed. They
take turns, and a ratio is that of one round; see `measure.interleave`. The exit code is 1 where a cell's median ratio
is below `LEAST`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import bertfast
from bertfast.benchmarks import measure

BATCHES, LENGTHS = (1, 8, 64), (16, 128, 512)
# Of stock's speed: what a swapped model must reach in every cell.
LEAST = 0.95
# Real tokens of each row, for a batch of B rows of S tokens.
MASKS: dict[str, Callable[[int, int], Tensor | None]] = {
    "no mask": lambda batch, length: None,
    "all ones": lambda batch, length: torch.full((batch,), length),
    # A row is as long as the batch, so that stock cannot cut it; from there down to nearly none, half in all.
    "half padded": lambda batch, length: (
        torch.tensor([length // 2]) if batch == 1 else torch.linspace(length, 1, batch).round().long()
    ),
}


def inputs_of(batch: int, length: int, mask: str, vocabulary: int, device: torch.device) -> dict[str, Tensor]:
    """Random ids (B, S) and, unless there is none, a mask of right padding."""
    ids = torch.randint(1000 % vocabulary, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    lengths = MASKS[mask](batch, length)
    if lengths is None:
        return {"input_ids": ids.to(device)}
    real = torch.arange(length) < lengths[:, None]
    return {"input_ids": ids.to(device), "attention_mask": real.long().to(device)}


def step_of(model: nn.Module, inputs: dict[str, Tensor], train: bool) -> Callable[[], object]:
    """A forward, or with `train` a forward and backward, of a mean over real tokens."""
    if not train:

        def forward() -> object:
            with torch.inference_mode():
                return model(**inputs)

        return forward
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs).last_hidden_state[mask].float().square().mean().backward()

    return step


def worst_difference(stock: nn.Module, swapped: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Between the two models' hidden states of real tokens, relative to stock's largest."""
    with torch.inference_mode():
        theirs, ours = (model(**inputs).last_hidden_state.double() for model in (stock, swapped))
    if "attention_mask" in inputs:
        real = inputs["attention_mask"].bool()
        theirs, ours = theirs[real], ours[real]
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def cell(
    stock: nn.Module, swapped: nn.Module, inputs: dict[str, Tensor], *, train: bool, rounds: int, device: torch.device
) -> dict:
    """Milliseconds of both, and how many times as fast the swapped model is, each as median and 10th and 90th
    percentile.

    Raises:
        RuntimeError: the models disagree.
    """
    dtype = next(stock.parameters()).dtype
    difference = worst_difference(stock, swapped, inputs)
    if not difference <= 64 * torch.finfo(dtype).eps:
        raise RuntimeError(f"the swapped model differs from stock by {difference:.1e} of the largest value")
    contestants = {name: step_of(model, inputs, train) for name, model in (("stock", stock), ("swapped", swapped))}
    timings = measure.interleave(contestants, rounds=rounds, synchronize=measure.synchronizer(device))
    ratio = timings["swapped"].speedup_over(timings["stock"])
    milliseconds = {name: 1e3 * timing.quantiles.median for name, timing in timings.items()}
    return {**milliseconds, "ratio": ratio.median, "p10": ratio.p10, "p90": ratio.p90, "difference": difference}


def models_of(path: str, dtype: torch.dtype, device: torch.device, train: bool) -> tuple[nn.Module, nn.Module]:
    """Stock's model and a copy of it with fused modules.

    Raises:
        SystemExit: transformers is not installed, or cannot load the checkpoint.
    """
    try:
        from transformers import AutoModel
    except ImportError:
        raise SystemExit("this benchmark needs transformers: pip install transformers") from None
    try:
        stock = AutoModel.from_pretrained(path, attn_implementation="sdpa", dtype=dtype).to(device).train(train)
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot load {path}: {str(error).splitlines()[0]}") from None
    for module in stock.modules():
        # Both must compute the same; dropout is drawn anew in each call.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    swapped = copy.deepcopy(stock)
    bertfast.accelerate(swapped, strict=True)
    return stock, swapped


def table(path: str, options: argparse.Namespace, show: Callable[[str], None]) -> Iterable[dict]:
    """The cells, each shown as it is measured."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    stock, swapped = models_of(path, dtype, device, options.train)
    if max(options.lengths) > stock.config.max_position_embeddings:
        raise SystemExit(f"--lengths must be at most {stock.config.max_position_embeddings}, the model's longest")
    show(f"{'B':>4} {'S':>4}  {'mask':<12} {'stock ms':>10} {'swapped ms':>10}  ratio (10-90 %)")
    for batch, length, mask in itertools.product(options.batches, options.lengths, MASKS):
        inputs = inputs_of(batch, length, mask, stock.config.vocab_size, device)
        row = cell(stock, swapped, inputs, train=options.train, rounds=options.rounds, device=device)
        show(
            f"{batch:>4} {length:>4}  {mask:<12} {row['stock']:>10.2f} {row['swapped']:>10.2f}  "
            f"{row['ratio']:.2f} ({row['p10']:.2f}-{row['p90']:.2f})"
        )
        yield {"batch": batch, "length": length, "mask": mask, **row}


def count(text: str) -> int:
    """A number of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", help="a BERT, RoBERTa or DistilBERT checkpoint: a folder or a hub id")
    parser.add_argument("--batches", type=count, nargs="+", default=BATCHES, help=f"rows (default: {BATCHES})")
    parser.add_argument("--lengths", type=count, nargs="+", default=LENGTHS, help=f"tokens a row (default: {LENGTHS})")
    parser.add_argument("--train", action="store_true", help="forward and backward")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=count, default=7, help="how often each is timed (7)")
    parser.add_argument("--json", type=Path, help="append a line for each cell to this file")
    options = parser.parse_args(arguments)
    facts = measure.machine()
    print(measure.machine_line(facts))
    settings = {"path": options.path, "dtype": options.dtype, "device": options.device, "train": options.train}
    slow = []
    for row in table(options.path, options, print):
        if row["ratio"] < LEAST:
            slow.append(row)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **settings, "machine": facts}) + "\n")
    if slow:
        print(f"{len(slow)} cells are below {LEAST} of stock's speed")
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())
